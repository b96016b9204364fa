"""A short way of `pair_windows` for tensors in host memory, where nothing is wrong with any pair."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import NULL_PAGE
from kvguard.kernels.mixing import signed64

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def pair_sound(
    *,
    full: Integers,
    window: Integers,
    fresh: bool,
    peer_tag: Int64,
    window_tag: Int64,
    window_holder: Int64,
    page_size: int,
    base_tag: int,
) -> bool:
    """True if every pair was sound and is written down; False: nothing was done. There is at least one token."""
    heads = np.flatnonzero(full % page_size == 0)
    if not len(heads):
        return True
    page, window_page = full[heads] // page_size, window[heads] // page_size
    if min(page.min(), window_page.min()) <= NULL_PAGE:
        return False
    if page.max() >= len(peer_tag) or window_page.max() >= len(window_tag):
        return False
    tags = window_tag[window_page]
    if fresh:
        if tags.any() or len(np.unique(window_page)) < len(heads):
            return False
        tags = heads.astype(np.int64) + np.array([signed64(base_tag)])
        window_tag[window_page] = tags
    elif not tags.all():
        return False
    peer_tag[page] = tags
    window_holder[window_page] = page
    return True
