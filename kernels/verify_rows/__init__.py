"""Do the slots that attention is about to read lie in the pages that the row was promised, in their order?

Like `verify_pages`, for block tables of token slots whose promises are kept on the device by `stamp_rows`,
`retire_pages` and `publish_row`.
"""

from __future__ import annotations

from typing import Any

from kvguard.kernels.backend import token_backend, token_operation

__all__ = ["verify_rows"]


def verify_rows(
    *,
    table: Any,
    rows: Any,
    lengths: Any,
    page_tag: Any,
    digest: Any,
    page_size: int,
    key: int,
    enforce: bool,
    record: Any,
    slot_mapping: Any = None,
    query_start: Any = None,
    skip_slot: int = 0,
    writes: Any = None,
    workspace: Any = None,
    backend: str | None = None,
) -> None:
    """Check the rows, write a verdict record for each, and with `enforce` take flagged ones off their slots.

    All arrays are NumPy arrays, or all are torch tensors on one device. `backend`: None takes that of `table`, Triton
    on a GPU. ValueError where shapes or page size do not fit, and for the backend `cupy`.

    Reads
      table        int32 [table_rows, positions], any strides: slots of tokens; slot // page_size is the page
      rows         int64 [batch]: the table row of each checked row
      lengths      int32 or int64 [batch]: live tokens, at positions 0 .. length - 1
      page_tag     int64 [num_pages]: 0 = vacant
      digest       int64 [table_rows]: sum of mix(key, column, tag) over the columns that the row was promised
      key          digest key, 64 bits
      writes       int64 [batch or more, 4] or None: the records that `verify_slots` made of the same rows
    Writes
      record       int64 [batch, 4]: flags, digest, first bad position, its slot (-1: none), as in
                   `verify_pages.layout`. The digest sums mix(key, column, tag) over the first slots of the live
                   columns that are in range
      table        with `enforce`: live slots of a flagged row that are outside the pool become 0, so that attention
                   cannot fault; the others stay, as the engine frees by them
      digest       with `enforce`: SPOILED is added to that of a flagged row (see `kvguard.kernels.events`)
      slot_mapping int32 or int64 [tokens] or None, with `enforce`: the tokens of a flagged row get `skip_slot`, so that
                   it writes nowhere. These are query_start[b] .. query_start[b + 1] - 1; without query_start token b
    For that it reads
      query_start  int32 or int64 [batch + 1 or more] or None, not decreasing; what follows the batch's is nobody's
    Uses
      workspace    int64 [2 + 4 * batch or more] on a GPU, zero, and left zero, so that a launch may use the last one's
                   on the same stream; None: made for this call

    Flags: a slot outside the pool, a position past the table, a negative length and a row outside the table are RANGE
    (the position is 0 in the last two, the slot -1 wherever nothing is to be read); page 0 is NULL, a page without a
    tag VACANT; a slot that is not the piece of its page that belongs at its position, or in another page than the first
    slot of its column, is SPLIT. A row with flags in `writes` is WRITE. A digest other than the row's is DIGEST; a row
    outside the table was promised nothing.
    All rows are judged before any is changed.
    """
    batch = rows.shape[0]
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    if lengths.shape[0] != batch or tuple(record.shape) != (batch, 4):
        raise ValueError("rows, lengths and record must have one element per checked row, record of four words")
    if table.shape[0] != digest.shape[0]:
        raise ValueError(f"there is one digest per table row: {digest.shape[0]} are not {table.shape[0]}")
    if writes is not None and (writes.shape[0] < batch or writes.shape[1] != 4):
        raise ValueError("writes must have one record of four words per checked row")
    if query_start is not None and query_start.shape[0] < batch + 1:
        raise ValueError("query_start must have one element more than rows")
    if page_tag.shape[0] == 0:
        raise ValueError("page_tag must have one element per page, and page 0 at least")
    backend = token_backend(table, backend)
    arguments: dict[str, Any] = {"workspace": workspace} if backend == "triton" else {}
    token_operation("verify_rows", backend)(
        table=table,
        rows=rows,
        lengths=lengths,
        page_tag=page_tag,
        digest=digest,
        page_size=page_size,
        key=key,
        enforce=enforce,
        record=record,
        slot_mapping=slot_mapping,
        query_start=query_start,
        skip_slot=skip_slot,
        writes=writes,
        **arguments,
    )
