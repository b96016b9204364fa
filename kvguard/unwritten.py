"""Tokens that a request takes for computed before its first step, and that no page holds for it.

A lookup that says more tokens than it has pages for, a preempted request that comes back where it was, a position that
was counted twice: the pages are the request's own, their tags are right, and what lies there is what their former
owners left. Later steps start where earlier ones ended; the first one starts behind what was adopted, or loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvguard.books import Books
from kvguard.requests import UNBOUNDED, RequestState
from kvguard.violation import Kind

if TYPE_CHECKING:
    from kvguard.batch import PendingStep


def look_at_first_steps(books: Books, pending: PendingStep, starts: Sequence[int]) -> None:
    """Rows that have written nothing yet and start behind what they were given."""
    for row, (state, start) in enumerate(zip(pending.batch.states, starts, strict=True)):
        if start == 0 or state.computed or state.stalled or row in pending.suspects:
            continue
        given = max(state.loaded, _adopted_tokens(books, state))
        if start > given and not books.scheduled_tokens(state):
            detail = f"its first step starts at token {start}, what it was given ends at {given}"
            pending.suspects[row] = (Kind.CONTENT_UNWRITTEN, detail)


def _adopted_tokens(books: Books, state: RequestState) -> int:
    """How many leading tokens stand in every pool on pages that it took over, or need none (behind a window)."""
    given = UNBOUNDED
    for table, ledger in zip(books.tables, state.ledgers, strict=True):
        size = table.spec.page_size
        if size is None:
            continue
        end = next((column for column, _, tag in ledger.entries() if tag not in state.adopted), len(ledger))
        tokens = end * size
        record = table.record_under(*ledger.entry(end - 1)) if end else None
        if record is not None and record.content is not None:
            # Of a page that was published in part only that part was written.
            tokens = min(tokens, record.content.key.tokens)
        given = min(given, tokens)
    return given
