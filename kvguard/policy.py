"""What follows from a violation: quarantine with a bound, and a breaker against a storm."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Quarantine:
    """Pages that leave circulation: neither the free list nor the prefix cache may hold them.

    A page is *marked* as soon as a violation involves it. It is *held* once nobody uses it any more; only held pages
    cost capacity and both count against the bound, so that a storm cannot eat the pool.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.pages: set[tuple[str, int]] = set()
        """(pool, page); to be looked at alone, where the question is asked in every step."""
        self.refused = 0
        """How often the bound was hit: pages that should have been quarantined and were not."""

    def __len__(self) -> int:
        return len(self.pages)

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self.pages

    @property
    def full(self) -> bool:
        return len(self.pages) >= self._bound

    def mark(self, pool: str, page: int) -> bool:
        """Quarantine the page; False (and counted) if the bound is reached."""
        if (pool, page) in self.pages:
            return True
        if self.full:
            self.refused += 1
            return False
        self.pages.add((pool, page))
        return True

    def release(self, pool: str) -> list[int]:
        """Let go of every page of a pool; returns them, ascending."""
        pages = sorted(page for name, page in self.pages if name == pool)
        self.pages = {place for place in self.pages if place[0] != pool}
        return pages


class Breaker:
    """Trips when `violations` of them fall into one window of `window_s` seconds; 0 violations: never trips.

    Once tripped it stays so until `reset`: a replica that had a storm is looked at by a person, not by a timer.
    """

    def __init__(
        self, violations: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = violations
        self._window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()
        self.tripped = False

    def count(self) -> bool:
        """Count one violation; True if this is the one that trips the breaker."""
        if self._limit == 0:
            return False
        now = self._clock()
        self._times.append(now)
        while now - self._times[0] > self._window_s:
            self._times.popleft()
        if self.tripped or len(self._times) < self._limit:
            return False
        self.tripped = True
        return True

    def reset(self) -> None:
        """Forget the storm."""
        self._times.clear()
        self.tripped = False
