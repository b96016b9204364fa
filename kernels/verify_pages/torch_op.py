"""`verify_pages` in PyTorch operations: any device torch runs on, no synchronisation on a GPU.

The portable path, not the fast one: it covers rows times the longest row, in chunks of at most `CHUNK_ENTRIES` entries
(one row may exceed that), with some 190 launches a chunk; the live mask and the neutralising are not chunked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.mixing import (
    COLUMN_MULTIPLIER,
    FINAL_MULTIPLIER_1,
    FINAL_MULTIPLIER_2,
    TAG_MULTIPLIER,
    signed64,
)
from kvguard.kernels.verify_pages.host_op import all_rows_clean
from kvguard.kernels.verify_pages.layout import (
    FLAG_DIGEST,
    FLAG_NULL,
    FLAG_RANGE,
    FLAG_SPLIT,
    FLAG_VACANT,
    FLAGS,
)

CHUNK_ENTRIES = 1 << 21


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: torch's own is arithmetic, so the copied sign bits are masked away."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_tensor(key: int, columns: Tensor, tags: Tensor) -> Tensor:
    """`kvguard.kernels.mixing.mix` for int64 tensors that broadcast; the bits of the uint64 result as int64."""
    x = (tags * signed64(TAG_MULTIPLIER)) ^ (columns * signed64(COLUMN_MULTIPLIER) + signed64(key))
    x = (x ^ _shift_right(x, 30)) * signed64(FINAL_MULTIPLIER_1)
    x = (x ^ _shift_right(x, 27)) * signed64(FINAL_MULTIPLIER_2)
    return x ^ _shift_right(x, 31)


def on_host(tensor: Tensor) -> bool:
    """Whether a look at the tensor's values waits for nothing. Tests of the path for devices say no."""
    return tensor.device.type == "cpu"


def _live_columns(offset: Tensor, start: Tensor, stop: Tensor, rows: int, columns: int) -> Tensor:
    """bool [rows, columns]: which manager-page columns lie in one of the row's extents.

    Every row has at least one extent, so as many extents as rows means exactly one each: a single comparison.
    Otherwise extents are counted with a running sum of +1 at each start and -1 at each stop.
    """
    position = torch.arange(columns, device=start.device)
    if start.shape[0] == rows:
        return (position >= start.unsqueeze(1)) & (position < stop.unsqueeze(1))
    row_of = torch.bucketize(torch.arange(start.shape[0], device=start.device), offset[1:-1], right=True)
    edges = torch.zeros((rows, columns + 1), dtype=torch.int64, device=start.device)
    real = (stop > start).to(torch.int64)
    edges.index_put_((row_of, start.clamp(0, columns)), real, accumulate=True)
    edges.index_put_((row_of, stop.clamp(0, columns)), -real, accumulate=True)
    return edges.cumsum(1)[:, :columns] > 0


def _check_rows(
    *,
    table: Tensor,
    page_tag: Tensor,
    row_index: Tensor,
    expected: Tensor,
    live: Tensor,
    key: int,
    split: int,
    null_page: int,
) -> Tensor:
    """Records int64 [rows, 4] of a chunk of rows."""
    rows, pages_wide = live.shape
    columns = torch.arange(pages_wide * split, device=table.device)
    if split > 1:
        live = live.repeat_interleave(split, dim=1)
    inside = ((row_index >= 0) & (row_index < table.shape[0])).unsqueeze(1) & (columns < table.shape[1])
    safe_row = row_index.clamp(0, max(table.shape[0] - 1, 0))
    safe_column = columns.clamp(max=max(table.shape[1] - 1, 0))
    if table.numel() == 0:
        entry = torch.full((rows, columns.shape[0]), -1, dtype=torch.int64, device=table.device)
    else:
        entry = table[safe_row.unsqueeze(1), safe_column].to(torch.int64)
        entry = torch.where(inside, entry, -1)
    page = entry if split == 1 else torch.div(entry, split, rounding_mode="floor")
    in_range = inside & (page >= 0) & (page < page_tag.shape[0])
    tag = torch.where(in_range, page_tag[page.clamp(0, page_tag.shape[0] - 1)], 0)
    null = in_range & (page == null_page)
    flag = torch.where(in_range, torch.where(null, FLAG_NULL, torch.where(tag == 0, FLAG_VACANT, 0)), FLAG_RANGE)
    term = mix_tensor(key, columns if split == 1 else torch.div(columns, split, rounding_mode="floor"), tag)
    counted = live & in_range
    if split > 1:
        first = page.view(rows, pages_wide, split)[:, :, :1].expand(-1, -1, split).reshape(rows, -1)
        piece = columns % split
        displaced = in_range & (((entry - page * split) != piece) | (page != first))
        flag = flag | torch.where(displaced, FLAG_SPLIT, 0)
        counted = counted & (piece == 0)
    flag = torch.where(live, flag, 0)
    digest = torch.where(counted, term, 0).sum(1)
    # The first flagged column: arg max of a 0/1 row is its first 1.
    bad = flag != 0
    record = torch.empty((rows, 4), dtype=torch.int64, device=table.device)
    if columns.shape[0] == 0:
        combined = torch.zeros(rows, dtype=torch.int64, device=table.device)
        record[:, 2] = -1
        record[:, 3] = -1
    else:
        combined = torch.zeros(rows, dtype=torch.int64, device=table.device)
        for bit in (FLAG_NULL, FLAG_RANGE, FLAG_VACANT, FLAG_SPLIT):
            combined = combined | (((flag & bit) != 0).any(1).to(torch.int64) * bit)
        first_bad = bad.to(torch.uint8).argmax(1)
        any_bad = bad.any(1)
        record[:, 2] = torch.where(any_bad, first_bad, -1)
        record[:, 3] = torch.where(any_bad, entry.gather(1, first_bad.unsqueeze(1)).squeeze(1), -1)
    record[:, 0] = combined | torch.where(digest != expected, FLAG_DIGEST, 0)
    record[:, 1] = digest
    return record


def verify_pages(
    *,
    table: Tensor,
    page_tag: Tensor,
    row_index: Tensor,
    expected: Tensor,
    extent_offset: Tensor,
    extent_start: Tensor,
    extent_stop: Tensor,
    columns: int,
    key: int,
    split: int,
    null_page: int,
    neutral_page: int,
    record: Tensor,
    evidence: Tensor,
    evidence_row: Tensor,
    slot_mapping: Tensor | None,
    query_start: Tensor | None,
    query_row: Tensor | None,
    skip_slot: int,
) -> None:
    """See `kvguard.kernels.verify_pages.verify_pages` for the contract."""
    rows = row_index.shape[0]
    if on_host(table) and split == 1 and extent_start.shape[0] == rows:
        clean = all_rows_clean(
            table=table.numpy(),
            page_tag=page_tag.numpy(),
            row_index=row_index.numpy(),
            expected=expected.numpy(),
            extent_start=extent_start.numpy(),
            extent_stop=extent_stop.numpy(),
            columns=columns,
            key=key,
            null_page=null_page,
            record=record.numpy(),
        )
        if clean:
            return
    live = _live_columns(extent_offset, extent_start, extent_stop, rows, columns)
    chunk = max(1, CHUNK_ENTRIES // max(1, columns * split))
    for begin in range(0, rows, chunk):
        end = min(rows, begin + chunk)
        record[begin:end] = _check_rows(
            table=table,
            page_tag=page_tag,
            row_index=row_index[begin:end],
            expected=expected[begin:end],
            live=live[begin:end],
            key=key,
            split=split,
            null_page=null_page,
        )
    flagged = record[:rows, FLAGS] != 0
    # On a CPU a look at the flags is no synchronisation, and almost every step ends here.
    if on_host(table) and not bool(flagged.any()):
        return
    _capture(table, row_index, flagged, evidence, evidence_row)
    if neutral_page < 0:
        return
    _neutralise_reads(table, row_index, flagged, live, split, neutral_page * split)
    if slot_mapping is not None and query_start is not None:
        token = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
        places = query_start.shape[0] - 1
        drop_place = flagged
        if query_row is None:
            # Rows are at their own places; what follows them in a padded batch is nobody's.
            places = min(places, rows)
        else:
            drop_place = torch.zeros(places, dtype=torch.int64, device=token.device)
            known = (query_row >= 0) & (query_row < places)
            hits = (flagged & known).to(torch.int64)
            drop_place = drop_place.index_add_(0, query_row.clamp(0, max(places - 1, 0)), hits) > 0
        place = torch.bucketize(token, query_start[1:].to(torch.int64), right=True)
        owned = (place < places) & (token >= query_start[0])
        drop = owned & drop_place[place.clamp(max=max(places - 1, 0))]
        slot_mapping.copy_(torch.where(drop, skip_slot, slot_mapping))


def _capture(table: Tensor, row_index: Tensor, flagged: Tensor, evidence: Tensor, evidence_row: Tensor) -> None:
    """Copy the first flagged rows' table entries aside before they are overwritten; the shapes are fixed."""
    room = min(evidence_row.shape[0], flagged.shape[0])
    if room == 0:
        return
    # A stable descending sort puts flagged rows first and keeps their order.
    order = torch.sort(flagged.to(torch.uint8), descending=True, stable=True).indices[:room]
    hit = flagged[order]
    evidence_row[:room] = torch.where(hit, order, evidence_row[:room])
    width = min(evidence.shape[1], table.shape[1])
    if width == 0 or table.shape[0] == 0:
        return
    source = row_index[order]
    hit = hit & (source >= 0) & (source < table.shape[0])
    entries = table[source.clamp(0, table.shape[0] - 1), :width].to(torch.int64)
    evidence[:room, :width] = torch.where(hit.unsqueeze(1), entries, evidence[:room, :width])


def _neutralise_reads(
    table: Tensor, row_index: Tensor, flagged: Tensor, live: Tensor, split: int, neutral_entry: int
) -> None:
    """Point the live columns of flagged rows at the null page, in place.

    Shapes may not depend on data, so rows that are not flagged are written with what they hold. A table row that two
    checked rows name (itself a fault) would then get two different writes: their masks are merged first.
    """
    width = min(live.shape[1] * split, table.shape[1])
    if width == 0 or table.shape[0] == 0 or row_index.shape[0] == 0:
        return
    inside = (row_index >= 0) & (row_index < table.shape[0])
    row = row_index.clamp(0, table.shape[0] - 1)
    mask = (live.repeat_interleave(split, dim=1) if split > 1 else live)[:, :width]
    mask = mask & (flagged & inside).unsqueeze(1)
    ordered, position = torch.sort(row)
    change = torch.zeros_like(ordered)
    change[1:] = (ordered[1:] != ordered[:-1]).to(torch.int64)
    group = torch.empty_like(ordered).scatter_(0, position, change.cumsum(0))
    hits = torch.zeros(mask.shape, dtype=torch.int32, device=table.device)
    hits.index_add_(0, group, mask.to(torch.int32))
    index = (row.unsqueeze(1), torch.arange(width, device=table.device))
    table.index_put_(index, torch.where(hits[group] > 0, neutral_entry, table[index]).to(table.dtype))
