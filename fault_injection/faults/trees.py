"""Faults of a prefix tree that outlives its pages: what the tree names was freed, and perhaps filled by somebody else.

They go into engines whose cache keeps pages of requests that are gone, and frees them by their numbers. See `pages.py`
for how a fault is tried. Nobody reads the page at the moment of injection: whoever follows the tree to it later is the
victim, as with the stale cache entry of `pages.py`, but here the cache itself is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvguard.fault_injection.faults.pages import Injection, PageFault
from kvguard.fault_injection.target import CacheKey, PageTarget, WaitingRequest


def _unused_hits(target: PageTarget, request: WaitingRequest) -> list[tuple[int, CacheKey, int]]:
    """(column, key, page) of the cached pages that a waiting request is about to take and that nobody runs with."""
    used = {page for running in target.running() for page in running.pages}
    hits = []
    for column, key in enumerate(request.prefix_keys):
        page = target.cached_page(key)
        if page is None:
            break
        if page not in used:
            hits.append((column, key, page))
    return hits


def _followers(target: PageTarget, column: int, key: CacheKey, page: int) -> Callable[[], frozenset[str]]:
    """Everyone who was led to the page by the tree. Who was given it since may hold it, at whatever place."""

    def affected() -> frozenset[str]:
        _, taker = target.handed_out(page)
        return frozenset(
            request.id
            for request in target.running()
            if request.pages[column : column + 1] == (page,)
            and request.prefix_keys[column : column + 1] == (key,)
            and (request.id != taker or request.pages.count(page) > 1)
        )

    return affected


@dataclass(frozen=True, kw_only=True)
class TreeFault(PageFault):
    """Base: the engine's own free path runs for a page that only the tree holds."""

    reaches_control_plane: ClassVar[bool] = True
    needs_arrival: ClassVar[bool] = True

    def undo(self, injection: Injection) -> None:
        self.target.unlist(injection.page)


@dataclass(frozen=True, kw_only=True)
class TreeOwnedPageFreed(TreeFault):
    """A page of the tree is freed, stays at the end of the free list, and is taken as a prefix hit."""

    name: ClassVar[str] = "tree-owned-page-freed"
    summary: ClassVar[str] = "page freed while the prefix tree names it, then taken as a prefix hit"

    def inject(self) -> Injection | None:
        target = self.target
        hits = [(request, hit) for request in target.waiting() for hit in _unused_hits(target, request)]
        if not hits:
            return None
        request, (column, key, page) = self._rng().choice(hits)
        target.free_under_users(page)
        freed, affected = target.is_free(page), _followers(target, column, key, page)
        return Injection(
            victims=(request.id,),
            page=page,
            column=column,
            live_when=lambda scheduled: freed and bool(scheduled & affected()),
            affected=affected,
            description=f"page {page} of the tree freed, which {request.id} is about to take as column {column}",
            cache_key=key,
        )


@dataclass(frozen=True, kw_only=True)
class StaleRadixNode(TreeFault):
    """A page of the tree is freed and handed to another request, which fills it, before a prefix hit takes it."""

    name: ClassVar[str] = "stale-radix-node"
    summary: ClassVar[str] = "prefix tree names a page that was freed and filled with other content"

    def inject(self) -> Injection | None:
        target = self.target
        waiting = list(target.waiting())
        takers = [w for w in waiting if w.fits]
        hits = [
            (reader, hit)
            for reader in waiting
            for hit in _unused_hits(target, reader)
            if takers and takers[0].id != reader.id and hit[1] not in takers[0].prefix_keys
        ]
        if not hits:
            return None
        reader, (column, key, page) = self._rng().choice(hits)
        before, _ = target.handed_out(page)
        target.free_under_users(page)
        freed, affected = target.is_free(page), _followers(target, column, key, page)
        if freed:
            target.make_next(page)

        def live(scheduled: frozenset[str]) -> bool:
            return freed and target.handed_out(page)[0] > before and bool(scheduled & affected())

        return Injection(
            victims=(reader.id,),
            page=page,
            column=column,
            live_when=live,
            affected=affected,
            description=f"page {page} of the tree, column {column} of {reader.id}, freed and handed to {takers[0].id}",
            cache_key=key,
        )


TREE_FAULTS: dict[str, type[PageFault]] = {fault.name: fault for fault in (StaleRadixNode, TreeOwnedPageFreed)}
"""Every fault of this module by name, in the order of the report."""
