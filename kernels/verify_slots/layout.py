"""Words of the record that every backend of `verify_slots` writes: four int64 per checked row, and four more for the
padding lanes, so that all of a step leave the device in one copy."""

from __future__ import annotations

RECORD_WORDS = 4
FLAGS, WRONG_TOKENS, FIRST, FIRST_SLOT = range(RECORD_WORDS)
"""FIRST is the position of the first wrong token, in the record of the padding lanes its index in the step; both it and
FIRST_SLOT are -1 where WRONG_TOKENS is 0, and may be so elsewhere."""

NOT_CHECKED = -1
"""What the flags word holds until a kernel has written it."""

SLOT_RANGE = 1 << 8
"""A slot outside of the pool that is not the skip slot. These flags have no bit in common with those of `verify_pages`:
one word may hold both."""
SLOT_PAGE = 1 << 9
"""A slot in a page that its row does not write at that position."""
SLOT_OFFSET = 1 << 10
"""A slot that is not at the offset in its page that its position has."""
SLOT_FLOOR = 1 << 11
"""A write at a negative position, or at one that is complete already."""
SLOT_LOST = 1 << 12
"""A token that has a place to be kept in, and is sent nowhere."""
SLOT_PADDING = 1 << 13
"""A token of nobody's that does not go to the skip slot."""
