"""A short way out of `verify_windows` for tensors in host memory: are all windows as they should be?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
MAX_ENTRIES = 1 << 21


def all_windows_clean(
    *,
    table: npt.NDArray[np.int32],
    rows: Int64,
    lengths: Integers,
    window: int,
    mapping: Int64,
    peer_tag: Int64,
    window_tag: Int64,
    page_size: int,
    query_start: Integers | None,
) -> bool:
    """True if no row gets a flag: there is nothing to write then. False says only: look closer.

    There is at least one row.
    """
    if lengths.max() > table.shape[1] or lengths.min() < 0 or rows.min() < 0 or rows.max() >= table.shape[0]:
        return False
    queries = 1 if query_start is None else np.diff(query_start[: len(rows) + 1])
    first = np.maximum(lengths - queries - window, 0)
    width = int((lengths - first).max())
    if width <= 0:
        return True
    if len(rows) * width > MAX_ENTRIES:
        return False
    position = first[:, None] + np.arange(width)
    live = position < lengths[:, None]
    slot = table[rows[:, None], np.where(live, position, 0)][live]
    if slot.size and (slot.min() < 0 or slot.max() >= len(peer_tag) * page_size):
        return False
    peer = mapping[slot]
    page = peer // page_size
    if page.size and (page.min() <= 0 or page.max() >= len(window_tag)):
        return False
    tag = window_tag[page]
    if page_size > 1 and (peer % page_size != position[live] % page_size).any():
        return False
    return bool(((tag == peer_tag[slot // page_size]) & (tag != 0)).all())
