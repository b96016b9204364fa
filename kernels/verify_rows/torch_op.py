"""`verify_rows` in PyTorch operations: no synchronisation, no shape that depends on data.

The portable path, not the fast one: it covers rows times the width of the table, in chunks of at most `CHUNK_ENTRIES`
entries (one row may exceed that). On a CPU a clean step is found to be one in NumPy and ends there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import NULL_PAGE, SPOILED
from kvguard.kernels.torch_slots import skip_tokens
from kvguard.kernels.verify_pages.layout import (
    FLAG_DIGEST,
    FLAG_NULL,
    FLAG_RANGE,
    FLAG_SPLIT,
    FLAG_VACANT,
    FLAG_WRITE,
    FLAGS,
)
from kvguard.kernels.verify_pages.torch_op import mix_tensor, on_host
from kvguard.kernels.verify_rows.host_op import all_rows_clean

CHUNK_ENTRIES = 1 << 21
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


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
) -> None:
    """See `kvguard.kernels.verify_rows.verify_rows` for the contract."""
    batch = rows.shape[0]
    if batch == 0:
        return
    if on_host(table) and all_rows_clean(
        table=table.numpy(),
        rows=rows.numpy(),
        lengths=lengths.numpy(),
        page_tag=page_tag.numpy(),
        digest=digest.numpy(),
        page_size=page_size,
        key=key,
        record=record.numpy(),
        writes=None if writes is None else writes.numpy(),
    ):
        return
    chunk = max(1, CHUNK_ENTRIES // max(1, table.shape[1]))
    chunks = [slice(begin, min(begin + chunk, batch)) for begin in range(0, batch, chunk)]
    for part in chunks:
        record[part] = _check_rows(table, rows[part], lengths[part], page_tag, digest, page_size, key)
    if writes is not None:
        record[:, FLAGS] |= torch.where(writes[:batch, FLAGS] != 0, FLAG_WRITE, 0)
    if not enforce:
        return
    flagged = record[:, FLAGS] != 0
    if digest.shape[0]:
        known = (rows >= 0) & (rows < digest.shape[0])
        digest.index_add_(0, torch.where(known, rows, 0), torch.where(flagged & known, SPOILED, 0))
    for part in chunks:
        _clear_slots(table, rows[part], lengths[part], flagged[part], page_tag.shape[0] * page_size)
    if slot_mapping is not None:
        skip_tokens(slot_mapping, query_start, flagged, skip_slot)


def _check_rows(
    table: Tensor, rows: Tensor, lengths: Tensor, page_tag: Tensor, digest: Tensor, page_size: int, key: int
) -> Tensor:
    """Records int64 [rows, 4] of a chunk of rows."""
    lengths = lengths.to(torch.int64)
    known = (rows >= 0) & (rows < table.shape[0])
    width = torch.where(known, table.shape[1], 0)
    beyond = (lengths > width) | (lengths < 0) | ~known
    flags = torch.where(beyond, FLAG_RANGE, 0)
    bad_position = torch.where(beyond, torch.where(lengths > width, width, 0), -1)
    if table.numel() == 0:
        found, bad_slot = torch.zeros_like(rows), torch.full_like(rows, -1)
    else:
        position = torch.arange(table.shape[1], device=table.device)
        column, piece = position // page_size, position % page_size
        live = position < torch.minimum(lengths, width).unsqueeze(1)
        slot = table[rows.clamp(0, table.shape[0] - 1)].to(torch.int64)
        in_range = (slot >= 0) & (slot < page_tag.shape[0] * page_size)
        page = torch.div(torch.where(in_range, slot, 0), page_size, rounding_mode="floor")
        tag = page_tag[page]
        flag = torch.where(page == NULL_PAGE, FLAG_NULL, torch.where(tag == 0, FLAG_VACANT, 0))
        # A page that is one, against the page of the column's first slot, or of none.
        head = torch.div(slot[:, position - piece], page_size, rounding_mode="floor")
        flag = flag | torch.where((slot % page_size != piece) | (page != head), FLAG_SPLIT, 0)
        flag = torch.where(live, torch.where(in_range, flag, FLAG_RANGE), 0)
        counted = live & in_range & (piece == 0)
        found = torch.where(counted, mix_tensor(key, column, tag), 0).sum(1)
        for bit in (FLAG_NULL, FLAG_RANGE, FLAG_VACANT, FLAG_SPLIT):
            flags = flags | torch.where(((flag & bit) != 0).any(1), bit, 0)
        # Arg max of a row of 0 and 1 is its first 1.
        first_bad = (flag != 0).to(torch.uint8).argmax(1)
        any_bad = (flag != 0).any(1)
        bad_position = torch.where(any_bad, first_bad, bad_position)
        bad_slot = torch.where(any_bad, slot.gather(1, first_bad.unsqueeze(1)).squeeze(1), -1)
    if digest.shape[0]:
        differs = known & (found != digest[rows.clamp(0, digest.shape[0] - 1)])
        flags = flags | torch.where(differs, FLAG_DIGEST, 0)
    return torch.stack((flags, found, bad_position, bad_slot), 1)


def _clear_slots(table: Tensor, rows: Tensor, lengths: Tensor, flagged: Tensor, slots_end: int) -> None:
    """Live slots of flagged rows that are outside the pool become 0.

    Shapes may not depend on data, so all rows are written. Two of them may name one table row: a maximum and a minimum
    with what changes nothing do not mind.
    """
    if table.numel() == 0:
        return
    known = (rows >= 0) & (rows < table.shape[0])
    index = torch.where(known, rows, 0)
    position = torch.arange(table.shape[1], device=table.device)
    slot = table[index]
    clear = (flagged & known).unsqueeze(1) & (position < lengths.unsqueeze(1)) & ((slot < 0) | (slot >= slots_end))
    target = index.unsqueeze(1).expand(-1, table.shape[1])
    table.scatter_reduce_(0, target, torch.where(clear, 0, _LEAST).to(table.dtype), "amax")
    table.scatter_reduce_(0, target, torch.where(clear, 0, _MOST).to(table.dtype), "amin")
