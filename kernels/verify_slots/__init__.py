"""Does every token of the step write to the slot that belongs to it?

One call checks all tokens of one pool, padding included. It must run on the stream of the forward, after the slot
mapping is final, and before anything is written to the cache. A wild write that it redirects has no victim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvguard.kernels.backend import DEVICE_BACKENDS, backend_of, check_backend, default_backend, token_operation
from kvguard.kernels.verify_slots import layout

__all__ = ["layout", "verify_slots", "verify_slots_step"]


def verify_slots(
    *,
    slot_mapping: Any,
    query_start: Any,
    query_row: Any,
    lengths: Any,
    writer: Any,
    floor: Any,
    page_writer: Any,
    page_size: int,
    skip_slot: int,
    skip_allowed: bool,
    enforce: bool,
    record: Any,
    null_page: int = 0,
    backend: str | None = None,
) -> None:
    """Check every token, write a record for each row and one for the padding, and redirect wrong tokens, in place.

    All arrays are NumPy arrays, or all are torch tensors on one device, or all are CuPy arrays. `backend`: None takes
    that of `slot_mapping`, Triton on a GPU where it is installed. `triton` and `cupy` want writer, floor, page_writer
    and record without gaps. ValueError where shapes or page size do not fit.

    Reads
      slot_mapping int32 or int64 [tokens]: where each token of the step is written; slot // page_size is the page
      query_start  int32 or int64 [places + 1 or more]: place p of the batch has tokens query_start[p] ..
                   query_start[p + 1] - 1; what follows is nobody's. None: place p has token p
      query_row    int64 [rows]: the place of each checked row; None: row r is at place r. A row without a place among
                   those of `lengths` has no tokens, and a place without a row is padding
      lengths      int32 or int64 [places]: KV length after this step. Token t of place p is at position
                   lengths[p] - (query_start[p + 1] - t), without query_start at lengths[p] - 1
      writer       int64 [rows]: the row's writer word at column 0
      floor        int64 [rows] or None: the first position that the row may write; what is before is complete
      page_writer  int64 [num_pages], at least one: the word of each page's one designated writer; 0 = nobody.
                   A page is the row's own at column c (position // page_size) if its word is writer + c. A word that is
                   not positive (see `kvguard.kernels.events`) is no row's, and a column of 2**32 or more is in no word
      skip_slot    where padding goes: a slot that engine and backend know to be nobody's
      skip_allowed whether a token of a row may be sent to the skip slot or the null page, as in windowed pools, whose
                   columns outside of the window are null
      null_page    the page that nobody owns; -1: there is none
    Writes
      record       int64 [rows + 1, 4]: flags, number of wrong tokens, position of the first of them, its slot; the
                   last record is that of the padding, with the token's index for a position. See `layout`. Each word
                   is written in each call
      slot_mapping with `enforce`: wrong tokens get `skip_slot`, those of rows as well as padding; right ones stay, also
                   those of a flagged row

    The flags of a row's token, in this order:
      1. the skip slot, or any slot of the null page: LOST without `skip_allowed`, else none, and nothing else is looked
         at, as nothing is written;
      2. a position that is negative or below the floor: FLOOR, whatever the slot;
      3. a slot outside of the pool: RANGE; it has no page and no offset to look at;
      4. else, unless the position is negative: PAGE where the page is not the row's own at the column of the position,
         OFFSET where slot % page_size is not position % page_size. Both may be.
    A token is wrong if it has a flag; a row's flags are those of its tokens together. The first is the one of the
    lowest index.

    A token belongs to a row if it lies in the span that query_start gives to the row's place, as far as there are
    tokens: a span that ends before it starts is empty, and where two overlap, or two rows name one place, each row
    judges the token by its own word, and it is wrong if one of them says so. (As a page has one word, at most one of
    two rows with different words can be right.) A token that lies in no row's span is padding: PADDING unless it goes
    to the skip slot, and nothing but the skip slot will do. All tokens are judged before any is redirected. Positions
    and words wrap in 64 bits.
    """
    rows = writer.shape[0]
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    if tuple(record.shape) != (rows + 1, layout.RECORD_WORDS):
        raise ValueError("record must have four words for each element of writer, and four more for the padding")
    if (floor is not None and floor.shape[0] != rows) or (query_row is not None and query_row.shape[0] != rows):
        raise ValueError("writer, floor and query_row must have one element per checked row")
    if query_start is not None and query_start.shape[0] <= lengths.shape[0]:
        raise ValueError("query_start must have one element more than lengths")
    if page_writer.shape[0] == 0:
        raise ValueError("page_writer must have one element per page, and at least one")
    if backend is None:
        backend = backend_of(slot_mapping)
        if backend == "torch" and slot_mapping.is_cuda:
            backend = default_backend(slot_mapping.device)
    if check_backend(backend) in DEVICE_BACKENDS:
        from kvguard.kernels.verify_slots import one_pool

        run = one_pool.verify_slots_by(_step_of(backend))
    else:
        run = token_operation("verify_slots", backend)
    run(
        slot_mapping=slot_mapping,
        query_start=query_start,
        query_row=query_row,
        lengths=lengths,
        writer=writer,
        floor=floor,
        page_writer=page_writer,
        page_size=page_size,
        skip_slot=skip_slot,
        skip_allowed=skip_allowed,
        enforce=enforce,
        record=record,
        null_page=null_page,
    )


def verify_slots_step(*, backend: str, launch: Any, descriptors: Any, packed: Any, out: Any, workspace: Any) -> None:
    """`verify_slots` for all pools of a step, in one launch of `triton` or `cupy` on the stream of the caller.

    launch       a `descriptor.Launch`; descriptors int64 [pools, words], both from `descriptor.describe_slots`
    packed       int64 [words]: what the descriptors' offsets into `packed` count from
    out          int64 [words]: what their offsets into `out` count from
    workspace    int64 [launch.workspace_words or more], zero; it is left zero, so a launch may use the last one's
                 on the same stream

    No token is redirected before every token of its pool has been judged. Pools must not share a slot mapping. Nothing
    is awaited and nothing is allocated, so that a CUDA graph may hold the launch: the grid depends on shapes alone, and
    a replay finds rows with any number of the step's tokens.
    """
    if launch.pools == 0:
        return
    _step_of(backend)(launch=launch, descriptors=descriptors, packed=packed, out=out, workspace=workspace)


def _step_of(backend: str) -> Callable[..., None]:
    """The backend's `verify_slots_step`; its packages are imported here and no earlier."""
    if check_backend(backend) == "triton":
        from kvguard.kernels.verify_slots import triton_op

        return triton_op.verify_slots_step
    if backend == "cupy":
        from kvguard.kernels.verify_slots import cupy_op

        return cupy_op.verify_slots_step
    raise ValueError(f"backend {backend} has no launch for all pools of a step: use {' or '.join(DEVICE_BACKENDS)}")
