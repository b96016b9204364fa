"""`stamp_rows` in PyTorch operations: no synchronisation, no shape that depends on data.

What is masked away becomes the addition of nothing, or page 0 written with what it holds: no token ever stamps that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import CONTENT, DOUBLE_ALLOCATION, NO_PAGE, NULL, NULL_PAGE, OUT_OF_RANGE, SPOILED
from kvguard.kernels.mixing import signed64
from kvguard.kernels.stamp_rows.host_op import stamp_tokens
from kvguard.kernels.torch_events import holds, write_first
from kvguard.kernels.verify_pages.torch_op import mix_tensor, on_host


def stamp_rows(
    *,
    slots: Tensor,
    rows: Tensor,
    first: Tensor,
    first_delta: int,
    offset: Tensor | None,
    adopted: Tensor | None,
    content: Tensor | None,
    page_content: Tensor | None,
    page_tag: Tensor,
    page_owner: Tensor,
    page_chain: Tensor,
    digest: Tensor,
    page_size: int,
    base_tag: int,
    key: int,
    event: Tensor,
) -> None:
    """See `kvguard.kernels.stamp_rows.stamp_rows` for the contract."""
    tokens, batch, pages = slots.shape[0], rows.shape[0], page_tag.shape[0]
    if batch == 0:
        return
    if on_host(slots) and offset is None and adopted is None:
        done = stamp_tokens(
            slots=slots.numpy(),
            rows=rows.numpy(),
            first=first.numpy(),
            first_delta=first_delta,
            page_tag=page_tag.numpy(),
            page_owner=page_owner.numpy(),
            digest=digest.numpy(),
            page_size=page_size,
            base_tag=signed64(base_tag),
            key=key,
        )
        if done:
            return
    known = (rows >= 0) & (rows < digest.shape[0])
    row_codes = torch.where(known, 0, OUT_OF_RANGE)
    row_pages = torch.full_like(rows, NO_PAGE)
    if digest.shape[0] and adopted is not None:
        fresh = known & (adopted >= 0)
        prefix = torch.div(adopted, page_size, rounding_mode="floor")
        outside = fresh & (prefix >= pages)
        ends = (adopted > 0) & ~outside
        chain = torch.where(ends, page_chain[prefix.clamp(0, pages - 1)], 0)
        if content is not None and page_content is not None:
            other = fresh & ends & ~holds(page_content[prefix.clamp(0, pages - 1)], content)
            chain = chain + torch.where(other, SPOILED, 0)
            row_codes = torch.where(other, CONTENT, row_codes)
            row_pages = torch.where(other, prefix, row_pages)
        target = torch.where(fresh, rows, 0)
        digest.index_add_(0, target, torch.where(fresh, chain - digest[target], 0))
        row_codes = torch.where(outside, OUT_OF_RANGE, row_codes)
        row_pages = torch.where(outside, prefix, row_pages)
    place = torch.arange(batch, device=rows.device)
    if tokens == 0 or digest.shape[0] == 0:
        write_first(event, row_codes, row_pages, place, place)
        return
    token = torch.arange(tokens, device=slots.device)
    if offset is None:
        row, owned, position = rows, known, first.to(torch.int64) + first_delta
    else:
        bounds = offset.to(torch.int64)
        which = torch.bucketize(token, bounds[1:], right=True)
        owned = (which < batch) & (token >= bounds[0])
        which = which.clamp(max=batch - 1)
        row, owned = rows[which], owned & known[which]
        position = first[which].to(torch.int64) + first_delta + token - bounds[which]
    opens = owned & (position >= 0) & (position % page_size == 0)
    page = torch.div(slots.to(torch.int64), page_size, rounding_mode="floor")
    column = torch.div(position, page_size, rounding_mode="floor")
    inside = (page >= 0) & (page < pages)
    stamped = opens & inside & (page != NULL_PAGE)
    target = torch.where(stamped, page, NULL_PAGE)
    before, tag = page_tag[target], token + signed64(base_tag)
    page_tag.index_put_((target,), torch.where(stamped, tag, before))
    # A page that was opened twice shows the tag of one token only; its owner is to be of the same one.
    won = stamped & (page_tag[target] == tag)
    winner = torch.where(won, page, NULL_PAGE)
    page_owner.index_put_((winner,), torch.where(won, ((row + 1) << 32) | column, page_owner[winner]))
    term = torch.where(stamped, mix_tensor(key, column, tag), 0)
    digest.index_add_(0, torch.where(stamped, row, 0), term)
    # Codes in reverse order of who has the last word.
    codes = torch.where(stamped & ((before != 0) | ~won), DOUBLE_ALLOCATION, 0)
    codes = torch.where(opens & (page == NULL_PAGE), NULL, codes)
    codes = torch.where(opens & ~inside, OUT_OF_RANGE, codes)
    write_first(
        event,
        torch.cat((row_codes, codes)),
        torch.cat((row_pages, page)),
        torch.cat((place, token)),
        torch.cat((place * 2, token * 2 + 1)),
    )
