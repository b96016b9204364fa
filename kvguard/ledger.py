"""A ledger: what one request was promised in one pool, column by column, and the digest the device must find.

Live extents are explicit. Columns that a sliding window dropped, middle gaps and truncated tails are not live, and the
digest covers exactly the live columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvguard.kernels.mixing import MASK64, mix, mix_array
from kvguard.tags import VACANT

GAP = -1
VECTOR_TERMS = 24
"""From so many new columns on (a prefill), their terms are computed as an array."""


class Ledger:
    """Pages and tags of one request in one pool.

    `digest` is the sum of mix(key, column, tag) over the live columns modulo 2**64: appending or dropping a page costs
    one term, whatever the length. Terms of appended columns are added when the digest is asked for, once a step and not
    once a page. A column is a gap where its tag is VACANT: a page id cannot tell, for a ledger may hold one outside the
    pool that nothing checked.
    """

    __slots__ = ("_key", "_pages", "_tags", "_extents", "_digest", "_summed")

    def __init__(self, key: int) -> None:
        self._key = key
        self._pages: list[int] = []
        self._tags: list[int] = []
        self._extents: list[list[int]] = []
        self._digest = 0
        self._summed = 0
        """Columns whose terms are in `_digest`; later ones were appended since."""

    def __len__(self) -> int:
        """Columns up to the last live one, gaps included."""
        return len(self._pages)

    @property
    def digest(self) -> int:
        """The digest over the live columns, in [0, 2**64)."""
        if self._summed != len(self._tags):
            self._add_terms()
        return self._digest

    def _add_terms(self) -> None:
        first, digest = self._summed, self._digest
        tags = self._tags[first:]
        if len(tags) < VECTOR_TERMS:
            for column, tag in enumerate(tags, first):
                if tag != VACANT:
                    digest += mix(self._key, column, tag)
        else:
            values = np.array(tags, np.uint64)
            terms = mix_array(self._key, np.arange(first, first + len(tags), dtype=np.uint64), values)
            digest += int(terms[values != VACANT].sum(dtype=np.uint64))
        self._digest, self._summed = digest & MASK64, len(self._tags)

    def write(self, cells: memoryview, cell: int, stride: int) -> int:
        """Digest, start and stop of the first extent into `cells` at cell, cell + stride and cell + 2 * stride.

        Returns the columns up to the last live one, negative if there are several extents.
        """
        tags, column = self._tags, self._summed
        columns = len(tags)
        if column != columns:
            if column + 1 == columns and tags[column] != VACANT:
                # One page was crossed: by far the most frequent change.
                self._digest = (self._digest + mix(self._key, column, tags[column])) & MASK64
                self._summed = columns
            else:
                self._add_terms()
        cells[cell] = self._digest
        extents = self._extents
        if extents:
            cells[cell + stride], cells[cell + stride + stride] = extents[0]
            return columns if len(extents) == 1 else -columns
        cells[cell + stride] = cells[cell + stride + stride] = 0
        return columns

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Live columns as half-open ranges, ascending, disjoint and not touching."""
        return [(start, stop) for start, stop in self._extents]

    @property
    def first_extent(self) -> tuple[int, int]:
        """The first live extent, (0, 0) if nothing is live."""
        return (self._extents[0][0], self._extents[0][1]) if self._extents else (0, 0)

    @property
    def in_one_run(self) -> bool:
        """Whether the live columns are one extent that goes up to the last column: another page extends it."""
        return bool(self._extents) and self._extents[0][1] == len(self._pages)

    @property
    def extent_count(self) -> int:
        return len(self._extents)

    def page(self, column: int) -> int:
        """The page promised in `column`, or GAP."""
        return self._pages[column] if 0 <= column < len(self._pages) else GAP

    def tag(self, column: int) -> int:
        """The tag promised in `column`; 0 in a gap."""
        return self._tags[column] if 0 <= column < len(self._tags) else 0

    def entry(self, column: int) -> tuple[int, int]:
        """(page, tag) promised in `column`; (GAP, VACANT) in a gap."""
        if 0 <= column < len(self._pages):
            return self._pages[column], self._tags[column]
        return GAP, VACANT

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """(column, page, tag) of every live column, ascending."""
        for start, stop in self._extents:
            for column in range(start, stop):
                yield column, self._pages[column], self._tags[column]

    def append(self, page: int, tag: int) -> int:
        """Add a page in the next column; returns the column."""
        column = len(self._pages)
        self._pages.append(page)
        self._tags.append(tag)
        if self._extents and self._extents[-1][1] == column:
            self._extents[-1][1] = column + 1
        else:
            self._extents.append([column, column + 1])
        return column

    def extend_run(self, page: int, tag: int) -> int:
        """`append` where the live columns are `in_one_run`; returns the digest."""
        column = len(self._pages)
        self._pages.append(page)
        self._tags.append(tag)
        self._extents[0][1] = column + 1
        if self._summed != column:
            return self.digest
        digest = self._digest = (self._digest + mix(self._key, column, tag)) & MASK64
        self._summed = column + 1
        return digest

    def skip(self, columns: int) -> None:
        """Leave the next `columns` columns as a gap: pages that a window never had."""
        self._pages.extend([GAP] * columns)
        self._tags.extend([0] * columns)

    def put(self, column: int, page: int, tag: int) -> None:
        """Set one column, live or not: what an engine does that swaps a page for a copy of its own."""
        if column == len(self._pages):
            self.append(page, tag)
            return
        if column > len(self._pages):
            self.skip(column - len(self._pages))
            self.append(page, tag)
            return
        was_gap = self._tags[column] == VACANT
        digest = self.digest + mix(self._key, column, tag)
        if not was_gap:
            digest -= mix(self._key, column, self._tags[column])
        self._digest = digest & MASK64
        self._pages[column], self._tags[column] = page, tag
        if was_gap:
            self._rebuild()

    def drop(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Columns [start, stop) are no longer live (a window moved on); returns (page, tag) of each that was.

        Only live columns are walked, so that a window that always drops from column 0 costs what it drops.
        """
        dropped: list[tuple[int, int]] = []
        extents: list[list[int]] = []
        digest = self.digest
        for first, last in self._extents:
            left, right = max(first, start), min(last, stop)
            if left >= right:
                extents.append([first, last])
                continue
            for column in range(left, right):
                dropped.append((self._pages[column], self._tags[column]))
                digest -= mix(self._key, column, self._tags[column])
                self._pages[column], self._tags[column] = GAP, VACANT
            extents += [[a, b] for a, b in ((first, left), (right, last)) if a < b]
        if dropped:
            self._extents = extents
            self._digest = digest & MASK64
        return dropped

    def truncate(self, columns: int) -> list[tuple[int, int]]:
        """Keep only the first `columns` columns (tail given back); returns (page, tag) of each live one cut off."""
        cut = self.drop(columns, len(self._pages))
        del self._pages[columns:], self._tags[columns:]
        self._summed = len(self._tags)
        return cut

    def clear(self) -> None:
        """Nothing is promised any more."""
        self._pages.clear()
        self._tags.clear()
        self._extents.clear()
        self._digest = self._summed = 0

    def _rebuild(self) -> None:
        extents: list[list[int]] = []
        for column, tag in enumerate(self._tags):
            if tag == VACANT:
                continue
            if extents and extents[-1][1] == column:
                extents[-1][1] = column + 1
            else:
                extents.append([column, column + 1])
        self._extents = extents
