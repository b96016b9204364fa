"""`verify_windows` in PyTorch operations: no synchronisation, no shape that depends on data.

The portable path, not the fast one. No window is longer than `window` and all queries together, which the host knows.
On a CPU a clean step is found to be one in NumPy and ends there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import NULL_PAGE
from kvguard.kernels.torch_slots import skip_tokens
from kvguard.kernels.verify_pages.layout import BAD_COLUMN, BAD_ENTRY, FLAG_WINDOW, FLAGS
from kvguard.kernels.verify_pages.torch_op import on_host
from kvguard.kernels.verify_windows.host_op import all_windows_clean

CHUNK_ENTRIES = 1 << 21
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


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
) -> None:
    """See `kvguard.kernels.verify_windows.verify_windows` for the contract."""
    batch, positions = rows.shape[0], table.shape[1]
    if batch == 0 or table.numel() == 0:
        return
    if on_host(table) and all_windows_clean(
        table=table.numpy(),
        rows=rows.numpy(),
        lengths=lengths.numpy(),
        window=window,
        mapping=mapping.numpy(),
        peer_tag=peer_tag.numpy(),
        window_tag=window_tag.numpy(),
        page_size=page_size,
        query_start=None if query_start is None else query_start.numpy(),
    ):
        return
    lengths = lengths.to(torch.int64)
    bounds = None if query_start is None else query_start[: batch + 1].to(torch.int64)
    first = (lengths - (1 if bounds is None else bounds[1:] - bounds[:-1]) - window).clamp(min=0)
    # Where lengths are not those of the queries, a window may be longer than this.
    width = positions if slot_mapping is None and bounds is not None else window + 1
    if slot_mapping is not None and bounds is not None:
        width = window + slot_mapping.shape[0]
    width = min(width, positions)
    chunk = max(1, CHUNK_ENTRIES // width)
    parts = []
    for begin in range(0, batch, chunk):
        part = slice(begin, min(begin + chunk, batch))
        place = first[part].unsqueeze(1) + torch.arange(width, device=table.device)
        known = (rows[part] >= 0) & (rows[part] < table.shape[0])
        live = known.unsqueeze(1) & (place < lengths[part].clamp(max=positions).unsqueeze(1))
        index = torch.where(known, rows[part], 0).unsqueeze(1)
        slot = table[index, torch.where(live, place, 0)].to(torch.int64)
        live = live & (slot >= 0) & (slot < peer_tag.shape[0] * page_size)
        slot = torch.where(live, slot, 0)
        peer = mapping[slot]
        page = torch.div(peer, page_size, rounding_mode="floor")
        inside = (page >= 0) & (page < window_tag.shape[0])
        tag = window_tag[torch.where(inside, page, NULL_PAGE)]
        kept = inside & (page != NULL_PAGE) & (peer % page_size == place % page_size) & (tag != 0)
        bad = live & ~(kept & (tag == peer_tag[slot // page_size]))
        _note(record[part], bad, place, peer)
        parts.append((part, slot, live))
    if not enforce:
        return
    flagged = (record[:, FLAGS] & FLAG_WINDOW) != 0
    for part, slot, live in parts:
        peer = mapping[slot]
        outside = (peer < 0) | (peer >= window_tag.shape[0] * page_size)
        clear = (live & outside & flagged[part].unsqueeze(1)).flatten()
        # A slot may come twice; a maximum and a minimum with what changes nothing do not mind.
        mapping.scatter_reduce_(0, slot.flatten(), torch.where(clear, 0, _LEAST), "amax")
        mapping.scatter_reduce_(0, slot.flatten(), torch.where(clear, 0, _MOST), "amin")
    if slot_mapping is not None:
        skip_tokens(slot_mapping, query_start, flagged, skip_slot)


def _note(record: Tensor, bad: Tensor, place: Tensor, peer: Tensor) -> None:
    """Add what is bad, bool [rows, width], to the records of these rows."""
    # Arg max of a row of 0 and 1 is its first 1.
    at = bad.to(torch.uint8).argmax(1, keepdim=True)
    any_bad = bad.any(1)
    first = any_bad & (record[:, BAD_COLUMN] < 0)
    record[:, FLAGS] |= torch.where(any_bad, FLAG_WINDOW, 0)
    record[:, BAD_COLUMN] = torch.where(first, place.gather(1, at).squeeze(1), record[:, BAD_COLUMN])
    record[:, BAD_ENTRY] = torch.where(first, peer.gather(1, at).squeeze(1), record[:, BAD_ENTRY])
