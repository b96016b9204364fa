"""`pair_windows` in PyTorch operations: no synchronisation, no shape that depends on data.

What is masked away writes to page 0 what that page holds: no token ever pairs it. On a CPU, where each operation costs
microseconds, pairs that are all sound are written down in NumPy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvguard.kernels.events import DOUBLE_ALLOCATION, NULL, NULL_PAGE, OUT_OF_RANGE, VACANT
from kvguard.kernels.mixing import signed64
from kvguard.kernels.pair_windows.host_op import pair_sound
from kvguard.kernels.torch_events import write_first
from kvguard.kernels.verify_pages.torch_op import on_host


def pair_windows(
    *,
    full: Tensor,
    window: Tensor,
    fresh: bool,
    peer_tag: Tensor,
    window_tag: Tensor,
    window_holder: Tensor,
    page_size: int,
    base_tag: int,
    event: Tensor,
) -> None:
    """See `kvguard.kernels.pair_windows.pair_windows` for the contract."""
    tokens = full.shape[0]
    if tokens == 0:
        return
    if on_host(full) and pair_sound(
        full=full.numpy(),
        window=window.numpy(),
        fresh=fresh,
        peer_tag=peer_tag.numpy(),
        window_tag=window_tag.numpy(),
        window_holder=window_holder.numpy(),
        page_size=page_size,
        base_tag=base_tag,
    ):
        return
    token = torch.arange(tokens, device=full.device)
    full, window = full.to(torch.int64), window.to(torch.int64)
    page = torch.div(full, page_size, rounding_mode="floor")
    window_page = torch.div(window, page_size, rounding_mode="floor")
    heads = full % page_size == 0
    inside = (page >= 0) & (page < peer_tag.shape[0])
    window_inside = (window_page >= 0) & (window_page < window_tag.shape[0])
    null = (page == NULL_PAGE) | (window_page == NULL_PAGE)
    paired = heads & inside & window_inside & ~null
    target = torch.where(paired, page, NULL_PAGE)
    window_target = torch.where(paired, window_page, NULL_PAGE)
    before = window_tag[window_target]
    if fresh:
        tag = token + signed64(base_tag)
        window_tag.index_put_((window_target,), torch.where(paired, tag, before))
        # A page that came twice shows the tag of one token only; its holder is to be of the same one.
        won = paired & (window_tag[window_target] == tag)
        codes = torch.where(paired & ((before != 0) | ~won), DOUBLE_ALLOCATION, 0)
    else:
        tag, won = before, paired
        codes = torch.where(paired & (before == 0), VACANT, 0)
    peer_tag.index_put_((target,), torch.where(paired, tag, peer_tag[target]))
    holds = torch.where(won, window_page, NULL_PAGE)
    window_holder.index_put_((holds,), torch.where(won, page, window_holder[holds]))
    codes = torch.where(heads & null, NULL, codes)
    codes = torch.where(heads & ~(inside & window_inside), OUT_OF_RANGE, codes)
    pages = torch.where(inside, torch.where(null & window_inside, NULL_PAGE, window_page), page)
    write_first(event, codes, pages, token, token)
