"""Continuous batching: which requests run in a step, and how many tokens each of them computes.

Running requests come first, in order of admission; a prompt is computed in chunks under a budget of tokens a step. When
pages run out, the request admitted last gives its pages back and starts over later (preemption by recomputation).
Pages are published to the prefix cache when they are scheduled, before they are computed, as vLLM does: requests of
the same step may already share them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvguard.fault_injection.engine.pool import PagePool, chain_keys

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks for: token ids of the prompt, and how many tokens to generate."""

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(eq=False)
class Sequence:
    """A request in the engine.

    tokens     prompt and generated tokens; computed: how many of them have their KV in the cache
    pages      logical page -> physical page; row: its row of the block table, -1 while it waits
    scheduled  tokens to compute in the step in hand
    published  leading full pages that were offered to the prefix cache
    written    leading columns that the block table on the device already holds
    """

    request: Request
    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    row: int = -1
    scheduled: int = 0
    published: int = 0
    written: int = 0
    was_preempted: bool = False

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)


@dataclass
class Counts:
    """What a run contained; a soak in which one of the first four is zero proves nothing."""

    preemptions: int = 0
    evictions: int = 0
    prefix_hits: int = 0
    client_aborts: int = 0
    steps: int = 0
    promised_hits: int = 0
    """Prefix hits on pages whose writer runs in the very same step."""


class Scheduler:
    """Decides, page by page, what the next forward computes."""

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_rows: int,
        token_budget: int,
        prefix_cache: bool,
        guard: PagedGuard | None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.token_budget = token_budget
        self.prefix_cache = prefix_cache
        self.guard = guard
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.counts = Counts()
        self.promised_adoptions: list[tuple[int, str, str]] = []
        """(step, reader, writer): a request took a page that another one writes in that very step."""
        self.publications: dict[int, tuple[int, str]] = {}
        """page -> (step, request) of its last publication."""

    def schedule(self, step: int) -> list[Sequence]:
        """The sequences of this step, each with `scheduled` > 0 and pages for all of its tokens."""
        budget = self.token_budget
        batch: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or budget == 0:
                continue
            count = min(budget, len(sequence.tokens) - sequence.computed)
            if self._grow_or_preempt(sequence, count):
                budget -= count
                self._plan(sequence, count, step)
                batch.append(sequence)
        while self.waiting and self.free_rows and budget > 0:
            count = self._admit(self.waiting[0], budget, step)
            if count == 0:
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= count
            self._plan(sequence, count, step)
            batch.append(sequence)
        return batch

    def end(self, sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
        """The sequence leaves. Pages that are not its own any more are not touched."""
        if self.guard is not None:
            self.guard.finish(sequence.id)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self._drop_pages(sequence, foreign_pages)

    def _drop_pages(self, sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
        self.pool.release([page for page in sequence.pages if page not in foreign_pages])
        sequence.pages = []
        sequence.written = 0
        if sequence.row >= 0:
            self.free_rows.append(sequence.row)
            sequence.row = -1

    def _plan(self, sequence: Sequence, count: int, step: int) -> None:
        sequence.scheduled = count
        if not self.prefix_cache:
            return
        full = (sequence.computed + count) // self.page_size
        if full > sequence.published:
            keys = chain_keys(sequence.tokens, self.page_size)
            for column in range(sequence.published, full):
                self.pool.publish(sequence.id, column, sequence.pages[column], keys[column])
                self.publications[sequence.pages[column]] = (step, sequence.id)
            sequence.published = full

    def _pages_short(self, sequence: Sequence, count: int) -> int:
        return -(-(sequence.computed + count) // self.page_size) - len(sequence.pages)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        for _ in range(self._pages_short(sequence, count)):
            page = self.pool.take(sequence.id)
            if page is None:
                return False
            sequence.pages.append(page)
        return True

    def _grow_or_preempt(self, sequence: Sequence, count: int) -> bool:
        while not self._grow(sequence, count):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Give all pages back and queue again, first in line."""
        self.counts.preemptions += 1
        if self.guard is not None:
            self.guard.preempt(sequence.id)
        self.running.remove(sequence)
        self._drop_pages(sequence)
        sequence.computed = sequence.published = 0
        sequence.was_preempted = True
        self.waiting.appendleft(sequence)

    def _admit(self, sequence: Sequence, budget: int, step: int) -> int:
        """Give a waiting sequence a row and pages for its first chunk; returns the chunk's tokens, 0 if none fits."""
        hits: list[tuple[int, int]] = []
        if self.prefix_cache:
            # The last token is always computed: its logits are needed.
            hits = self.pool.lookup(chain_keys(sequence.tokens[:-1], self.page_size))
        count = min(budget, len(sequence.tokens) - len(hits) * self.page_size)
        need = -(-(len(hits) * self.page_size + count) // self.page_size) - len(hits)
        idle_hits = sum(page in self.pool.idle for _, page in hits)
        if need > self.pool.available - idle_hits:
            return 0
        if self.guard is not None and sequence.was_preempted:
            self.guard.resume(sequence.id)
        sequence.was_preempted = False
        sequence.pages = self.pool.share(sequence.id, hits)
        for page in sequence.pages:
            published, writer = self.publications.get(page, (0, ""))
            if published == step:
                self.promised_adoptions.append((step, sequence.id, writer))
                self.counts.promised_hits += 1
        self.counts.prefix_hits += bool(sequence.pages)
        sequence.computed = len(sequence.pages) * self.page_size
        sequence.published = len(sequence.pages)
        count = min(budget, len(sequence.tokens) - sequence.computed)
        if not self._grow(sequence, count):
            # The guard passed pages over, so that fewer were there than counted: wait for the next step.
            if self.guard is not None:
                self.guard.preempt(sequence.id)
            self._drop_pages(sequence)
            sequence.computed = sequence.published = 0
            sequence.was_preempted = True
            return 0
        sequence.row = self.free_rows.pop()
        return count
