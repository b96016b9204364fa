"""`publish_row` in one Triton launch of one program: a path is a running sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels.arrays import require_dense
from kvguard.kernels.mixing import signed64
from kvguard.kernels.triton_events import (
    CONTENT_CODE,
    LANES,
    NEVER,
    NULL_PAGE,
    SPOILED,
    TREE,
    floor_divide,
    holds_content,
    write_event,
)
from kvguard.kernels.verify_pages.triton_op import mix_terms

BLOCK = 512
WARPS = 4
POINTERS = (
    "old", "new", "content", "page_content", "event", "page_tag", "page_owner", "page_chain", "digest", "chains",
)  # fmt: skip
SCALARS = ("row", "start", "columns", "count", "old_stride", "new_stride", "num_pages", "key")


@triton.jit
def _join(restarts, value, next_restarts, next_value):
    """Two pieces of the path: a sum, that goes on from what is before it or begins anew."""
    return restarts | next_restarts, tl.where(next_restarts != 0, next_value, value + next_value)


@triton.jit
def _pages(slots, place, stride, mask, num_pages, PAGE_SIZE: tl.constexpr):
    """Pages, and which of them are in the pool."""
    page = floor_divide(tl.load(slots + place * stride, mask=mask, other=-1).to(tl.int64), PAGE_SIZE)
    return page, (page >= 0) & (page < num_pages)


@triton.jit
def _own(old, new, page_owner, place, mask, row, start, old_stride, new_stride, num_pages, PAGE_SIZE: tl.constexpr):
    """Pages that the row holds now, which of them are in the pool, and which are its own."""
    ahead = tl.where(start > 0, 1, 0)
    page, inside = _pages(new, place + ahead, new_stride, mask, num_pages, PAGE_SIZE)
    before, _ = _pages(old, place, old_stride, mask, num_pages, PAGE_SIZE)
    inside = inside & mask
    owner = tl.load(page_owner + page, mask=inside, other=0)
    own = inside & (page == before) & (page != NULL_PAGE) & (owner == (((row + 1) << 32) | (start + place)))
    return page, inside, own


@triton.jit
def _first_other(old, new, content, page_content, columns, start, old_stride, new_stride, num_pages,
                 BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr):  # fmt: skip
    """The first column whose page took the place of the row's and holds other content; `NEVER` if there is none."""
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    ahead = tl.where(start > 0, 1, 0)
    firsts = tl.full([BLOCK], NEVER, tl.int64)
    for block in range(0, columns, BLOCK):
        place = block + lanes
        mask = place < columns
        page, inside = _pages(new, place + ahead, new_stride, mask, num_pages, PAGE_SIZE)
        before, _ = _pages(old, place, old_stride, mask, num_pages, PAGE_SIZE)
        changed = mask & inside & (page != NULL_PAGE) & (page != before)
        other = changed & (holds_content(page_content, page, content, place, changed) == 0)
        firsts = tl.minimum(firsts, tl.where(other, place, NEVER))
    return tl.min(firsts)


@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=[*POINTERS, *SCALARS])
def publish_kernel(
    old, new, content, page_content, event, page_tag, page_owner, page_chain, digest, chains,
    row: tl.int64, start: tl.int64, columns: tl.int64, count: tl.int64, old_stride: tl.int64, new_stride: tl.int64,
    num_pages: tl.int64, key: tl.int64,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, CONTENT: tl.constexpr,
):  # fmt: skip
    """One program. columns: stop - start; count: of `old`; chains int64 [columns]: room for what is to be written."""
    row, start, key = row.to(tl.int64), start.to(tl.int64), key.to(tl.uint64)
    columns, count = columns.to(tl.int64), count.to(tl.int64)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    path = row * 0
    if start > 0:
        page, inside = _pages(new, row * 0, new_stride, row >= 0, num_pages, PAGE_SIZE)
        path = tl.load(page_chain + page, mask=inside, other=0)
    terms = tl.full([BLOCK], 0, tl.int64)
    rest = tl.full([BLOCK], 0, tl.int64)
    for block in range(0, count, BLOCK):
        place = block + lanes
        page, inside = _pages(old, place, old_stride, place < count, num_pages, PAGE_SIZE)
        term = mix_terms(key, start + place, tl.load(page_tag + page, mask=inside, other=0))
        term = tl.where(inside, term, 0)
        terms += term
        rest += tl.where(place >= columns, term, 0)
    error = tl.load(digest + row) - path - tl.sum(terms)
    if CONTENT:
        other = _first_other(
            old, new, content, page_content, columns, start, old_stride, new_stride, num_pages, BLOCK, PAGE_SIZE
        )
        if other < NEVER:
            error += SPOILED
            ahead = tl.where(start > 0, 1, 0)
            page, inside = _pages(new, other + ahead, new_stride, other < columns, num_pages, PAGE_SIZE)
            write_event(event, other * 16 + CONTENT_CODE, page)
    for block in range(0, columns, BLOCK):
        place = block + lanes
        page, inside, own = _own(
            old, new, page_owner, place, place < columns, row, start, old_stride, new_stride, num_pages, PAGE_SIZE
        )
        term = mix_terms(key, start + place, tl.load(page_tag + page, mask=own, other=0))
        restarts = (place < columns) & (own == 0)
        value = tl.load(page_chain + page, mask=inside & restarts, other=0)
        value = tl.where(own, term, value)
        began, run = tl.associative_scan((restarts.to(tl.int32), value), 0, _join)
        run += tl.where(began != 0, 0, path)
        tl.store(chains + place, run + error, mask=place < columns)
        path = tl.sum(tl.where(lanes == BLOCK - 1, run, 0))
    # Owners, chains and contents have all been read by now.
    tl.debug_barrier()
    if CONTENT:
        # Word by word, in a loop of its own: fewer registers. Owners are still those of before.
        for block in range(0, columns * LANES, BLOCK):
            place = (block + lanes) // LANES
            page, inside, own = _own(
                old, new, page_owner, place, place < columns, row, start, old_stride, new_stride, num_pages, PAGE_SIZE
            )
            lane = (block + lanes) % LANES
            word = tl.load(content + block + lanes, mask=own, other=0)
            tl.store(page_content + page * LANES + lane, word, mask=own)
        tl.debug_barrier()
    for block in range(0, columns, BLOCK):
        place = block + lanes
        page, inside, own = _own(
            old, new, page_owner, place, place < columns, row, start, old_stride, new_stride, num_pages, PAGE_SIZE
        )
        # What another node of the tree has left there stays in it.
        left = tl.load(page_chain + page, mask=own, other=0)
        tl.store(page_chain + page, tl.load(chains + place, mask=own, other=0) + left, mask=own)
        tl.store(page_owner + page, TREE, mask=own)
    tl.store(digest + row, path + tl.sum(rest) + error)


INTERPRETED = not isinstance(publish_kernel, triton.JITFunction)
if INTERPRETED:
    for _name in ("_pages", "_own", "_first_other"):
        globals()[_name] = globals()[_name].rewrite()


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
    require_dense(
        page_tag=page_tag, page_owner=page_owner, page_chain=page_chain, digest=digest, content=content,
        page_content=page_content, event=event,
    )  # fmt: skip
    columns = stop - start
    chains = torch.empty(max(columns, 1), dtype=torch.int64, device=page_tag.device)
    publish_kernel[(1,)](
        old, new, page_tag if content is None else content, page_tag if page_content is None else page_content,
        page_tag if event is None else event, page_tag, page_owner, page_chain, digest, chains,
        row, start, columns, old.shape[0], old.stride(0), new.stride(0), page_tag.shape[0], signed64(key),
        BLOCK=BLOCK, PAGE_SIZE=page_size, CONTENT=content is not None, num_warps=WARPS,
    )  # fmt: skip
