"""`retire_pages` in PyTorch operations: no synchronisation, no shape that depends on data."""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import (
    ANYBODY,
    DOUBLE_FREE,
    FREE_UNOWNED,
    NULL,
    NULL_PAGE,
    OUT_OF_RANGE,
    ROW_SHIFT,
    TREE,
    UNSAID,
)
from kvguard.kernels.torch_events import write_first


def retire_pages(
    *,
    pages: Tensor,
    page_tag: Tensor,
    page_owner: Tensor,
    page_chain: Tensor,
    divisor: int,
    by: int | Tensor,
    event: Tensor,
) -> None:
    """See `kvguard.kernels.retire_pages.retire_pages` for the contract."""
    count = pages.shape[0]
    if count == 0:
        return
    place = torch.arange(count, device=pages.device)
    page = torch.div(pages.to(torch.int64), divisor, rounding_mode="floor")
    inside = (page >= 0) & (page < page_tag.shape[0])
    given = inside & (page != NULL_PAGE)
    holder = page_owner[torch.where(given, page, NULL_PAGE)] >> ROW_SHIFT
    if not isinstance(by, Tensor):
        by = torch.full_like(page, by)
    # What is vacant belongs to nobody, and is a double free below.
    foreign = given & (holder != 0) & (holder != by) & (by != ANYBODY) & (by != UNSAID)
    given = given & ~foreign
    evicted = given & (holder == TREE) & (by != ANYBODY)
    # What is not given back writes to page 0 what that page holds.
    target = torch.where(given, page, NULL_PAGE)
    twice = given & (page_tag[target] == 0)
    if divisor == 1:
        # The first to name a page leaves its place there, everybody looks for their own.
        marks = torch.where(given, place, page_tag[NULL_PAGE])
        page_tag.scatter_reduce_(0, target, marks, "amin", include_self=False)
        twice = twice | (given & (page_tag[target] != place))
    for of_page in (page_tag, page_owner):
        of_page.index_put_((target,), torch.where(given, 0, of_page[NULL_PAGE]))
    left = torch.where(evicted, 0, page_chain[NULL_PAGE])
    page_chain.index_put_((torch.where(evicted, page, NULL_PAGE),), left)
    codes = torch.where(twice, DOUBLE_FREE, 0)
    codes = torch.where(foreign, FREE_UNOWNED, codes)
    codes = torch.where(inside & (page == NULL_PAGE), NULL, codes)
    codes = torch.where(inside, codes, OUT_OF_RANGE)
    write_first(event, codes, page, place, place)
