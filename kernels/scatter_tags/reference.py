"""`scatter_tags` in NumPy: the oracle, written for reading."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def scatter_tags(*, page_tag: Int64, pages: Int64, tags: Int64) -> None:
    """See `kvguard.kernels.scatter_tags.scatter_tags` for the contract."""
    for page, tag in zip(pages, tags, strict=True):
        if 0 <= page < len(page_tag):
            page_tag[page] = tag
