"""Building a StepDelta: one gather for all rows and pools, no loop over pages, and nothing where nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import gt, lt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvguard.books import Books
from kvguard.messages import PoolSection, StepDelta
from kvguard.page_table import Promise
from kvguard.requests import DIGEST, FIELDS, FLOOR, OF_REQUEST, STOP, WRITER, RequestState
from kvguard.violation import Kind

Int64 = npt.NDArray[np.int64]
NO_WRITER = -1 << 62
"""A writer word that no column makes equal to a page's: the row may write nowhere."""
FEW_MARKED = 8
"""So many requests are looked up one by one; more of them are found in one pass over the rows."""


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
    sections      the sections of the last delta, made for `sections_of`: spans, columns, and tag changes of each pool
    """

    requests: tuple[str, ...]
    states: list[RequestState]
    incarnations: list[int]
    table_rows: list[int]
    roster: int
    slots: Int64
    head: Int64
    regular: list[_Spans]
    spans: list[_Spans]
    columns: list[int]
    capacities: list[int] | None = None
    floors: list[int] | None = None
    body: Int64 | None = None
    sections: tuple[PoolSection, ...] = ()
    sections_of: tuple[list[_Spans], list[int], list[int]] | None = None
    places: dict[RequestState, list[int]] | None = None

    def rows_of(self, state: RequestState) -> list[int]:
        """The rows of a request: none, one, or, if the engine lists it twice, several."""
        if self.places is None:
            self.places = {}
            for row, other in enumerate(self.states):
                self.places.setdefault(other, []).append(row)
        return self.places.get(state, [])


class _Spans(NamedTuple):
    """Where one pool's arrays lie in `Batch.body`."""

    expected: tuple[int, int]
    offset: tuple[int, int]
    start: tuple[int, int]
    stop: tuple[int, int]
    writer: tuple[int, int]
    floor: tuple[int, int]


@dataclass(slots=True, eq=False)
class PendingStep:
    """What the host must remember of a step until its verdicts are back.

    batch         its rows, as they were when it was scheduled
    ends          each request's KV length after the step, in tokens
    enforce       whether violations of this step have consequences; fixed when it is built, for its kernel acts on it
    suspects      row -> (kind, detail): rows the host already knows to be unproven; the device neutralises them
    condemned     rows of requests that a violation ended, before this step was built or while it was in flight
    promises      promises that this step keeps if its row is verified, with the row
    waiting       open promises that a row of this step reads, with the row
    next_tag      the first tag that was given out after it was built: a page that carries it or a later one may have
                  been somebody else's when this step was built, and read by it
    """

    step: int
    batch: Batch
    ends: list[int]
    enforce: bool
    suspects: dict[int, tuple[Kind, str]] = field(default_factory=dict)
    condemned: set[int] = field(default_factory=set)
    promises: list[tuple[int, Promise]] = field(default_factory=list)
    waiting: list[tuple[int, Promise]] = field(default_factory=list)
    next_tag: int = 0

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


def build_step(
    books: Books,
    step: int,
    requests: Sequence[str],
    table_rows: Sequence[int],
    tokens_end: Sequence[int],
    tokens_start: Sequence[int] | None = None,
) -> tuple[StepDelta, PendingStep]:
    """The message for one step, and what `judge` needs when its verdicts come back."""
    batch = _batch(books, tuple(requests), list(table_rows))
    pending = PendingStep(step, batch, list(tokens_end), books.enforcing, next_tag=books.tags.upcoming)
    if books.checks_writes and tokens_start is not None:
        _set_floors(books, pending, tokens_start)
    if books.rows.touched:
        books.rows.settle()
        batch.capacities = batch.floors = batch.body = None
    if books.marked:
        _look_at_marked(books, pending)
    if books.checks_tags:
        if batch.capacities is None:
            batch.capacities = [state.capacity for state in batch.states]
        if any(map(gt, pending.ends, batch.capacities)):
            _check_coverage(books, pending)
    return _pack(books, pending), pending


def _batch(books: Books, requests: tuple[str, ...], table_rows: list[int]) -> Batch:
    """The last step's rows if they are the same, else new ones."""
    last = books.batch
    if (
        last is not None
        and last.roster == books.roster
        and last.requests == requests
        and last.table_rows == table_rows
    ):
        return last
    states = [books.state(request) for request in requests]
    rows = len(states)
    fields = FIELDS * len(books.tables)
    places = [2 * rows + 1 + field * rows for field in range(fields + OF_REQUEST + 1)]
    writer, floor = [(places[fields + field], places[fields + field + 1]) for field in (WRITER, FLOOR)]
    spans = [
        _Spans((expected, start), (rows, 2 * rows + 1), (start, stop), (stop, end), writer, floor)
        for expected, start, stop, end in zip(places[::3], places[1::3], places[2::3], places[3::3], strict=False)
    ]
    batch = books.batch = Batch(
        requests=requests,
        states=states,
        incarnations=[state.incarnation for state in states],
        table_rows=table_rows,
        roster=books.roster,
        slots=np.array([state.slot for state in states], np.int64),
        head=np.concatenate((np.array(table_rows, np.int64), np.arange(rows + 1))),
        regular=spans,
        spans=spans,
        columns=[],
    )
    return batch


def _look_at_marked(books: Books, pending: PendingStep) -> None:
    """Promises that this step covers, those that its rows depend on, and rows of requests that are being ended."""
    marked, batch = books.marked, pending.batch
    if len(marked) < FEW_MARKED:
        rows = [(row, batch.states[row]) for row in sorted(row for state in marked for row in batch.rows_of(state))]
    else:
        rows = [(row, state) for row, state in enumerate(batch.states) if state in marked]
    for row, state in rows:
        if state.promises:
            _cover_promises(pending, row, state, pending.ends[row])
    if books.checks_device:
        for row, state in rows:
            if state.observed and pending.enforce:
                state.condemned, state.observed = None, False
            if state.condemned is not None:
                pending.condemned.add(row)
            elif state.depends and books.checks_tags:
                _check_dependencies(pending, row, state)
    books.marked = {
        state for state in marked if state.alive and (state.promises or state.depends or state.condemned is not None)
    }


def _cover_promises(pending: PendingStep, row: int, state: RequestState, end: int) -> None:
    """Promises that this step writes to their end wait for its verdict; the rest stay with the writer."""
    still_open = []
    for promise in state.promises:
        if promise.need_tokens <= end:
            promise.step = pending.step
            pending.promises.append((row, promise))
        else:
            still_open.append(promise)
    state.promises = still_open


def _check_dependencies(pending: PendingStep, row: int, state: RequestState) -> None:
    """An adopter may run in its writer's step or later, never before: the page would hold a former owner's bytes."""
    still_open = []
    for promise in state.depends:
        if promise.kept:
            continue
        still_open.append(promise)
        if promise.kept is False or promise.step is None or promise.writer.stalled:
            pending.suspects.setdefault(row, never_ran(promise))
        else:
            pending.waiting.append((row, promise))
    state.depends = still_open


def never_ran(promise: Promise) -> tuple[Kind, str]:
    """Why a row that reads this promised page is unproven."""
    detail = f"page {promise.page} was promised by request {promise.writer.id}, whose step did not run"
    return Kind.WRITER_NEVER_RAN, detail


def _set_floors(books: Books, pending: PendingStep, starts: Sequence[int]) -> None:
    """Pages before a row's first token of this step are full: nothing may write there again.

    The floor is brought up to date when a page is crossed, and is the start of a page: within one, drafts that were
    rejected are written again. A row that goes further back computes again what it had written: fine, unless others
    read it.
    """
    batch, size = pending.batch, books.page_size_max
    if batch.floors is None:
        batch.floors = [state.floor for state in batch.states]
    if any(map(lt, starts, batch.floors)):
        for row, (state, start, floor) in enumerate(zip(batch.states, starts, batch.floors, strict=True)):
            if start < floor:
                books.rows.touch(state)
                _look_at_rewriting(books, pending, row, start, floor)
    for state in books.rows.touched:
        for row in batch.rows_of(state):
            state.floor = starts[row] - starts[row] % size


def _look_at_rewriting(books: Books, pending: PendingStep, row: int, start: int, stop: int) -> None:
    """The row is about to write tokens [start, stop) for a second time."""
    state = pending.states[row]
    for table, ledger in zip(books.tables, state.ledgers, strict=True):
        size = table.spec.page_size
        for column in range(start // size, min(-(-stop // size), len(ledger))) if size else ():
            record = table.record_under(*ledger.entry(column))
            others = () if record is None else sorted(record.holders - {state.id})
            if others:
                detail = f"tokens {start} to {stop - 1} again, in a page that {', '.join(others)} holds, too"
                pending.suspects.setdefault(row, (Kind.WRITE_COMPLETE, detail))


def _check_coverage(books: Books, pending: PendingStep) -> None:
    """A row that reads past its ledger reads pages that nobody vouched for: an adapter missed an allocation path."""
    for index, table in enumerate(books.tables):
        size = table.spec.page_size
        if size is None:
            continue
        for row, (state, end) in enumerate(zip(pending.batch.states, pending.ends, strict=True)):
            covered = len(state.ledgers[index]) * size
            if end > covered and row not in pending.condemned:
                detail = f"the step reads {end} tokens, the ledger holds pages for {covered}"
                pending.suspects.setdefault(row, (Kind.UNRECORDED_PAGE, detail))


def _pack(books: Books, pending: PendingStep) -> StepDelta:
    """One int64 array: what the ledgers of the rows say, then each pool's tag changes.

    With nothing changed since the last step it is the very same array.
    """
    batch = pending.batch
    packed = batch.body
    if packed is None:
        packed = batch.body = _gather(books, batch)
    suspects = [*pending.suspects, *pending.condemned]
    if suspects and pending.enforce:
        # An expectation that nothing meets makes the kernel neutralise the row in this very step.
        packed = packed.copy()
        for spans in batch.spans:
            packed[slice(*spans.expected)][suspects] ^= 1
            packed[slice(*spans.writer)][suspects] = NO_WRITER
    changes: list[int] = []
    counts: list[int] = []
    for table in books.tables:
        counts.append(len(table.changes))
        if table.changes:
            changes += table.changes.keys()
            changes += table.changes.values()
            writers = table.writers
            changes += [writers.get(page, 0) if tag else 0 for page, tag in table.changes.items()]
            table.changes, table.writers = {}, {}
    end = len(packed)
    if changes:
        packed = np.concatenate((packed, np.array(changes, np.int64)))
    # Later steps may share it.
    packed.flags.writeable = False
    made_for = batch.sections_of
    if (
        made_for is None
        or made_for[0] is not batch.spans
        or made_for[1] != batch.columns
        or made_for[2] != counts
    ):
        batch.sections_of = (batch.spans, batch.columns, counts)
        batch.sections = _sections(books, batch, end, counts)
    return StepDelta(
        step=pending.step,
        requests=batch.requests,
        enforce=pending.enforce,
        packed=packed,
        sections=batch.sections,
    )


def _sections(books: Books, batch: Batch, position: int, changes: list[int]) -> tuple[PoolSection, ...]:
    """Where everything lies; the tag changes, so many of each pool, begin at `position`."""
    sections = []
    for table, spans, columns, count in zip(books.tables, batch.spans, batch.columns, changes, strict=True):
        sections.append(
            PoolSection(
                pool=table.spec.name,
                tag_pages=(position, position + count),
                tag_values=(position + count, position + 2 * count),
                tag_writers=(position + 2 * count, position + 3 * count),
                table_row=(0, len(batch.states)),
                expected=spans.expected,
                extent_offset=spans.offset,
                extent_start=spans.start,
                extent_stop=spans.stop,
                columns=columns,
                writer=spans.writer,
                floor=spans.floor,
            )
        )
        position += 3 * count
    return tuple(sections)


def _gather(books: Books, batch: Batch) -> Int64:
    """Table rows, offsets; digests, starts, stops of each pool; writers, floors. Every row has at least one extent."""
    if books.rows.ragged and not books.rows.ragged.isdisjoint(batch.slots.tolist()):
        return _gather_ragged(books, batch)
    gathered = books.rows.table.take(batch.slots, 1)
    batch.spans = batch.regular
    batch.columns = [max(stops, default=0) for stops in gathered[STOP::FIELDS].tolist()]
    return np.concatenate((batch.head, gathered.ravel()))


def _gather_ragged(books: Books, batch: Batch) -> Int64:
    """The same where some row has several live extents: an empty row has one, (0, 0)."""
    parts: list[Int64] = [batch.head]
    position = len(batch.head)

    def add(array: Int64) -> tuple[int, int]:
        nonlocal position
        start, position = position, position + len(array)
        parts.append(array)
        return start, position

    batch.spans, batch.columns = [], []
    of_request = len(books.tables) * FIELDS
    writer, floor = [add(books.rows.table[of_request + field, batch.slots]) for field in (WRITER, FLOOR)]
    for pool in range(len(books.tables)):
        offset, starts, stops = [0], [], []
        for state in batch.states:
            for first, last in state.ledgers[pool].extents or [(0, 0)]:
                starts.append(first)
                stops.append(last)
            offset.append(len(starts))
        batch.spans.append(
            _Spans(
                expected=add(books.rows.table[pool * FIELDS + DIGEST, batch.slots]),
                offset=add(np.array(offset, np.int64)),
                start=add(np.array(starts, np.int64)),
                stop=add(np.array(stops, np.int64)),
                writer=writer,
                floor=floor,
            )
        )
        batch.columns.append(max(stops, default=0))
    return np.concatenate(parts)
