"""What the Triton kernels that report an event have in common. None needs a workspace: they count in the event itself.

A problem's rank is its place, then whether it is a token's, then its code, in one word. While a call runs, the word of
the place holds the distance of the lowest rank from `NEVER`, so that zero says none, and the fourth word counts the
programs that have ended. The last of them writes the event.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvguard.kernels import events

CODE, PAGE, PLACE = tl.constexpr(events.CODE), tl.constexpr(events.PAGE), tl.constexpr(events.PLACE)
ENDED = tl.constexpr(events.EVENT_WORDS - 1)
NEVER = tl.constexpr(1 << 62)
OUT_OF_RANGE, NULL = tl.constexpr(events.OUT_OF_RANGE), tl.constexpr(events.NULL)
DOUBLE_ALLOCATION, DOUBLE_FREE = tl.constexpr(events.DOUBLE_ALLOCATION), tl.constexpr(events.DOUBLE_FREE)
FREE_UNOWNED, ANYBODY, UNSAID, ROW_SHIFT = (
    tl.constexpr(word) for word in (events.FREE_UNOWNED, events.ANYBODY, events.UNSAID, events.ROW_SHIFT)
)
CONTENT_CODE, SPOILED = tl.constexpr(events.CONTENT), tl.constexpr(events.SPOILED)
LANES = tl.constexpr(events.CONTENT_LANES)
NULL_PAGE, NO_PAGE, TREE = tl.constexpr(events.NULL_PAGE), tl.constexpr(events.NO_PAGE), tl.constexpr(events.TREE)


@triton.jit
def floor_divide(value, divisor):
    """Floor division of int64 by a positive constant; the operator rounds to zero."""
    return tl.where(value < 0, -((divisor - 1 - value) // divisor), value // divisor)


@triton.jit
def rank_of(place, is_token: tl.constexpr, codes):
    """Ranks int64 [n] of codes int32 [n]; `NEVER` for those that are 0."""
    return tl.where(codes != 0, place * 16 + is_token * 8 + codes, NEVER)


@triton.jit
def note_problem(event, rank):
    """The lowest rank of this program, if it has a problem."""
    if rank < NEVER:
        tl.atomic_max(event + PLACE, -rank + NEVER, sem="relaxed")


@triton.jit
def first_problem(event, programs):
    """In the last of so many programs the lowest rank of all of them; `NEVER` in the others and if there is none."""
    rank = tl.full((), NEVER, tl.int64)
    tl.debug_barrier()
    last = tl.atomic_add(event + ENDED, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()
    if last:
        tl.atomic_xchg(event + ENDED, 0, sem="relaxed")
        noted = tl.atomic_max(event + PLACE, 0, sem="relaxed")
        # Anything smaller is the place of an event that nobody took away.
        if noted > NEVER // 2:
            rank = -noted + NEVER
    return rank


@triton.jit
def write_event(event, rank, page):
    """The problem of this rank."""
    tl.store(event + CODE, rank & 7)
    tl.store(event + PAGE, page)
    tl.store(event + PLACE, rank // 16)


@triton.jit
def holds_content(page_content, page, content, place, mask):
    """Whether pages hold the content at these places, lane by lane; 0 and 0 is nobody's. True outside of the mask."""
    first = tl.load(page_content + page * LANES, mask=mask, other=1)
    second = tl.load(page_content + page * LANES + 1, mask=mask, other=1)
    same = first == tl.load(content + place * LANES, mask=mask, other=1)
    same = same & (second == tl.load(content + place * LANES + 1, mask=mask, other=1))
    return same & ((first | second) != 0)


if not isinstance(floor_divide, triton.JITFunction):
    # Interpreted: as plain functions, see `verify_pages.triton_op`.
    for _name in ("floor_divide", "rank_of", "note_problem", "first_problem", "write_event", "holds_content"):
        globals()[_name] = globals()[_name].rewrite()
