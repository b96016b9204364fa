"""What vLLM's requests are made of, for content keys (level `keys`): told to the guard once per life of a request.

Everything is read off the Request and the configuration, never off vLLM's block hashes: they are what is checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvguard.content_key import ContentDomain, MultimodalInput
from kvguard.guard import Guard

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""What vLLM reads in the folder of a LoRA adapter: how its weights are scaled and where they go, and the weights."""
WEIGHT_READERS = frozenset(
    {
        "compute_weight_checksums",
        "set_weight_version",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "init_weight_update_group",
        "destroy_weight_update_group",
    }
)
"""Remote calls whose names speak of weights and that change none: vLLM's own, and those of its examples."""
READING = ("get_", "check_", "save_")
"""How names of others begin that only read."""


@dataclass(slots=True)
class _Known:
    """What the guard was told of one request: tokens, multimodal inputs, and under which epoch of the weights."""

    tokens: int
    inputs: int
    epoch: int


class RequestContents:
    """Keeps the guard's idea of each request's content up with vLLM's."""

    def __init__(self, guard: Guard, config: Any, groups: Any, hash_block_size: int) -> None:
        """config: the VllmConfig; groups: its KV cache groups; hash_block_size: tokens that vLLM hashes at a time."""
        self._guard = guard
        self._hash_block_size = hash_block_size
        self._domain = base_domain(config, groups)
        self._known: dict[str, _Known] = {}
        self.epoch = 0
        """Counts changes of the weights that this process was told of."""

    def identify(self, request: Any) -> None:
        """Tell the guard what a request is made of that was started, unless it knows. The request holds no pages yet.

        Its last token is left out: no lookup needs it, and in a streaming session it may be taken back.
        """
        name = request.request_id
        known = self._known.get(name)
        if known is not None and known.epoch == self.epoch:
            return
        tokens = max(request.num_tokens - 1, 0)
        self._guard.identify(
            name,
            self.domain_of(request),
            list(request.all_token_ids[:tokens]),
            [*inputs_of(request, 0), *embeddings_of(request, self._hash_block_size)],
        )
        self._known[name] = _Known(tokens, len(request.mm_features), self.epoch)

    def domain_of(self, request: Any) -> ContentDomain:
        """In which the request's KV is computed."""
        domain = self._domain
        if self.epoch or request.lora_request is not None or request.cache_salt:
            lora = request.lora_request
            domain = replace(
                domain,
                weights_epoch=self.epoch,
                lora=None if lora is None else lora.lora_name,
                lora_revision=None if lora is None else adapter_revision(lora.lora_path),
                # To vLLM an empty salt is none.
                tenant=request.cache_salt or None,
            )
        return domain

    def learn(self, request: Any, tokens: int) -> None:
        """The guard is to know the request's first `tokens` tokens: a page that ends there is published."""
        known = self._known.get(request.request_id)
        if known is not None and known.tokens < tokens:
            more = list(request.all_token_ids[known.tokens : tokens])
            if more:
                self._guard.add_tokens(request.request_id, more)
                known.tokens += len(more)

    def current(self, name: str) -> bool:
        """Whether the request computes with the weights that are in force; False for one that began before."""
        known = self._known.get(name)
        return known is None or known.epoch == self.epoch

    def forget(self, name: str) -> None:
        """The request ended, or was preempted."""
        self._known.pop(name, None)

    def follow_session(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Scheduler._update_request_as_session`: the next chunk of input takes the last sampled token's place."""

        def guarded(session: Any, *args: Any, **kwargs: Any) -> Any:
            kept = session.num_computed_tokens
            result = original(session, *args, **kwargs)
            known = self._known.get(session.request_id)
            if known is not None and self._guard.armed:
                if known.tokens > kept:
                    self._guard.cut_tokens(session.request_id, kept)
                    known.tokens = kept
                if len(session.mm_features) > known.inputs:
                    self._guard.add_tokens(session.request_id, [], inputs_of(session, known.inputs))
                    known.inputs = len(session.mm_features)
            return result

        return guarded

    def watch_weights(self, core: Any) -> None:
        """Count what changes the weights and passes the engine core: remote calls by name, and sleep at level 2."""
        call, sleep = core.collective_rpc, core.model_executor.sleep

        def watched_call(method: Any, *args: Any, **kwargs: Any) -> Any:
            name = method if isinstance(method, str) else getattr(method, "__name__", "")
            try:
                return call(method, *args, **kwargs)
            finally:
                if changes_weights(name):
                    self.epoch += 1

        def watched_sleep(level: int = 1, *args: Any, **kwargs: Any) -> Any:
            try:
                return sleep(level, *args, **kwargs)
            finally:
                self.epoch += level >= 2

        core.collective_rpc, core.model_executor.sleep = watched_call, watched_sleep


def changes_weights(method: str) -> bool:
    """Whether a worker's method of this name is taken to change the weights: it names them, and is no known reader.

    Reinforcement learning brings methods of its own (`update_weight`, `load_weights_from_ipc`), all called after them.
    """
    return "weight" in method.lower() and method not in WEIGHT_READERS and not method.startswith(READING)


def base_domain(config: Any, groups: Any) -> ContentDomain:
    """What all requests of an engine have in common."""
    model, cache = getattr(config, "model_config", None), getattr(config, "cache_config", None)
    said = [getattr(model, name, None) for name in ("model", "revision", "quantization", "dtype")]
    layouts = []
    for group in groups:
        spec = group.kv_cache_spec
        names = ("block_size", "num_kv_heads", "head_size", "dtype", "sliding_window", "attention_chunk_size")
        values = ",".join(f"{name}={getattr(spec, name)}" for name in names if getattr(spec, name, None) is not None)
        layouts.append(f"{type(spec).__name__}({values})")
    return ContentDomain(
        model=repr(tuple(None if value is None else str(value) for value in said)),
        kv_layout=";".join(layouts),
        kv_dtype=str(getattr(cache, "cache_dtype", "")),
    )


def adapter_revision(path: str) -> str:
    """Which weights go by an adapter's name: its path and, where that is a local one, when its files were written.

    What else comes and goes in its folder is nothing to the weights.
    """
    written = []
    for file in ADAPTER_FILES:
        try:
            found = os.stat(os.path.join(path, file))
        except (OSError, ValueError):
            continue
        # The size, too: copies often keep the time of their original.
        written.append(f"{file} {found.st_mtime_ns} {found.st_size}")
    return " ".join([*written, path])


def inputs_of(request: Any, first: int) -> list[MultimodalInput]:
    """The request's multimodal inputs from the `first` on, by vLLM's own hashes of what they are."""
    return [
        MultimodalInput(
            position=feature.mm_position.offset, tokens=feature.mm_position.length, identity=feature.identifier
        )
        for feature in request.mm_features[first:]
    ]


def embeddings_of(request: Any, block_size: int) -> list[MultimodalInput]:
    """A prompt given as embeddings: one input for each block's part of it, so that a common beginning is shared.

    The identity is a hash of the bytes. vLLM has the tensor in host memory, and hashes it there as well.
    """
    embeddings = getattr(request, "prompt_embeds", None)
    if embeddings is None:
        return []
    mask = getattr(request, "prompt_is_token_ids", None)
    found = []
    for start in range(0, len(embeddings), block_size):
        part = embeddings[start : start + block_size]
        digest = hashlib.blake2b(part.contiguous().flatten().view(_bytes_of()).numpy().tobytes(), digest_size=32)
        digest.update(repr((str(part.dtype), tuple(part.shape), mask and mask[start : start + block_size])).encode())
        found.append(MultimodalInput(position=start, tokens=len(part), identity=digest.digest()))
    return found


def _bytes_of() -> Any:
    import torch

    return torch.uint8
