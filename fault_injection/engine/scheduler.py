"""Continuous batching: which requests run in a step, and how many tokens each of them computes.

Running requests come first, in order of admission; a prompt is computed in chunks under a budget of tokens a step. When
pages run out, the request admitted last gives its pages back and starts over later (preemption by recomputation).
Pages are published to the prefix cache when they are scheduled, before they are computed, as vLLM does: requests of
the same step may already share them. With `publish_ahead` a page is published when its content is known, though a later
chunk writes the rest of it; others share it once that is scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvguard.fault_injection.engine.drafts import draft
from kvguard.fault_injection.engine.pool import PagePool, chain_keys

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.fault_injection.engine.window import WindowPages


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asks for: token ids of the prompt, and how many tokens to generate.

    tenant  whose it is: tenants share no cached pages
    lora    the adapter that it runs with; "": none
    keep_last    tokens of the prompt that are used, the last ones; 0: all. untruncated: what the prompt was before
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    tenant: str = ""
    lora: str = ""
    keep_last: int = 0
    untruncated: tuple[int, ...] = ()


@dataclass(eq=False)
class Sequence:
    """A request in the engine.

    tokens     prompt and generated tokens; computed: how many of them have their KV in the cache
    pages      logical page -> physical page; row: its row of the block table, -1 while it waits
    scheduled  tokens to compute in the step in hand; the last of them are `drafts`, guesses that the step verifies
    published  leading full pages that were offered to the prefix cache
    written    leading columns that the block table on the device already holds
    window_pages, window_written, window_published  the same for windowed layers; columns before window_start are the
               null page, and those in foreign_window are not the sequence's own any more
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
    drafts: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    window_start: int = 0
    window_written: int = 0
    window_published: int = 0
    foreign_window: tuple[int, ...] = ()

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
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    partly_written: int = 0
    """Pages that were published before a later step wrote the rest of them."""
    padding_lanes: int = 0
    dummy_batches: int = 0
    window_pages_passed: int = 0
    cached_tokens: int = 0
    """Tokens that prefix hits were good for."""
    store_hits: int = 0
    """Pages that came back from the external store."""
    weight_updates: int = 0
    tenant_hits: int = 0
    """Prefix hits of requests that belong to a tenant."""
    returns: int = 0
    """Prompts that were served before, and of which nothing was cached any more: their pages were in other hands."""


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
        publish_ahead: bool = False,
        draft_tokens: int = 0,
        window: WindowPages | None = None,
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.token_budget = token_budget
        self.prefix_cache = prefix_cache
        self.guard = guard
        self.publish_ahead = publish_ahead
        self.draft_tokens = draft_tokens
        self.window = window
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_rows = list(range(max_rows - 1, -1, -1))
        self.counts = Counts()
        self.promised_adoptions: list[tuple[int, str, str]] = []
        """(step, reader, writer): a request took a page that another one writes in that very step."""
        self.publications: dict[int, tuple[int, str]] = {}
        """page -> (step, request) that writes the end of what was published last; window_publications: of the windowed
        layers' pages."""
        self.window_publications: dict[int, tuple[int, str]] = {}
        self.keys_of: Callable[[Sequence, list[int]], list[int]] = self._chain_keys
        """The cache keys of the full pages of some first tokens of a sequence."""
        self.unwritten: set[int] = set()
        """Published pages of which no step that was scheduled writes the last token."""

    def _chain_keys(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        return chain_keys(tokens, self.page_size, sequence.request.tenant, sequence.request.lora)

    def schedule(self, step: int) -> list[Sequence]:
        """The sequences of this step, each with `scheduled` > 0 and pages for all of its tokens."""
        budget = self.token_budget
        batch: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or budget == 0:
                continue
            if self.window is not None:
                self.window.slide(sequence)
            count = min(budget, len(sequence.tokens) - sequence.computed)
            sequence.drafts = self._drafts(sequence, budget)
            count += len(sequence.drafts)
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
        elif sequence in self.running:
            self.running.remove(sequence)
        self._drop_pages(sequence, foreign_pages)

    def park(self, sequence: Sequence) -> None:
        """The sequence computes nothing any more but keeps its pages: a copy to another engine still reads them."""
        self.running.remove(sequence)
        self.free_rows.append(sequence.row)
        sequence.row = -1

    def _drop_pages(self, sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
        # References count requests, not columns: a page that is listed twice was taken once too often, not shared.
        pages = [page for page in dict.fromkeys(sequence.pages) if page not in foreign_pages]
        if self.unwritten:
            for page in self.unwritten.intersection(pages):
                # What was to be written there is not: nobody may find it.
                self.pool.forget(page)
                self.unwritten.discard(page)
        self.pool.release(pages)
        sequence.pages = []
        sequence.written = 0
        if self.window is not None:
            self.window.release(sequence)
        if sequence.row >= 0:
            self.free_rows.append(sequence.row)
            sequence.row = -1

    def _plan(self, sequence: Sequence, count: int, step: int) -> None:
        sequence.scheduled = count
        if not self.prefix_cache:
            return
        # A draft is nothing that a page can be found by, and neither is what stands before a rejected one.
        full = min(sequence.computed + count, len(sequence.tokens)) // self.page_size
        if self.unwritten:
            for page in self.unwritten.intersection(sequence.pages[:full]):
                self.unwritten.discard(page)
                self.publications[page] = (step, sequence.id)
        known = full
        if self.publish_ahead:
            known = min(len(sequence.tokens) // self.page_size, len(sequence.pages))
        keys: list[int] = []
        if known > sequence.published or (self.window is not None and full > sequence.window_published):
            keys = self.keys_of(sequence, sequence.tokens)
        if known > sequence.published:
            for column in range(sequence.published, known):
                page = sequence.pages[column]
                self.pool.publish(sequence.id, column, page, keys[column])
                self.publications[page] = (step, sequence.id)
                if column >= full and self.pool.cached.get(keys[column]) == page:
                    self.unwritten.add(page)
                    self.counts.partly_written += 1
            sequence.published = known
        if self.window is not None and full > sequence.window_published:
            for column in range(sequence.window_published, full):
                self.window.publish(sequence, column, keys[column])
                self.window_publications[sequence.window_pages[column]] = (step, sequence.id)
            sequence.window_published = full

    def _drafts(self, sequence: Sequence, budget: int) -> list[int]:
        """Guesses to verify with a generating sequence's next token; none where they would take somebody's pages."""
        left = sequence.request.max_new_tokens - sequence.generated
        count = min(self.draft_tokens, left - 1, budget - 1)
        if count <= 0 or len(sequence.tokens) - sequence.computed != 1:
            return []
        drafts = draft(sequence.tokens, count)
        return drafts if self._room_for(sequence, 1 + len(drafts)) else []

    def _room_for(self, sequence: Sequence, count: int) -> bool:
        columns = -(-(sequence.computed + count) // self.page_size)
        if columns - len(sequence.pages) > self.pool.available:
            return False
        return self.window is None or columns - len(sequence.window_pages) <= self.window.pool.available

    def _pages_short(self, sequence: Sequence, count: int) -> int:
        return -(-(sequence.computed + count) // self.page_size) - len(sequence.pages)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        for _ in range(self._pages_short(sequence, count)):
            page = self.pool.take(sequence.id)
            if page is None:
                return False
            sequence.pages.append(page)
        return self.window is None or self.window.grow(sequence, len(sequence.pages))

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
        self._start_over(sequence)
        self.waiting.appendleft(sequence)

    def restart_all(self) -> None:
        """Everybody gives the pages back and computes again, in the same order."""
        for sequence in reversed(list(self.running)):
            self._preempt(sequence)

    def _start_over(self, sequence: Sequence) -> None:
        sequence.computed = sequence.published = sequence.window_published = 0
        sequence.was_preempted = True
        sequence.drafts = []

    def _admit(self, sequence: Sequence, budget: int, step: int) -> int:
        """Give a waiting sequence a row and pages for its first chunk; returns the chunk's tokens, 0 if none fits."""
        hits, window_hits = self._hits(sequence)
        count = min(budget, len(sequence.tokens) - len(hits) * self.page_size)
        need = -(-(len(hits) * self.page_size + count) // self.page_size) - len(hits)
        idle_hits = sum(page in self.pool.idle for _, page in hits)
        if need > self.pool.available - idle_hits:
            return 0
        if self.window is not None:
            pool = self.window.pool
            if need > pool.available - sum(page in pool.idle for _, page in window_hits):
                return 0
        if self.guard is not None and sequence.was_preempted:
            self.guard.resume(sequence.id)
        sequence.was_preempted = False
        sequence.pages = self.pool.share(sequence.id, hits)
        if self.window is not None and hits:
            self._share_window(sequence, window_hits if len(sequence.pages) == len(hits) else None)
        sources = [self.publications.get(page, (0, "")) for page in sequence.pages]
        sources += [self.window_publications.get(page, (0, "")) for page in sequence.window_pages]
        for published, writer in sources:
            if published == step:
                self.promised_adoptions.append((step, sequence.id, writer))
                self.counts.promised_hits += 1
        self.counts.prefix_hits += bool(sequence.pages)
        self.counts.tenant_hits += bool(sequence.pages and sequence.request.tenant)
        sequence.computed = len(sequence.pages) * self.page_size
        self.counts.cached_tokens += sequence.computed
        sequence.published = sequence.window_published = len(sequence.pages)
        sequence.drafts = []
        count = min(budget, len(sequence.tokens) - sequence.computed)
        if not self._grow(sequence, count):
            # The guard passed pages over, so that fewer were there than counted: wait for the next step.
            if self.guard is not None:
                self.guard.preempt(sequence.id)
            self._drop_pages(sequence)
            self._start_over(sequence)
            return 0
        sequence.row = self.free_rows.pop()
        return count - self._load(sequence, count)

    def _load(self, sequence: Sequence, count: int) -> int:
        """Take what the external store has for pages that the sequence was just given; how many tokens that saves."""
        store, size = self.pool.store, self.page_size
        if store is None or self.window is not None or not self.prefix_cache:
            return 0
        first = sequence.computed // size
        # The last token is always computed, as with hits of the prefix cache.
        keys = store.lookup(self.keys_of(sequence, sequence.tokens[:-1])[first : len(sequence.pages)])
        keys = keys[: (count - 1) // size]
        if self.guard is not None and keys:
            keys = keys[: self.guard.vet_stored(sequence.id, keys, first)]
        if not keys:
            return 0
        loaded = store.load(keys, sequence.pages[first : first + len(keys)])
        if self.guard is not None:
            loaded = min(loaded, self.guard.vet_loaded(sequence.id, keys[:loaded], store.completed, first))
        self.counts.store_hits += loaded
        sequence.computed += loaded * size
        return loaded * size

    def _hits(self, sequence: Sequence) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Cached pages of the longest prefix that both pools have, as (key, page); those of windowed layers apart."""
        if not self.prefix_cache:
            return [], []
        # The last token is always computed: its logits are needed.
        keys = self.keys_of(sequence, sequence.tokens[:-1])
        hits = self.pool.lookup(keys)
        if self.unwritten:
            ready = (place for place, (_, page) in enumerate(hits) if page in self.unwritten)
            hits = hits[: next(ready, len(hits))]
        if self.window is None:
            return hits, []
        for columns in range(len(hits), 0, -1):
            window_hits = self.window.hits(keys, columns)
            if window_hits is not None:
                return hits[:columns], window_hits
        return [], []

    def _share_window(self, sequence: Sequence, hits: list[tuple[int, int]] | None) -> None:
        """Windowed layers take their part of a prefix hit; where either pool's was refused, nothing is shared."""
        assert self.window is not None
        if hits is not None and self.window.share(sequence, hits, len(sequence.pages)):
            return
        if self.guard is not None:
            self.guard.truncate(sequence.id, 0)
        self.pool.release(sequence.pages)
        sequence.pages = []
