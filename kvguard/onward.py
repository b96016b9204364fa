"""Decode, step after step: the last step made again with every row some tokens further, and pages that are crossed.

The long way of the same is `allocate_each`, `publish` and `step`, one after the other; `tests/core/test_onward.py`
holds both to the same books and messages. Each function here answers None, with nothing changed, where only the long
way will do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import compress, count
from operator import ne, sub
from typing import Any

import numpy as np

from kvguard.batch import Again, Batch, PendingStep
from kvguard.books import Books, page_ids
from kvguard.content_calls import ContentBinding
from kvguard.kernels.native import extension
from kvguard.messages import Int64, StepDelta
from kvguard.packing import plain_sections, with_changes
from kvguard.page_table import PageRecord, Promise
from kvguard.requests import DIGEST, FIELDS, FLOOR, STOP, UNBOUNDED, RequestState

# Half of what a call of the named tuple's class takes, and every step of decode makes a few.
_new = tuple.__new__
_ONWARD: Any = extension("kvguard._onward")
_STEPS: Any = extension("kvguard._steps")
advance: Callable[..., Any] | None = _ONWARD and _ONWARD.advance
grown_in_c: Callable[..., list[tuple[int, Any]] | None] | None = _STEPS and _STEPS.grown_by_one


def grown_by_one(names: list[str], lists: dict[str, list[Any]], counts: list[int]) -> list[tuple[int, Any]] | None:
    """(place, last element) for each of `names` whose list is one longer than `counts` says at that place.

    None where one has changed in another way.
    """
    if grown_in_c is not None:
        return grown_in_c(names, lists, counts)
    lengths = [len(lists.get(name, ())) for name in names]
    places = list(compress(count(), map(ne, lengths, counts)))
    if any(lengths[place] != counts[place] + 1 for place in places):
        return None
    return [(place, lists[names[place]][-1]) for place in places]


def repeat_step(books: Books, step: int, tokens: int) -> tuple[StepDelta, PendingStep] | None:
    """The step before once more, every row `tokens` further; None where anything but the lengths has changed."""
    batch = books.batch
    again = _unchanged(books, batch)
    if again is None or batch is None:
        return None
    further = again.further + tokens
    if further > (_look_for_room(books, batch, again) if again.room is None else again.room):
        return None
    assert batch.body is not None
    again.further = further
    pending = PendingStep(step, batch, again.ends, again.enforce, books.tags.upcoming, further)
    return _new(StepDelta, (step, batch.requests, again.enforce, batch.body, batch.sections, True)), pending


def continue_step(
    books: Books,
    step: int,
    grown: Sequence[tuple[int, int]],
    published: Sequence[tuple[int, int, Hashable]],
    tokens: int,
) -> tuple[StepDelta, PendingStep] | None:
    """`repeat_step` in which some rows take a page each, and pages are published that this step fills.

    grown: (row, page); published: (row, column, the engine's cache key).
    """
    batch, table = books.batch, books.tables[0]
    again = None if batch is None else batch.again
    # `_unchanged` and what else makes it the long way, in one place: between two forwards each call costs more than
    # what it does.
    if again is None or batch is None or batch.body is None or len(books.tables) != 1 or books.quarantine.pages:
        return None
    size = table.spec.page_size
    if size is None or again.enforce is not books.enforcing or books.marked or books.rows.touched or table.changes:
        return None
    contents: list[ContentBinding | None] | None = [None] * len(published)
    if books.checks_contents:
        contents = _contents_of(books, batch, published)
    if contents is None:
        return None
    if again.rooms is None:
        _look_for_room(books, batch, again)
    rooms = again.rooms
    if rooms is None or not again.distinct:
        return None
    further = again.further + tokens
    if advance is not None:
        made = _in_one_call(books, batch, again, step, grown, published, contents, size, further)
        if made is not None:
            return made
    taken = _pages_to_take(books, batch, again, grown, size)
    publications = _publications_to_make(books, batch, again, published, size, further)
    if taken is None or publications is None:
        return None
    rooms = rooms.copy()
    for row, *_, room in taken:
        rooms[row] = room
    room = min(rooms, default=0)
    if further > room:
        return None
    again.rooms, again.room, again.further = rooms, room, further
    delta = _take(books, batch, step, taken, size, again.enforce)
    pending = PendingStep(step, batch, again.ends, again.enforce, books.tags.upcoming, further)
    for (row, page, key, promise, keeper), content in zip(publications, contents, strict=True):
        books.tables[0].publish(page, key, promise, batch.requests[row], content)
        if promise is not None:
            step_that_writes, row = keeper if keeper is not None else (pending, row)
            promise.step = step_that_writes.step
            step_that_writes.promises.append((row, promise))
    return delta, pending


def _in_one_call(
    books: Books,
    batch: Batch,
    again: Again,
    step: int,
    grown: Sequence[tuple[int, int]],
    published: Sequence[tuple[int, int, Hashable]],
    contents: list[ContentBinding | None],
    size: int,
    further: int,
) -> tuple[StepDelta, PendingStep] | None:
    """The rest of `continue_step` in C (`_onward.c`); None, with nothing changed, in all but the usual case."""
    body, table, enforce, taken, packed = batch.body, books.tables[0], again.enforce, len(grown), None
    assert body is not None and advance is not None
    if taken:
        packed = np.empty(len(body) + 3 * taken, np.int64)
    pending = PendingStep(step, batch, again.ends, enforce, books.tags.upcoming + taken, further)
    done = advance(
        books,
        table,
        batch,
        again,
        list(grown),
        list(published),
        contents,
        size,
        further,
        pending,
        packed,
        PageRecord,
        Promise,
    )
    if done is NotImplemented:
        return None
    if packed is None:
        return _new(StepDelta, (step, batch.requests, enforce, body, batch.sections, True)), pending
    return _message(books, batch, step, packed, taken, enforce), pending


def _contents_of(
    books: Books, batch: Batch, published: Sequence[tuple[int, int, Hashable]]
) -> list[ContentBinding | None] | None:
    """What each page that is published holds; None where one must not be published."""
    size, found = books.tables[0].spec.page_size, list[ContentBinding | None]()
    for row, column, _ in published:
        state = batch.states[row]
        content = state.content
        key = None if content is None or size is None else content.key((column + 1) * size)
        if content is None or key is None:
            return None
        found.append(ContentBinding(key, content.domain, state.id))
    return found


def _unchanged(books: Books, batch: Batch | None) -> Again | None:
    """The last step, if nothing of its rows, of tags or of anybody that the books look closer at has changed."""
    again = None if batch is None else batch.again
    if again is None or batch is None or batch.body is None or books.marked or books.rows.touched:
        return None
    if again.enforce is not books.enforcing:
        return None
    for table in books.tables:
        if table.changes:
            return None
    return again


def _look_for_room(books: Books, batch: Batch, again: Again) -> int:
    """How far each row can go on within what it has, and with it the least of them."""
    rooms = [UNBOUNDED] * len(again.ends)
    if batch.capacities is not None:
        rooms = list(map(sub, batch.capacities, again.ends))
    if again.floors_known:
        # A row that goes on to the next page has another floor.
        size = books.page_size_max
        to_next = [state.floor + size - end for state, end in zip(batch.states, again.ends, strict=True)]
        rooms = list(map(min, rooms, to_next))
    again.rooms, again.room = rooms, min(rooms, default=0)
    again.distinct = len(set(batch.states)) == len(rooms)
    return again.room


_Taken = tuple[int, int, RequestState, int, int]
"""A row that goes on to a page: row, page, request, the floor that it has then, and how far it can go on."""


_Publication = tuple[int, int, Hashable, Promise | None, tuple[PendingStep, int] | None]
"""Row, page, key; the promise, if it is not complete yet; the step in flight that keeps it, if not this one."""


def _pages_to_take(
    books: Books, batch: Batch, again: Again, grown: Sequence[tuple[int, int]], size: int
) -> list[_Taken] | None:
    pages = page_ids([page for _, page in grown])
    if not len({row for row, _ in grown}) == len(set(pages)) == len(pages) or not books.tables[0].unclaimed(pages):
        return None
    taken: list[_Taken] = []
    for (row, _), page in zip(grown, pages, strict=True):
        state, end = batch.states[row], again.ends[row]
        ledger, floor, room = state.ledgers[0], state.floor, UNBOUNDED
        if not ledger.in_one_run:
            return None
        if batch.capacities is not None:
            room = (len(ledger) + 1) * size - end
        if again.floors_known:
            # It starts to write where the last step ended.
            start = end + again.further
            floor = start - start % size
            room = min(room, floor + size - end)
        taken.append((row, page, state, floor, room))
    return taken


def _publications_to_make(
    books: Books, batch: Batch, again: Again, published: Sequence[tuple[int, int, Hashable]], size: int, further: int
) -> list[_Publication] | None:
    """Publications of pages that are their request's own, that nobody has published, and that this step fills at last.

    With steps in flight an engine publishes a page once it knows its last token, which an earlier one has written.
    """
    table = books.tables[0]
    found: list[_Publication] = []
    for row, column, key in published:
        state, need = batch.states[row], (column + 1) * size
        page, tag = state.ledgers[0].entry(column)
        record = table.record_under(page, tag)
        if record is None or record.publication is not None or record.promise is not None or state.stalled:
            return None
        if need > again.ends[row] + further:
            return None
        promise: Promise | None = Promise(table.spec.name, page, tag, state, need)
        keeper = None
        if need <= again.ends[row] + again.further:
            books.write_progress()
            if need <= state.computed:
                promise = None
            else:
                keeper = books.writing_step(state, need)
                if keeper is None:
                    return None
        found.append((row, page, key, promise, keeper))
    return found if len({page for _, page, *_ in found}) == len(found) else None


def _take(books: Books, batch: Batch, step: int, taken: list[_Taken], size: int, enforce: bool) -> StepDelta:
    """The pages into ledgers and page table, and the message of the step."""
    body = batch.body
    assert body is not None
    if not taken:
        return StepDelta(step, batch.requests, enforce, body, batch.sections, True)
    table, rows, words, count = books.tables[0], len(batch.states), len(body), len(taken)
    packed = np.empty(words + 3 * count, np.int64)
    packed[:words] = body
    # A memoryview takes a Python integer for a third of what a NumPy element costs.
    cells, first = packed.view(np.uint64).data, len(batch.head)
    tags = table.allocate_each([page for _, page, *_ in taken], [state.id for _, _, state, *_ in taken])
    capacities, floors, stop_max = batch.capacities, batch.floors, batch.columns[0]
    for place, ((row, page, state, floor, _), tag) in enumerate(zip(taken, tags, strict=True), words):
        ledger = state.ledgers[0]
        digest, stop = ledger.extend_run(page, tag), len(ledger)
        state.capacity, state.floor = stop * size, floor
        books.rows.write_run(state, digest, stop)
        cells[first + DIGEST * rows + row] = digest
        cells[first + STOP * rows + row] = stop
        cells[first + (FIELDS + FLOOR) * rows + row] = floor
        cells[place], cells[place + count], cells[place + 2 * count] = page, tag, state.writer + stop - 1
        if stop > stop_max:
            stop_max = stop
        if capacities is not None:
            capacities[row] = state.capacity
        if floors is not None:
            floors[row] = floor
    table.changes, table.writers = {}, {}
    if stop_max != batch.columns[0]:
        batch.columns = [stop_max]
    return _message(books, batch, step, packed, count, enforce)


def _message(
    books: Books, batch: Batch, step: int, packed: Int64, count: int, enforce: bool
) -> StepDelta:
    """The message of a step that takes `count` pages: `packed` is the batch's new body, then its tag changes."""
    words = len(packed) - 3 * count
    packed.setflags(write=False)
    batch.body = packed[:words]
    plain, kept = plain_sections(books, batch), batch.sections_with
    if kept is None or kept[0] is not plain or kept[1] != count:
        kept = batch.sections_with = plain, count, with_changes(plain, words, [count])
    return _new(StepDelta, (step, batch.requests, enforce, packed, kept[2], False))
