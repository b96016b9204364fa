"""Does every page that attention is about to read carry the tag that the row was promised?

One call checks all rows of one pool. It must run on the stream of the forward, after the block table, its padding and
the slot mapping are final, and before attention or the cache write reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvguard.kernels.backend import DEVICE_BACKENDS, backend_of, check_backend
from kvguard.kernels.verify_pages import layout

__all__ = ["layout", "verify_pages", "verify_step"]


def verify_pages(
    *,
    table: Any,
    page_tag: Any,
    row_index: Any,
    expected: Any,
    extent_offset: Any,
    extent_start: Any,
    extent_stop: Any,
    columns: int,
    key: int,
    split: int = 1,
    null_page: int = -1,
    neutral_page: int = -1,
    record: Any,
    evidence: Any,
    evidence_row: Any,
    slot_mapping: Any = None,
    query_start: Any = None,
    query_row: Any = None,
    skip_slot: int = -1,
    backend: str | None = None,
) -> None:
    """Check the rows, write a verdict record for each, and neutralise the flagged ones, in place.

    All arrays are NumPy arrays, or all are torch tensors on one device, or all are CuPy arrays. `backend`: None takes
    that of the table; `triton` takes torch tensors, `cupy` takes torch tensors on a GPU as well as its own arrays, and
    both want record, evidence, evidence_row and page_tag without gaps (ValueError).

    Reads
      table          int32 or int64 [table_rows, table_columns], any strides: kernel-page ids, what attention reads
      page_tag       int64 [num_pages]: the tag of each manager page; 0 = vacant
      row_index      int64 [rows]: the table row of each checked row
      expected       int64 [rows]: the bits of the expected 64-bit digest
      extent_offset  int64 [rows + 1]: row r owns extents extent_offset[r] .. extent_offset[r + 1] - 1, at least one
      extent_start, extent_stop  int64 [extents]: live columns in manager pages, half open, disjoint within a row;
                     (0, 0) says that nothing of the row is live
      columns        host integer: no extent_stop is larger; it sizes the launch
      key            digest key, 64 bits
      split          kernel pages per manager page; entry // split is the manager page, entry % split its piece
      null_page      manager page id that is never a request's own, or -1
    Writes
      record         int64 [rows, 4]: flags, digest, first bad kernel-page column, its entry (-1: none); see `layout`.
                     The digest sums mix(key, column, tag) over the live manager pages that are in range.
      evidence       int64 [places, width]: table entries of the first flagged rows in row order, as they were found
      evidence_row   int64 [places]: which checked row each place holds; places not needed are left as they are
      table          live entries of a flagged row become the first piece of `neutral_page` (-1: left alone)
      slot_mapping   int64 [tokens] or None: tokens query_start[q] .. query_start[q + 1] - 1 of a flagged row get
                     `skip_slot`, so that its writes of this step go nowhere (only where `neutral_page` is given)
    For that it reads
      query_start    int32 or int64 [batch rows + 1], not decreasing
      query_row      int64 [rows] or None: q, the place of each checked row in the batch; None: row r is at place r.
                     A row without a place in query_start has no tokens
    """
    backend = backend_of(table) if backend is None else check_backend(backend)
    if backend == "numpy":
        from kvguard.kernels.verify_pages import reference

        reference.verify_pages(
            table=table,
            page_tag=page_tag,
            row_index=row_index,
            expected=expected,
            extent_offset=extent_offset,
            extent_start=extent_start,
            extent_stop=extent_stop,
            key=key,
            split=split,
            null_page=null_page,
            neutral_page=neutral_page,
            record=record,
            evidence=evidence,
            evidence_row=evidence_row,
            slot_mapping=slot_mapping,
            query_start=query_start,
            query_row=query_row,
            skip_slot=skip_slot,
        )
        return
    if backend in DEVICE_BACKENDS:
        from kvguard.kernels.verify_pages import one_pool

        one_pool.verify_pages(
            _step_of(backend),
            table=table,
            page_tag=page_tag,
            row_index=row_index,
            expected=expected,
            extent_offset=extent_offset,
            extent_start=extent_start,
            extent_stop=extent_stop,
            columns=columns,
            key=key,
            split=split,
            null_page=null_page,
            neutral_page=neutral_page,
            record=record,
            evidence=evidence,
            evidence_row=evidence_row,
            slot_mapping=slot_mapping,
            query_start=query_start,
            query_row=query_row,
            skip_slot=skip_slot,
        )
        return
    from kvguard.kernels.verify_pages import torch_op

    torch_op.verify_pages(
        table=table,
        page_tag=page_tag,
        row_index=row_index,
        expected=expected,
        extent_offset=extent_offset,
        extent_start=extent_start,
        extent_stop=extent_stop,
        columns=columns,
        key=key,
        split=split,
        null_page=null_page,
        neutral_page=neutral_page,
        record=record,
        evidence=evidence,
        evidence_row=evidence_row,
        slot_mapping=slot_mapping,
        query_start=query_start,
        query_row=query_row,
        skip_slot=skip_slot,
    )


def verify_step(*, backend: str, launch: Any, descriptors: Any, packed: Any, out: Any, workspace: Any) -> None:
    """`verify_pages` for all pools of a step, in one launch of `triton` or `cupy` on the stream of the caller.

    launch       a `descriptor.Launch`; descriptors int64 [pools, words], both from `descriptor.describe`
    packed       int64 [words]: what the descriptors' offsets into `packed` count from
    out          int64 [words]: what their offsets into `out` count from
    workspace    int64 [launch.workspace_words or more], zero; it is left zero, so a launch may use the last one's
                 on the same stream

    No row is neutralised before every row of its pool has been read. Pools must not share a table or a slot mapping.
    Nothing is awaited and nothing is allocated, so that a CUDA graph may hold the launch; a replay finds rows of any
    length, `columns` of the pools only said how many programs to start.
    """
    if launch.rows == 0:
        return
    _step_of(backend)(launch=launch, descriptors=descriptors, packed=packed, out=out, workspace=workspace)


def _step_of(backend: str) -> Callable[..., None]:
    """The backend's `verify_step`; its packages are imported here and no earlier."""
    if check_backend(backend) == "triton":
        from kvguard.kernels.verify_pages import triton_op

        return triton_op.verify_step
    if backend == "cupy":
        from kvguard.kernels.verify_pages import cupy_op

        return cupy_op.verify_step
    raise ValueError(f"backend {backend} has no launch for all pools of a step: use {' or '.join(DEVICE_BACKENDS)}")
