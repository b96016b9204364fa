"""A KV connector that loads behind the forward's back: vLLM's ExampleConnector, two steps late.

Requests wait with their blocks allocated until the worker says that the KV has arrived, as over a network. vLLM
then publishes these blocks although no step of theirs has run.
"""

from __future__ import annotations

from typing import Any

import safetensors.torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata

LATE_STEPS = 2


class LateConnector(ExampleConnector):  # type: ignore[misc]
    """Both sides in one class, as vLLM wants it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layers = vllm_config.compilation_config.static_forward_context
        self._allocated: list[tuple[Any, list[int]]] = []
        self._arriving: list[tuple[int, str, Any]] = []
        self._calls = 0

    # scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._allocated.append((request, blocks.get_block_ids()[0]))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.late = []
        for request, blocks in self._allocated:
            part = ExampleConnectorMetadata()
            part.add_request(list(request.prompt_token_ids), blocks, self._block_size, False, [])
            meta.late.append((request.request_id, part.requests[0]))
        self._allocated = []
        return meta

    # worker side

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._calls += 1
        for name, load in self._get_connector_metadata().late:
            self._arriving.append((self._calls + LATE_STEPS, name, load))
        arrived = [(name, load) for when, name, load in self._arriving if when <= self._calls]
        self._arriving = [entry for entry in self._arriving if entry[0] > self._calls]
        for _, load in arrived:
            self._load(load)
        return None, {name for name, _ in arrived} or None

    def _load(self, load: Any) -> None:
        blocks, offsets = load.slot_mapping // self._block_size, load.slot_mapping % self._block_size
        for name, layer in self._layers.items():
            if getattr(layer, "kv_cache", None) is None:
                continue
            filename = self._generate_filename_debug(name, load.token_ids, load.mm_hashes)
            layer.kv_cache[blocks, :, offsets] = safetensors.torch.load_file(filename)["kv_cache"]


class FailingConnector(ExampleConnector):  # type: ignore[misc]
    """Loads at once, and reports the last loaded block of one request as invalid while `failing` is set."""

    failing = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._invalid: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for load in self._get_connector_metadata().requests:
            if not load.is_store and type(self).failing:
                type(self).failing = False
                self._invalid.add(int(load.slot_mapping[self._block_size] // self._block_size))

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
