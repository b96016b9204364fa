"""Public bugs of vLLM on unmodified releases: the release's own code decides what is shared, ours only asks.

vLLM is imported by the runs alone. Each run is of one release; see `releases.py` for how older ones are had.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvguard.fault_injection.scenarios.scenario import ReplayRun
from kvguard.fault_injection.scenarios.stand_in import PAGE, Asked, StandIn, in_turn, prompt_of
from kvguard.fault_injection.scenarios.vllm_manager import ManagerRun

__all__ = ["VLLM_REPLAYS"]

LocalReplay = Callable[..., ReplayRun]


def salt_like_adapter(*, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
    """A tenant's salt reads like the name of an adapter; without the bug it does not."""
    prompt = prompt_of(seed)
    adapted = Asked("adapted", prompt, 4, lora=("fr", 1, "/adapters/fr"), weights="fr")
    salted = Asked("salted", prompt, 6, salt="fr" if bug else "tenant", tenant="tenant")
    # Blocks behind the first carry no salt, only the hash of what is before them: the salted one comes first.
    return ManagerRun(proofs=proofs, backend=backend, seed=seed).go(in_turn(salted, adapted))


def adapters_of_one_name(*, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
    """Two adapters, loaded under one name with an id each; without the bug the names differ."""
    prompt = prompt_of(seed)
    one = Asked("one", prompt, 4, lora=("fr", 1, "/adapters/one"), weights="one")
    two = Asked("two", prompt, 6, lora=("fr" if bug else "de", 2, "/adapters/two"), weights="two")
    return ManagerRun(proofs=proofs, backend=backend, seed=seed).go(in_turn(one, two))


def adapter_reloaded(*, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
    """An adapter is trained further and loaded in place, from the same path; without the bug from another one."""
    prompt = prompt_of(seed)
    before = Asked("before", prompt, 4, lora=("fr", 1, "/adapters/fr"), weights="fr, first")
    path = "/adapters/fr" if bug else "/adapters/fr2"
    after = Asked("after", prompt, 6, lora=("fr", 1, path), lora_revision=1, weights="fr, second")
    return ManagerRun(proofs=proofs, backend=backend, seed=seed).go(in_turn(before, after))


class _WithDeferredFrees(ManagerRun):
    """Blocks of requests named `sent...` are taken from the books and returned to the pool later, by a transfer."""

    def _free(self, asked: Asked) -> None:
        if asked.name.startswith("sent"):
            self.manager.pop_blocks_for_free(asked.request)
        else:
            super()._free(asked)


def _cascade(run: StandIn, batch: list[Asked]) -> None:
    """Cascade attention reads the common prefix, as long as the manager says it is, through the first row."""
    assert isinstance(run, ManagerRun)
    common = run.manager.get_num_common_prefix_blocks(batch[0].name)[0]
    for other in batch[1:]:
        run.table[other.row, :common] = run.table[batch[0].row, :common]


def common_prefix_by_count(*, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
    """Three requests share a prefix; two end, their blocks held by a transfer; two that share nothing arrive.

    Without the bug the transfer holds nothing.
    """
    shared = prompt_of(seed, 40)
    first = Asked("first", shared + prompt_of(seed + 1, 10), 12)
    sent = [Asked(f"sent{number}", shared + prompt_of(seed + 2 + number, 10), 2) for number in range(2)]
    others = [Asked(f"other{number}", prompt_of(seed + 4 + number, 50), 6) for number in range(2)]
    made = (_WithDeferredFrees if bug else ManagerRun)(proofs=proofs, backend=backend, seed=seed)
    made.at_launch.append(_cascade)
    return made.go([[first], sent, [], [], others])


class _WithConnector(ManagerRun):
    """vLLM's ExampleConnector says what is stored; its files hold marks in place of tensors. No prefix cache."""

    def __init__(self, folder: Path, *, per_tenant: bool, **how: Any) -> None:
        super().__init__(prefix_cache=False, **how)
        self._folder, self._per_tenant = folder, per_tenant
        self._connectors: dict[str | None, Any] = {}

    def _connector(self, asked: Asked) -> Any:
        tenant = asked.tenant if self._per_tenant else None
        if tenant not in self._connectors:
            from types import SimpleNamespace

            from vllm.config import KVTransferConfig
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
            from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

            config = KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": str(self._folder / str(tenant))},
            )
            # All that its scheduler side reads of vLLM's configuration.
            settings: Any = SimpleNamespace(
                kv_transfer_config=config, cache_config=SimpleNamespace(block_size=PAGE)
            )
            layout: Any = None
            self._connectors[tenant] = ExampleConnector(settings, KVConnectorRole.SCHEDULER, layout)
        return self._connectors[tenant]

    def _file(self, asked: Asked, blocks: int) -> Path:
        import torch

        tokens = torch.tensor(asked.prompt)[: blocks * PAGE]
        return Path(self._connector(asked)._generate_filename_debug("layer", tokens, []))

    def _keys(self, asked: Asked, blocks: int) -> list[tuple[str, int]]:
        folder = str(self._file(asked, blocks).parent)
        return [(folder, column) for column in range(blocks)]

    def _admit(self, asked: Asked) -> int:
        computed = super()._admit(asked)
        matched, _ = self._connector(asked).get_num_new_matched_tokens(asked.request, computed)
        blocks = matched // PAGE
        if blocks and self.guard is not None:
            blocks = self.guard.vet_stored(asked.name, self._keys(asked, blocks), 0)
        if not blocks:
            return computed
        stored = json.loads(self._file(asked, matched // PAGE).read_text())
        own = self.pages_of(asked)
        for position in range(blocks * PAGE):
            self.marks[own[position // PAGE] * PAGE + position % PAGE] = stored[position]
        self.run.counts.store_hits += blocks
        return int(blocks * PAGE)

    def _computed(self, asked: Asked) -> None:
        super()._computed(asked)
        if len(asked.tokens) > len(asked.prompt):
            return
        # The prompt was computed: its whole blocks are stored.
        blocks = (len(asked.prompt) - 1) // PAGE
        own = self.pages_of(asked)
        marks = [self.marks[own[at // PAGE] * PAGE + at % PAGE] for at in range(blocks * PAGE)]
        self._file(asked, blocks).write_text(json.dumps(marks))
        if self.guard is not None:
            for column, key in enumerate(self._keys(asked, blocks)):
                if self.guard.publish(asked.name, column, key):
                    self.guard.stored(key, own[column])


def connector_keys_tokens_only(*, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
    """Two tenants, one prompt of three whole blocks, one connector; without the bug a connector each."""
    prompt = prompt_of(seed)
    one = Asked("one", prompt, 4, salt="tenant a", tenant="tenant a")
    two = Asked("two", prompt, 6, salt="tenant b", tenant="tenant b")
    with tempfile.TemporaryDirectory(prefix="kvguard-connector-") as folder:
        made = _WithConnector(Path(folder), per_tenant=not bug, proofs=proofs, backend=backend, seed=seed)
        return made.go(in_turn(one, two))


VLLM_REPLAYS: dict[str, LocalReplay] = {
    "vllm-salt-equal-to-adapter": salt_like_adapter,
    "vllm-adapters-of-one-name": adapters_of_one_name,
    "vllm-adapter-reloaded-in-place": adapter_reloaded,
    "vllm-common-prefix-by-count": common_prefix_by_count,
    "vllm-connector-keys-tokens-only": connector_keys_tokens_only,
}
"""Scenario -> its run, in whatever release of vLLM this process imports."""
