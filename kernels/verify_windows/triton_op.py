"""`verify_windows` in one Triton launch: a program takes a row, whose window is short against the whole of it.

With `enforce` the last row to arrive, by which time all have been read, takes rows that got the flag off their slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels.arrays import require_dense
from kvguard.kernels.triton_events import NULL_PAGE, floor_divide
from kvguard.kernels.verify_pages import layout

BLOCK = 512
WARPS = 4
WORKSPACE_WORDS = 2
"""Rows that have arrived, rows that got the flag."""

RECORD_WORDS, FLAG_WINDOW = tl.constexpr(layout.RECORD_WORDS), tl.constexpr(layout.FLAG_WINDOW)
BAD_COLUMN, BAD_ENTRY = tl.constexpr(layout.BAD_COLUMN), tl.constexpr(layout.BAD_ENTRY)
NO_POSITION = tl.constexpr((1 << 31) - 1)
POINTERS = (
    "table", "rows", "lengths", "mapping", "peer_tag", "window_tag", "record", "slot_mapping", "query_start",
    "workspace",
)  # fmt: skip
SCALARS = (
    "row_stride", "table_rows", "positions", "num_pages", "window_pages", "window", "batch", "tokens", "skip_slot",
)  # fmt: skip


@triton.jit
def _extent(rows, lengths, query_start, b, table_rows, positions, window, QUERIES: tl.constexpr):
    """A row's place in the table, the first position of its window, where it ends, and its queries."""
    row, length = tl.load(rows + b), tl.load(lengths + b).to(tl.int64)
    start, stop = b, b + 1
    if QUERIES:
        start = tl.load(query_start + b).to(tl.int64)
        stop = tl.load(query_start + b + 1).to(tl.int64)
    known = (row >= 0) & (row < table_rows)
    end = tl.where(known, tl.minimum(length, positions), 0).to(tl.int64)
    return row, tl.maximum(length - (stop - start) - window, 0), end, start, stop


@triton.jit
def _read(table, mapping, row, position, live, row_stride, slots_end):
    """The full slots of positions, the window slots beside them, and which of them there are."""
    slot = tl.load(table + row * row_stride + position, mask=live, other=-1).to(tl.int64)
    live = live & (slot >= 0) & (slot < slots_end)
    return slot, tl.load(mapping + slot, mask=live, other=0), live


@triton.jit
def _take_off(table, rows, lengths, mapping, slot_mapping, query_start, b, row_stride, table_rows, positions, slots_end,
              window_end, window, tokens, skip_slot, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
              SLOTS: tl.constexpr):  # fmt: skip
    """What the window of such a row reads cannot fault any more, and its tokens write nowhere."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    row, first, end, start, stop = _extent(rows, lengths, query_start, b, table_rows, positions, window, QUERIES)
    for block in range(first, end, BLOCK):
        position = block + lanes
        slot, peer, live = _read(table, mapping, row, position, position < end, row_stride, slots_end)
        tl.store(mapping + slot, lanes * 0, mask=live & ((peer < 0) | (peer >= window_end)))
    if SLOTS:
        stop = tl.minimum(stop, tokens)
        for block in range(tl.maximum(start, 0), stop, BLOCK):
            tl.store(slot_mapping + block + lanes, skip_slot, mask=block + lanes < stop)


# One binary, however the arrays are aligned and whatever the numbers are.
@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=[*POINTERS, *SCALARS])
def windows_kernel(
    table, rows, lengths, mapping, peer_tag, window_tag, record, slot_mapping, query_start, workspace,
    row_stride: tl.int64, table_rows: tl.int64, positions: tl.int64, num_pages: tl.int64, window_pages: tl.int64,
    window: tl.int64, batch: tl.int64, tokens: tl.int64, skip_slot: tl.int64,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, ENFORCE: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (batch). QUERIES: query_start says whose the queries are; SLOTS: there is a slot_mapping."""
    b = tl.program_id(0).to(tl.int64)
    row_stride, window = row_stride.to(tl.int64), window.to(tl.int64)
    slots_end = num_pages.to(tl.int64) * PAGE_SIZE
    row, first, end, start, stop = _extent(rows, lengths, query_start, b, table_rows, positions, window, QUERIES)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    first_bad = tl.full([BLOCK], NO_POSITION, tl.int64)
    for block in range(first, end, BLOCK):
        position = block + lanes
        slot, peer, live = _read(table, mapping, row, position, position < end, row_stride, slots_end)
        page = floor_divide(peer, PAGE_SIZE)
        inside = live & (page > NULL_PAGE) & (page < window_pages)
        tag = tl.load(window_tag + page, mask=inside, other=0)
        promised = tl.load(peer_tag + slot // PAGE_SIZE, mask=inside, other=0)
        kept = inside & (tag == promised) & (tag != 0) & (peer - page * PAGE_SIZE == position % PAGE_SIZE)
        first_bad = tl.minimum(first_bad, tl.where(live & (kept == 0), position, NO_POSITION))
    bad = tl.min(first_bad)
    found = bad < NO_POSITION
    if found:
        of_row = record + b * RECORD_WORDS
        tl.store(of_row, tl.load(of_row) | FLAG_WINDOW)
        if tl.load(of_row + BAD_COLUMN) < 0:
            peer_there = tl.load(mapping + tl.load(table + row * row_stride + bad).to(tl.int64))
            tl.store(of_row + BAD_COLUMN, bad)
            tl.store(of_row + BAD_ENTRY, peer_there)
    if ENFORCE:
        if found:
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
                    if (tl.load(record + other_row * RECORD_WORDS) & FLAG_WINDOW) != 0:
                        _take_off(
                            table, rows, lengths, mapping, slot_mapping, query_start, other_row, row_stride, table_rows,
                            positions, slots_end, window_pages.to(tl.int64) * PAGE_SIZE, window, tokens, skip_slot,
                            BLOCK, QUERIES, SLOTS,
                        )  # fmt: skip


if not isinstance(windows_kernel, triton.JITFunction):
    for _name in ("_extent", "_read", "_take_off"):
        globals()[_name] = globals()[_name].rewrite()


def verify_windows(
    *,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    window: int,
    mapping: Tensor,
    peer_tag: Tensor,
    window_tag: Tensor,
    page_size: int,
    enforce: bool,
    record: Tensor,
    slot_mapping: Tensor | None,
    query_start: Tensor | None,
    skip_slot: int,
    workspace: Tensor | None,
) -> None:
    """See `kvguard.kernels.verify_windows.verify_windows` for the contract."""
    batch, positions = rows.shape[0], table.shape[1]
    if batch == 0:
        return
    require_dense(
        rows=rows, lengths=lengths, mapping=mapping, peer_tag=peer_tag, window_tag=window_tag, record=record,
        slot_mapping=slot_mapping, query_start=query_start, workspace=workspace,
    )  # fmt: skip
    if table.dtype != torch.int32 or (positions > 1 and table.stride(1) != 1):
        raise ValueError("table must be int32, the slots of a row side by side")
    if workspace is None:
        workspace = torch.zeros(WORKSPACE_WORDS, dtype=torch.int64, device=table.device)
    windows_kernel[(batch,)](
        table, rows, lengths, mapping, peer_tag, window_tag, record,
        rows if slot_mapping is None else slot_mapping, rows if query_start is None else query_start, workspace,
        table.stride(0), table.shape[0], positions, peer_tag.shape[0], window_tag.shape[0], window, batch,
        0 if slot_mapping is None else slot_mapping.shape[0], skip_slot,
        BLOCK=BLOCK, PAGE_SIZE=page_size, ENFORCE=enforce, QUERIES=query_start is not None,
        SLOTS=slot_mapping is not None, num_warps=WARPS,
    )  # fmt: skip
