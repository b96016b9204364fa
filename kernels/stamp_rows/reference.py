"""`stamp_rows` in NumPy: the oracle, written for reading, one token at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import CONTENT, DOUBLE_ALLOCATION, NO_PAGE, NULL, NULL_PAGE, OUT_OF_RANGE, SPOILED, owner_of
from kvguard.kernels.mixing import mix, signed64

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def stamp_rows(
    *,
    slots: Integers,
    rows: Int64,
    first: Integers,
    first_delta: int,
    offset: Integers | None,
    adopted: Int64 | None,
    content: Int64 | None,
    page_content: Int64 | None,
    page_tag: Int64,
    page_owner: Int64,
    page_chain: Int64,
    digest: Int64,
    page_size: int,
    base_tag: int,
    key: int,
    event: Int64,
) -> None:
    """See `kvguard.kernels.stamp_rows.stamp_rows` for the contract."""
    # (place, whether it is a token's, code, page)
    problems: list[tuple[int, bool, int, int]] = []
    # Fresh rows first: in a batch that names a row twice no term may be lost.
    for b, row in enumerate(rows.tolist()):
        if not 0 <= row < len(digest):
            problems.append((b, False, OUT_OF_RANGE, NO_PAGE))
        elif adopted is not None and adopted[b] >= 0:
            digest[row] = 0
            page = int(adopted[b]) // page_size
            if page >= len(page_chain):
                problems.append((b, False, OUT_OF_RANGE, page))
            elif adopted[b] > 0:
                digest[row] = page_chain[page]
                if content is not None and page_content is not None:
                    there = page_content[page].tolist()
                    if there != content[b].tolist() or there == [0, 0]:
                        digest[row] = signed64(int(digest[row]) + SPOILED)
                        problems.append((b, False, CONTENT, page))
    opened: dict[int, int] = {}
    for b, row in enumerate(rows.tolist()):
        start = b if offset is None else int(offset[b])
        stop = b + 1 if offset is None else int(offset[b + 1])
        if not 0 <= row < len(digest):
            continue
        for t in range(max(start, 0), min(stop, len(slots))):
            position = int(first[b]) + first_delta + t - start
            if position < 0 or position % page_size != 0:
                continue
            page, column = int(slots[t]) // page_size, position // page_size
            if not 0 <= page < len(page_tag):
                problems.append((t, True, OUT_OF_RANGE, page))
                continue
            if page == NULL_PAGE:
                problems.append((t, True, NULL, page))
                continue
            if page in opened:
                problems.append((opened[page], True, DOUBLE_ALLOCATION, page))
            elif page_tag[page] != 0:
                problems.append((t, True, DOUBLE_ALLOCATION, page))
            opened[page] = t
            tag = signed64(base_tag + t)
            page_tag[page] = tag
            page_owner[page] = owner_of(row, column)
            digest[row] = signed64(int(digest[row]) + mix(key, column, tag))
    if problems:
        place, _, code, page = min(problems)
        event[:3] = code, page, place
