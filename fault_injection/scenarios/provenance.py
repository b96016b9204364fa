"""Whose KV lies in every slot of the embedded engine, and who reads what is not its own: the measure of harm.

It knows no guard and no tags. Each slot is marked with the whole history that its KV was computed from: every token up
to it, tenant, adapter and weights. A forward is judged by what it really takes: the table and slots that the model is
given, after padding and after whatever a guard has changed. What is computed from wrong KV is wrong itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.kv_cache import PagedKV
from kvguard.fault_injection.engine.model import ForwardBatch, LlamaModel
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.engine.step import MAIN_POOL
from kvguard.fault_injection.engine.window import WINDOW_POOL

__all__ = ["Provenance"]

Mark = int
"""A hash of a history; 0: nothing, or nobody's."""


class _Watched:
    """The engine's model; every forward is seen first."""

    def __init__(self, model: LlamaModel, see: Callable[[ForwardBatch], None]) -> None:
        self._model, self._see = model, see

    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        self._see(batch)
        return self._model.forward(batch, kv)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Provenance:
    """Watches one engine from before its first step.

    misread  request -> steps in which it read a slot that does not hold its own history
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._marks: dict[str, dict[int, Mark]] = {MAIN_POOL: {}, WINDOW_POOL: {}}
        self._stored: dict[int, list[Mark]] = {}
        self.misread: dict[str, list[int]] = {}
        engine.model = _Watched(engine.model, self._see)  # type: ignore[assignment]
        self._hook_store(engine)

    def _hook_store(self, engine: Engine) -> None:
        """Marks go with the copies that are made."""
        store, size, marks = engine.pool.store, engine.config.page_size, self._marks[MAIN_POOL]
        if store is None:
            return
        save, load = store.save, store.load

        def save_marked(key: int, page: int) -> None:
            save(key, page)
            self._stored[key] = [marks.get(page * size + offset, 0) for offset in range(size)]

        def load_marked(keys: list[int], pages: list[int]) -> int:
            count = load(keys, pages)
            for key, page in zip(store.completed, pages, strict=False):
                marks.update({page * size + offset: mark for offset, mark in enumerate(self._stored[key])})
            return count

        store.save, store.load = save_marked, load_marked  # type: ignore[method-assign,assignment]

    def _history(self, sequence: Sequence, length: int) -> list[Mark]:
        """The mark of each of the sequence's first `length` tokens, drafts included."""
        request, mark = sequence.request, hash(self._engine.weights_epoch)
        mark = hash((mark, request.tenant, request.lora))
        marks = []
        for token in (sequence.tokens + sequence.drafts)[:length]:
            mark = hash((mark, token))
            marks.append(mark)
        return marks

    def _see(self, batch: ForwardBatch) -> None:
        engine = self._engine
        assert engine.tensors is not None
        requests = engine.tensors.requests
        lengths, starts, positions = batch.seq_lens, batch.query_start, batch.positions.tolist()
        owners = [
            self._history(engine.sequences[name], lengths[place]) if name in engine.sequences else []
            for place, name in enumerate(requests)
        ]
        pools = [(MAIN_POOL, batch.slot_mapping, batch.block_table, engine.config.num_pages, 0)]
        if batch.window is not None and engine.window is not None:
            pages = engine.window.pool.num_pages
            windowed = batch.window
            pools.append((WINDOW_POOL, windowed.slot_mapping, windowed.block_table, pages, engine.window.window))
        size, wrong = engine.config.page_size, set()
        for pool, slot_mapping, table, num_pages, window in pools:
            marks = self._marks[pool]
            slots = [max(slot, 0) % (num_pages * size) for slot in slot_mapping.tolist()]
            for place in range(len(lengths)):
                own = owners[place] if place < len(owners) else []
                for token in range(starts[place], starts[place + 1]):
                    position = positions[token]
                    marks[slots[token]] = own[position] if position < len(own) else 0
            for place, name in enumerate(requests):
                row = table[place].tolist()
                first = max(0, positions[starts[place]] - window + 1) if window else 0
                for position in range(first, lengths[place]):
                    page = row[position // size] % num_pages
                    own = owners[place]
                    if position >= len(own) or marks.get(page * size + position % size) != own[position]:
                        wrong.add(name)
                        break
        for name in wrong:
            self.misread.setdefault(name, []).append(engine.step_index)
            place = requests.index(name)
            # What it writes was computed from what it read.
            for pool, slot_mapping, _, num_pages, _ in pools:
                for slot in slot_mapping[starts[place] : starts[place + 1]].tolist():
                    self._marks[pool][max(slot, 0) % (num_pages * size)] = 0
