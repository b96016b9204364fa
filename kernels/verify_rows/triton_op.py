"""`verify_rows` in one Triton launch, in the same order of memory as `verify_pages.triton_op`.

A program takes every `chunks`-th block of a row's live positions. The last program of a row to arrive writes the row's
record; with `enforce` the last row to arrive, by which time all have been read, takes flagged rows off their slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels import events
from kvguard.kernels.arrays import require_dense
from kvguard.kernels.mixing import signed64
from kvguard.kernels.verify_pages import layout
from kvguard.kernels.verify_pages.triton_op import mix_terms

BLOCK = 512
WARPS = 4
PROGRAMS = 2048
"""About as many are started where rows are long."""
WORKSPACE_WORDS, WORKSPACE_ROW_WORDS = 2, 4
"""Rows that have arrived, rows that are flagged; then for each row programs, digest, flags, distance of a position."""

FLAG_DIGEST, FLAG_NULL = tl.constexpr(layout.FLAG_DIGEST), tl.constexpr(layout.FLAG_NULL)
FLAG_RANGE, FLAG_VACANT = tl.constexpr(layout.FLAG_RANGE), tl.constexpr(layout.FLAG_VACANT)
FLAG_SPLIT, FLAG_WRITE = tl.constexpr(layout.FLAG_SPLIT), tl.constexpr(layout.FLAG_WRITE)
RECORD_WORDS = tl.constexpr(layout.RECORD_WORDS)
NULL_PAGE, SPOILED = tl.constexpr(events.NULL_PAGE), tl.constexpr(events.SPOILED)
POOL_WORDS, ROW_WORDS = tl.constexpr(WORKSPACE_WORDS), tl.constexpr(WORKSPACE_ROW_WORDS)
NO_POSITION = tl.constexpr((1 << 31) - 1)
NO_SLOTS, A_TOKEN_EACH, BY_QUERY_START = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
POINTERS = (
    "table", "rows", "lengths", "page_tag", "digest", "record", "slot_mapping", "query_start", "writes", "workspace",
)  # fmt: skip
SCALARS = ("row_stride", "table_rows", "positions", "num_pages", "key", "batch", "tokens", "skip_slot")


@triton.jit
def _live(rows, lengths, b, table_rows, positions):
    """A checked row's table row, whether there is one, its length, and how many of its positions can be read."""
    row, length = tl.load(rows + b), tl.load(lengths + b).to(tl.int64)
    known = (row >= 0) & (row < table_rows)
    width = tl.where(known, positions, 0).to(tl.int64)
    return row, known, length, width, tl.maximum(tl.minimum(length, width), 0)


@triton.jit
def _finish_row(table, rows, lengths, digest, record, writes, b, row_stride, table_rows, positions, found, flags, bad,
                WRITES: tl.constexpr):  # fmt: skip
    """Write a row's record; its flags. Loads anew what it needs, so that nothing is kept in registers for it."""
    row, known, length, width, covered = _live(rows, lengths, b, table_rows, positions)
    bad_slot = row * 0 - 1
    if flags != 0:
        bad_slot = tl.load(table + row * row_stride + bad).to(tl.int64)
    else:
        bad = row * 0 - 1
    if (length > width) | (length < 0) | (known == 0):
        if flags == 0:
            bad = tl.where(length > width, width, 0)
        flags |= FLAG_RANGE
    if known:
        if found != tl.load(digest + row):
            flags |= FLAG_DIGEST
    if WRITES:
        if tl.load(writes + b * RECORD_WORDS) != 0:
            flags |= FLAG_WRITE
    tl.store(record + b * RECORD_WORDS, flags)
    tl.store(record + b * RECORD_WORDS + 1, found)
    tl.store(record + b * RECORD_WORDS + 2, bad)
    tl.store(record + b * RECORD_WORDS + 3, bad_slot)
    return flags


@triton.jit
def _take_off(table, rows, lengths, digest, slot_mapping, query_start, b, row_stride, table_rows, positions, slots_end,
              tokens, skip_slot, BLOCK: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """What is live of a flagged row cannot fault any more, its tokens write nowhere, and its digest is spoiled."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    row, known, length, width, covered = _live(rows, lengths, b, table_rows, positions)
    if known:
        tl.atomic_add(digest + row, row * 0 + SPOILED, sem="relaxed")
    for block in range(0, covered, BLOCK):
        place = table + row * row_stride + block + lanes
        slot = tl.load(place, mask=block + lanes < covered, other=0).to(tl.int64)
        tl.store(place, (lanes * 0).to(tl.int32), mask=(block + lanes < covered) & ((slot < 0) | (slot >= slots_end)))
    if SLOTS == A_TOKEN_EACH:
        if b < tokens:
            tl.store(slot_mapping + b, skip_slot)
    if SLOTS == BY_QUERY_START:
        start = tl.maximum(tl.load(query_start + b).to(tl.int64), 0)
        stop = tl.minimum(tl.load(query_start + b + 1).to(tl.int64), tokens)
        for block in range(start, stop, BLOCK):
            tl.store(slot_mapping + block + lanes, skip_slot, mask=block + lanes < stop)


# One binary, however the arrays are aligned and whatever the numbers are.
@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=[*POINTERS, *SCALARS])
def verify_kernel(
    table, rows, lengths, page_tag, digest, record, slot_mapping, query_start, writes, workspace,
    row_stride: tl.int64, table_rows: tl.int64, positions: tl.int64, num_pages: tl.int64, key: tl.int64,
    batch: tl.int64, tokens: tl.int64, skip_slot: tl.int64,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, ENFORCE: tl.constexpr, SLOTS: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, batch). SLOTS: whose the elements of slot_mapping are, if there is one; WRITES: are there any."""
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    b = tl.program_id(1).to(tl.int64)
    row, known, length, width, covered = _live(rows, lengths, b, table_rows, positions)
    row_stride, key = row_stride.to(tl.int64), key.to(tl.uint64)
    slots_end = num_pages.to(tl.int64) * PAGE_SIZE
    source = table + row * row_stride
    lanes = tl.arange(0, BLOCK)
    digests = tl.full([BLOCK], 0, tl.int64)
    seen = tl.full([BLOCK], 0, tl.int32)
    first_bad = tl.full([BLOCK], NO_POSITION, tl.int32)
    blocks = tl.cdiv(covered, BLOCK)
    for block in range(chunk.to(tl.int64), blocks, chunks):
        position = (lanes + block * BLOCK).to(tl.int32)
        live = position < covered
        slot = tl.load(source + position, mask=live, other=-1)
        # What was not read is -1.
        inside = (slot >= 0) & (slot < slots_end)
        page, column = slot // PAGE_SIZE, position // PAGE_SIZE
        tag = tl.load(page_tag + page, mask=inside, other=0)
        flag = tl.where(page == NULL_PAGE, FLAG_NULL, tl.where(tag == 0, FLAG_VACANT, 0))
        counted = inside
        if PAGE_SIZE > 1:
            piece = position - column * PAGE_SIZE
            head = tl.load(source + position - piece, mask=live, other=-1)
            displaced = (slot - page * PAGE_SIZE != piece) | (head < 0) | (page != head // PAGE_SIZE)
            flag = tl.where(displaced, flag | FLAG_SPLIT, flag)
            counted = inside & (piece == 0)
        flag = tl.where(live, tl.where(inside, flag, FLAG_RANGE), 0)
        seen |= flag
        first_bad = tl.minimum(first_bad, tl.where(flag != 0, position, NO_POSITION))
        digests += tl.where(counted, mix_terms(key, column, tag), 0)

    # Chunks that were given no block have no part in the row.
    parts = tl.minimum(tl.maximum(blocks, 1), chunks)
    if chunk < parts:
        found = tl.sum(digests)
        # One reduction for all flags: each kind is counted in 16 bits of its own, which BLOCK cannot overflow.
        kinds = seen.to(tl.int64)
        kinds = ((kinds >> 1) & 1) | ((kinds & 4) << 14) | ((kinds & 8) << 29) | ((kinds & 16) << 44)
        count = tl.sum(kinds)
        null, out_of_range = (count & 0xFFFF) != 0, (count & 0xFFFF0000) != 0
        vacant, moved = ((count >> 32) & 0xFFFF) != 0, ((count >> 48) & 0xFFFF) != 0
        flags = null.to(tl.int64) * FLAG_NULL + out_of_range.to(tl.int64) * FLAG_RANGE
        flags += vacant.to(tl.int64) * FLAG_VACANT + moved.to(tl.int64) * FLAG_SPLIT
        bad = tl.min(first_bad).to(tl.int64)
        of_row = workspace + POOL_WORDS + b * ROW_WORDS
        last_part = parts == 1
        if parts > 1:
            tl.atomic_add(of_row + 1, found, sem="relaxed")
            if flags != 0:
                tl.atomic_or(of_row + 2, flags, sem="relaxed")
                # Kept as a distance from NO_POSITION, so that zero, what an idle workspace holds, says none.
                tl.atomic_max(of_row + 3, -bad + NO_POSITION, sem="relaxed")
            tl.debug_barrier()
            last_part = tl.atomic_add(of_row, 1, sem="acq_rel", scope="gpu") == parts - 1
            tl.debug_barrier()
            if last_part:
                # Taken out and left at zero for the next launch.
                found = tl.atomic_xchg(of_row + 1, 0, sem="relaxed")
                flags = tl.atomic_xchg(of_row + 2, 0, sem="relaxed")
                bad = -tl.atomic_xchg(of_row + 3, 0, sem="relaxed") + NO_POSITION
                tl.atomic_xchg(of_row, 0, sem="relaxed")
        if last_part:
            flags = _finish_row(
                table, rows, lengths, digest, record, writes, b, row_stride, table_rows, positions, found, flags, bad,
                WRITES,
            )  # fmt: skip
            if ENFORCE:
                if flags != 0:
                    tl.atomic_add(workspace + 1, 1, sem="relaxed")
                tl.debug_barrier()
                last_row = tl.atomic_add(workspace, 1, sem="acq_rel", scope="gpu") == batch - 1
                tl.debug_barrier()
                if last_row:
                    flagged = tl.atomic_xchg(workspace + 1, 0, sem="relaxed")
                    tl.atomic_xchg(workspace, 0, sem="relaxed")
                    if flagged > 0:
                        for other in range(0, batch):
                            other_row = b * 0 + other
                            if tl.load(record + other_row * RECORD_WORDS) != 0:
                                _take_off(
                                    table, rows, lengths, digest, slot_mapping, query_start, other_row, row_stride,
                                    table_rows, positions, slots_end, tokens, skip_slot, BLOCK, SLOTS,
                                )  # fmt: skip


INTERPRETED = not isinstance(verify_kernel, triton.JITFunction)
if INTERPRETED:
    for _name in ("_live", "_finish_row", "_take_off"):
        globals()[_name] = globals()[_name].rewrite()


def workspace_words(batch: int) -> int:
    """How long the workspace must be."""
    return WORKSPACE_WORDS + WORKSPACE_ROW_WORDS * batch


def verify_rows(
    *,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    page_tag: Tensor,
    digest: Tensor,
    page_size: int,
    key: int,
    enforce: bool,
    record: Tensor,
    slot_mapping: Tensor | None,
    query_start: Tensor | None,
    skip_slot: int,
    writes: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """See `kvguard.kernels.verify_rows.verify_rows` for the contract."""
    batch, positions = rows.shape[0], table.shape[1]
    if batch == 0:
        return
    require_dense(
        rows=rows, lengths=lengths, page_tag=page_tag, digest=digest, record=record, slot_mapping=slot_mapping,
        query_start=query_start, writes=writes, workspace=workspace,
    )  # fmt: skip
    if table.dtype != torch.int32 or (positions > 1 and table.stride(1) != 1):
        raise ValueError("table must be int32, the slots of a row side by side")
    if workspace is None:
        workspace = torch.zeros(workspace_words(batch), dtype=torch.int64, device=table.device)
    elif workspace.shape[0] < workspace_words(batch):
        raise ValueError(f"{batch} rows want a workspace of {workspace_words(batch)} words")
    slots = NO_SLOTS if slot_mapping is None else A_TOKEN_EACH if query_start is None else BY_QUERY_START
    chunks = max(1, min(-(-positions // BLOCK), PROGRAMS // batch))
    verify_kernel[(chunks, batch)](
        table, rows, lengths, page_tag, digest, record,
        rows if slot_mapping is None else slot_mapping, rows if query_start is None else query_start,
        rows if writes is None else writes, workspace,
        table.stride(0), table.shape[0], positions, page_tag.shape[0], signed64(key), batch,
        0 if slot_mapping is None else slot_mapping.shape[0], skip_slot,
        BLOCK=BLOCK, PAGE_SIZE=page_size, ENFORCE=enforce, SLOTS=slots, WRITES=writes is not None,
        num_warps=WARPS,
    )  # fmt: skip
