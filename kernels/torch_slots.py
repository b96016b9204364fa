"""Slot mappings in PyTorch operations; what operations on token rows have in common."""

from __future__ import annotations

import torch
from torch import Tensor


def skip_tokens(slot_mapping: Tensor, query_start: Tensor | None, flagged: Tensor, skip_slot: int) -> None:
    """The tokens of flagged rows, bool [batch, not empty], write to `skip_slot`, in place and without synchronisation.

    Row b has tokens query_start[b] .. query_start[b + 1] - 1; without query_start token b. What lies outside is
    nobody's.
    """
    batch = flagged.shape[0]
    token = torch.arange(slot_mapping.shape[0], device=slot_mapping.device)
    if query_start is None:
        place, owned = token, token < batch
    else:
        bounds = query_start[: batch + 1].to(torch.int64)
        place = torch.bucketize(token, bounds[1:], right=True)
        owned = (place < batch) & (token >= bounds[0])
    drop = owned & flagged[place.clamp(max=batch - 1)]
    slot_mapping.copy_(torch.where(drop, skip_slot, slot_mapping))
