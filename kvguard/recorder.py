"""The flight recorder: the last events in the life of each page, for violation reports.

Recording is a plain tuple in a short list; no object is made and nothing is formatted until a report asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PageEvent(NamedTuple):
    """One event of one page: `what` happened in which `step`, to which `tag`, by or for which request."""

    step: int
    what: str
    tag: int
    request: str | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class PageHistory:
    """What a report shows of one page, oldest event first."""

    pool: str
    page: int
    events: tuple[PageEvent, ...]


Event = tuple[int, str, int, str | None] | PageEvent
"""Kept as it comes: the fields of a PageEvent, with or without `detail`."""


class FlightRecorder:
    """Keeps the last `depth` events of every page that had any. Memory is bounded by pages * depth events."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.step = 1
        """The step under which page tables record events."""
        self._events: dict[str, dict[int, list[Event]]] = {}

    def events_of(self, pool: str) -> dict[int, list[Event]]:
        """The pool's events by page, oldest first; a page table appends to them, and keeps them to `depth`."""
        return self._events.setdefault(pool, {})

    def record(self, pool: str, page: int, event: Event) -> None:
        """Append one event; the oldest of that page falls out when it has `depth` already."""
        if self.depth == 0:
            return
        events = self.events_of(pool).setdefault(page, [])
        events.append(event)
        if len(events) > self.depth:
            del events[0]

    def history(self, pool: str, page: int) -> PageHistory:
        """All that is kept of one page."""
        kept = self._events.get(pool, {}).get(page, ())
        return PageHistory(pool=pool, page=page, events=tuple(PageEvent(*event) for event in kept))
