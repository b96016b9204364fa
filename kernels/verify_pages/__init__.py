"""Does every page that attention is about to read carry the tag that the row was promised?

One call checks all rows of one pool. It must run on the stream of the forward, after the block table, its padding and
the slot mapping are final, and before attention or the cache write reads them.
"""

from __future__ import annotations

from typing import Any

from kvguard.kernels.backend import backend_of
from kvguard.kernels.verify_pages import layout

__all__ = ["layout", "verify_pages"]


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
) -> None:
    """Check the rows, write a verdict record for each, and neutralise the flagged ones, in place.

    All arrays are NumPy arrays or all are torch tensors on one device.

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
      query_row      int64 [rows] or None: q, the place of each checked row in the batch; None: row r is at place r
    """
    if backend_of(table) == "numpy":
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
