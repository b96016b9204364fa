"""`verify_slots` in NumPy: the oracle, written for reading, one token at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import ROW_SHIFT
from kvguard.kernels.mixing import signed64
from kvguard.kernels.verify_slots.layout import (
    SLOT_FLOOR,
    SLOT_LOST,
    SLOT_OFFSET,
    SLOT_PADDING,
    SLOT_PAGE,
    SLOT_RANGE,
)

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def verify_slots(
    *,
    slot_mapping: Integers,
    query_start: Integers | None,
    query_row: Int64 | None,
    lengths: Integers,
    writer: Int64,
    floor: Int64 | None,
    page_writer: Int64,
    page_size: int,
    skip_slot: int,
    skip_allowed: bool,
    enforce: bool,
    record: Int64,
    null_page: int,
) -> None:
    """See `kvguard.kernels.verify_slots.verify_slots` for the contract."""

    def flags_of(slot: int, position: int, row: int) -> int:
        page, inside = slot // page_size, 0 <= slot < len(page_writer) * page_size
        if slot == skip_slot or (inside and page == null_page):
            return 0 if skip_allowed else SLOT_LOST
        flags = 0
        if position < 0 or (floor is not None and position < floor[row]):
            flags |= SLOT_FLOOR
        if not inside:
            return flags | SLOT_RANGE
        if position < 0:
            return flags
        column, word = position // page_size, int(page_writer[page])
        if word <= 0 or word != signed64(int(writer[row]) + column) or column >= 1 << ROW_SHIFT:
            flags |= SLOT_PAGE
        if slot % page_size != position % page_size:
            flags |= SLOT_OFFSET
        return flags

    tokens, places = len(slot_mapping), len(lengths)
    owned, wrong = np.zeros(tokens, bool), np.zeros(tokens, bool)
    for row in range(len(writer)):
        place = row if query_row is None else int(query_row[row])
        found = [0, 0, -1, -1]
        if 0 <= place < places:
            start = place if query_start is None else int(query_start[place])
            stop = place + 1 if query_start is None else int(query_start[place + 1])
            for token in range(max(start, 0), min(stop, tokens)):
                owned[token] = True
                slot, position = int(slot_mapping[token]), signed64(int(lengths[place]) - (stop - token))
                flags = flags_of(slot, position, row)
                if flags:
                    wrong[token] = True
                    first = found[2:] if found[0] else [position, slot]
                    found = [found[0] | flags, found[1] + 1, *first]
        record[row] = found
    padding = ~owned & (slot_mapping != skip_slot)
    lanes = padding.nonzero()[0]
    record[-1] = (SLOT_PADDING, len(lanes), lanes[0], slot_mapping[lanes[0]]) if len(lanes) else (0, 0, -1, -1)
    if enforce:
        slot_mapping[wrong | padding] = skip_slot
