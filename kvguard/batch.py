"""The rows of a step, and what the host must remember of a step until its verdicts are back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvguard.messages import Int64, PoolSection
from kvguard.page_table import Promise
from kvguard.requests import RequestState
from kvguard.violation import Kind


class Spans(NamedTuple):
    """Where one pool's arrays lie in `Batch.body`."""

    expected: tuple[int, int]
    offset: tuple[int, int]
    start: tuple[int, int]
    stop: tuple[int, int]
    writer: tuple[int, int]
    floor: tuple[int, int]


@dataclass(slots=True, eq=False)
class Again:
    """A step that can be made again, its tag changes left out and its rows some tokens further.

    ends      each row's KV length after it, in tokens
    enforce   whether its violations have consequences
    floors_known  whether it was said where its rows start to write
    rooms     tokens that each row can go on by, behind `ends`, within the pages of its ledgers and, if that was said,
              within the page in which it stands; None until somebody asks
    room      the least of them
    distinct  no request is listed twice; known with `rooms`
    further   tokens that the last step went beyond `ends`
    """

    ends: tuple[int, ...]
    enforce: bool
    floors_known: bool = False
    rooms: list[int] | None = None
    room: int | None = None
    distinct: bool = False
    further: int = 0


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of a step. In steady decode the next step has the same ones, and takes over all that is here.

    requests, states, incarnations, table_rows   of each row; never changed
    roster        the books' roster when it was made: another one means that a request may be another by now
    slots         int64 [rows]: where the rows stand in RowArrays
    head          int64 [2 * rows + 1]: table rows, then the extent offsets of rows with one extent each
    capacities    tokens that each row's ledgers have pages for; None after a ledger changed
    floors        tokens that each row may not write again; None after one changed
    body          int64 [words]: what a step without tag changes sends; None after a ledger changed. Read-only: deltas
                  that were handed over share it.
    regular       where each pool's arrays lie in a body whose rows have one extent each
    spans         where they lie in this body: `regular` itself, or a list of its own
    columns       the largest column that each pool's rows need
    sections      where the body's arrays lie, made for `sections_of`: spans and columns
    sections_with the same for so many tag changes of the only pool: the sections, how many, and what was made of them
    again         the last step, if another one can be made of it; it is not looked at while anything has changed that
                  `Guard.step_again` can see
    """

    requests: tuple[str, ...]
    states: list[RequestState]
    incarnations: list[int]
    table_rows: list[int]
    roster: int
    slots: Int64
    head: Int64
    regular: list[Spans]
    spans: list[Spans]
    columns: list[int]
    capacities: list[int] | None = None
    floors: list[int] | None = None
    body: Int64 | None = None
    sections: tuple[PoolSection, ...] = ()
    sections_of: tuple[list[Spans], list[int]] | None = None
    sections_with: tuple[tuple[PoolSection, ...], int, tuple[PoolSection, ...]] | None = None
    places: dict[RequestState, list[int]] | None = None
    again: Again | None = None

    def rows_of(self, state: RequestState) -> list[int]:
        """The rows of a request: none, one, or, if the engine lists it twice, several."""
        if self.places is None:
            self.places = {}
            for row, other in enumerate(self.states):
                self.places.setdefault(other, []).append(row)
        return self.places.get(state, [])


@dataclass(slots=True, eq=False)
class PendingStep:
    """What the host must remember of a step until its verdicts are back.

    batch         its rows, as they were when it was scheduled
    base          each request's KV length after the step, in tokens, less `further`; never changed
    enforce       whether violations of this step have consequences; fixed when it is built, for its kernel acts on it
    further       tokens that every row ends behind `base`
    suspects      row -> (kind, detail): rows the host already knows to be unproven; the device neutralises them
    condemned     rows of requests that a violation ended, before this step was built or while it was in flight
    promises      promises that this step keeps if its row is verified, with the row
    waiting       open promises that a row of this step reads, with the row
    next_tag      the first tag that was given out after it was built: a page that carries it or a later one may have
                  been somebody else's when this step was built, and read by it
    """

    step: int
    batch: Batch
    base: tuple[int, ...]
    enforce: bool
    next_tag: int
    further: int = 0
    suspects: dict[int, tuple[Kind, str]] = field(default_factory=dict)
    condemned: set[int] = field(default_factory=set)
    promises: list[tuple[int, Promise]] = field(default_factory=list)
    waiting: list[tuple[int, Promise]] = field(default_factory=list)
    _ends: list[int] | None = None

    @property
    def ends(self) -> list[int]:
        """Each request's KV length after the step, in tokens; a rewind changes it in place."""
        ends = self._ends
        if ends is None:
            further = self.further
            ends = self._ends = [end + further for end in self.base]
        return ends

    def end(self, row: int) -> int:
        """The KV length of one row's request after the step, in tokens."""
        return self.base[row] + self.further if self._ends is None else self._ends[row]

    @property
    def unmoved(self) -> bool:
        """Whether nobody has asked for `ends`, and so nobody can have changed it."""
        return self._ends is None

    @property
    def states(self) -> list[RequestState]:
        """The request of each row."""
        return self.batch.states

    @property
    def incarnations(self) -> list[int]:
        """The incarnation of each row's request when the step was made."""
        return self.batch.incarnations

    def rows_of(self, state: RequestState) -> list[int]:
        """The rows of a request in this step."""
        return self.batch.rows_of(state)
