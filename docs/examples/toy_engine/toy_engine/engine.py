"""Continuous batching over a block manager. The "model" reads its whole KV, as attention does, and adds it up."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvguard.adapters.generic import PagedGuard, guard_allocator
from kvguard.verifier import PoolInputs
from toy_engine.block_manager import BlockManager, Seq

VOCAB = 61
MAX_ROWS, MAX_COLUMNS = 4, 16


class Engine:
    """One forward a `step`; `outputs` and `errors` are what the clients have."""

    def __init__(self, manager: BlockManager, guard: PagedGuard | None = None) -> None:
        self.manager, self.guard = manager, guard
        self.block_table = np.zeros((MAX_ROWS, MAX_COLUMNS), np.int32)
        self.kv = np.zeros(manager.num_blocks * manager.block_size, np.int64)
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.seqs: dict[str, Seq] = {}
        self.outputs: dict[str, list[int]] = {}
        self.errors: dict[str, str | None] = {}
        if guard is not None:
            guard_allocator(guard, manager, alloc="take", free="give_back")
            manager.share, manager.publish = guard.adopt, guard.publish

    def submit(self, seq_id: str, prompt: list[int], max_new_tokens: int) -> None:
        self.seqs[seq_id] = seq = Seq(seq_id, list(prompt), len(prompt), max_new_tokens)
        self.outputs[seq_id], self.errors[seq_id] = [], None
        self.waiting.append(seq)
        if self.guard is not None:
            self.guard.start(seq_id)

    def end(self, seq: Seq, error: str | None = None, foreign: tuple[int, ...] = ()) -> None:
        if self.guard is not None:
            self.guard.finish(seq.seq_id)
        self.errors[seq.seq_id] = error
        (self.running if seq in self.running else self.waiting).remove(seq)
        del self.seqs[seq.seq_id]
        self.manager.deallocate(seq, but=foreign)

    def step(self) -> None:
        batch = self._schedule()
        if not batch:
            return
        size = self.manager.block_size
        rows, ends = [seq.row for seq in batch], [len(seq.tokens) for seq in batch]
        for seq in batch:
            # Only what is new since its last step: the rest of the row is there already.
            self.block_table[seq.row, seq.written : len(seq.block_table)] = seq.block_table[seq.written :]
            seq.written = len(seq.block_table)
        # Where this step writes: the tokens without KV yet, through the block table, as on a GPU.
        starts, slots = [0], []
        for seq in batch:
            position = np.arange(seq.cached_tokens, len(seq.tokens))
            slots.append(self.block_table[seq.row, position // size].astype(np.int64) * size + position % size)
            starts.append(starts[-1] + len(position))
        slot_mapping, pending = np.concatenate(slots), None
        if self.guard is not None:
            inputs = PoolInputs(table=self.block_table, slot_mapping=slot_mapping, query_start=np.array(starts))
            pending = self.guard.before_forward([seq.seq_id for seq in batch], rows, ends, inputs)
        sampled = self._forward(batch, slot_mapping)
        withheld: frozenset[str] = frozenset()
        if self.guard is not None:
            judgement = self.guard.after_forward(pending)
            withheld = judgement.withheld
            for abort in judgement.aborts:
                if abort.request in self.seqs:
                    foreign = abort.foreign_pages.get("main", ())
                    self.end(self.seqs[abort.request], abort.violation.message, foreign)
            for _, block_id in judgement.evict:
                self.manager.cached = {key: b for key, b in self.manager.cached.items() if b != block_id}
                self.manager.key_of.pop(block_id, None)
        for seq, token in zip(batch, sampled, strict=True):
            if seq.seq_id in self.seqs and seq.seq_id not in withheld:
                self._emit(seq, token)

    def _schedule(self) -> list[Seq]:
        for seq in list(self.running):
            while seq in self.running and not self.manager.grow(seq):
                self._preempt(self.running[-1])
        while self.waiting and len(self.running) < MAX_ROWS:
            seq = self.waiting[0]
            if not self.manager.allocate(seq):
                self._release(seq)
                break
            self.waiting.remove(seq)
            seq.row = min(set(range(MAX_ROWS)) - {other.row for other in self.running})
            self.running.append(seq)
        for seq in self.running:
            self.manager.publish_full(seq)
        return list(self.running)

    def _preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        self._release(seq)
        self.waiting.insert(0, seq)

    def _release(self, seq: Seq) -> None:
        """All blocks go back, and the request starts over later."""
        if self.guard is not None:
            self.guard.preempt(seq.seq_id)
            self.guard.resume(seq.seq_id)
        self.manager.deallocate(seq)
        seq.written = 0

    def _forward(self, batch: list[Seq], slot_mapping: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
        size, sampled = self.manager.block_size, []
        new = [(token, place) for seq in batch for place, token in enumerate(seq.tokens) if place >= seq.cached_tokens]
        for slot, (token, place) in zip(slot_mapping, new, strict=True):
            if slot >= 0:  # -1: write nothing
                self.kv[slot % len(self.kv)] = (token + 1) * (2 * place + 1)
        for seq in batch:
            place = np.arange(len(seq.tokens))
            slot = self.block_table[seq.row, place // size].astype(np.int64) * size + place % size
            read = self.kv[slot % len(self.kv)]  # unchecked pointers land in somebody's memory, too
            sampled.append(int((read * (place + 3) % 10_007).sum() % VOCAB))
            seq.cached_tokens = len(seq.tokens)
        return sampled

    def _emit(self, seq: Seq, token: int) -> None:
        seq.tokens.append(token)
        self.outputs[seq.seq_id].append(token)
        if len(self.outputs[seq.seq_id]) >= seq.max_new_tokens:
            self.end(seq)
