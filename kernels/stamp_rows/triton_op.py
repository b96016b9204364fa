"""`stamp_rows` in one Triton launch.

Decode: a program takes a block of rows, a token each. Otherwise it takes a row, so that a fresh row's digest is written
once, with all of its terms, and steps from one opened page to the next. The exchange of tags tells who is displaced by
whom, so that pages that are opened twice need no second look.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvguard.kernels.arrays import require_dense
from kvguard.kernels.mixing import signed64
from kvguard.kernels.triton_events import (
    CONTENT_CODE,
    DOUBLE_ALLOCATION,
    NEVER,
    NO_PAGE,
    NULL,
    NULL_PAGE,
    OUT_OF_RANGE,
    SPOILED,
    first_problem,
    floor_divide,
    holds_content,
    note_problem,
    rank_of,
    write_event,
)
from kvguard.kernels.verify_pages.triton_op import mix_terms

BLOCK = 256
WARPS = 4
POINTERS = (
    "slots", "rows", "first", "offset", "adopted", "content", "page_content", "page_tag", "page_owner", "page_chain",
    "digest", "event",
)  # fmt: skip
SCALARS = ("batch", "tokens", "table_rows", "num_pages", "first_delta", "base_tag", "key")


@triton.jit
def _stamp(token, opens, slot, row, column, page_tag, page_owner, num_pages, base_tag, tokens, key,
           PAGE_SIZE: tl.constexpr):  # fmt: skip
    """Stamp the pages that `opens` says; terms and ranks int64 [BLOCK]."""
    page = floor_divide(slot, PAGE_SIZE)
    inside = (page >= 0) & (page < num_pages)
    stamped = opens & inside & (page != NULL_PAGE)
    tag = token + base_tag
    before = tl.atomic_xchg(page_tag + page, tag, mask=stamped, sem="relaxed")
    tl.store(page_owner + page, ((row + 1) << 32) | column, mask=stamped)
    # The place of whoever stamped the page earlier in this call: a tag of this call's is reported where it was given.
    earlier = before - base_tag
    of_call = (earlier >= 0) & (earlier < tokens)
    codes = tl.where(stamped & (before != 0), DOUBLE_ALLOCATION, 0)
    codes = tl.where(opens & (page == NULL_PAGE), NULL, codes)
    codes = tl.where(opens & (inside == 0), OUT_OF_RANGE, codes)
    place = tl.where((codes == DOUBLE_ALLOCATION) & of_call, earlier, token)
    return tl.where(stamped, mix_terms(key, column, tag), 0), rank_of(place, 1, codes)


@triton.jit
def _begin(digest, adopted, content, page_content, page_chain, row, b, mask, num_pages, table_rows,
           ADOPTS: tl.constexpr, CONTENT: tl.constexpr, PAGE_SIZE: tl.constexpr):  # fmt: skip
    """Which rows there are, which of them are fresh, the digests that these begin with, and ranks."""
    known = mask & (row >= 0) & (row < table_rows)
    codes = tl.where(mask & (known == 0), OUT_OF_RANGE, 0)
    fresh = known & (row < 0)
    begin = row * 0
    if ADOPTS:
        prefix = tl.load(adopted + b, mask=mask, other=-1)
        fresh = known & (prefix >= 0)
        outside = fresh & (prefix // PAGE_SIZE >= num_pages)
        ends = fresh & (prefix > 0) & (outside == 0)
        begin = tl.load(page_chain + prefix // PAGE_SIZE, mask=ends, other=0)
        codes = tl.where(outside, OUT_OF_RANGE, codes)
        if CONTENT:
            other = ends & (holds_content(page_content, prefix // PAGE_SIZE, content, b, ends) == 0)
            begin += tl.where(other, SPOILED, 0)
            codes = tl.where(other, CONTENT_CODE, codes)
    return known, fresh, begin, rank_of(b, 0, codes)


# One binary, however the arrays are aligned and whatever the numbers are.
@triton.jit(do_not_specialize=SCALARS, do_not_specialize_on_alignment=[*POINTERS, *SCALARS])
def stamp_kernel(
    slots, rows, first, offset, adopted, content, page_content, page_tag, page_owner, page_chain, digest, event,
    batch: tl.int64, tokens: tl.int64, table_rows: tl.int64, num_pages: tl.int64, first_delta: tl.int64,
    base_tag: tl.int64, key: tl.int64,
    BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, DECODE: tl.constexpr, ADOPTS: tl.constexpr, CONTENT: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows) for DECODE, else (rows)."""
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    base_tag, key, tokens = base_tag.to(tl.int64), key.to(tl.uint64), tokens.to(tl.int64)
    if DECODE:
        b = program * BLOCK + lanes
        mask = b < batch
        row = tl.load(rows + b, mask=mask, other=0)
        known, fresh, begin, ranks = _begin(
            digest, adopted, content, page_content, page_chain, row, b, mask, num_pages, table_rows, ADOPTS, CONTENT,
            PAGE_SIZE,
        )  # fmt: skip
        position = tl.load(first + b, mask=mask, other=0).to(tl.int64) + first_delta
        opens = known & (position >= 0) & (position % PAGE_SIZE == 0)
        slot = tl.load(slots + b, mask=opens, other=0).to(tl.int64)
        term, found = _stamp(
            b, opens, slot, row, position // PAGE_SIZE, page_tag, page_owner, num_pages, base_tag, tokens, key,
            PAGE_SIZE,
        )  # fmt: skip
        tl.store(digest + row, begin + term, mask=fresh)
        tl.atomic_add(digest + row, term, mask=opens & (fresh == 0), sem="relaxed")
        note_problem(event, tl.min(tl.minimum(ranks, found)))
    else:
        b = program
        row = tl.load(rows + b)
        known, fresh, begin, rank = _begin(
            digest, adopted, content, page_content, page_chain, row, b, b < batch, num_pages, table_rows, ADOPTS,
            CONTENT, PAGE_SIZE,
        )  # fmt: skip
        if known:
            from_token = tl.load(offset + b).to(tl.int64)
            stop = tl.minimum(tl.load(offset + b + 1).to(tl.int64), tokens)
            # The position of token t is t + shift; the first multiple of the page size that is not negative.
            shift = tl.load(first + b).to(tl.int64) + first_delta - from_token
            position = tl.maximum(tl.maximum(from_token, 0) + shift, 0)
            column = (position + PAGE_SIZE - 1) // PAGE_SIZE
            count = tl.maximum(stop - column * PAGE_SIZE + shift + PAGE_SIZE - 1, 0) // PAGE_SIZE
            terms = tl.full([BLOCK], 0, tl.int64)
            ranks = tl.full([BLOCK], NEVER, tl.int64)
            for block in range(0, count, BLOCK):
                columns = column + block + lanes
                token = columns * PAGE_SIZE - shift
                opens = token < stop
                slot = tl.load(slots + token, mask=opens, other=0).to(tl.int64)
                term, found = _stamp(
                    token, opens, slot, row, columns, page_tag, page_owner, num_pages, base_tag, tokens, key,
                    PAGE_SIZE,
                )  # fmt: skip
                terms += term
                ranks = tl.minimum(ranks, found)
            total = tl.sum(terms)
            if fresh:
                tl.store(digest + row, begin + total)
            else:
                tl.atomic_add(digest + row, total, sem="relaxed")
            rank = tl.minimum(rank, tl.min(ranks))
        note_problem(event, rank)
    rank = first_problem(event, tl.num_programs(0))
    if rank < NEVER:
        place = rank // 16
        page = rank * 0 + NO_PAGE
        if (rank & 8) != 0:
            page = floor_divide(tl.load(slots + place).to(tl.int64), PAGE_SIZE)
        else:
            row_there = tl.load(rows + place)
            if ADOPTS:
                if (row_there >= 0) & (row_there < table_rows):
                    page = tl.load(adopted + place) // PAGE_SIZE
        write_event(event, rank, page)


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
    batch = rows.shape[0]
    if batch == 0:
        return
    require_dense(
        slots=slots, rows=rows, first=first, offset=offset, adopted=adopted, page_tag=page_tag, page_owner=page_owner,
        page_chain=page_chain, digest=digest, event=event, content=content, page_content=page_content,
    )  # fmt: skip
    stamp_kernel[(-(-batch // BLOCK) if offset is None else batch,)](
        slots, rows, first, rows if offset is None else offset, rows if adopted is None else adopted,
        rows if content is None else content, rows if page_content is None else page_content,
        page_tag, page_owner, page_chain, digest, event,
        batch, slots.shape[0], digest.shape[0], page_tag.shape[0], first_delta, signed64(base_tag), signed64(key),
        BLOCK=BLOCK, PAGE_SIZE=page_size, DECODE=offset is None, ADOPTS=adopted is not None,
        CONTENT=content is not None and adopted is not None, num_warps=WARPS,
    )  # fmt: skip
