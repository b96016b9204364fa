"""Pages are given back: their tags and owners become 0, and the chains of what the prefix tree gives back itself."""

from __future__ import annotations

from typing import Any

from kvguard.kernels.backend import token_backend, token_operation
from kvguard.kernels.events import UNSAID

__all__ = ["retire_pages"]


def retire_pages(
    *,
    pages: Any,
    page_tag: Any,
    page_owner: Any,
    page_chain: Any,
    divisor: int = 1,
    by: Any = UNSAID,
    event: Any,
    backend: str | None = None,
) -> None:
    """Make the pages vacant, in place, and report the first that cannot be given back.

    All arrays are NumPy arrays, or all are torch tensors on one device. `backend`: None takes that of `pages`, Triton
    on a GPU. ValueError where shapes do not fit, for a divisor below 1, and for the backend `cupy`.

    Reads
      pages        int32 or int64 [n], any stride: page ids, or with divisor = page_size slots of tokens
      divisor      each element // divisor is the page. Above 1 a page may come as often as it likes
      by           host integer, or int64 [n]: who gives each page back: a row + 1, TREE, UNSAID where the caller is
                   known and cannot say, or ANYBODY where nobody knows the caller
    Writes
      page_tag, page_owner   int64 [num_pages]: 0 at the pages
      page_chain             int64 [num_pages]: 0 at the pages that the tree held, unless ANYBODY gives them back. The
                             tree still names those, and what is left there spoils the chain of whoever publishes them
      event        int64 [4], zeroed by the caller; see `kvguard.kernels.events`. Places count elements of `pages`

    A page outside the pool is OUT_OF_RANGE and left alone, page 0 is NULL and left alone. A page whose tag is 0 before
    the call is DOUBLE_FREE, and so is, with a divisor of 1, each further time that a page comes; where the order is not
    defined, each time but one. A page that somebody else holds than `by` is FREE_UNOWNED and left as it is: its holder
    has done nothing.
    """
    if divisor < 1:
        raise ValueError(f"divisor must be positive, not {divisor}")
    if not page_tag.shape[0] == page_owner.shape[0] == page_chain.shape[0] > 0:
        raise ValueError("page_tag, page_owner and page_chain must have one element per page, and page 0 at least")
    backend = token_backend(pages, backend)
    token_operation("retire_pages", backend)(
        pages=pages,
        page_tag=page_tag,
        page_owner=page_owner,
        page_chain=page_chain,
        divisor=divisor,
        by=by,
        event=event,
    )
