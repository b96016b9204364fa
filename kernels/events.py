"""The words of an event, four int64 on the device: the problem that a call of `stamp_rows`, `retire_pages`,
`publish_row` or `pair_windows` met.

The caller zeroes it; a call without a problem leaves it alone. Of several problems the one at the lowest place is kept.
"""

from __future__ import annotations

EVENT_WORDS = 4
CODE, PAGE, PLACE = range(EVENT_WORDS - 1)
"""Of these words; the fourth is zero before and after a call, and a kernel may count in it meanwhile."""

OUT_OF_RANGE, NULL, DOUBLE_ALLOCATION, DOUBLE_FREE, FREE_UNOWNED, VACANT, CONTENT = range(1, 8)
"""The codes, below 8; 0 is no problem."""

NULL_PAGE = 0
"""Where engines of this kind send their padding: never a request's own page."""

NO_PAGE = -1
"""In the word of the page where a problem is not one of a page."""

SPOILED = 0x5851F42D4C957F2D
"""Added to the digest of a row each time that it is flagged, or that a page it is to read holds other content than its
own: what it publishes from then on adds up for nobody, even where its table is right again by then."""
CONTENT_LANES = 2
"""Words of a content key on the device; both 0 where nothing is known of a page, which is nobody's content."""
TREE = -1
"""The owner of a page that the prefix tree holds; 0 is nobody."""

ROW_SHIFT = 32
"""An owner word >> this is the row + 1, and -1 for the tree."""
ANYBODY = 0
"""Whose page a free gives back, where it comes from nowhere that is known to own pages."""
UNSAID = -2
"""The same, where it comes from a known place that cannot say whose pages they were."""


def owner_of(row: int, column: int) -> int:
    """The owner word of a page that a row of the block table holds at a column."""
    return (row + 1) << ROW_SHIFT | column
