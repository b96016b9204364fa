"""The flight recorder: the last events in the life of each page, for violation reports.

Recording is a tuple append to a bounded deque; nothing is formatted until a report asks for it.
"""

from __future__ import annotations

from collections import deque
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


class FlightRecorder:
    """Keeps the last `depth` events of every page that had any. Memory is bounded by pages * depth events."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._events: dict[tuple[str, int], deque[PageEvent]] = {}

    def record(self, pool: str, page: int, event: PageEvent) -> None:
        """Append one event; the oldest of that page falls out when it has `depth` already."""
        if self._depth == 0:
            return
        events = self._events.get((pool, page))
        if events is None:
            events = self._events[pool, page] = deque(maxlen=self._depth)
        events.append(event)

    def history(self, pool: str, page: int) -> PageHistory:
        """All that is kept of one page."""
        return PageHistory(pool=pool, page=page, events=tuple(self._events.get((pool, page), ())))
