"""The page pool: a free list, reference counts, and a prefix cache whose unused pages are evicted oldest first.

Counts and lists are not policed here, just as in a real engine: a page whose count is dropped once too often goes back
to the free list while somebody reads it. That is what the guard is for, and what the faults do on purpose.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.fault_injection.engine.store import ExternalStore

NULL_PAGE = 0


def chain_keys(tokens: Sequence[int], page_size: int, tenant: str = "", lora: str = "") -> list[int]:
    """The cache key of every full page of `tokens`: each covers its page, what is before it, tenant and adapter."""
    keys: list[int] = []
    parent = hash((tenant, lora)) if lora else hash(tenant) if tenant else 0
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = hash((parent, *tokens[start : start + page_size]))
        keys.append(parent)
    return keys


class PagePool:
    """Pages 1 .. num_pages - 1; page 0 is the null page, which padding and neutralised rows use.

    free         pages with nothing in them, next to be handed out first
    references   how many requests use each page
    cached       cache key -> page, for pages that hold (or, promised, are about to hold) a full page of tokens
    key_of       page -> the key it is cached under
    handed_out   how often each page was given to a request; last_taker: to which one last
    idle         cached pages that no request uses, least recently used first
    store        where cached pages go when they are evicted; None: nowhere
    """

    def __init__(self, num_pages: int, guard: PagedGuard | None, name: str | None = None) -> None:
        """`name`: what the guard calls the pool; None: its first one."""
        self.num_pages = num_pages
        self.guard = guard
        self.name = name
        self.free: deque[int] = deque(range(1, num_pages))
        self.references = [0] * num_pages
        self.cached: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self.handed_out = [0] * num_pages
        self.last_taker: dict[int, str] = {}
        self.store: ExternalStore | None = None

    @property
    def available(self) -> int:
        """Pages that could be handed out now, cached ones included."""
        return len(self.free) + len(self.idle)

    def take(self, request: str) -> int | None:
        """One page for the request, or None if there is none left. A page that the guard refuses is passed over."""
        while self.free or self.idle:
            if not self.free:
                self.evict(next(iter(self.idle)))
                continue
            page = self.free.popleft()
            if self.guard is not None and not self.guard.allocate(request, [page], pool=self.name):
                continue
            self.references[page] = 1
            self.handed_out[page] += 1
            self.last_taker[page] = request
            self.idle.pop(page, None)
            return page
        return None

    def lookup(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """The cached pages of the longest cached prefix of `keys`, as (key, page)."""
        hits: list[tuple[int, int]] = []
        for key in keys:
            page = self.cached.get(key)
            if page is None:
                break
            hits.append((key, page))
        return hits

    def share(self, request: str, hits: Sequence[tuple[int, int]]) -> list[int]:
        """One more user for each cached page; returns the pages that the guard let through, a prefix of the hits."""
        accepted = len(hits) if self.guard is None else self.guard.adopt(request, hits, pool=self.name)
        pages = [page for _, page in hits[:accepted]]
        for page in pages:
            self.references[page] += 1
            self.idle.pop(page, None)
        return pages

    def publish(self, request: str, column: int, page: int, key: int) -> None:
        """Let others find the page under `key`, unless a page of the same content is cached already."""
        if key in self.cached:
            return
        if self.guard is not None and not self.guard.publish(request, column, key, pool=self.name):
            return
        self.cached[key] = page
        self.key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each page, the last column first, so that a prefix outlives its continuation."""
        for page in reversed(pages):
            self.references[page] -= 1
            if self.references[page] > 0:
                continue
            if page in self.key_of:
                self.idle[page] = None
                self.idle.move_to_end(page)
            else:
                self.give_back(page)

    def evict(self, page: int) -> None:
        """Drop a cached page and put it on the free list, once the external store has a copy of it."""
        self.evictions += 1
        key = self.key_of.get(page)
        if self.store is not None and key is not None and self.cached.get(key) == page:
            self.store.save(key, page)
        self.give_back(page)

    def forget(self, page: int) -> None:
        """No cache entry may name the page any more, stale ones included."""
        for key in [key for key, cached in self.cached.items() if cached == page]:
            del self.cached[key]
        self.key_of.pop(page, None)
        if self.guard is not None:
            self.guard.unpublish([page], pool=self.name)
        if page in self.idle:
            self.give_back(page)

    def give_back(self, page: int) -> None:
        """Put the page on the free list, unless the guard says that somebody still holds it or that it is suspect."""
        self.idle.pop(page, None)
        key = self.key_of.pop(page, None)
        if key is not None and self.cached.get(key) == page:
            del self.cached[key]
        if self.guard is None:
            self.free.append(page)
        else:
            self.free.extend(self.guard.retire([page], pool=self.name).reusable)

    def reset_cache(self) -> list[int]:
        """Forget every cached page that nobody uses; returns pages that quarantine let go, to be zeroed."""
        for page in list(self.idle):
            self.give_back(page)
        self.cached.clear()
        self.key_of.clear()
        if self.guard is None:
            return []
        released = self.guard.reset(pool=self.name)
        listed = set(self.free)
        self.free.extend(page for page in released if page not in listed)
        return released
