"""How a GPU kernel is told about the slots of every pool of a step: one row of int64 words per pool, and a launch.

As in `verify_pages.descriptor`: addresses and shapes, which hardly ever change, are in the descriptors; what changes
with every step lies in two int64 arrays, `packed` and `out`, that are launch arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.arrays import address, is_dense, item_bytes, strides

BLOCK = 256
"""Tokens that a program looks at in one round: two a thread, as slots and words have 64 bits. Twice as many want 120
registers."""
PROGRAMS = 2048
"""Programs that a launch is cut into where there is work for as many."""
POOL_WORDS, ROW_WORDS = 1, 4
"""Workspace int64 words of a pool (rows done), and of a row (parts done, wrong tokens, flags, the first of them). A
word for each token follows: UNOWNED, OWNED or WRONG."""
UNOWNED, OWNED, WRONG = range(3)
TOKENS_MAX = 1 << 30
NO_QUERY_ROW, QUERY_ROW_ARRAY, QUERY_ROW_IS_TABLE_ROW = range(3)


class SlotWord(IntEnum):
    """The words of a descriptor, in order. Offsets count int64 words from `packed` or, where they say so, `out`."""

    SLOT_MAPPING = 0
    SLOT_STRIDE = auto()
    SLOT_WIDE = auto()  # 1: int64, 0: int32
    TOKENS = auto()
    QUERY_START = auto()  # 0: none
    QUERY_START_STRIDE = auto()
    QUERY_START_WIDE = auto()
    PLACES = auto()
    QUERY_ROW = auto()
    QUERY_ROW_STRIDE = auto()
    QUERY_ROW_MODE = auto()
    LENGTHS = auto()
    LENGTHS_STRIDE = auto()
    LENGTHS_WIDE = auto()
    ROWS = auto()
    ROW_INDEX = auto()
    WRITER = auto()
    FLOOR = auto()
    HAS_FLOOR = auto()
    PAGE_WRITER = auto()
    NUM_PAGES = auto()
    PAGE_SIZE = auto()
    NULL_PAGE = auto()
    SKIP_SLOT = auto()
    SKIP_ALLOWED = auto()
    ENFORCE = auto()
    RECORD = auto()  # in out
    WORKSPACE = auto()  # in workspace


@dataclass(frozen=True, kw_only=True)
class SlotStep:
    """One pool of a step. Arrays are those of `verify_slots`, torch tensors or CuPy arrays, and stay the caller's.

    writer, floor   int64 words from `packed`: [rows] each, without gaps; floor None: there is none
    record          int64 words from `out`: [rows + 1, 4] without gaps
    place_is_row    a row's place in the batch is the word at row_index + row of `packed` (what `verify_pages` has for
                    its table row); query_row is then not looked at
    """

    slot_mapping: Any
    lengths: Any
    page_writer: Any
    rows: int
    writer: int
    floor: int | None
    page_size: int
    skip_slot: int
    skip_allowed: bool
    enforce: bool
    record: int
    null_page: int = 0
    query_start: Any = None
    query_row: Any = None
    place_is_row: bool = False
    row_index: int = 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the host decides about a launch of `verify_slots_step`; all of it depends on shapes alone.

    rows         the most rows of any pool; chunks: programs per row; block: tokens that one looks at in a round
    workspace_words  int64 words of workspace, zero before the first launch; a launch leaves them zero
    """

    pools: int
    rows: int
    chunks: int
    block: int
    workspace_words: int


def describe_slots(
    pools: Sequence[SlotStep], *, block: int = BLOCK, programs: int = PROGRAMS
) -> tuple[npt.NDArray[np.int64], Launch]:
    """Descriptors int64 [pools, words] and the launch for them. Reads nothing of the arrays but where they lie.

    `block`: a power of two up to 2048. ValueError for arrays that a kernel cannot take.
    """
    described = np.zeros((len(pools), len(SlotWord)), np.int64)
    workspace = 0
    for words, pool in zip(described, pools, strict=True):
        if not is_dense(pool.page_writer):
            raise ValueError("page_writer must have no gaps")
        if pool.slot_mapping.shape[0] >= TOKENS_MAX or pool.page_writer.shape[0] >= 1 << 31:
            raise ValueError(f"{pool.slot_mapping.shape[0]} tokens or {pool.page_writer.shape[0]} pages are too many")
        values = {
            SlotWord.TOKENS: pool.slot_mapping.shape[0],
            SlotWord.PLACES: pool.lengths.shape[0],
            SlotWord.PAGE_WRITER: address(pool.page_writer),
            SlotWord.NUM_PAGES: pool.page_writer.shape[0],
            SlotWord.FLOOR: 0 if pool.floor is None else pool.floor,
            SlotWord.HAS_FLOOR: pool.floor is not None,
            SlotWord.WORKSPACE: workspace,
        }
        for name in (
            "rows", "row_index", "writer", "page_size", "null_page", "skip_slot", "skip_allowed", "enforce", "record",
        ):  # fmt: skip
            values[SlotWord[name.upper()]] = getattr(pool, name)
        values |= _array_words("slot", SlotWord.SLOT_MAPPING, pool.slot_mapping)
        values |= _array_words("lengths", SlotWord.LENGTHS, pool.lengths)
        if pool.query_start is not None:
            values |= _array_words("query_start", SlotWord.QUERY_START, pool.query_start)
        for word, value in (values | _query_row_words(pool)).items():
            words[word] = value
        workspace += POOL_WORDS + ROW_WORDS * pool.rows + pool.slot_mapping.shape[0]
    rows = max((pool.rows for pool in pools), default=0)
    blocks = -(-max((pool.slot_mapping.shape[0] for pool in pools), default=0) // block)
    launch = Launch(
        pools=len(pools),
        rows=rows,
        chunks=max(1, min(blocks, programs // max(1, rows * len(pools)))),
        block=block,
        workspace_words=workspace,
    )
    return described, launch


def _array_words(name: str, at: SlotWord, array: Any) -> dict[SlotWord, int]:
    """Where an array of int32 or int64 lies; the address is the word `at`."""
    if item_bytes(array) not in (4, 8):
        raise ValueError(f"{at.name.lower()} holds int32 or int64, not {array.dtype}")
    return {
        at: address(array),
        SlotWord[f"{name}_stride".upper()]: strides(array)[0],
        SlotWord[f"{name}_wide".upper()]: item_bytes(array) == 8,
    }


def _query_row_words(pool: SlotStep) -> dict[SlotWord, int]:
    if pool.place_is_row:
        return {SlotWord.QUERY_ROW_MODE: QUERY_ROW_IS_TABLE_ROW}
    if pool.query_row is None:
        return {SlotWord.QUERY_ROW_MODE: NO_QUERY_ROW}
    if item_bytes(pool.query_row) != 8:
        raise ValueError(f"query_row holds int64, not {pool.query_row.dtype}")
    return {
        SlotWord.QUERY_ROW_MODE: QUERY_ROW_ARRAY,
        SlotWord.QUERY_ROW: address(pool.query_row),
        SlotWord.QUERY_ROW_STRIDE: strides(pool.query_row)[0],
    }
