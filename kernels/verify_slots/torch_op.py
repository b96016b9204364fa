"""`verify_slots` in PyTorch operations: no synchronisation, no shape that depends on data.

The portable path, not the fast one: it covers rows times tokens, in chunks of at most `CHUNK_ENTRIES` entries (one row
may exceed that). On a CPU a clean step is found to be one in NumPy and ends there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import ROW_SHIFT
from kvguard.kernels.verify_pages.torch_op import on_host
from kvguard.kernels.verify_slots.host_op import all_slots_right
from kvguard.kernels.verify_slots.layout import (
    SLOT_FLOOR,
    SLOT_LOST,
    SLOT_OFFSET,
    SLOT_PADDING,
    SLOT_PAGE,
    SLOT_RANGE,
)

CHUNK_ENTRIES = 1 << 21


def verify_slots(
    *,
    slot_mapping: Tensor,
    query_start: Tensor | None,
    query_row: Tensor | None,
    lengths: Tensor,
    writer: Tensor,
    floor: Tensor | None,
    page_writer: Tensor,
    page_size: int,
    skip_slot: int,
    skip_allowed: bool,
    enforce: bool,
    record: Tensor,
    null_page: int,
) -> None:
    """See `kvguard.kernels.verify_slots.verify_slots` for the contract."""
    if on_host(slot_mapping) and all_slots_right(
        slot_mapping=slot_mapping.numpy(),
        query_start=None if query_start is None else query_start.numpy(),
        query_row=None if query_row is None else query_row.numpy(),
        lengths=lengths.numpy(),
        writer=writer.numpy(),
        floor=None if floor is None else floor.numpy(),
        page_writer=page_writer.numpy(),
        page_size=page_size,
        skip_slot=skip_slot,
        skip_allowed=skip_allowed,
        record=record.numpy(),
        null_page=null_page,
    ):
        return
    rows, tokens = writer.shape[0], slot_mapping.shape[0]
    if tokens == 0:
        record[:, :2] = 0
        record[:, 2:] = -1
        return
    slot = slot_mapping.to(torch.int64)
    token = torch.arange(tokens, device=slot.device)
    owned = torch.zeros(tokens, dtype=torch.bool, device=slot.device)
    wrong = torch.zeros_like(owned)
    start, stop, shift = _spans(query_start, query_row, lengths, rows)
    chunk = max(1, CHUNK_ENTRIES // tokens)
    for begin in range(0, rows, chunk):
        part = slice(begin, min(begin + chunk, rows))
        mine = (token >= start[part].unsqueeze(1)) & (token < stop[part].unsqueeze(1))
        position = token + shift[part].unsqueeze(1)
        flags = _judge(
            slot, position, writer[part], None if floor is None else floor[part], page_writer, page_size, skip_slot,
            skip_allowed, null_page,
        )  # fmt: skip
        flags = torch.where(mine, flags, 0)
        record[part] = _records(flags, position, slot)
        owned, wrong = owned | mine.any(0), wrong | (flags != 0).any(0)
    padding = ~owned & (slot != skip_slot)
    record[rows:] = _records(torch.where(padding, SLOT_PADDING, 0).unsqueeze(0), token.unsqueeze(0), slot)
    if enforce:
        slot_mapping.copy_(torch.where(wrong | padding, skip_slot, slot_mapping))


def _spans(
    query_start: Tensor | None, query_row: Tensor | None, lengths: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [start, stop) of each row, and what a token's index lacks of its position; all int64 [rows]."""
    places = lengths.shape[0]
    place = torch.arange(rows, device=lengths.device) if query_row is None else query_row
    if places == 0:
        return place, torch.zeros_like(place), place
    known = (place >= 0) & (place < places)
    place = place.clamp(0, places - 1)
    if query_start is None:
        start, stop = place, place + 1
    else:
        start, stop = query_start[place].to(torch.int64), query_start[place + 1].to(torch.int64)
    shift = lengths[place].to(torch.int64) - stop
    return start, torch.where(known, stop, 0), shift


def _judge(
    slot: Tensor,
    position: Tensor,
    writer: Tensor,
    floor: Tensor | None,
    page_writer: Tensor,
    page_size: int,
    skip_slot: int,
    skip_allowed: bool,
    null_page: int,
) -> Tensor:
    """The flags int64 [rows, tokens] of slots [tokens] at the positions [rows, tokens] that each row has for them."""
    inside = (slot >= 0) & (slot < page_writer.shape[0] * page_size)
    safe = torch.where(inside, slot, 0)
    page = torch.div(safe, page_size, rounding_mode="floor")
    word, offset = page_writer[page], safe - page * page_size
    column = torch.div(position, page_size, rounding_mode="floor")
    own = (word > 0) & (word == writer.unsqueeze(1) + column) & (column < 1 << ROW_SHIFT)
    flags = torch.where(own, 0, SLOT_PAGE) | torch.where(offset != position - column * page_size, SLOT_OFFSET, 0)
    flags = torch.where(position < 0, 0, flags)
    flags = torch.where(inside, flags, SLOT_RANGE)
    low = position < 0
    if floor is not None:
        low = low | (position < floor.unsqueeze(1))
    flags = flags | torch.where(low, SLOT_FLOOR, 0)
    nowhere = (slot == skip_slot) | (inside & (page == null_page))
    return torch.where(nowhere, 0 if skip_allowed else SLOT_LOST, flags)


def _records(flags: Tensor, place: Tensor, slot: Tensor) -> Tensor:
    """Records int64 [rows, 4] of flags and places [rows, tokens] and slots [tokens]; there is at least one token."""
    wrong = flags != 0
    together = torch.zeros(flags.shape[0], dtype=torch.int64, device=flags.device)
    for bit in (SLOT_RANGE, SLOT_PAGE, SLOT_OFFSET, SLOT_FLOOR, SLOT_LOST, SLOT_PADDING):
        together = together | torch.where(((flags & bit) != 0).any(1), bit, 0)
    # Arg max of a row of 0 and 1 is its first 1.
    first, any_wrong = wrong.to(torch.uint8).argmax(1), wrong.any(1)
    at = torch.where(any_wrong, place.gather(1, first.unsqueeze(1)).squeeze(1), -1)
    return torch.stack((together, wrong.sum(1), at, torch.where(any_wrong, slot[first], -1)), 1)
