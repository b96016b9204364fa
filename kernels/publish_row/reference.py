"""`publish_row` in NumPy: the oracle, written for reading, one column at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import CONTENT, NULL_PAGE, SPOILED, TREE, owner_of
from kvguard.kernels.mixing import mix, signed64

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]


def publish_row(
    *,
    row: int,
    old: Integers,
    new: Integers,
    start: int,
    stop: int,
    content: Int64 | None,
    page_content: Int64 | None,
    event: Int64 | None,
    page_tag: Int64,
    page_owner: Int64,
    page_chain: Int64,
    digest: Int64,
    page_size: int,
    key: int,
) -> None:
    """See `kvguard.kernels.publish_row.publish_row` for the contract."""
    old_page = {start + place: slot // page_size for place, slot in enumerate(old.tolist())}
    new_page = {start - (start > 0) + place: slot // page_size for place, slot in enumerate(new.tolist())}
    owner, chain = page_owner.copy(), page_chain.copy()

    def is_page(page: int) -> bool:
        return 0 <= page < len(page_tag)

    term = {j: mix(key, j, int(page_tag[page])) if is_page(page) else 0 for j, page in old_page.items()}
    before = int(chain[new_page[start - 1]]) if start > 0 and is_page(new_page[start - 1]) else 0
    error = int(digest[row]) - before - sum(term.values())
    if content is not None and page_content is not None and event is not None:
        for j in range(stop - 1, start - 1, -1):
            page = new_page[j]
            if is_page(page) and page not in (old_page[j], NULL_PAGE):
                if not np.array_equal(page_content[page], content[j - start]) or not page_content[page].any():
                    event[:3] = CONTENT, page, j - start
        error += SPOILED if event[0] else 0
    run = before
    for j in range(start, stop):
        page = new_page[j]
        if is_page(page) and page == old_page[j] != NULL_PAGE and owner[page] == owner_of(row, j):
            run += term[j]
            page_chain[page] = signed64(run + error + int(chain[page]))
            page_owner[page] = TREE
            if content is not None and page_content is not None:
                page_content[page] = content[j - start]
        else:
            run = int(chain[page]) if is_page(page) else 0
    digest[row] = signed64(run + sum(term[j] for j in old_page if j >= stop) + error)
