"""How a GPU kernel is told about every pool of a step whose tags change: one row of int64 words per pool."""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any

from kvguard.kernels.arrays import address, is_dense

BLOCK = 256
"""Changes that a program makes."""


class ScatterWord(IntEnum):
    """The words of a descriptor, in order. Offsets count int64 words from `packed`."""

    PAGE_TAG = 0
    NUM_PAGES = auto()
    PAGES = auto()
    TAGS = auto()
    CHANGES = auto()


def describe_scatter(*, page_tag: Any, pages: int, tags: int, changes: int) -> tuple[int, ...]:
    """The words of `ScatterWord`. `pages`, `tags`: offsets. ValueError if page_tag int64 [num_pages] has gaps."""
    if not is_dense(page_tag):
        raise ValueError("page_tag must have no gaps")
    return address(page_tag), int(page_tag.shape[0]), pages, tags, changes
