"""Pages of windowed layers: a pool of their own, given back once every window has passed them.

Logical pages are counted as in the main pool. A column that the window has left, or that a prefix hit never needed, is
the null page in the sequence's list and in the block table.
"""

from __future__ import annotations

from collections.abc import Sequence as Keys
from typing import TYPE_CHECKING

import torch

from kvguard.fault_injection.engine.pool import NULL_PAGE, PagePool

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.fault_injection.engine.scheduler import Sequence

WINDOW_POOL = "window"


class WindowPages:
    """The pool, the block table, and what each sequence holds there (`Sequence.window_pages`).

    window   tokens that a query sees, itself included
    passed   pages that were given back because the window had passed them, in all
    """

    def __init__(
        self, *, window: int, num_pages: int, page_size: int, rows: int, columns: int, guard: PagedGuard | None
    ) -> None:
        self.window = window
        self.page_size = page_size
        self.guard = guard
        self.pool = PagePool(num_pages, guard, WINDOW_POOL)
        self.block_table = torch.full((rows, columns), NULL_PAGE, dtype=torch.int32)
        self.passed = 0

    def first_column(self, tokens: int) -> int:
        """The first column that the token behind `tokens` others still sees."""
        return max(0, tokens - self.window + 1) // self.page_size

    def pages_for(self, tokens: int) -> int:
        """The most pages that are held at once where `tokens` are computed in one step."""
        return -(-(tokens + self.window) // self.page_size) + 1

    def slide(self, sequence: Sequence) -> None:
        """Give back what no token to come sees any more. Only computed tokens count: drafts may be rejected."""
        stop = min(self.first_column(sequence.computed), len(sequence.window_pages))
        start = sequence.window_start
        if stop <= start:
            return
        if self.guard is not None:
            self.guard.drop(sequence.id, start, stop, pool=WINDOW_POOL)
        passed = [page for page in sequence.window_pages[start:stop] if page != NULL_PAGE]
        sequence.window_pages[start:stop] = [NULL_PAGE] * (stop - start)
        self.pool.release(passed)
        self.passed += len(passed)
        sequence.window_start = stop
        sequence.window_written = min(sequence.window_written, start)

    def grow(self, sequence: Sequence, columns: int) -> bool:
        """Pages up to `columns` columns; False if they have run out."""
        while len(sequence.window_pages) < columns:
            page = self.pool.take(sequence.id)
            if page is None:
                return False
            sequence.window_pages.append(page)
        return True

    def hits(self, keys: Keys[int], columns: int) -> list[tuple[int, int]] | None:
        """(key, page) of what a sequence sees that goes on behind `columns` cached ones; None if some of it is gone."""
        seen = keys[self.first_column(columns * self.page_size) : columns]
        hits = self.pool.lookup(seen)
        return hits if len(hits) == len(seen) else None

    def share(self, sequence: Sequence, hits: list[tuple[int, int]], columns: int) -> bool:
        """Use these pages as the last of `columns`; False, and nothing held, if the guard refused one of them."""
        skipped = columns - len(hits)
        if self.guard is not None and skipped:
            self.guard.skip(sequence.id, skipped, pool=WINDOW_POOL)
        pages = self.pool.share(sequence.id, hits)
        if len(pages) < len(hits):
            if self.guard is not None:
                self.guard.truncate(sequence.id, 0, pool=WINDOW_POOL)
            self.pool.release(pages)
            return False
        sequence.window_pages = [NULL_PAGE] * skipped + pages
        sequence.window_start = skipped
        return True

    def publish(self, sequence: Sequence, column: int, key: int) -> None:
        """The page can be found under its key from now on, if it is still there."""
        page = sequence.window_pages[column]
        if page != NULL_PAGE:
            self.pool.publish(sequence.id, column, page, key)

    def release(self, sequence: Sequence) -> None:
        """Everything that the sequence holds, pages that are not its own any more excepted."""
        gone = (NULL_PAGE, *sequence.foreign_window)
        self.pool.release([page for page in sequence.window_pages if page not in gone])
        sequence.window_pages = []
        sequence.window_start = sequence.window_written = 0

    def update_block_table(self, sequence: Sequence) -> None:
        """Write the entries that have changed since the sequence's last step."""
        start, stop = sequence.window_written, len(sequence.window_pages)
        if stop > start:
            entries = torch.tensor(sequence.window_pages[start:stop], dtype=torch.int32)
            self.block_table[sequence.row, start:stop] = entries
            sequence.window_written = stop
