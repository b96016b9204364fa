"""The first position that each row of a step may write: pages before the one in which it starts are complete."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import ge, lt, sub
from typing import TYPE_CHECKING

from kvguard.books import Books
from kvguard.violation import Kind

if TYPE_CHECKING:
    from kvguard.batch import PendingStep


def set_floors(books: Books, pending: PendingStep, starts: Sequence[int]) -> None:
    """Pages before a row's first token of this step are full: nothing may write there again.

    The floor is the start of the page in which the row starts, brought up to date when it gets there, also where it had
    the page before: within one, drafts that were rejected are written again. A row that goes further back computes
    again what it had written: fine, unless others read it.
    """
    batch, size = pending.batch, books.page_size_max
    if batch.floors is None:
        batch.floors = [state.floor for state in batch.states]
    if any(map(lt, starts, batch.floors)):
        for row, (state, start, floor) in enumerate(zip(batch.states, starts, batch.floors, strict=True)):
            if start < floor:
                books.rows.touch(state)
                _look_at_rewriting(books, pending, row, start, floor)
    if any(map(ge, map(sub, starts, batch.floors), repeat(size))):
        for state, start, floor in zip(batch.states, starts, batch.floors, strict=True):
            if start - floor >= size:
                books.rows.touch(state)
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
