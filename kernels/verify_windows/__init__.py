"""Is what sliding-window layers are about to read kept in the pages that the row's own pages were paired with?

The second half of a chain of proof: `verify_rows` shows that a row's slots lie in the pages that it was promised, and
this one that each such page leads to the window page that it was paired with, which nobody has given back since.
"""

from __future__ import annotations

from typing import Any

from kvguard.kernels.backend import token_backend, token_operation

__all__ = ["verify_windows"]


def verify_windows(
    *,
    table: Any,
    rows: Any,
    lengths: Any,
    window: int,
    mapping: Any,
    peer_tag: Any,
    window_tag: Any,
    page_size: int,
    enforce: bool,
    record: Any,
    slot_mapping: Any = None,
    query_start: Any = None,
    skip_slot: int = 0,
    workspace: Any = None,
    backend: str | None = None,
) -> None:
    """Check the windows of rows that `verify_rows` has judged, and add to its records.

    All arrays are NumPy arrays, or all are torch tensors on one device. `backend`: None takes that of `table`, Triton
    on a GPU. ValueError where shapes, window or page size do not fit, and for the backend `cupy`.

    Reads
      table        int32 [table_rows, positions], any strides: slots of tokens in the pool of full attention
      rows         int64 [batch]: the table row of each checked row
      lengths      int32 or int64 [batch]: live tokens, at positions 0 .. length - 1
      window       how many positions before its own a query reads, not negative
      query_start  int32 or int64 [batch + 1 or more] or None, not decreasing: row b has the queries query_start[b] ..
                   query_start[b + 1] - 1, and these are its last tokens, no more than slot_mapping has. None: the last
                   token is the row's one query
      peer_tag     int64 [full_pages]: the tag of the window page that each full page was paired with
      window_tag   int64 [window_pages]: 0 = vacant
    Writes
      record       int64 [batch, 4]: FLAG_WINDOW is added to the flags; where there was no bad position, the first one
                   of the window with the window slot found there
      mapping      int64 [full_pages * page_size or more]: the window slot of each full slot; with `enforce` those of a
                   row with FLAG_WINDOW that are outside the pool become 0, so that attention cannot fault
      slot_mapping int32 or int64 [tokens] or None, with `enforce`: the tokens of such a row get `skip_slot`
    Uses
      workspace    int64 [2 or more] on a GPU, zero, and left zero; None: made for this call

    The window of a row begins `window` positions before its first query, and at 0 where that is negative. A token of it
    is where it was if its window slot is in a page of the pool other than page 0, is the piece of its page that belongs
    at its position, and the tag of that page is the peer tag of the token's full page, and not 0. Positions past the
    table, rows outside it and full slots outside the pool are left to `verify_rows`. All rows are judged before
    anything but the records is changed.
    """
    batch = rows.shape[0]
    if page_size < 1 or window < 0:
        raise ValueError(f"page_size must be positive and window not negative, not {page_size} and {window}")
    if lengths.shape[0] != batch or tuple(record.shape) != (batch, 4):
        raise ValueError("rows, lengths and record must have one element per checked row, record of four words")
    if query_start is not None and query_start.shape[0] < batch + 1:
        raise ValueError("query_start must have one element more than rows")
    if peer_tag.shape[0] == 0 or window_tag.shape[0] == 0:
        raise ValueError("peer_tag and window_tag must have one element per page, and page 0 at least")
    if mapping.shape[0] < peer_tag.shape[0] * page_size:
        raise ValueError(f"mapping has {mapping.shape[0]} elements for {peer_tag.shape[0]} pages of {page_size}")
    backend = token_backend(table, backend)
    arguments: dict[str, Any] = {"workspace": workspace} if backend == "triton" else {}
    token_operation("verify_windows", backend)(
        table=table,
        rows=rows,
        lengths=lengths,
        window=window,
        mapping=mapping,
        peer_tag=peer_tag,
        window_tag=window_tag,
        page_size=page_size,
        enforce=enforce,
        record=record,
        slot_mapping=slot_mapping,
        query_start=query_start,
        skip_slot=skip_slot,
        **arguments,
    )
