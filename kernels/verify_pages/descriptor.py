"""How a GPU kernel is told about every pool of a step: one row of int64 words per pool, and a launch that fits them.

The descriptors hold addresses and shapes, which an engine with persistent tensors hardly ever changes; what changes
with every step (digests, extents, verdicts) lies in two int64 arrays, `packed` and `out`, that are launch arguments.
A caller keeps descriptors on the device and makes them anew only where `describe` gives other words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.arrays import address, is_dense, item_bytes, strides
from kvguard.kernels.mixing import signed64

BLOCK = 512
"""Table entries that a program looks at in one round: four a thread with four warps, one 16-byte load of int32."""
PROGRAMS = 2048
"""Programs that a launch is cut into where there is work for as many: several on each multiprocessor of a big GPU."""
POOL_WORDS, ROW_WORDS = 2, 4
"""Workspace int64 words of a pool (rows done, rows flagged) and of a row (parts done, digest, flags, first column)."""
GROUP = 4
"""Entries that a thread reads at a time: 16 bytes of int32."""
COLUMNS_MAX = 1 << 30
"""Kernels count columns in 32 bits, and pages too where entries are int32; offsets in memory have 64."""
NARROW, WIDE, MIXED = range(3)
NO_QUERY_ROW, QUERY_ROW_ARRAY, QUERY_ROW_IS_TABLE_ROW = range(3)


class Word(IntEnum):
    """The words of a descriptor, in order. Offsets count int64 words from `packed` or, where they say so, `out`."""

    TABLE = 0
    TABLE_ROW_STRIDE = auto()
    TABLE_COLUMN_STRIDE = auto()
    TABLE_ROWS = auto()
    TABLE_COLUMNS = auto()
    TABLE_WIDE = auto()  # 1: int64 entries, 0: int32
    TABLE_VECTOR = auto()  # 1: rows can be read 16 bytes at a time
    PAGE_TAG = auto()
    NUM_PAGES = auto()
    SPLIT = auto()
    NULL_PAGE = auto()
    NEUTRAL_ENTRY = auto()  # -1: flagged rows are not touched
    KEY = auto()
    ROWS = auto()
    ROW_INDEX = auto()
    EXPECTED = auto()
    EXTENT_OFFSET = auto()
    EXTENT_START = auto()
    EXTENT_STOP = auto()
    RECORD = auto()  # in out
    EVIDENCE = auto()  # in out
    EVIDENCE_ROW = auto()  # in out
    EVIDENCE_PLACES = auto()
    EVIDENCE_WIDTH = auto()
    SLOT_MAPPING = auto()  # 0: none
    SLOT_STRIDE = auto()
    TOKENS = auto()
    QUERY_START = auto()
    QUERY_START_STRIDE = auto()
    QUERY_START_WIDE = auto()
    PLACES = auto()
    QUERY_ROW = auto()
    QUERY_ROW_STRIDE = auto()
    QUERY_ROW_MODE = auto()
    SKIP_SLOT = auto()
    WORKSPACE = auto()  # in workspace


@dataclass(frozen=True, kw_only=True)
class PoolStep:
    """One pool of a step. Arrays are those of `verify_pages`, torch tensors or CuPy arrays, and stay the caller's.

    row_index, expected, extent_offset, extent_start, extent_stop  int64 words from `packed`
    record, evidence, evidence_row  int64 words from `out`: [rows, 4], [evidence_places, evidence_width] and
                    [evidence_places], each without gaps
    place_is_row    a request's place in the batch is its table row; query_row is then not looked at
    """

    table: Any
    page_tag: Any
    rows: int
    columns: int
    split: int
    null_page: int
    neutral_page: int
    skip_slot: int
    row_index: int
    expected: int
    extent_offset: int
    extent_start: int
    extent_stop: int
    record: int
    evidence: int
    evidence_row: int
    evidence_places: int
    evidence_width: int
    key: int
    slot_mapping: Any = None
    query_start: Any = None
    query_row: Any = None
    place_is_row: bool = False


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the host decides about a launch of `verify_step`.

    rows         the most rows of any pool; chunks: programs per row; block: entries that one looks at in a round
    table_types  NARROW: every table is int32, WIDE: int64, MIXED: some of each
    vector       every table can be read 16 bytes at a time
    split        some pool has kernel pages smaller than manager pages
    workspace_words  int64 words of workspace, zero before the first launch; a launch leaves them zero
    """

    pools: int
    rows: int
    chunks: int
    block: int
    table_types: int
    vector: bool
    split: bool
    workspace_words: int


def reads_16_bytes(table: Any) -> bool:
    """Every row starts on a multiple of 16 bytes and holds whole groups of four entries, without gaps."""
    row_stride, column_stride = strides(table)
    aligned = address(table) % 16 == 0 and (table.shape[0] < 2 or row_stride * item_bytes(table) % 16 == 0)
    return column_stride == 1 and aligned and table.shape[1] % GROUP == 0


def describe(
    pools: Sequence[PoolStep], *, block: int = BLOCK, programs: int = PROGRAMS
) -> tuple[npt.NDArray[np.int64], Launch]:
    """Descriptors int64 [pools, words] and the launch for them. Reads nothing of the arrays but where they lie.

    `block`: a power of two, at least 4. ValueError for arrays that a kernel cannot take.
    """
    described = np.zeros((len(pools), len(Word)), np.int64)
    workspace = 0
    for words, pool in zip(described, pools, strict=True):
        values = {
            Word.KEY: signed64(pool.key),
            Word.NUM_PAGES: pool.page_tag.shape[0],
            Word.PAGE_TAG: address(pool.page_tag),
            Word.NEUTRAL_ENTRY: pool.neutral_page * pool.split if pool.neutral_page >= 0 else -1,
            Word.WORKSPACE: workspace,
        }
        for name in (
            "split", "null_page", "rows", "row_index", "expected", "extent_offset", "extent_start", "extent_stop",
            "record", "evidence", "evidence_row", "evidence_places", "evidence_width", "skip_slot",
        ):  # fmt: skip
            values[Word[name.upper()]] = getattr(pool, name)
        for word, value in (values | _table_words(pool.table) | _slot_words(pool)).items():
            words[word] = value
        if not is_dense(pool.page_tag):
            raise ValueError("page_tag must have no gaps")
        if pool.table.shape[1] >= COLUMNS_MAX or pool.page_tag.shape[0] >= 1 << 31:
            raise ValueError(f"a table of {pool.table.shape[1]} columns or {pool.page_tag.shape[0]} pages is too large")
        workspace += POOL_WORDS + ROW_WORDS * pool.rows
    wide = {item_bytes(pool.table) == 8 for pool in pools}
    rows = max((pool.rows for pool in pools), default=0)
    blocks = -(-max((pool.columns * pool.split for pool in pools), default=0) // block)
    launch = Launch(
        pools=len(pools),
        rows=rows,
        chunks=max(1, min(blocks, programs // max(1, rows * len(pools)))),
        block=block,
        table_types=MIXED if len(wide) > 1 else WIDE if wide == {True} else NARROW,
        vector=all(reads_16_bytes(pool.table) for pool in pools),
        split=any(pool.split > 1 for pool in pools),
        workspace_words=workspace,
    )
    return described, launch


def _table_words(table: Any) -> dict[Word, int]:
    row_stride, column_stride = strides(table)
    if item_bytes(table) not in (4, 8):
        raise ValueError(f"a block table holds int32 or int64, not {table.dtype}")
    return {
        Word.TABLE: address(table),
        Word.TABLE_ROW_STRIDE: row_stride,
        Word.TABLE_COLUMN_STRIDE: column_stride,
        Word.TABLE_ROWS: table.shape[0],
        Word.TABLE_COLUMNS: table.shape[1],
        Word.TABLE_WIDE: item_bytes(table) == 8,
        Word.TABLE_VECTOR: reads_16_bytes(table),
    }


def _slot_words(pool: PoolStep) -> dict[Word, int]:
    """Where the slots of a flagged row lie; nothing where no slot may be written."""
    if pool.slot_mapping is None or pool.query_start is None or pool.slot_mapping.shape[0] == 0:
        return {}
    if item_bytes(pool.slot_mapping) != 8:
        raise ValueError(f"a slot mapping holds int64, not {pool.slot_mapping.dtype}")
    words = {
        Word.SLOT_MAPPING: address(pool.slot_mapping),
        Word.SLOT_STRIDE: strides(pool.slot_mapping)[0],
        Word.TOKENS: pool.slot_mapping.shape[0],
        Word.QUERY_START: address(pool.query_start),
        Word.QUERY_START_STRIDE: strides(pool.query_start)[0],
        Word.QUERY_START_WIDE: item_bytes(pool.query_start) == 8,
        Word.PLACES: pool.query_start.shape[0] - 1,
    }
    if pool.place_is_row:
        return words | {Word.QUERY_ROW_MODE: QUERY_ROW_IS_TABLE_ROW}
    if pool.query_row is None:
        return words
    if item_bytes(pool.query_row) != 8:
        raise ValueError(f"query_row holds int64, not {pool.query_row.dtype}")
    return words | {
        Word.QUERY_ROW_MODE: QUERY_ROW_ARRAY,
        Word.QUERY_ROW: address(pool.query_row),
        Word.QUERY_ROW_STRIDE: strides(pool.query_row)[0],
    }
