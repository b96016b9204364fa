"""`pair_windows` in NumPy: the oracle, written for reading, one token at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import DOUBLE_ALLOCATION, NULL, NULL_PAGE, OUT_OF_RANGE, VACANT
from kvguard.kernels.mixing import signed64

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def pair_windows(
    *,
    full: Integers,
    window: Integers,
    fresh: bool,
    peer_tag: Int64,
    window_tag: Int64,
    window_holder: Int64,
    page_size: int,
    base_tag: int,
    event: Int64,
) -> None:
    """See `kvguard.kernels.pair_windows.pair_windows` for the contract."""
    problems: list[tuple[int, int, int]] = []
    opened: dict[int, int] = {}
    for t, (slot, peer) in enumerate(zip(full.tolist(), window.tolist(), strict=True)):
        if slot % page_size != 0:
            continue
        page, window_page = slot // page_size, peer // page_size
        if not 0 <= page < len(peer_tag):
            problems.append((t, OUT_OF_RANGE, page))
        elif not 0 <= window_page < len(window_tag):
            problems.append((t, OUT_OF_RANGE, window_page))
        elif NULL_PAGE in (page, window_page):
            problems.append((t, NULL, NULL_PAGE))
        else:
            if fresh:
                if window_page in opened:
                    problems.append((opened[window_page], DOUBLE_ALLOCATION, window_page))
                elif window_tag[window_page] != 0:
                    problems.append((t, DOUBLE_ALLOCATION, window_page))
                opened[window_page] = t
                window_tag[window_page] = signed64(base_tag + t)
            elif window_tag[window_page] == 0:
                problems.append((t, VACANT, window_page))
            peer_tag[page] = signed64(base_tag + t) if fresh else window_tag[window_page]
            window_holder[window_page] = page
    if problems:
        place, code, page = min(problems)
        event[:3] = code, page, place
