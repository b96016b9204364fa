"""Public bugs of SGLang on an unmodified release: its file store and page hashes, beside a stand-in model.

SGLang is imported by the runs alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from kvguard.fault_injection.scenarios.scenario import ReplayRun
from kvguard.fault_injection.scenarios.stand_in import PAGE, PAGES, Asked, StandIn, in_turn, prompt_of

__all__ = ["SGLANG_REPLAYS"]


class _WithFileStore(StandIn):
    """Pages of one request only; every complete page of a prompt goes to SGLang's HiCacheFile, and comes from it.

    What stands in for a page's tensor holds marks.
    """

    def __init__(self, folder: str, *, names: dict[int, str], **how: Any) -> None:
        """`names`: epoch of the weights -> the name that the model is served under."""
        super().__init__(**how)
        self._folder, self._names = folder, names
        self._vacant = list(range(PAGES - 1, 0, -1))
        self._held: dict[str, list[int]] = {}
        self._stores: dict[int, Any] = {}

    def _store(self, asked: Asked) -> Any:
        """The store of the server that runs with these weights."""
        epoch = asked.weights_epoch
        if epoch not in self._stores:
            from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

            config = HiCacheStorageConfig(
                tp_rank=0,
                tp_size=1,
                pp_rank=0,
                pp_size=1,
                attn_cp_rank=0,
                attn_cp_size=1,
                is_mla_model=False,
                enable_storage_metrics=False,
                is_page_first_layout=False,
                model_name=self._names[epoch],
            )
            self._stores[epoch] = HiCacheFile(config, self._folder)
        return self._stores[epoch]

    def _hashes(self, asked: Asked) -> list[str]:
        """SGLang's hash of each whole page of the prompt but the one that holds its last token."""
        from sglang.srt.mem_cache.utils import get_hash_str

        whole = (len(asked.prompt) - 1) // PAGE * PAGE
        found = get_hash_str(asked.prompt[:whole], None, page_size=PAGE)
        return [found] if isinstance(found, str) else list(found)

    def _keys(self, asked: Asked) -> list[str]:
        """What the files of these pages are named."""
        store = self._store(asked)
        return [str(store._get_suffixed_key(name)) for name in self._hashes(asked)]

    def pages_of(self, asked: Asked) -> list[int]:
        return self._held[asked.name]

    def _take(self, asked: Asked) -> None:
        page = self._vacant.pop()
        self._held[asked.name].append(page)
        if self.guard is not None:
            self.guard.allocate(asked.name, [page])

    def _admit(self, asked: Asked) -> int:
        import torch

        self._held[asked.name] = []
        for _ in range(-(-len(asked.prompt) // PAGE)):
            self._take(asked)
        store, hashes = self._store(asked), self._hashes(asked)
        hits = store.batch_exists(hashes)
        if hits and self.guard is not None:
            hits = self.guard.vet_stored(asked.name, self._keys(asked)[:hits], 0)
        for column in range(hits):
            loaded = store.get(hashes[column], torch.zeros(PAGE, dtype=torch.int64))
            marks = loaded.numpy().view(np.uint64).tolist()
            page = self._held[asked.name][column]
            self.marks.update({page * PAGE + offset: mark for offset, mark in enumerate(marks)})
        self.run.counts.store_hits += hits
        return int(hits * PAGE)

    def _grow(self, asked: Asked) -> None:
        if len(asked.tokens) > len(self._held[asked.name]) * PAGE:
            self._take(asked)

    def _computed(self, asked: Asked) -> None:
        import torch

        if len(asked.tokens) > len(asked.prompt):
            return
        store, keys = self._store(asked), self._keys(asked)
        for column, name in enumerate(self._hashes(asked)):
            page = self._held[asked.name][column]
            marks = np.array([self.marks[page * PAGE + offset] for offset in range(PAGE)], np.uint64)
            if self.guard is not None and not self.guard.publish(asked.name, column, keys[column]):
                continue
            store.set(name, torch.from_numpy(marks.view(np.int64)))
            if self.guard is not None:
                self.guard.stored(keys[column], page)

    def _give_back(self, asked: Asked) -> list[int]:
        pages = self._held.pop(asked.name)
        if self.guard is not None:
            self.guard.unpublish(pages)
        self._vacant.extend(pages)
        return pages


def file_named_after_served_model(*, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
    """One prompt before and after new weights under the served name; without the bug the new ones have another name."""
    prompt = prompt_of(seed)
    before = Asked("before", prompt, 4, weights="first checkpoint")
    after = Asked("after", prompt, 6, weights="second checkpoint", weights_epoch=1)
    names = {0: "chat", 1: "chat" if bug else "chat-2"}
    with tempfile.TemporaryDirectory(prefix="kvguard-hicache-") as folder:
        made = _WithFileStore(folder, names=names, proofs=proofs, backend=backend, seed=seed)
        return made.go(in_turn(before, after))


SGLANG_REPLAYS: dict[str, Callable[..., ReplayRun]] = {
    "sglang-file-named-after-served-model": file_named_after_served_model
}
"""Scenario -> its run, in the release of SGLang that this process imports."""
