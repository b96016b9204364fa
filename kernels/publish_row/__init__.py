"""A request's record goes into the prefix tree: whoever adopts the pages inherits a digest."""

from __future__ import annotations

from typing import Any

from kvguard.kernels.arrays import require_contents
from kvguard.kernels.backend import token_backend, token_operation

__all__ = ["publish_row"]


def publish_row(
    *,
    row: int,
    old: Any,
    new: Any,
    start: int,
    stop: int,
    content: Any = None,
    page_content: Any = None,
    event: Any = None,
    page_tag: Any,
    page_owner: Any,
    page_chain: Any,
    digest: Any,
    page_size: int,
    key: int,
    backend: str | None = None,
) -> None:
    """Hand the columns start .. stop - 1 of a row to the prefix tree, in place, and bring the row's digest up to date.

    All arrays are NumPy arrays, or all are torch tensors on one device. `backend`: None takes that of `page_tag`,
    Triton on a GPU. ValueError where row, start, stop, shapes or page size do not fit, and for the backend `cupy`.

    Reads
      row          host integer in [0, table_rows)
      start, stop  host integers, 0 <= start <= stop; the columns before start are the tree's already
      old          int32 or int64 [n], any stride, n >= stop - start: slots of the first token of columns start ..
                   start + n - 1, up to the end of the row, as they were before the tree took the record
      new          int32 or int64 [stop - start, and one more in front if start > 0], any stride: the slots that the row
                   holds now at the first token of columns start - 1 (if start > 0), start .. stop - 1
      page_tag     int64 [num_pages]; 0 = vacant
      key          digest key, 64 bits
      content      int64 [stop - start, 2] or None: the lanes of the row's own content key at the ends of the columns
    Writes
      page_owner   int64 [num_pages]: -1 for the pages that the tree took from the row
      page_chain   int64 [num_pages]: for those, the digest of the whole path from the root through the page
      digest       int64 [table_rows]: of the row, what it holds now was promised to it
      page_content int64 [num_pages, 2], given where `content` is: for the pages that the tree took, the lanes of their
                   columns
      event        int64 [4], given where `content` is and zeroed by the caller; see `kvguard.kernels.events`. Its place
                   counts columns from start on

    A column's page is taken where the row still holds the page that it held and owns it at that column; elsewhere the
    tree had a page already, the row goes on with that one, and the digest with its chain. What the row's digest is off
    by stays in it and goes into the chain of every page that was taken, so that no adopter of them adds up either. So
    does what stood in a taken page's chain before: another node of the tree names that page (see `retire_pages`), and
    would otherwise be satisfied by what the page is now.
    With `content` a page that takes the place of the row's must hold the row's own content. The first one that does
    not, unless it is page 0 or outside of the pool, is CONTENT, and SPOILED is added to what the row is off by.
    Owners, chains and contents are read before any is written. A slot outside of the pool has no page: its term and its
    chain are 0 and nothing is taken; page 0 is never taken either.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    if not 0 <= row < digest.shape[0]:
        raise ValueError(f"row {row} is not one of {digest.shape[0]} rows")
    if not 0 <= start <= stop:
        raise ValueError(f"columns {start} .. {stop} are no range")
    if old.shape[0] < stop - start or new.shape[0] != stop - start + (start > 0):
        raise ValueError(f"{old.shape[0]} old and {new.shape[0]} new slots do not fit columns {start} .. {stop}")
    require_contents(content, page_content, stop - start, page_tag.shape[0])
    if content is not None and event is None:
        raise ValueError("with content there must be an event")
    if not page_tag.shape[0] == page_owner.shape[0] == page_chain.shape[0] > 0:
        raise ValueError("page_tag, page_owner and page_chain must have one element per page, and page 0 at least")
    backend = token_backend(page_tag, backend)
    token_operation("publish_row", backend)(
        row=row,
        old=old,
        new=new,
        start=start,
        stop=stop,
        content=content,
        page_content=page_content,
        event=event,
        page_tag=page_tag,
        page_owner=page_owner,
        page_chain=page_chain,
        digest=digest,
        page_size=page_size,
        key=key,
    )
