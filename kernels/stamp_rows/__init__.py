"""New tokens of a batch got slots: the pages that they open get fresh tags and are promised to their rows."""

from __future__ import annotations

from typing import Any

from kvguard.kernels.arrays import require_contents
from kvguard.kernels.backend import token_backend, token_operation

__all__ = ["stamp_rows"]


def stamp_rows(
    *,
    slots: Any,
    rows: Any,
    first: Any,
    first_delta: int = 0,
    offset: Any = None,
    adopted: Any = None,
    content: Any = None,
    page_content: Any = None,
    page_tag: Any,
    page_owner: Any,
    page_chain: Any,
    digest: Any,
    page_size: int,
    base_tag: int,
    key: int,
    event: Any,
    backend: str | None = None,
) -> None:
    """Stamp the pages that new tokens open and add them to the digests of their rows, in place.

    All arrays are NumPy arrays, or all are torch tensors on one device. `backend`: None takes that of `slots`, Triton
    on a GPU. ValueError where shapes do not fit, for a page size below 1, and for the backend `cupy`.

    Reads
      slots        int32 or int64 [tokens]: where each new token is kept; slot // page_size is its page
      rows         int64 [batch]: the block-table row of each request. A row that `adopted` makes fresh comes once;
                   others may come again, and each time counts
      first        int32 or int64 [batch]; first[b] + first_delta is the position of the row's first new token
      offset       int32 or int64 [batch + 1], not decreasing: row b has tokens offset[b] .. offset[b + 1] - 1.
                   None: one token per row
      adopted      int64 [batch] or None: negative: the row goes on as it was (None: all do); 0: it is fresh, without
                   a prefix; s > 0: it is fresh and its prefix ends in slot s, the chain of whose page is its digest
      page_chain   int64 [num_pages]: digest of the path from the root of the prefix tree through a page
      content      int64 [batch, 2] or None: the lanes of each row's own content key at the end of its prefix; counts
                   where adopted > 0
      page_content int64 [num_pages, 2], given where `content` is: lanes of the content that a page was published with,
                   0 and 0 for none
      base_tag     token t stamps base_tag + t, wrapping in 64 bits: none of these may be in use, or 0
      key          digest key, 64 bits
    Writes
      page_tag     int64 [num_pages]: 0 = vacant
      page_owner   int64 [num_pages]: (row + 1) << 32 | column
      digest       int64 [table_rows]: sum of mix(key, column, tag) over the columns that the row was promised
      event        int64 [4], zeroed by the caller; see `kvguard.kernels.events`. Places count tokens

    A token opens a page where its position, if not negative, is a multiple of page_size. Nothing is stamped or promised
    for a page outside the pool (OUT_OF_RANGE) and for page 0 (NULL). A page that has a tag is DOUBLE_ALLOCATION, and is
    stamped and promised all the same. So is a page that is opened twice in a call: both terms are in the digests, one
    tag stays, and the place of the other is reported. Where the order is defined, the last token's stays; on a GPU the
    owner may be of another token than the tag, and then neither row can publish the page soundly.

    A row outside of digest is skipped (OUT_OF_RANGE), as is a prefix whose slot is outside the pool, for a digest of 0.
    Their place is that of the row in the batch, where they come before a problem of a token at the same place; the page
    of the first is -1. With `content` a fresh row whose prefix ends in a page of other content than its own, or of
    none, is CONTENT at the same place: SPOILED is added to what its digest begins with (see `kvguard.kernels.events`).
    """
    batch = rows.shape[0]
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    if first.shape[0] != batch or (adopted is not None and adopted.shape[0] != batch):
        raise ValueError("rows, first and adopted must have one element per row of the batch")
    if offset is None and slots.shape[0] != batch:
        raise ValueError("without an offset there is one slot per row of the batch")
    if offset is not None and offset.shape[0] != batch + 1:
        raise ValueError("offset must have one element more than rows")
    require_contents(content, page_content, batch, page_tag.shape[0])
    if not page_tag.shape[0] == page_owner.shape[0] == page_chain.shape[0] > 0:
        raise ValueError("page_tag, page_owner and page_chain must have one element per page, and page 0 at least")
    backend = token_backend(slots, backend)
    token_operation("stamp_rows", backend)(
        slots=slots,
        rows=rows,
        first=first,
        first_delta=first_delta,
        offset=offset,
        adopted=adopted,
        content=content,
        page_content=page_content,
        page_tag=page_tag,
        page_owner=page_owner,
        page_chain=page_chain,
        digest=digest,
        page_size=page_size,
        base_tag=base_tag,
        key=key,
        event=event,
    )
