"""`verify_pages` in NumPy: the oracle, written for reading, one row at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.mixing import mix_array
from kvguard.kernels.verify_pages.layout import (
    BAD_COLUMN,
    BAD_ENTRY,
    DIGEST,
    FLAG_DIGEST,
    FLAG_NULL,
    FLAG_RANGE,
    FLAG_SPLIT,
    FLAG_VACANT,
    FLAGS,
)

Int64 = npt.NDArray[np.int64]


def verify_pages(
    *,
    table: npt.NDArray[np.integer],
    page_tag: Int64,
    row_index: Int64,
    expected: Int64,
    extent_offset: Int64,
    extent_start: Int64,
    extent_stop: Int64,
    key: int,
    split: int,
    null_page: int,
    neutral_page: int,
    record: Int64,
    evidence: Int64,
    evidence_row: Int64,
    slot_mapping: Int64 | None,
    query_start: Int64 | None,
    query_row: Int64 | None,
    skip_slot: int,
) -> None:
    """See `kvguard.kernels.verify_pages.verify_pages` for the contract."""
    # Every row is judged before any is neutralised, as two rows may name one table row.
    for row in range(len(row_index)):
        table_row = int(row_index[row])
        extents = range(int(extent_offset[row]), int(extent_offset[row + 1]))
        flags, digest, bad_column, bad_entry = 0, 0, -1, -1
        for extent in extents:
            for column in range(int(extent_start[extent]) * split, int(extent_stop[extent]) * split):
                flag, entry, page = 0, -1, -1
                if not (0 <= table_row < table.shape[0] and 0 <= column < table.shape[1]):
                    flag = FLAG_RANGE
                else:
                    entry = int(table[table_row, column])
                    page, piece = entry // split, entry % split
                    if not 0 <= page < len(page_tag):
                        flag = FLAG_RANGE
                    elif page == null_page:
                        flag = FLAG_NULL
                    elif page_tag[page] == 0:
                        flag = FLAG_VACANT
                    if flag != FLAG_RANGE and split > 1:
                        first = int(table[table_row, column - column % split])
                        if piece != column % split or page != first // split:
                            flag |= FLAG_SPLIT
                if flag and bad_column < 0:
                    bad_column, bad_entry = column, entry
                flags |= flag
                # Only the first piece of a manager page carries its term; the others were compared with it above.
                if column % split == 0 and not flag & FLAG_RANGE:
                    tags = page_tag[page : page + 1].view(np.uint64)
                    digest += int(mix_array(key, np.array([column // split], np.uint64), tags)[0])
        digest &= (1 << 64) - 1
        if digest != int(expected[row]) & ((1 << 64) - 1):
            flags |= FLAG_DIGEST
        record[row, FLAGS] = flags
        record[row, DIGEST] = np.uint64(digest).astype(np.int64)
        record[row, BAD_COLUMN] = bad_column
        record[row, BAD_ENTRY] = bad_entry
    captured = 0
    for row in range(len(row_index)):
        if record[row, FLAGS] == 0:
            continue
        table_row = int(row_index[row])
        inside = 0 <= table_row < table.shape[0]
        if captured < len(evidence_row):
            evidence_row[captured] = row
            if inside:
                width = min(evidence.shape[1], table.shape[1])
                evidence[captured, :width] = table[table_row, :width]
            captured += 1
    for row in range(len(row_index)):
        if record[row, FLAGS] == 0 or neutral_page < 0:
            continue
        table_row = int(row_index[row])
        if 0 <= table_row < table.shape[0]:
            for extent in range(int(extent_offset[row]), int(extent_offset[row + 1])):
                start = max(0, int(extent_start[extent]) * split)
                stop = max(start, int(extent_stop[extent]) * split)
                table[table_row, start:stop] = neutral_page * split
        if slot_mapping is not None and query_start is not None:
            place = row if query_row is None else int(query_row[row])
            if not 0 <= place < len(query_start) - 1:
                continue
            slot_mapping[int(query_start[place]) : int(query_start[place + 1])] = skip_slot
