"""`pair_windows` in one Triton launch: a program takes a block of tokens.

As in `stamp_rows.triton_op` the exchange of tags tells who is displaced by whom.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels import events
from kvguard.kernels.arrays import require_dense
from kvguard.kernels.mixing import signed64
from kvguard.kernels.triton_events import (
    DOUBLE_ALLOCATION,
    NEVER,
    NULL,
    NULL_PAGE,
    OUT_OF_RANGE,
    first_problem,
    floor_divide,
    note_problem,
    rank_of,
    write_event,
)

BLOCK = 256
WARPS = 4
VACANT = tl.constexpr(events.VACANT)
POINTERS = ("full", "window", "peer_tag", "window_tag", "window_holder", "event")
SCALARS = ("tokens", "num_pages", "window_pages", "base_tag")


@triton.jit
def _pages(full, window, token, mask, PAGE_SIZE: tl.constexpr):
    """Whether each token is the first of its page, and its two pages."""
    slot = tl.load(full + token, mask=mask, other=0).to(tl.int64)
    page = floor_divide(slot, PAGE_SIZE)
    window_page = floor_divide(tl.load(window + token, mask=mask, other=0).to(tl.int64), PAGE_SIZE)
    return mask & (slot == page * PAGE_SIZE), page, window_page


# One binary, however the arrays are aligned and whatever the numbers are.
@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=[*POINTERS, *SCALARS])
def pair_kernel(
    full, window, peer_tag, window_tag, window_holder, event,
    tokens: tl.int64, num_pages: tl.int64, window_pages: tl.int64, base_tag: tl.int64,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens)."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    base_tag, tokens = base_tag.to(tl.int64), tokens.to(tl.int64)
    heads, page, window_page = _pages(full, window, token, token < tokens, PAGE_SIZE)
    inside = (page >= 0) & (page < num_pages) & (window_page >= 0) & (window_page < window_pages)
    null = (page == NULL_PAGE) | (window_page == NULL_PAGE)
    paired = heads & inside & (null == 0)
    place = token
    if FRESH:
        tag = token + base_tag
        before = tl.atomic_xchg(window_tag + window_page, tag, mask=paired, sem="relaxed")
        codes = tl.where(paired & (before != 0), DOUBLE_ALLOCATION, 0)
        # Whoever stamped the page earlier in this call is told of where its tag was given.
        earlier = before - base_tag
        of_call = (codes == DOUBLE_ALLOCATION) & (earlier >= 0) & (earlier < tokens)
        place = tl.where(of_call, earlier, token)
    else:
        tag = tl.load(window_tag + window_page, mask=paired, other=0)
        codes = tl.where(paired & (tag == 0), VACANT, 0)
    tl.store(peer_tag + page, tag, mask=paired)
    tl.store(window_holder + window_page, page, mask=paired)
    codes = tl.where(heads & null, NULL, codes)
    codes = tl.where(heads & (inside == 0), OUT_OF_RANGE, codes)
    note_problem(event, tl.min(rank_of(place, 0, codes)))
    rank = first_problem(event, tl.num_programs(0))
    if rank < NEVER:
        head, page_there, window_there = _pages(full, window, rank // 16, rank >= 0, PAGE_SIZE)
        if (page_there >= 0) & (page_there < num_pages):
            if (page_there != NULL_PAGE) | (window_there < 0) | (window_there >= window_pages):
                page_there = window_there
        write_event(event, rank, page_there)


if not isinstance(pair_kernel, triton.JITFunction):
    globals()["_pages"] = globals()["_pages"].rewrite()


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
    require_dense(
        full=full, window=window, peer_tag=peer_tag, window_tag=window_tag, window_holder=window_holder, event=event
    )
    pair_kernel[(-(-tokens // BLOCK),)](
        full, window, peer_tag, window_tag, window_holder, event,
        tokens, peer_tag.shape[0], window_tag.shape[0], signed64(base_tag),
        BLOCK=BLOCK, PAGE_SIZE=page_size, FRESH=fresh, num_warps=WARPS,
    )  # fmt: skip
