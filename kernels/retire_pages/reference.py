"""`retire_pages` in NumPy: the oracle, written for reading."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import (
    ANYBODY,
    DOUBLE_FREE,
    FREE_UNOWNED,
    NULL,
    NULL_PAGE,
    OUT_OF_RANGE,
    ROW_SHIFT,
    TREE,
    UNSAID,
)

Int64 = npt.NDArray[np.int64]


def retire_pages(
    *,
    pages: npt.NDArray[np.integer],
    page_tag: Int64,
    page_owner: Int64,
    page_chain: Int64,
    divisor: int,
    by: int | Int64,
    event: Int64,
) -> None:
    """See `kvguard.kernels.retire_pages.retire_pages` for the contract."""
    problems: list[tuple[int, int, int]] = []
    given: set[int] = set()
    holder = np.broadcast_to(np.asarray(by), pages.shape)
    held_by = page_owner >> ROW_SHIFT
    for place, entry in enumerate(pages.tolist()):
        page = entry // divisor
        if not 0 <= page < len(page_tag):
            problems.append((place, OUT_OF_RANGE, page))
        elif page == NULL_PAGE:
            problems.append((place, NULL, page))
        elif held_by[page] and holder[place] not in (ANYBODY, UNSAID, held_by[page]):
            problems.append((place, FREE_UNOWNED, page))
        else:
            if (page_tag[page] == 0 and page not in given) or (page in given and divisor == 1):
                problems.append((place, DOUBLE_FREE, page))
            given.add(page)
            page_tag[page] = page_owner[page] = 0
            if held_by[page] == TREE and holder[place] != ANYBODY:
                page_chain[page] = 0
    if problems:
        place, code, page = min(problems)
        event[:3] = code, page, place
