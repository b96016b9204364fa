"""`verify_slots` for all pools of a step in one Triton launch, in the same order of memory as `verify_pages.triton_op`.

A program takes every `chunks`-th block of one row's tokens, and marks in the workspace each token that the row owns and
each that is wrong. The last program of a row to arrive writes the row's record. One program more than there are rows
only arrives, so that there is one without rows too. The last of all to arrive, by which time every token has been
judged, finds the padding, which nobody has marked, writes its record, redirects, and clears the marks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels import events
from kvguard.kernels.verify_slots import descriptor, layout
from kvguard.kernels.verify_slots.descriptor import Launch, SlotWord

THREADS = 128
"""Two tokens a thread of a block of 256, on warps of 32 threads (NVIDIA) as on those of 64 (AMD)."""

SLOT_RANGE, SLOT_PAGE = tl.constexpr(layout.SLOT_RANGE), tl.constexpr(layout.SLOT_PAGE)
SLOT_OFFSET, SLOT_FLOOR = tl.constexpr(layout.SLOT_OFFSET), tl.constexpr(layout.SLOT_FLOOR)
SLOT_LOST, SLOT_PADDING = tl.constexpr(layout.SLOT_LOST), tl.constexpr(layout.SLOT_PADDING)
RECORD_WORDS = tl.constexpr(layout.RECORD_WORDS)
COLUMNS_END = tl.constexpr(1 << events.ROW_SHIFT)
POOL_WORDS, ROW_WORDS = tl.constexpr(descriptor.POOL_WORDS), tl.constexpr(descriptor.ROW_WORDS)
UNOWNED, OWNED, WRONG = tl.constexpr(descriptor.UNOWNED), tl.constexpr(descriptor.OWNED), tl.constexpr(descriptor.WRONG)
NO_TOKEN = tl.constexpr(descriptor.TOKENS_MAX)
QUERY_ROW_ARRAY = tl.constexpr(descriptor.QUERY_ROW_ARRAY)
QUERY_ROW_IS_TABLE_ROW = tl.constexpr(descriptor.QUERY_ROW_IS_TABLE_ROW)

WORDS = tl.constexpr(len(SlotWord))
SLOT_MAPPING, SLOT_STRIDE = tl.constexpr(int(SlotWord.SLOT_MAPPING)), tl.constexpr(int(SlotWord.SLOT_STRIDE))
SLOT_WIDE, TOKENS = tl.constexpr(int(SlotWord.SLOT_WIDE)), tl.constexpr(int(SlotWord.TOKENS))
QUERY_START, PLACES = tl.constexpr(int(SlotWord.QUERY_START)), tl.constexpr(int(SlotWord.PLACES))
QUERY_START_STRIDE = tl.constexpr(int(SlotWord.QUERY_START_STRIDE))
QUERY_START_WIDE = tl.constexpr(int(SlotWord.QUERY_START_WIDE))
QUERY_ROW, QUERY_ROW_STRIDE = tl.constexpr(int(SlotWord.QUERY_ROW)), tl.constexpr(int(SlotWord.QUERY_ROW_STRIDE))
QUERY_ROW_MODE, LENGTHS = tl.constexpr(int(SlotWord.QUERY_ROW_MODE)), tl.constexpr(int(SlotWord.LENGTHS))
LENGTHS_STRIDE, LENGTHS_WIDE = tl.constexpr(int(SlotWord.LENGTHS_STRIDE)), tl.constexpr(int(SlotWord.LENGTHS_WIDE))
ROWS, ROW_INDEX = tl.constexpr(int(SlotWord.ROWS)), tl.constexpr(int(SlotWord.ROW_INDEX))
WRITER, FLOOR = tl.constexpr(int(SlotWord.WRITER)), tl.constexpr(int(SlotWord.FLOOR))
HAS_FLOOR, PAGE_WRITER = tl.constexpr(int(SlotWord.HAS_FLOOR)), tl.constexpr(int(SlotWord.PAGE_WRITER))
NUM_PAGES, PAGE_SIZE = tl.constexpr(int(SlotWord.NUM_PAGES)), tl.constexpr(int(SlotWord.PAGE_SIZE))
NULL_PAGE, SKIP_SLOT = tl.constexpr(int(SlotWord.NULL_PAGE)), tl.constexpr(int(SlotWord.SKIP_SLOT))
SKIP_ALLOWED, ENFORCE = tl.constexpr(int(SlotWord.SKIP_ALLOWED)), tl.constexpr(int(SlotWord.ENFORCE))
RECORD, WORKSPACE = tl.constexpr(int(SlotWord.RECORD)), tl.constexpr(int(SlotWord.WORKSPACE))


@triton.jit
def _load_words(address, offset, mask, wide):
    """Elements at `offset` from an array of int64 or, if it is not wide, int32; 0 where the mask is off."""
    if wide != 0:
        words = tl.load(address.to(tl.pointer_type(tl.int64)) + offset, mask=mask, other=0)
    else:
        words = tl.load(address.to(tl.pointer_type(tl.int32)) + offset, mask=mask, other=0).to(tl.int64)
    return words


@triton.jit
def _load_slots(pool, token, mask):
    """The slots of tokens."""
    offset = token * tl.load(pool + SLOT_STRIDE)
    return _load_words(tl.load(pool + SLOT_MAPPING), offset, mask, tl.load(pool + SLOT_WIDE))


@triton.jit
def _redirect(pool, token, mask):
    """These tokens write nowhere."""
    offset, skip = token * tl.load(pool + SLOT_STRIDE), tl.load(pool + SKIP_SLOT)
    if tl.load(pool + SLOT_WIDE) != 0:
        tl.store(tl.load(pool + SLOT_MAPPING).to(tl.pointer_type(tl.int64)) + offset, skip, mask=mask)
    else:
        tl.store(tl.load(pool + SLOT_MAPPING).to(tl.pointer_type(tl.int32)) + offset, skip.to(tl.int32), mask=mask)


@triton.jit
def _span(pool, packed, row):
    """The tokens [start, stop) of a row that there are, and what a token's index lacks of its position."""
    place = row
    mode = tl.load(pool + QUERY_ROW_MODE)
    if mode == QUERY_ROW_ARRAY:
        query_row = tl.load(pool + QUERY_ROW).to(tl.pointer_type(tl.int64))
        place = tl.load(query_row + row * tl.load(pool + QUERY_ROW_STRIDE))
    if mode == QUERY_ROW_IS_TABLE_ROW:
        place = tl.load(packed + tl.load(pool + ROW_INDEX) + row)
    known = (place >= 0) & (place < tl.load(pool + PLACES))
    start, stop = place, place + 1
    query_start = tl.load(pool + QUERY_START)
    if query_start != 0:
        stride, wide = tl.load(pool + QUERY_START_STRIDE), tl.load(pool + QUERY_START_WIDE)
        start = _load_words(query_start, place * stride, known, wide)
        stop = _load_words(query_start, (place + 1) * stride, known, wide)
    offset = place * tl.load(pool + LENGTHS_STRIDE)
    length = _load_words(tl.load(pool + LENGTHS), offset, known, tl.load(pool + LENGTHS_WIDE))
    shift = length - stop
    tokens = tl.load(pool + TOKENS)
    # Both within the tokens, so that no difference of them wraps.
    start, stop = tl.minimum(tl.maximum(start, 0), tokens), tl.minimum(tl.maximum(stop, 0), tokens)
    return start, tl.where(known, stop, 0), shift


@triton.jit
def _judge(pool, packed, row, token, mine, shift):
    """The flags int32 [n] of a row's tokens int64 [n]; 0 for those that are not its own."""
    slot, position = _load_slots(pool, token, mine), token + shift
    page_size = tl.load(pool + PAGE_SIZE)
    inside = (slot >= 0) & (slot < tl.load(pool + NUM_PAGES) * page_size)
    safe_slot, safe_position = tl.where(inside, slot, 0), tl.maximum(position, 0)
    page, column = safe_slot // page_size, safe_position // page_size
    page_writer = tl.load(pool + PAGE_WRITER).to(tl.pointer_type(tl.int64))
    word = tl.load(page_writer + page, mask=mine & inside, other=0)
    own = (word > 0) & (word == tl.load(packed + tl.load(pool + WRITER) + row) + column) & (column < COLUMNS_END)
    flags = tl.where(own, 0, SLOT_PAGE)
    displaced = safe_slot - page * page_size != safe_position - column * page_size
    flags = tl.where(displaced, flags | SLOT_OFFSET, flags)
    flags = tl.where(position < 0, 0, flags)
    flags = tl.where(inside, flags, SLOT_RANGE)
    floor = position * 0
    if tl.load(pool + HAS_FLOOR) != 0:
        floor = tl.maximum(floor, tl.load(packed + tl.load(pool + FLOOR) + row))
    flags = tl.where(position < floor, flags | SLOT_FLOOR, flags)
    nowhere = (slot == tl.load(pool + SKIP_SLOT)) | (inside & (page == tl.load(pool + NULL_PAGE)))
    lost = tl.where(tl.load(pool + SKIP_ALLOWED) != 0, 0, SLOT_LOST)
    return tl.where(mine, tl.where(nowhere, lost, flags), 0)


@triton.jit
def _finish_row(pool, packed, out, row, count, flags, first):
    """Write a row's record. Loads anew what it needs, so that nothing is kept in registers for it."""
    position, slot = row * 0 - 1, row * 0 - 1
    if flags != 0:
        start, stop, shift = _span(pool, packed, row)
        position, slot = first + shift, _load_slots(pool, first, first >= 0)
    record = out + tl.load(pool + RECORD) + row * RECORD_WORDS
    tl.store(record, flags)
    tl.store(record + 1, count)
    tl.store(record + 2, position)
    tl.store(record + 3, slot)


@triton.jit
def _finish_pool(pool, out, marks, BLOCK: tl.constexpr):
    """Padding, redirection, and marks that are clear for the next launch. A lane meets its tokens in their order."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    tokens, skip, enforce = tl.load(pool + TOKENS), tl.load(pool + SKIP_SLOT), tl.load(pool + ENFORCE)
    first = lanes * 0 + NO_TOKEN
    first_slot, counts = lanes * 0, lanes * 0
    for block in range(0, tokens, BLOCK):
        token = block + lanes
        there = token < tokens
        mark, slot = tl.load(marks + token, mask=there, other=OWNED), _load_slots(pool, token, there)
        padding = there & (mark == UNOWNED) & (slot != skip)
        counts += padding.to(tl.int64)
        first_slot = tl.where(padding & (first == NO_TOKEN), slot, first_slot)
        first = tl.where(padding, tl.minimum(first, token), first)
        if enforce != 0:
            _redirect(pool, token, padding | (there & (mark == WRONG)))
        tl.store(marks + token, lanes * 0 + UNOWNED, mask=there)
    count, lane = tl.sum(counts), tl.min(first)
    record = out + tl.load(pool + RECORD) + tl.load(pool + ROWS) * RECORD_WORDS
    any_padding = count > 0
    tl.store(record, tl.where(any_padding, SLOT_PADDING, 0).to(tl.int64))
    tl.store(record + 1, count)
    tl.store(record + 2, tl.where(any_padding, lane, -1))
    # No token is in two lanes.
    tl.store(record + 3, tl.where(any_padding, tl.sum(tl.where(first == lane, first_slot, 0)), -1))


# One binary, however the arrays are aligned: a view into a packed array may lie anywhere, and an engine in service must
# not wait for a compiler.
@triton.jit(do_not_specialize_on_alignment=["descriptors", "packed", "out", "workspace"])
def slots_kernel(descriptors, packed, out, workspace, BLOCK: tl.constexpr):
    """Grid (chunks, rows + 1, pools). See `descriptor.SlotWord` for what the descriptors say of a pool."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    pool = descriptors + tl.program_id(2) * WORDS
    rows = tl.load(pool + ROWS)
    if row > rows:
        return
    of_pool = workspace + tl.load(pool + WORKSPACE)
    marks = of_pool + POOL_WORDS + rows * ROW_WORDS
    arrives = chunk == 0
    if row < rows:
        start, stop, shift = _span(pool, packed, row)
        lanes = tl.arange(0, BLOCK).to(tl.int64)
        seen = tl.full([BLOCK], 0, tl.int32)
        counts = tl.full([BLOCK], 0, tl.int32)
        first = tl.full([BLOCK], NO_TOKEN, tl.int64)
        blocks = tl.maximum(stop - start + BLOCK - 1, 0) // BLOCK
        for block in range(chunk.to(tl.int64), blocks, chunks):
            token = start + block * BLOCK + lanes
            mine = token < stop
            flags = _judge(pool, packed, row, token, mine, shift)
            wrong = flags != 0
            # Rows may share a token: what is wrong for one of them stays wrong.
            tl.atomic_max(marks + token, tl.where(wrong, WRONG, OWNED).to(tl.int64), mask=mine, sem="relaxed")
            seen |= flags
            counts += wrong.to(tl.int32)
            first = tl.where(wrong, tl.minimum(first, token), first)
        # Chunks that were given no block have no part in the row.
        parts = tl.minimum(tl.maximum(blocks, 1), chunks)
        arrives = chunk < parts
        if arrives:
            count, first_wrong = tl.sum(counts).to(tl.int64), tl.min(first)
            # One reduction for all flags: each kind is counted in 12 bits of its own, which BLOCK cannot overflow.
            kinds = seen.to(tl.int64) >> 8
            kinds = (kinds & 1) | ((kinds & 2) << 11) | ((kinds & 4) << 22) | ((kinds & 8) << 33) | ((kinds & 16) << 44)
            kinds = tl.sum(kinds)
            found = tl.where((kinds & 0xFFF) != 0, SLOT_RANGE, 0)
            found = tl.where(((kinds >> 12) & 0xFFF) != 0, found | SLOT_PAGE, found)
            found = tl.where(((kinds >> 24) & 0xFFF) != 0, found | SLOT_OFFSET, found)
            found = tl.where(((kinds >> 36) & 0xFFF) != 0, found | SLOT_FLOOR, found)
            found = tl.where(((kinds >> 48) & 0xFFF) != 0, found | SLOT_LOST, found).to(tl.int64)
            if parts > 1:
                of_row = of_pool + POOL_WORDS + row * ROW_WORDS
                if found != 0:
                    tl.atomic_add(of_row + 1, count, sem="relaxed")
                    tl.atomic_or(of_row + 2, found, sem="relaxed")
                    # Kept as a distance from NO_TOKEN, so that zero, what an idle workspace holds, says none.
                    tl.atomic_max(of_row + 3, -first_wrong + NO_TOKEN, sem="relaxed")
                tl.debug_barrier()
                arrives = tl.atomic_add(of_row, 1, sem="acq_rel", scope="gpu") == parts - 1
                tl.debug_barrier()
                if arrives:
                    # Taken out and left at zero for the next launch.
                    count = tl.atomic_xchg(of_row + 1, 0, sem="relaxed")
                    found = tl.atomic_xchg(of_row + 2, 0, sem="relaxed")
                    first_wrong = -tl.atomic_xchg(of_row + 3, 0, sem="relaxed") + NO_TOKEN
                    tl.atomic_xchg(of_row, 0, sem="relaxed")
            if arrives:
                _finish_row(pool, packed, out, row, count, found, first_wrong)
    if arrives:
        tl.debug_barrier()
        last = tl.atomic_add(of_pool, 1, sem="acq_rel", scope="gpu") == rows
        tl.debug_barrier()
        if last:
            tl.atomic_xchg(of_pool, 0, sem="relaxed")
            _finish_pool(pool, out, marks, BLOCK)


INTERPRETED = not isinstance(slots_kernel, triton.JITFunction)
if INTERPRETED:
    # As plain functions: see `verify_pages.triton_op`.
    for _name in ("_load_words", "_load_slots", "_redirect", "_span", "_judge", "_finish_row", "_finish_pool"):
        globals()[_name] = globals()[_name].rewrite()


def verify_slots_step(*, launch: Launch, descriptors: Tensor, packed: Tensor, out: Tensor, workspace: Tensor) -> None:
    """See `kvguard.kernels.verify_slots.verify_slots_step` for the contract."""
    slots_kernel[(launch.chunks, launch.rows + 1, launch.pools)](
        descriptors, packed, out, workspace,
        BLOCK=launch.block, num_warps=warps(on_amd=torch.version.hip is not None),
    )  # fmt: skip


def warps(*, on_amd: bool) -> int:
    """Of a program."""
    return THREADS // (64 if on_amd else 32)
