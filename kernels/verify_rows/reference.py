"""`verify_rows` in NumPy: the oracle, written for reading, one position at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import NULL_PAGE, SPOILED
from kvguard.kernels.mixing import mix, signed64
from kvguard.kernels.verify_pages.layout import (
    FLAG_DIGEST,
    FLAG_NULL,
    FLAG_RANGE,
    FLAG_SPLIT,
    FLAG_VACANT,
    FLAG_WRITE,
    FLAGS,
)

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def verify_rows(
    *,
    table: npt.NDArray[np.int32],
    rows: Int64,
    lengths: Integers,
    page_tag: Int64,
    digest: Int64,
    page_size: int,
    key: int,
    enforce: bool,
    record: Int64,
    slot_mapping: Integers | None,
    query_start: Integers | None,
    skip_slot: int,
    writes: Int64 | None,
) -> None:
    """See `kvguard.kernels.verify_rows.verify_rows` for the contract."""
    slots_end = len(page_tag) * page_size
    # Every row is judged before any is changed, as two rows may name one table row.
    for b, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        flags, found, bad_position, bad_slot = 0, 0, -1, -1
        width = table.shape[1] if 0 <= row < len(table) else 0
        for position in range(min(length, width)):
            slot, head = int(table[row, position]), int(table[row, position - position % page_size])
            page, flag = slot // page_size, 0
            if not 0 <= slot < slots_end:
                flag = FLAG_RANGE
            else:
                if page == NULL_PAGE:
                    flag = FLAG_NULL
                elif page_tag[page] == 0:
                    flag = FLAG_VACANT
                if slot % page_size != position % page_size or page != head // page_size:
                    flag |= FLAG_SPLIT
                if position % page_size == 0:
                    found += mix(key, position // page_size, int(page_tag[page]))
            if flag and bad_position < 0:
                bad_position, bad_slot = position, slot
            flags |= flag
        if length > width or length < 0 or not 0 <= row < len(table):
            flags |= FLAG_RANGE
            if bad_position < 0:
                bad_position = width if length > width else 0
        if writes is not None and writes[b, FLAGS]:
            flags |= FLAG_WRITE
        found = signed64(found)
        if 0 <= row < len(table) and found != digest[row]:
            flags |= FLAG_DIGEST
        record[b] = flags, found, bad_position, bad_slot
    if not enforce:
        return
    for b, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if record[b, FLAGS] == 0:
            continue
        if 0 <= row < len(table):
            digest[row] = signed64(int(digest[row]) + SPOILED)
            for position in range(min(length, table.shape[1])):
                if not 0 <= table[row, position] < slots_end:
                    table[row, position] = 0
        if slot_mapping is not None:
            start = b if query_start is None else int(query_start[b])
            stop = b + 1 if query_start is None else int(query_start[b + 1])
            slot_mapping[max(start, 0) : max(stop, 0)] = skip_slot
