"""The message of a step as one array: what the ledgers of its rows say, then each pool's tag changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvguard.batch import Batch, PendingStep, Spans
from kvguard.books import Books
from kvguard.messages import NO_WRITER, Int64, PoolSection, StepDelta
from kvguard.requests import DIGEST, FIELDS, FLOOR, STOP, WRITER, RequestState


def pack(books: Books, pending: PendingStep) -> StepDelta:
    """The message. With nothing changed since the last step its array is the very same one."""
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
    sections = plain_sections(books, batch)
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
    if changes:
        sections = with_changes(sections, len(packed), counts)
        packed = np.concatenate((packed, np.array(changes, np.int64)))
    # Later steps may share it.
    packed.flags.writeable = False
    return StepDelta(pending.step, batch.requests, pending.enforce, packed, sections)


def patch_rows(books: Books, batch: Batch, states: Sequence[RequestState]) -> bool:
    """Bring the body up to date after a few ledgers have changed; False where it has to be gathered anew.

    A row that went on to another page is the usual change. Other messages have the body as it was: a copy is changed.
    """
    body, capacities, floors = batch.body, batch.capacities, batch.floors
    if body is None or not batch.states or batch.spans is not batch.regular:
        return False
    body = body.copy()
    rows, columns, pools = books.rows, list(batch.columns), range(len(books.tables))
    fields = body[len(batch.head) :].reshape(-1, len(batch.states))
    for state in states:
        if state.slot in rows.ragged:
            return False
        now = rows.table[:, state.slot]
        for row in batch.rows_of(state):
            for pool in pools:
                stop = int(now[pool * FIELDS + STOP])
                if stop < fields[pool * FIELDS + STOP, row]:
                    return False
                if stop > columns[pool]:
                    columns[pool] = stop
            fields[:, row] = now
            if capacities is not None:
                capacities[row] = state.capacity
            if floors is not None:
                floors[row] = state.floor
    batch.body, batch.columns = body, columns
    return True


def plain_sections(books: Books, batch: Batch) -> tuple[PoolSection, ...]:
    """Where everything lies in a message without tag changes."""
    made_for = batch.sections_of
    if made_for is None or made_for[0] is not batch.spans or made_for[1] != batch.columns:
        assert batch.body is not None
        rows, none = (0, len(batch.states)), (len(batch.body), len(batch.body))
        batch.sections_of = (batch.spans, batch.columns)
        batch.sections = tuple(
            PoolSection(
                table.spec.name,
                none,
                none,
                none,
                rows,
                spans.expected,
                spans.offset,
                spans.start,
                spans.stop,
                columns,
                spans.writer,
                spans.floor,
            )
            for table, spans, columns in zip(books.tables, batch.spans, batch.columns, strict=True)
        )
    return batch.sections


def with_changes(
    sections: tuple[PoolSection, ...], position: int, changes: Sequence[int]
) -> tuple[PoolSection, ...]:
    """The same with so many tag changes of each pool, which begin at `position`."""
    found = []
    for section, count in zip(sections, changes, strict=True):
        pages, values, writers, end = range(position, position + 3 * count + 1, count) if count else (position,) * 4
        found.append(PoolSection(section[0], (pages, values), (values, writers), (writers, end), *section[4:]))
        position += 3 * count
    return tuple(found)


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
            Spans(
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
