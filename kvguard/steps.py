"""Building a StepDelta: one gather per array and pool, no loop over pages, and a loop over rows only for promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvguard.books import Books
from kvguard.messages import PoolSection, StepDelta
from kvguard.page_table import PageTable, Promise
from kvguard.requests import PoolRows, RequestState
from kvguard.violation import Kind, Proof

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class PendingStep:
    """What the host must remember of a step until its verdicts are back.

    states, slots, incarnations  its rows, as they were when it was scheduled
    ends          int64 [rows]: each request's KV length after the step, in tokens
    enforce       whether violations of this step have consequences; fixed when it is built, for its kernel acts on it
    suspects      row -> (kind, detail): rows the host already knows to be unproven; the device neutralises them
    condemned     rows of requests that a violation ended, before this step was built or while it was in flight
    promises      promises that this step keeps if its row is verified, with the row
    waiting       open promises that a row of this step reads, with the row
    """

    step: int
    states: list[RequestState]
    slots: Int64
    incarnations: Int64
    table_rows: Int64
    ends: Int64
    enforce: bool
    suspects: dict[int, tuple[Kind, str]] = field(default_factory=dict)
    condemned: set[int] = field(default_factory=set)
    promises: list[tuple[int, Promise]] = field(default_factory=list)
    waiting: list[tuple[int, Promise]] = field(default_factory=list)
    _rows_of: dict[RequestState, list[int]] | None = None

    def rows_of(self, state: RequestState) -> list[int]:
        """The rows of a request in this step: none, one, or, if the engine lists it twice, several."""
        if self._rows_of is None:
            self._rows_of = {}
            for row, other in enumerate(self.states):
                self._rows_of.setdefault(other, []).append(row)
        return self._rows_of.get(state, [])


def build_step(
    books: Books, step: int, requests: Sequence[str], table_rows: Sequence[int], tokens_end: Sequence[int]
) -> tuple[StepDelta, PendingStep]:
    """The message for one step, and what `judge` needs when its verdicts come back."""
    states = [books.state(request) for request in requests]
    rows = books.rows
    slots = np.array([state.slot for state in states], np.int64)
    ends = np.array(tokens_end, np.int64)
    pending = PendingStep(
        step=step,
        states=states,
        slots=slots,
        incarnations=rows.incarnation[slots],
        table_rows=np.array(table_rows, np.int64),
        ends=ends,
        enforce=books.enforcing,
    )
    rows.scheduled[slots] = np.maximum(rows.scheduled[slots], ends)
    for row, state in enumerate(states):
        if state.promises:
            _cover_promises(pending, row, state, int(ends[row]))
    if Proof.TAG in books.proofs:
        for row, state in enumerate(states):
            if state.observed and pending.enforce:
                state.condemned, state.observed = None, False
            if state.condemned is not None:
                pending.condemned.add(row)
            elif state.depends:
                _check_dependencies(pending, row, state)
        _check_coverage(books, pending)
    delta = _pack(books, pending, tuple(requests))
    return delta, pending


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


def _check_coverage(books: Books, pending: PendingStep) -> None:
    """A row that reads past its ledger reads pages that nobody vouched for: an adapter missed an allocation path."""
    for table, rows in zip(books.tables, books.rows.pools, strict=True):
        size = table.spec.page_size
        if size is None:
            continue
        short = pending.ends > rows.length[pending.slots] * size
        if short.any():
            for row in np.flatnonzero(short).tolist():
                if row not in pending.condemned:
                    pending.suspects.setdefault(
                        row,
                        (
                            Kind.UNRECORDED_PAGE,
                            f"the step reads {int(pending.ends[row])} tokens, the ledger holds pages for "
                            f"{int(rows.length[pending.slots[row]]) * size}",
                        ),
                    )


def _pack(books: Books, pending: PendingStep, requests: tuple[str, ...]) -> StepDelta:
    """Concatenate every section's arrays into one int64 array."""
    parts: list[Int64] = []
    sections: list[PoolSection] = []
    position = 0

    def add(array: Int64) -> tuple[int, int]:
        nonlocal position
        start, position = position, position + len(array)
        parts.append(array)
        return start, position

    suspects = list(pending.suspects) + list(pending.condemned)
    for index, (table, rows) in enumerate(zip(books.tables, books.rows.pools, strict=True)):
        tag_pages, tag_values = _drain_changes(table)
        expected = rows.digest[pending.slots].view(np.int64)
        if suspects and pending.enforce:
            # An expectation that nothing meets makes the kernel neutralise the row in this very step.
            expected[suspects] ^= 1
        offset, start, stop = _extents(pending, index, rows)
        sections.append(
            PoolSection(
                pool=table.spec.name,
                tag_pages=add(tag_pages),
                tag_values=add(tag_values),
                table_row=add(pending.table_rows),
                expected=add(expected),
                extent_offset=add(offset),
                extent_start=add(start),
                extent_stop=add(stop),
                columns=int(stop.max(initial=0)),
            )
        )
    packed = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return StepDelta(
        step=pending.step,
        requests=requests,
        enforce=pending.enforce,
        packed=packed,
        sections=tuple(sections),
    )


def _drain_changes(table: PageTable) -> tuple[Int64, Int64]:
    changes = table.changes
    pages = np.fromiter(changes.keys(), np.int64, len(changes))
    values = np.fromiter(changes.values(), np.int64, len(changes))
    table.changes = {}
    return pages, values


def _extents(pending: PendingStep, pool: int, rows: PoolRows) -> tuple[Int64, Int64, Int64]:
    """Offsets, starts and stops of the live extents; every row has at least one, an empty row (0, 0)."""
    count = rows.count[pending.slots]
    if not (count > 1).any():
        return np.arange(len(count) + 1, dtype=np.int64), rows.start[pending.slots], rows.stop[pending.slots]
    offset, start, stop = [0], [], []
    for state in pending.states:
        for first, last in state.ledgers[pool].extents or [(0, 0)]:
            start.append(first)
            stop.append(last)
        offset.append(len(start))
    return np.array(offset, np.int64), np.array(start, np.int64), np.array(stop, np.int64)
