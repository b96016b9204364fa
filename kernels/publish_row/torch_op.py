"""`publish_row` in PyTorch operations: no synchronisation, no shape that depends on data."""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import CONTENT, NULL_PAGE, SPOILED, TREE, owner_of
from kvguard.kernels.torch_events import holds, write_first
from kvguard.kernels.verify_pages.torch_op import mix_tensor


def _pages(slots: Tensor, page_size: int, num_pages: int) -> tuple[Tensor, Tensor]:
    """int64 pages, page 0 for slots outside the pool, and bool: which are inside."""
    page = torch.div(slots.to(torch.int64), page_size, rounding_mode="floor")
    inside = (page >= 0) & (page < num_pages)
    return torch.where(inside, page, NULL_PAGE), inside


def publish_row(
    *,
    row: int,
    old: Tensor,
    new: Tensor,
    start: int,
    stop: int,
    content: Tensor | None,
    page_content: Tensor | None,
    event: Tensor | None,
    page_tag: Tensor,
    page_owner: Tensor,
    page_chain: Tensor,
    digest: Tensor,
    page_size: int,
    key: int,
) -> None:
    """See `kvguard.kernels.publish_row.publish_row` for the contract."""
    columns = stop - start
    of_row = digest[row : row + 1]
    old_page, old_inside = _pages(old, page_size, page_tag.shape[0])
    column = torch.arange(start, start + old.shape[0], device=page_tag.device)
    terms = torch.where(old_inside, mix_tensor(key, column, page_tag[old_page]), 0)
    new_page, new_inside = _pages(new, page_size, page_tag.shape[0])
    chains = torch.where(new_inside, page_chain[new_page], 0)
    before = chains[:1] if start else torch.zeros_like(of_row)
    error = of_row - before - terms.sum()
    if columns == 0:
        of_row.copy_(before + terms.sum() + error)
        return
    page, chains, inside = new_page[-columns:], chains[-columns:], new_inside[-columns:]
    taken, column = terms[:columns], column[:columns]
    own = inside & old_inside[:columns] & (page == old_page[:columns]) & (page != NULL_PAGE)
    own = own & (page_owner[page] == column + owner_of(row, 0))
    place = torch.arange(columns, device=page_tag.device)
    if content is not None and page_content is not None and event is not None:
        other = inside & (page != NULL_PAGE) & (page != old_page[:columns]) & ~holds(page_content[page], content)
        write_first(event, torch.where(other, CONTENT, 0), page, place, place)
        error = error + torch.where(other.any(), SPOILED, 0)
    # The path restarts at each column that is not the row's own: what has been summed up to there is taken off again.
    summed = torch.where(own, taken, 0).cumsum(0)
    restart = torch.where(own, -1, place).cummax(0).values
    at = restart.clamp(min=0)
    run = summed + torch.where(restart >= 0, chains[at] - summed[at], before)
    # A page of the row has one column, so that no two of these write to one page but to page 0, and that what it holds.
    target = torch.where(own, page, NULL_PAGE)
    page_chain.index_put_((target,), torch.where(own, run + error + chains, page_chain[NULL_PAGE]))
    page_owner.index_put_((target,), torch.where(own, TREE, page_owner[NULL_PAGE]))
    if content is not None and page_content is not None:
        page_content.index_put_((target,), torch.where(own.unsqueeze(1), content, page_content[NULL_PAGE]))
    of_row.copy_(run[-1:] + terms[columns:].sum() + error)
