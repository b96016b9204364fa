"""A short way out of `verify_rows` for tensors in host memory: are all rows clean?

Almost every step is clean, and NumPy on the same memory looks at the longest row where PyTorch, which may not look at
a length, has to cover the width of the table. Whatever is not provably clean goes the full way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.mixing import mix_array

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
MAX_ENTRIES = 1 << 21


def all_rows_clean(
    *,
    table: npt.NDArray[np.int32],
    rows: Int64,
    lengths: Integers,
    page_tag: Int64,
    digest: Int64,
    page_size: int,
    key: int,
    record: Int64,
    writes: Int64 | None,
) -> bool:
    """True if no row has a flag; `record` int64 [rows, 4] is then written. False says only: look closer.

    There is at least one row.
    """
    if writes is not None and writes[: len(rows), 0].any():
        return False
    width = int(lengths.max())
    if len(rows) * width > MAX_ENTRIES or width > table.shape[1] or lengths.min() < 0:
        return False
    if not (0 <= rows.min() and rows.max() < table.shape[0]):
        return False
    heads = table[rows, :width:page_size]
    columns = np.arange(heads.shape[1])
    live = columns * page_size < lengths[:, None]
    # What is not live is looked up as page 0 and counts for nothing.
    pages = np.where(live, heads // page_size, 0)
    if pages.size and (pages.min() < 0 or pages.max() >= len(page_tag)):
        return False
    tags = page_tag[pages]
    if (((tags == 0) | (pages == 0)) & live).any():
        return False
    if page_size > 1:
        position = np.arange(width)
        # With every slot where its page and its position put it, all of them are in range as well.
        wanted = (pages * page_size)[:, position // page_size] + position % page_size
        if ((table[rows, :width] != wanted) & (position < lengths[:, None])).any():
            return False
    terms = mix_array(key, columns.astype(np.uint64), tags.view(np.uint64))
    found = np.where(live, terms, np.uint64(0)).sum(axis=1, dtype=np.uint64).view(np.int64)
    if not np.array_equal(found, digest[rows]):
        return False
    record[:, 0] = 0
    record[:, 1] = found
    record[:, 2:] = -1
    return True
