"""The pages that a request had when it ended, until an allocator that frees by request takes them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard

__all__ = ["LastPages"]

REQUESTS_MAX = 4096
"""Ended requests that are remembered; the oldest go first, for engines that never free them."""


class LastPages:
    """Whose pages a free by request is about, in either order of `finish` (or `preempt`) and free."""

    def __init__(self, guard: PagedGuard, pool: str | None) -> None:
        self._guard, self._pool = guard, pool
        self._ended: dict[str, tuple[dict[int, int], frozenset[int]]] = {}

    def remember(self, request: str) -> None:
        """The request is about to end or to be preempted: its own pages with their tags, and the foreign ones."""
        if self._guard.columns(request, pool=self._pool) <= 0:
            return
        own, foreign = self.held(request)
        self._ended.pop(request, None)
        self._ended[request] = (
            dict(zip(own, self._guard.page_tags(own, pool=self._pool), strict=True)),
            frozenset(foreign),
        )
        if len(self._ended) > REQUESTS_MAX:
            del self._ended[next(iter(self._ended))]

    def ended(self, request: str) -> bool:
        """Whether the request ended or was preempted and has no pages since; a free of it ends it no more."""
        return request in self._ended and self._guard.columns(request, pool=self._pool) <= 0

    def forget(self, request: str) -> None:
        """It freed its pages, or has new ones."""
        self._ended.pop(request, None)

    def held(self, request: str) -> tuple[list[int], set[int]]:
        """Pages of the request that are its own, and pages that were freed or are somebody else's by now."""
        guard, pool = self._guard, self._pool
        if not self.ended(request):
            foreign = set(guard.foreign_pages(request, pool=pool))
            return [page for page in guard.pages(request, pool=pool) if page not in foreign], foreign
        tags, before = self._ended[request]
        now = guard.page_tags(list(tags), pool=pool)
        moved = {page for page, tag in zip(tags, now, strict=True) if tags[page] != tag}
        return [page for page in tags if page not in moved], moved | before
