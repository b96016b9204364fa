"""`verify_pages` for all pools of a step in one Triton launch, on NVIDIA and AMD GPUs.

A program takes every `chunks`-th block of one row's live columns. The last program of a row to arrive writes the row's
record. The last row of a pool to arrive, by which time every row has been read, captures and neutralises; in a clean
step it finds a counter at zero and ends. Nothing waits: whoever arrives last does the work.

Order in memory. Whatever a program leaves for another one lies before its ticket: stores, a barrier of the program's
threads, an atomic add with release; the last one's add is an acquire, with a barrier behind it. All tickets have GPU
scope. Sums wrap modulo 2**64 in any order, so the digest does not depend on who came first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels import mixing
from kvguard.kernels.verify_pages import descriptor, layout
from kvguard.kernels.verify_pages.descriptor import Launch, Word

THREADS = 128
"""Four entries a thread of a block of 512, on warps of 32 threads (NVIDIA) as on those of 64 (AMD)."""
REGISTERS_MAX = 128
"""Left to itself, ptxas spills a few bytes of what only the last program needs, to fit one more program on sm_80."""

TAG_MULTIPLIER = tl.constexpr(mixing.TAG_MULTIPLIER)
COLUMN_MULTIPLIER = tl.constexpr(mixing.COLUMN_MULTIPLIER)
FINAL_MULTIPLIER_1 = tl.constexpr(mixing.FINAL_MULTIPLIER_1)
FINAL_MULTIPLIER_2 = tl.constexpr(mixing.FINAL_MULTIPLIER_2)
FLAG_DIGEST = tl.constexpr(layout.FLAG_DIGEST)
FLAG_NULL = tl.constexpr(layout.FLAG_NULL)
FLAG_RANGE = tl.constexpr(layout.FLAG_RANGE)
FLAG_VACANT = tl.constexpr(layout.FLAG_VACANT)
FLAG_SPLIT = tl.constexpr(layout.FLAG_SPLIT)
RECORD_WORDS = tl.constexpr(layout.RECORD_WORDS)
POOL_WORDS, ROW_WORDS = tl.constexpr(descriptor.POOL_WORDS), tl.constexpr(descriptor.ROW_WORDS)
NARROW, WIDE = tl.constexpr(descriptor.NARROW), tl.constexpr(descriptor.WIDE)
QUERY_ROW_ARRAY = tl.constexpr(descriptor.QUERY_ROW_ARRAY)
QUERY_ROW_IS_TABLE_ROW = tl.constexpr(descriptor.QUERY_ROW_IS_TABLE_ROW)
COLUMNS_MAX = tl.constexpr(descriptor.COLUMNS_MAX)
NO_COLUMN = tl.constexpr((1 << 31) - 1)

WORDS = tl.constexpr(len(Word))
TABLE, TABLE_ROW_STRIDE = tl.constexpr(int(Word.TABLE)), tl.constexpr(int(Word.TABLE_ROW_STRIDE))
TABLE_COLUMN_STRIDE, TABLE_ROWS = tl.constexpr(int(Word.TABLE_COLUMN_STRIDE)), tl.constexpr(int(Word.TABLE_ROWS))
TABLE_COLUMNS, TABLE_WIDE = tl.constexpr(int(Word.TABLE_COLUMNS)), tl.constexpr(int(Word.TABLE_WIDE))
PAGE_TAG, NUM_PAGES = tl.constexpr(int(Word.PAGE_TAG)), tl.constexpr(int(Word.NUM_PAGES))
SPLIT, NULL_PAGE = tl.constexpr(int(Word.SPLIT)), tl.constexpr(int(Word.NULL_PAGE))
NEUTRAL_ENTRY, KEY = tl.constexpr(int(Word.NEUTRAL_ENTRY)), tl.constexpr(int(Word.KEY))
ROWS = tl.constexpr(int(Word.ROWS))
ROW_INDEX, EXPECTED = tl.constexpr(int(Word.ROW_INDEX)), tl.constexpr(int(Word.EXPECTED))
EXTENT_OFFSET, EXTENT_START = tl.constexpr(int(Word.EXTENT_OFFSET)), tl.constexpr(int(Word.EXTENT_START))
EXTENT_STOP, RECORD = tl.constexpr(int(Word.EXTENT_STOP)), tl.constexpr(int(Word.RECORD))
EVIDENCE, EVIDENCE_ROW = tl.constexpr(int(Word.EVIDENCE)), tl.constexpr(int(Word.EVIDENCE_ROW))
EVIDENCE_PLACES, EVIDENCE_WIDTH = tl.constexpr(int(Word.EVIDENCE_PLACES)), tl.constexpr(int(Word.EVIDENCE_WIDTH))
SLOT_MAPPING, SLOT_STRIDE = tl.constexpr(int(Word.SLOT_MAPPING)), tl.constexpr(int(Word.SLOT_STRIDE))
TOKENS, QUERY_START = tl.constexpr(int(Word.TOKENS)), tl.constexpr(int(Word.QUERY_START))
QUERY_START_STRIDE = tl.constexpr(int(Word.QUERY_START_STRIDE))
QUERY_START_WIDE, PLACES = tl.constexpr(int(Word.QUERY_START_WIDE)), tl.constexpr(int(Word.PLACES))
QUERY_ROW, QUERY_ROW_STRIDE = tl.constexpr(int(Word.QUERY_ROW)), tl.constexpr(int(Word.QUERY_ROW_STRIDE))
QUERY_ROW_MODE, SKIP_SLOT = tl.constexpr(int(Word.QUERY_ROW_MODE)), tl.constexpr(int(Word.SKIP_SLOT))
WORKSPACE = tl.constexpr(int(Word.WORKSPACE))


@triton.jit
def mix_terms(key, columns, tags):
    """`kvguard.kernels.mixing.mix`: key uint64, columns int32 [n], tags int64 [n]; the term's bits as int64 [n]."""
    x = (tags.to(tl.uint64) * TAG_MULTIPLIER) ^ (columns.to(tl.int64).to(tl.uint64) * COLUMN_MULTIPLIER + key)
    x = (x ^ (x >> 30)) * FINAL_MULTIPLIER_1
    x = (x ^ (x >> 27)) * FINAL_MULTIPLIER_2
    return (x ^ (x >> 31)).to(tl.int64)


@triton.jit
def _load_entries(row_address, offset, mask, wide, TYPES: tl.constexpr, VECTOR: tl.constexpr):
    """Entries at `offset` elements from a table row, int32 or, for wide tables, int64; -1 where the mask is off."""
    if TYPES == NARROW:
        narrow = row_address.to(tl.pointer_type(tl.int32))
        if VECTOR:
            narrow = tl.multiple_of(narrow, 16)
        entries = tl.load(narrow + offset, mask=mask, other=-1)
    elif TYPES == WIDE:
        full = row_address.to(tl.pointer_type(tl.int64))
        if VECTOR:
            full = tl.multiple_of(full, 16)
        entries = tl.load(full + offset, mask=mask, other=-1)
    else:
        if wide != 0:
            entries = tl.load(row_address.to(tl.pointer_type(tl.int64)) + offset, mask=mask, other=-1)
        else:
            entries = tl.load(row_address.to(tl.pointer_type(tl.int32)) + offset, mask=mask, other=-1).to(tl.int64)
    return entries


@triton.jit
def _row_address(pool, table_row):
    """Where a table row begins; 64-bit throughout, for tables of any size."""
    item_bytes = 4 + 4 * tl.load(pool + TABLE_WIDE)
    return tl.load(pool + TABLE) + table_row * tl.load(pool + TABLE_ROW_STRIDE) * item_bytes


@triton.jit
def _floor_divide(entries, split):
    """Floor division of entries by a positive number, as far as it matters: negative ones stay negative."""
    return tl.where(entries < 0, -1, entries // split)


@triton.jit
def _capture(pool, packed, out, BLOCK: tl.constexpr, TYPES: tl.constexpr):
    """Copy the first flagged rows' table entries aside, in row order."""
    rows, places = tl.load(pool + ROWS), tl.load(pool + EVIDENCE_PLACES)
    record = out + tl.load(pool + RECORD)
    row_index = packed + tl.load(pool + ROW_INDEX)
    columns, stride = tl.load(pool + TABLE_COLUMNS), tl.load(pool + TABLE_COLUMN_STRIDE)
    width = tl.load(pool + EVIDENCE_WIDTH)
    wide = tl.load(pool + TABLE_WIDE)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    captured = rows * 0
    for block in range(0, rows, BLOCK):
        marks = tl.load(record + (block + lanes) * RECORD_WORDS, mask=block + lanes < rows, other=0)
        if (tl.max(marks) > 0) & (captured < places):
            for row in range(block, tl.minimum(block + BLOCK, rows)):
                if (tl.load(record + row * RECORD_WORDS) != 0) & (captured < places):
                    tl.store(out + tl.load(pool + EVIDENCE_ROW) + captured, row)
                    table_row = tl.load(row_index + row)
                    if (table_row >= 0) & (table_row < tl.load(pool + TABLE_ROWS)):
                        source = _row_address(pool, table_row)
                        place = out + tl.load(pool + EVIDENCE) + captured * width
                        for first in range(0, tl.minimum(width, columns), BLOCK):
                            column = first + lanes
                            mask = column < tl.minimum(width, columns)
                            entries = _load_entries(source, column * stride, mask, wide, TYPES, False)
                            tl.store(place + column, entries, mask=mask)
                    captured += 1


@triton.jit
def _neutralise_slots(pool, packed, row, BLOCK: tl.constexpr):
    """The tokens of a flagged row write nowhere."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    place = row
    mode = tl.load(pool + QUERY_ROW_MODE)
    if mode == QUERY_ROW_ARRAY:
        query_row = tl.load(pool + QUERY_ROW).to(tl.pointer_type(tl.int64))
        place = tl.load(query_row + row * tl.load(pool + QUERY_ROW_STRIDE))
    if mode == QUERY_ROW_IS_TABLE_ROW:
        place = tl.load(packed + tl.load(pool + ROW_INDEX) + row)
    if (place >= 0) & (place < tl.load(pool + PLACES)):
        query_start, stride = tl.load(pool + QUERY_START), tl.load(pool + QUERY_START_STRIDE)
        if tl.load(pool + QUERY_START_WIDE) != 0:
            full = query_start.to(tl.pointer_type(tl.int64))
            start, stop = tl.load(full + place * stride), tl.load(full + (place + 1) * stride)
        else:
            narrow = query_start.to(tl.pointer_type(tl.int32))
            start = tl.load(narrow + place * stride).to(tl.int64)
            stop = tl.load(narrow + (place + 1) * stride).to(tl.int64)
        start, stop = tl.maximum(start, 0), tl.minimum(stop, tl.load(pool + TOKENS))
        slots, slot_stride = tl.load(pool + SLOT_MAPPING).to(tl.pointer_type(tl.int64)), tl.load(pool + SLOT_STRIDE)
        skip = tl.load(pool + SKIP_SLOT)
        for first in range(start, stop, BLOCK):
            token = first + lanes
            tl.store(slots + token * slot_stride, skip, mask=token < stop)


@triton.jit
def _neutralise_row(pool, packed, row, BLOCK: tl.constexpr, TYPES: tl.constexpr):
    """Live entries of a flagged row become the neutral entry."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    table_row = tl.load(packed + tl.load(pool + ROW_INDEX) + row)
    if (table_row >= 0) & (table_row < tl.load(pool + TABLE_ROWS)):
        neutral, split = tl.load(pool + NEUTRAL_ENTRY), tl.load(pool + SPLIT)
        columns, stride = tl.load(pool + TABLE_COLUMNS), tl.load(pool + TABLE_COLUMN_STRIDE)
        target = _row_address(pool, table_row)
        offset = packed + tl.load(pool + EXTENT_OFFSET) + row
        for extent in range(tl.load(offset), tl.load(offset + 1)):
            start = tl.maximum(tl.load(packed + tl.load(pool + EXTENT_START) + extent) * split, 0)
            stop = tl.minimum(tl.load(packed + tl.load(pool + EXTENT_STOP) + extent) * split, columns)
            for first in range(start, stop, BLOCK):
                column = first + lanes
                if TYPES == NARROW:
                    narrow = target.to(tl.pointer_type(tl.int32))
                    tl.store(narrow + column * stride, neutral.to(tl.int32), mask=column < stop)
                elif TYPES == WIDE:
                    tl.store(target.to(tl.pointer_type(tl.int64)) + column * stride, neutral, mask=column < stop)
                else:
                    if tl.load(pool + TABLE_WIDE) != 0:
                        tl.store(target.to(tl.pointer_type(tl.int64)) + column * stride, neutral, mask=column < stop)
                    else:
                        narrow = target.to(tl.pointer_type(tl.int32))
                        tl.store(narrow + column * stride, neutral.to(tl.int32), mask=column < stop)


@triton.jit
def _neutralise(pool, packed, out, BLOCK: tl.constexpr, TYPES: tl.constexpr):
    """Take every flagged row of a pool off its pages and slots."""
    rows = tl.load(pool + ROWS)
    record = out + tl.load(pool + RECORD)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for block in range(0, rows, BLOCK):
        marks = tl.load(record + (block + lanes) * RECORD_WORDS, mask=block + lanes < rows, other=0)
        if tl.max(marks) > 0:
            for row in range(block, tl.minimum(block + BLOCK, rows)):
                if tl.load(record + row * RECORD_WORDS) != 0:
                    _neutralise_row(pool, packed, row, BLOCK, TYPES)
                    if tl.load(pool + SLOT_MAPPING) != 0:
                        _neutralise_slots(pool, packed, row, BLOCK)


@triton.jit
def _finish_row(pool, packed, out, row, digest, flags, bad_column, TYPES: tl.constexpr):
    """Write a row's record; its flags. Loads anew what it needs, so that nothing is kept in registers for it."""
    bad_entry = row * 0 - 1
    if flags != 0:
        table_row = tl.load(packed + tl.load(pool + ROW_INDEX) + row)
        inside = (table_row >= 0) & (table_row < tl.load(pool + TABLE_ROWS))
        inside = inside & (bad_column < tl.load(pool + TABLE_COLUMNS))
        source, offset = _row_address(pool, table_row), bad_column * tl.load(pool + TABLE_COLUMN_STRIDE)
        bad_entry = _load_entries(source, offset, inside, tl.load(pool + TABLE_WIDE), TYPES, False).to(tl.int64)
    else:
        bad_column = row * 0 - 1
    if digest != tl.load(packed + tl.load(pool + EXPECTED) + row):
        flags |= FLAG_DIGEST
    record = out + tl.load(pool + RECORD) + row * RECORD_WORDS
    tl.store(record, flags)
    tl.store(record + 1, digest)
    tl.store(record + 2, bad_column)
    tl.store(record + 3, bad_entry)
    return flags


# One binary, however the arrays are aligned: a view into a packed array may lie anywhere, and an engine in service must
# not wait for a compiler.
@triton.jit(do_not_specialize_on_alignment=["descriptors", "packed", "out", "workspace"])
def verify_kernel(
    descriptors, packed, out, workspace,
    BLOCK: tl.constexpr, TYPES: tl.constexpr, VECTOR: tl.constexpr, SPLIT_PAGES: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, rows, pools). See `descriptor.Word` for what the descriptors say of a pool."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    pool = descriptors + tl.program_id(2) * WORDS
    if row >= tl.load(pool + ROWS):
        return
    table_row = tl.load(packed + tl.load(pool + ROW_INDEX) + row)
    offset = packed + tl.load(pool + EXTENT_OFFSET) + row
    starts, stops = packed + tl.load(pool + EXTENT_START), packed + tl.load(pool + EXTENT_STOP)
    stride, wide = tl.load(pool + TABLE_COLUMN_STRIDE), tl.load(pool + TABLE_WIDE)
    page_tag, num_pages = tl.load(pool + PAGE_TAG).to(tl.pointer_type(tl.int64)), tl.load(pool + NUM_PAGES).to(tl.int32)
    null_page, key = tl.load(pool + NULL_PAGE).to(tl.int32), tl.load(pool + KEY).to(tl.uint64)
    split = tl.load(pool + SPLIT)
    pieces = split.to(tl.int32)
    source = _row_address(pool, table_row)
    in_table = (table_row >= 0) & (table_row < tl.load(pool + TABLE_ROWS))
    # Columns that may be read: none of a row outside the table.
    width = tl.where(in_table, tl.load(pool + TABLE_COLUMNS), 0).to(tl.int32)

    lanes = tl.arange(0, BLOCK)
    digests = tl.full([BLOCK], 0, tl.int64)
    seen = tl.full([BLOCK], 0, tl.int32)
    first_bad = tl.full([BLOCK], NO_COLUMN, tl.int32)
    blocks_before = 0
    for extent in range(tl.load(offset), tl.load(offset + 1)):
        start = tl.minimum(tl.maximum(tl.load(starts + extent) * split, 0), COLUMNS_MAX)
        # One column past the table says as much as all of them.
        stop = tl.minimum(tl.load(stops + extent) * split, tl.maximum(start, width) + 1).to(tl.int32)
        start = start.to(tl.int32)
        begin = tl.multiple_of(start & -4, 4)
        readable = tl.minimum((stop + 3) & -4, width)
        if VECTOR:
            readable = tl.multiple_of(readable, 4)
        blocks = tl.where(stop > start, (stop - begin + BLOCK - 1) // BLOCK, 0)
        for block in range((chunk - blocks_before % chunks + chunks) % chunks, blocks, chunks):
            columns = begin + block * BLOCK + lanes
            live = (columns >= start) & (columns < stop)
            if VECTOR:
                # Whole groups of four, a few of them beyond the extent: so the mask is no obstacle to wide loads.
                entries = _load_entries(source, columns, columns < readable, wide, TYPES, True)
            else:
                entries = _load_entries(source, columns * stride, live & (columns < width), wide, TYPES, False)
            pages, logical = entries, columns
            if SPLIT_PAGES:
                logical = columns // pieces
                piece = columns - logical * pieces
                pages = _floor_divide(entries, pieces)
                heads = _load_entries(source, logical * split * stride, live & (columns < width), wide, TYPES, False)
                displaced = (entries - pages * pieces != piece) | (pages != _floor_divide(heads, pieces))
            # What was not read is -1.
            known = live & (pages >= 0) & (pages < num_pages)
            tags = tl.load(page_tag + pages, mask=known, other=0)
            flag = tl.where(tags == 0, FLAG_VACANT, 0)
            flag = tl.where(pages == null_page, FLAG_NULL, flag)
            if SPLIT_PAGES:
                flag = tl.where(displaced, flag | FLAG_SPLIT, flag)
            flag = tl.where(live, tl.where(known, flag, FLAG_RANGE), 0)
            seen |= flag
            first_bad = tl.minimum(first_bad, tl.where(flag != 0, columns, NO_COLUMN))
            counted = known
            if SPLIT_PAGES:
                counted = known & (piece == 0)
            digests += tl.where(counted, mix_terms(key, logical, tags), 0)
        blocks_before += blocks

    # Chunks that were given no block have no part in the row.
    parts = tl.minimum(tl.maximum(blocks_before, 1), chunks)
    if chunk < parts:
        digest = tl.sum(digests)
        # One reduction for all flags: each kind is counted in 16 bits of its own, which BLOCK cannot overflow.
        kinds = seen.to(tl.int64)
        kinds = ((kinds >> 1) & 1) | ((kinds & 4) << 14) | ((kinds & 8) << 29) | ((kinds & 16) << 44)
        count = tl.sum(kinds)
        null, out_of_range = (count & 0xFFFF) != 0, (count & 0xFFFF0000) != 0
        vacant, moved = ((count >> 32) & 0xFFFF) != 0, ((count >> 48) & 0xFFFF) != 0
        flags = null.to(tl.int64) * FLAG_NULL + out_of_range.to(tl.int64) * FLAG_RANGE
        flags += vacant.to(tl.int64) * FLAG_VACANT + moved.to(tl.int64) * FLAG_SPLIT
        bad_column = tl.min(first_bad).to(tl.int64)

        of_pool = workspace + tl.load(pool + WORKSPACE)
        of_row = of_pool + POOL_WORDS + row * ROW_WORDS
        last_part = parts == 1
        if parts > 1:
            tl.atomic_add(of_row + 1, digest, sem="relaxed")
            if flags != 0:
                tl.atomic_or(of_row + 2, flags, sem="relaxed")
                # Kept as a distance from NO_COLUMN, so that zero, what an idle workspace holds, says none.
                tl.atomic_max(of_row + 3, -bad_column + NO_COLUMN, sem="relaxed")
            tl.debug_barrier()
            last_part = tl.atomic_add(of_row, 1, sem="acq_rel", scope="gpu") == parts - 1
            tl.debug_barrier()
            if last_part:
                # Taken out and left at zero for the next launch.
                digest = tl.atomic_xchg(of_row + 1, 0, sem="relaxed")
                flags = tl.atomic_xchg(of_row + 2, 0, sem="relaxed")
                bad_column = -tl.atomic_xchg(of_row + 3, 0, sem="relaxed") + NO_COLUMN
                tl.atomic_xchg(of_row, 0, sem="relaxed")
        if last_part:
            flags = _finish_row(pool, packed, out, row, digest, flags, bad_column, TYPES)
            if flags != 0:
                tl.atomic_add(of_pool + 1, 1, sem="relaxed")
            tl.debug_barrier()
            last_row = tl.atomic_add(of_pool, 1, sem="acq_rel", scope="gpu") == tl.load(pool + ROWS) - 1
            tl.debug_barrier()
            if last_row:
                flagged = tl.atomic_xchg(of_pool + 1, 0, sem="relaxed")
                tl.atomic_xchg(of_pool, 0, sem="relaxed")
                if flagged > 0:
                    _capture(pool, packed, out, BLOCK, TYPES)
                    # Rows may share a table row: all that is captured is read before anything is overwritten.
                    tl.debug_barrier()
                    if tl.load(pool + NEUTRAL_ENTRY) >= 0:
                        _neutralise(pool, packed, out, BLOCK, TYPES)


INTERPRETED = not isinstance(verify_kernel, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels: TRITON_INTERPRET was set when this module was imported."""

if INTERPRETED:
    # As plain functions: the interpreter puts its stand-ins for the language in place anew at each call of a device
    # function, though the kernel's own call has done so already, and that takes most of its time.
    for _name in (
        "mix_terms", "_load_entries", "_row_address", "_floor_divide", "_capture", "_neutralise_slots",
        "_neutralise_row", "_neutralise", "_finish_row",
    ):  # fmt: skip
        globals()[_name] = globals()[_name].rewrite()


def verify_step(*, launch: Launch, descriptors: Tensor, packed: Tensor, out: Tensor, workspace: Tensor) -> None:
    """See `kvguard.kernels.verify_pages.verify_step` for the contract."""
    verify_kernel[(launch.chunks, launch.rows, launch.pools)](
        descriptors, packed, out, workspace,
        BLOCK=launch.block,
        TYPES=launch.table_types,
        VECTOR=launch.vector and launch.table_types != descriptor.MIXED,
        SPLIT_PAGES=launch.split,
        **launch_options(on_amd=torch.version.hip is not None),
    )  # fmt: skip


def launch_options(*, on_amd: bool) -> dict[str, int]:
    """What the compiler is told besides the constants."""
    return {"num_warps": THREADS // 64} if on_amd else {"num_warps": THREADS // 32, "maxnreg": REGISTERS_MAX}
