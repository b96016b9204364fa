"""Tokens got slots in the pool of the sliding-window layers beside those that they have in the pool of the others."""

from __future__ import annotations

from typing import Any

from kvguard.kernels.backend import token_backend, token_operation

__all__ = ["pair_windows"]


def pair_windows(
    *,
    full: Any,
    window: Any,
    fresh: bool,
    peer_tag: Any,
    window_tag: Any,
    window_holder: Any,
    page_size: int,
    base_tag: int,
    event: Any,
    backend: str | None = None,
) -> None:
    """Write down, in place, which window page each full page was paired with.

    All arrays are NumPy arrays, or all are torch tensors on one device. `backend`: None takes that of `full`, Triton on
    a GPU. ValueError where shapes do not fit, for a page size below 1, and for the backend `cupy`.

    Reads
      full           int32 or int64 [tokens]: the slot of each token in the pool of full attention
      window         int32 or int64 [tokens]: its slot in the pool of the window layers; slot // page_size is the page
      fresh          True: the window pages were just allocated; False: pages in use go over to other full pages
      base_tag       with `fresh` token t stamps base_tag + t, wrapping in 64 bits: none of these may be in use, or 0
    Writes
      peer_tag       int64 [full_pages]: the tag that the window page had when it was paired with this full page
      window_tag     int64 [window_pages], with `fresh`: 0 = vacant
      window_holder  int64 [window_pages]: the full page that it was paired with last
      event          int64 [4], zeroed by the caller; see `kvguard.kernels.events`. Places count tokens

    Only a token in the first slot of a full page pairs anything: pages are paired whole, and whether each token of one
    is kept in its place is for `verify_windows` to see. Nothing is paired where either page is outside its pool
    (OUT_OF_RANGE, the page is the one outside, the full one where both are) or is page 0 (NULL). With `fresh` a window
    page that has a tag, or comes twice in the call, is DOUBLE_ALLOCATION and paired all the same: one of its tags
    stays, and where the order is defined the last token's. Without it a window page that has none is VACANT: the full
    page is left with 0, which proves nothing.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be positive, not {page_size}")
    if full.shape[0] != window.shape[0]:
        raise ValueError("full and window must have one element per token")
    if window_tag.shape[0] != window_holder.shape[0] or window_tag.shape[0] == 0 or peer_tag.shape[0] == 0:
        raise ValueError("peer_tag, window_tag and window_holder must have one element per page, and page 0 at least")
    backend = token_backend(full, backend)
    token_operation("pair_windows", backend)(
        full=full,
        window=window,
        fresh=fresh,
        peer_tag=peer_tag,
        window_tag=window_tag,
        window_holder=window_holder,
        page_size=page_size,
        base_tag=base_tag,
        event=event,
    )
