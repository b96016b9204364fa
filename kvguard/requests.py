"""Requests as the Guard sees them, and the array from which a step is gathered without a loop over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvguard.content_key import RequestContent
from kvguard.ledger import Ledger

if TYPE_CHECKING:
    from kvguard.page_table import Promise

DIGEST, START, STOP = range(3)
FIELDS = 3
WRITER, FLOOR = range(2)
OF_REQUEST = 2
"""Fields that a request has once, behind those of each pool."""
UNBOUNDED = 1 << 62
WRITER_SHIFT = 32
"""A writer word is an incarnation shifted by this, plus a column: of the form of `kvguard.kernels.events.owner_of`."""
WRITERS = (1 << 31) - 1
"""Incarnations from which writer words are made; they come round after that many."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One live request.

    slot         its place in RowArrays
    incarnation  grows at every start, preemption and resumption: verdicts of an earlier one do not count as progress
    ledgers      one per pool
    writer       its writer word at column 0: that of no other incarnation
    computed     tokens whose KV was written by a step that was verified
    floor        tokens that its next step may not write again: they fill pages to their end
    loaded       tokens up to which an external store has filled its pages
    capacity     tokens that the ledgers of every pool with a page size have pages for; current once it was settled
    promises     publications of pages that no scheduled step writes yet
    depends      promises of other requests that it adopted pages on
    adopted      tags of cached pages that it took over: others wrote them, and a transfer does not
    condemned    id of the violation that ended it; its steps in flight are withheld without another report
    stalled      a step of it was not proven and was only observed: what it has written since is not known to be whole
    content      what it is made of, at level `keys` once it was identified
    observed     that violation was only observed; it is judged afresh once violations have consequences again
    """

    id: str
    slot: int
    incarnation: int
    ledgers: tuple[Ledger, ...]
    writer: int = 0
    computed: int = 0
    floor: int = 0
    loaded: int = 0
    capacity: int = 0
    promises: list[Promise] = field(default_factory=list)
    depends: list[Promise] = field(default_factory=list)
    adopted: set[int] = field(default_factory=set)
    condemned: str | None = None
    content: RequestContent | None = None
    observed: bool = False
    stalled: bool = False
    preempted: bool = False
    alive: bool = True


class RowArrays:
    """What a step sends of each live request, in one array with a column per request slot.

    table  int64 [pools * FIELDS + OF_REQUEST, slots]: of each pool the digest of the ledger, and start and stop of its
           first extent; then the request's writer word and floor.

    Changes of a ledger are only noted (`touch`); `settle` writes them into the array, once per request and step. A
    slot is used again after its request ended.
    """

    def __init__(self, page_sizes: Sequence[int | None], capacity: int = 64) -> None:
        """`page_sizes`: of each pool, in tokens; None for a pool whose pages hold no token range."""
        self._page_sizes = tuple(page_sizes)
        self._free = list(range(capacity - 1, -1, -1))
        self._use(np.zeros((len(self._page_sizes) * FIELDS + OF_REQUEST, capacity), np.int64))
        self.touched: set[RequestState] = set()
        """Requests whose ledgers changed since the last `settle`."""
        self.ragged: set[int] = set()
        """Slots of requests with more than one live extent in some pool."""

    def _use(self, table: npt.NDArray[np.int64]) -> None:
        self.table = table
        # A memoryview takes a Python integer for a third of what a NumPy element costs.
        self._cells = table.view(np.uint64).reshape(-1).data

    def take_slot(self) -> int:
        """A free slot; doubles the array when there is none."""
        if not self._free:
            capacity = self.table.shape[1]
            self._use(np.concatenate([self.table, np.zeros_like(self.table)], axis=1))
            self._free = list(range(2 * capacity - 1, capacity - 1, -1))
        return self._free.pop()

    def give_slot(self, slot: int) -> None:
        """The slot's request ended."""
        self.ragged.discard(slot)
        self._free.append(slot)

    def begin(self, state: RequestState) -> None:
        """A new incarnation: nothing is computed, nothing is promised."""
        state.computed = state.floor = state.loaded = 0
        state.writer = (state.incarnation % WRITERS + 1) << WRITER_SHIFT
        self.touched.add(state)

    def touch(self, state: RequestState) -> None:
        """To be called after every change of a ledger: the next step sends what it says then."""
        self.touched.add(state)

    def settle(self) -> None:
        """Write what the touched ledgers say now into the array."""
        cells, stride, sizes, ragged = self._cells, self.table.shape[1], self._page_sizes, self.ragged
        for state in self.touched:
            if not state.alive:
                # Its slot may be another request's by now.
                continue
            cell = slot = state.slot
            capacity, several = UNBOUNDED, False
            for pool, ledger in enumerate(state.ledgers):
                columns = ledger.write(cells, cell, stride)
                if columns < 0:
                    columns, several = -columns, True
                size = sizes[pool]
                if size is not None and columns * size < capacity:
                    capacity = columns * size
                cell += FIELDS * stride
            state.capacity = capacity
            cells[cell] = state.writer
            cells[cell + stride] = state.floor
            if several:
                ragged.add(slot)
            elif ragged:
                ragged.discard(slot)
        self.touched.clear()

    def write_run(self, state: RequestState, digest: int, stop: int) -> None:
        """`settle` of a request with one ledger, after its only extent has grown to `stop`, and of its floor.

        It must not be touched, for what else has changed is not looked at.
        """
        cells, stride, cell = self._cells, self.table.shape[1], state.slot
        cells[cell] = digest
        cells[cell + STOP * stride] = stop
        cells[cell + (FIELDS + FLOOR) * stride] = state.floor
