"""Problems of a call, found in PyTorch operations without a look at any value."""

from __future__ import annotations

import torch
from torch import Tensor

_NEVER = (1 << 63) - 1


def write_first(event: Tensor, codes: Tensor, pages: Tensor, places: Tensor, ranks: Tensor) -> None:
    """Of `codes` that are not 0 the one of lowest rank goes to `event`, with its page and place; none: nothing is done.

    All are int64 [n], n > 0.
    """
    ranked = torch.where(codes != 0, ranks, _NEVER)
    at = ranked.argmin().reshape(1)
    found = torch.cat((codes[at], pages[at], places[at]))
    event[:3].copy_(torch.where(ranked[at] != _NEVER, found, event[:3]))


def holds(page_content: Tensor, content: Tensor) -> Tensor:
    """Whether what pages hold, int64 [n, 2], is this content, int64 [n, 2]: bool [n]. 0 and 0 is nobody's."""
    return (page_content == content).all(1) & (page_content != 0).any(1)
