"""`verify_windows` in NumPy: the oracle, written for reading, one position at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import NULL_PAGE
from kvguard.kernels.verify_pages.layout import BAD_COLUMN, BAD_ENTRY, FLAG_WINDOW, FLAGS

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def verify_windows(
    *,
    table: npt.NDArray[np.int32],
    rows: Int64,
    lengths: Integers,
    window: int,
    mapping: Int64,
    peer_tag: Int64,
    window_tag: Int64,
    page_size: int,
    enforce: bool,
    record: Int64,
    slot_mapping: Integers | None,
    query_start: Integers | None,
    skip_slot: int,
) -> None:
    """See `kvguard.kernels.verify_windows.verify_windows` for the contract."""
    slots_end, window_end = len(peer_tag) * page_size, len(window_tag) * page_size

    def queries(b: int) -> tuple[int, int]:
        return (b, b + 1) if query_start is None else (int(query_start[b]), int(query_start[b + 1]))

    def slots(b: int) -> list[tuple[int, int]]:
        """Positions of the window with their full slots, where there is one."""
        row, length, (start, stop) = int(rows[b]), int(lengths[b]), queries(b)
        if not 0 <= row < len(table):
            return []
        first, end = max(length - (stop - start) - window, 0), min(length, table.shape[1])
        found = [(position, int(table[row, position])) for position in range(first, end)]
        return [(position, slot) for position, slot in found if 0 <= slot < slots_end]

    judged = [slots(b) for b in range(len(rows))]
    for b, tokens in enumerate(judged):
        for position, slot in tokens:
            peer = int(mapping[slot])
            page = peer // page_size
            if 0 <= page < len(window_tag) and page != NULL_PAGE and peer % page_size == position % page_size:
                if window_tag[page] == peer_tag[slot // page_size] != 0:
                    continue
            record[b, FLAGS] |= FLAG_WINDOW
            if record[b, BAD_COLUMN] < 0:
                record[b, BAD_COLUMN], record[b, BAD_ENTRY] = position, peer
    if not enforce:
        return
    for b, tokens in enumerate(judged):
        if not record[b, FLAGS] & FLAG_WINDOW:
            continue
        for _, slot in tokens:
            if not 0 <= mapping[slot] < window_end:
                mapping[slot] = 0
        if slot_mapping is not None:
            start, stop = queries(b)
            slot_mapping[max(start, 0) : max(stop, 0)] = skip_slot
