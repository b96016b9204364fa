"""Words of the verdict record that every backend of `verify_pages` writes.

A record is four int64 per checked row, so that all verdicts of a step leave the device in one copy.
"""

from __future__ import annotations

RECORD_WORDS = 4
FLAGS, DIGEST, BAD_COLUMN, BAD_ENTRY = range(RECORD_WORDS)

NOT_CHECKED = -1
"""What the flags word holds until a kernel has written it: a verdict that was never computed is not a clean one."""

FLAG_DIGEST = 1
"""The digest over the live extents differs from the expected one: some page is not the one that was promised."""
FLAG_NULL = 2
"""A live entry names the engine's null page."""
FLAG_RANGE = 4
"""A live entry is negative or past the pool, or the row or a live column lies outside the table."""
FLAG_VACANT = 8
"""A live entry names a page whose tag is 0: freed, or never allocated."""
FLAG_SPLIT = 16
"""Kernel pages smaller than manager pages: an entry is not the piece of its manager page that belongs there."""
FLAG_WRITE = 64
"""`verify_rows`: `verify_slots` flagged the row, whose tokens then go nowhere at all."""
FLAG_WINDOW = 32
"""`verify_windows`: a token of the attention window is not kept where it was, in the pool of the window layers."""
