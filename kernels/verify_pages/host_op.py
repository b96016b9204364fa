"""A short way out for tensors in host memory: are all rows clean?

Almost every step is clean, and on a CPU the fixed price of each PyTorch call dominates a small batch. NumPy on the same
memory costs a fraction. It answers only the common question, one extent a row and one kernel page per manager page;
whatever is not provably clean goes the full way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.mixing import mix_array

Int64 = npt.NDArray[np.int64]
MAX_ENTRIES = 1 << 21


def all_rows_clean(
    *,
    table: npt.NDArray[np.integer],
    page_tag: Int64,
    row_index: Int64,
    expected: Int64,
    extent_start: Int64,
    extent_stop: Int64,
    columns: int,
    key: int,
    null_page: int,
    record: Int64,
) -> bool:
    """True if no row has a flag; `record` int64 [rows, 4] is then written. False says only: look closer."""
    rows = len(row_index)
    if rows * columns > MAX_ENTRIES or columns > table.shape[1]:
        return False
    if rows and not (0 <= row_index.min() and row_index.max() < table.shape[0]):
        return False
    column = np.arange(columns)
    live = column < extent_stop[:, None]
    if extent_start.any():
        live &= column >= extent_start[:, None]
    entries = table[row_index, :columns]
    # What is not live is looked up as page 0 and counts for nothing.
    entries = np.where(live, entries, 0)
    if entries.size and not (0 <= entries.min() and entries.max() < len(page_tag)):
        return False
    tags = page_tag[entries]
    bad = tags == 0
    if null_page >= 0:
        bad |= entries == null_page
    if (bad & live).any():
        return False
    terms = mix_array(key, column.astype(np.uint64), tags.view(np.uint64))
    digest = np.where(live, terms, np.uint64(0)).sum(axis=1, dtype=np.uint64).view(np.int64)
    if not np.array_equal(digest, expected):
        return False
    record[:, 0] = 0
    record[:, 1] = digest
    record[:, 2:] = -1
    return True
