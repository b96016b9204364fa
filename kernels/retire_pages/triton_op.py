"""`retire_pages` in one Triton launch for page ids, in two for the slots of tokens.

The exchange of a page's tag for 0 tells whether it was vacant, or was named before. Where a page may come again, that
would not do: every tag has to be looked at before the first is taken away, wherever in the grid, hence two launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels.arrays import require_dense
from kvguard.kernels.triton_events import (
    ANYBODY,
    DOUBLE_FREE,
    FREE_UNOWNED,
    NEVER,
    NULL,
    NULL_PAGE,
    OUT_OF_RANGE,
    ROW_SHIFT,
    TREE,
    UNSAID,
    first_problem,
    floor_divide,
    note_problem,
    rank_of,
    write_event,
)

BLOCK = 256
WARPS = 4
POINTERS = ("pages", "holders", "page_tag", "page_owner", "page_chain", "event")
SCALARS = ("count", "stride", "by", "num_pages")


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=[*POINTERS, *SCALARS])
def retire_kernel(
    pages, holders, page_tag, page_owner, page_chain, event,
    count: tl.int64, stride: tl.int64, by: tl.int64, num_pages: tl.int64,
    BLOCK: tl.constexpr, DIVISOR: tl.constexpr, LOOKS: tl.constexpr, CLEARS: tl.constexpr, HOLDERS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of elements). LOOKS: problems are noted; CLEARS: pages become vacant; HOLDERS: one for each page."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    page = floor_divide(tl.load(pages + place * stride, mask=mask, other=0).to(tl.int64), DIVISOR)
    inside = (page >= 0) & (page < num_pages)
    given = mask & inside & (page != NULL_PAGE)
    if HOLDERS:
        holder = tl.load(holders + place, mask=mask, other=ANYBODY)
    else:
        holder = place * 0 + by
    held_by = tl.load(page_owner + page, mask=given, other=0) >> ROW_SHIFT
    # What is vacant belongs to nobody, and is a double free below.
    foreign = given & (held_by != 0) & (holder != ANYBODY) & (holder != UNSAID) & (held_by != holder)
    given = given & (foreign == 0)
    if CLEARS:
        if LOOKS:
            tag = tl.atomic_xchg(page_tag + page, page * 0, mask=given, sem="relaxed")
        else:
            tl.store(page_tag + page, 0, mask=given)
        tl.store(page_owner + page, 0, mask=given)
        tl.store(page_chain + page, 0, mask=given & (held_by == TREE) & (holder != ANYBODY))
    else:
        tag = tl.load(page_tag + page, mask=given, other=0)
    if LOOKS:
        codes = tl.where(given & (tag == 0), DOUBLE_FREE, 0)
        codes = tl.where(foreign, FREE_UNOWNED, codes)
        codes = tl.where(mask & (page == NULL_PAGE), NULL, codes)
        codes = tl.where(mask & (inside == 0), OUT_OF_RANGE, codes)
        note_problem(event, tl.min(rank_of(place, 0, codes)))
        rank = first_problem(event, tl.num_programs(0))
        if rank < NEVER:
            write_event(event, rank, floor_divide(tl.load(pages + rank // 16 * stride).to(tl.int64), DIVISOR))


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
    each = isinstance(by, Tensor)
    require_dense(page_tag=page_tag, page_owner=page_owner, page_chain=page_chain, event=event)
    for looks, clears in ((True, True),) if divisor == 1 else ((True, False), (False, True)):
        retire_kernel[(-(-count // BLOCK),)](
            pages, by if each else pages, page_tag, page_owner, page_chain, event,
            count, pages.stride(0), 0 if each else by, page_tag.shape[0],
            BLOCK=BLOCK, DIVISOR=divisor, LOOKS=looks, CLEARS=clears, HOLDERS=each, num_warps=WARPS,
        )  # fmt: skip
