"""Building a step: one pass over its rows, no loop over pages, and nothing where nothing changed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

import numpy as np

from kvguard.batch import Again, Batch, PendingStep, Spans
from kvguard.books import Books
from kvguard.messages import StepDelta
from kvguard.packing import pack, patch_rows
from kvguard.page_table import Promise
from kvguard.requests import FIELDS, FLOOR, OF_REQUEST, WRITER, RequestState
from kvguard.unwritten import look_at_first_steps
from kvguard.violation import Kind
from kvguard.write_floors import set_floors

FEW = 8
"""So many requests are looked up one by one; more of them are found in one pass over the rows."""


def build_step(
    books: Books,
    step: int,
    requests: Sequence[str],
    table_rows: Sequence[int],
    tokens_end: Sequence[int],
    tokens_start: Sequence[int] | None = None,
) -> tuple[StepDelta, PendingStep]:
    """The message for one step, and what `judge` needs when its verdicts come back."""
    books.write_progress()
    last = books.batch
    batch = _batch(books, tuple(requests), list(table_rows))
    pending = PendingStep(step, batch, tuple(tokens_end), books.enforcing, books.tags.upcoming)
    if books.all_is_told and tokens_start is not None and batch is not last:
        look_at_first_steps(books, pending, tokens_start)
    floors_known = books.checks_writes and tokens_start is not None
    if floors_known and tokens_start is not None:
        set_floors(books, pending, tokens_start)
    if books.rows.touched:
        touched = list(books.rows.touched)
        books.rows.settle()
        if len(touched) > FEW or not patch_rows(books, batch, touched):
            batch.capacities = batch.floors = batch.body = None
    if books.marked:
        _look_at_marked(books, pending)
    if books.checks_tags:
        if batch.capacities is None:
            batch.capacities = [state.capacity for state in batch.states]
        if any(map(gt, pending.base, batch.capacities)):
            _check_coverage(books, pending)
    batch.again = None
    delta = pack(books, pending)
    if not (pending.suspects or pending.condemned):
        batch.again = Again(pending.base, pending.enforce, floors_known)
    return delta, pending


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
        Spans((expected, start), (rows, 2 * rows + 1), (start, stop), (stop, end), writer, floor)
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
    if len(marked) < FEW:
        rows = [(row, batch.states[row]) for row in sorted(row for state in marked for row in batch.rows_of(state))]
    else:
        rows = [(row, state) for row, state in enumerate(batch.states) if state in marked]
    for row, state in rows:
        if state.promises:
            _cover_promises(pending, row, state, pending.base[row])
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


def _check_coverage(books: Books, pending: PendingStep) -> None:
    """A row that reads past its ledger reads pages that nobody vouched for: an adapter missed an allocation path."""
    for index, table in enumerate(books.tables):
        size = table.spec.page_size
        if size is None:
            continue
        for row, (state, end) in enumerate(zip(pending.batch.states, pending.base, strict=True)):
            covered = len(state.ledgers[index]) * size
            if end > covered and row not in pending.condemned:
                detail = f"the step reads {end} tokens, the ledger holds pages for {covered}"
                pending.suspects.setdefault(row, (Kind.UNRECORDED_PAGE, detail))
