"""Requests as the Guard sees them, and the arrays from which a step is gathered without a loop over pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvguard.ledger import Ledger

if TYPE_CHECKING:
    from kvguard.page_table import Promise


@dataclass(slots=True, eq=False)
class RequestState:
    """One live request.

    slot         its place in RowArrays
    incarnation  grows at every start, preemption and resumption: verdicts of an earlier one do not count as progress
    ledgers      one per pool
    promises     publications of pages that no scheduled step writes yet
    depends      promises of other requests that it adopted pages on
    condemned    id of the violation that ended it; its steps in flight are withheld without another report
    stalled      a step of it was not proven and was only observed: what it has written since is not known to be whole
    observed     that violation was only observed; it is judged afresh once violations have consequences again
    """

    id: str
    slot: int
    incarnation: int
    ledgers: tuple[Ledger, ...]
    promises: list[Promise] = field(default_factory=list)
    depends: list[Promise] = field(default_factory=list)
    condemned: str | None = None
    observed: bool = False
    stalled: bool = False
    preempted: bool = False
    alive: bool = True


class PoolRows:
    """Per request slot, what a step sends of one pool: digest, first extent, number of extents, ledger length."""

    __slots__ = ("digest", "start", "stop", "count", "length")

    def __init__(self, capacity: int) -> None:
        self.digest: npt.NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.start: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.stop: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.count: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.length: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)

    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
        for name in self.__slots__:
            yield name, getattr(self, name)


class RowArrays:
    """Slot-indexed arrays of all live requests; a slot is reused after its request ended."""

    def __init__(self, pools: int, capacity: int = 64) -> None:
        self.pools = tuple(PoolRows(capacity) for _ in range(pools))
        self.computed: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        """Tokens whose KV was written by a step that was verified."""
        self.scheduled: npt.NDArray[np.int64] = np.zeros(capacity, np.int64)
        """Tokens whose KV is written once the steps in flight have run."""
        self.incarnation: npt.NDArray[np.int64] = np.full(capacity, -1, np.int64)
        self._free = list(range(capacity - 1, -1, -1))

    def take_slot(self) -> int:
        """A free slot; doubles the arrays when there is none."""
        if not self._free:
            capacity = len(self.computed)
            for rows in self.pools:
                for name, array in rows.arrays():
                    setattr(rows, name, np.concatenate([array, np.zeros(capacity, array.dtype)]))
            self.computed = np.concatenate([self.computed, np.zeros(capacity, np.int64)])
            self.scheduled = np.concatenate([self.scheduled, np.zeros(capacity, np.int64)])
            self.incarnation = np.concatenate([self.incarnation, np.full(capacity, -1, np.int64)])
            self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        return self._free.pop()

    def give_slot(self, slot: int) -> None:
        """The slot's request ended."""
        self.incarnation[slot] = -1
        self._free.append(slot)

    def begin(self, state: RequestState) -> None:
        """A new incarnation: nothing is computed, nothing is promised."""
        self.computed[state.slot] = self.scheduled[state.slot] = 0
        self.incarnation[state.slot] = state.incarnation
        for pool in range(len(self.pools)):
            self.sync(state, pool)

    def sync(self, state: RequestState, pool: int) -> None:
        """Copy what the pool's ledger says now into the arrays; to be called after every change of the ledger."""
        ledger, rows, slot = state.ledgers[pool], self.pools[pool], state.slot
        rows.digest[slot] = ledger.digest
        rows.start[slot], rows.stop[slot] = ledger.first_extent
        rows.count[slot] = ledger.extent_count
        rows.length[slot] = len(ledger)
