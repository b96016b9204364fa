"""`scatter_tags` in PyTorch operations: one gather and one scatter, no synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def scatter_tags(*, page_tag: Tensor, pages: Tensor, tags: Tensor) -> None:
    """See `kvguard.kernels.scatter_tags.scatter_tags` for the contract."""
    if pages.shape[0] == 0 or page_tag.shape[0] == 0:
        return
    inside = (pages >= 0) & (pages < page_tag.shape[0])
    # An ignored change becomes the addition of nothing to page 0, so that no shape depends on the data.
    target = torch.where(inside, pages, 0)
    page_tag.index_add_(0, target, torch.where(inside, tags - page_tag[target], 0))
