"""Bring a pool's tag mirror on the device up to date: page_tag[pages] = tags."""

from __future__ import annotations

from typing import Any

from kvguard.kernels.backend import backend_of

__all__ = ["scatter_tags"]


def scatter_tags(*, page_tag: Any, pages: Any, tags: Any) -> None:
    """Write `tags` int64 [changes] to `page_tag` int64 [num_pages] at `pages` int64 [changes], in place.

    `pages` holds no page twice (the host keeps the last change of a step) and none outside the pool: the order of
    equal indices is undefined on a device. A page outside the pool is ignored rather than written out of bounds.
    """
    if backend_of(page_tag) == "numpy":
        from kvguard.kernels.scatter_tags import reference

        reference.scatter_tags(page_tag=page_tag, pages=pages, tags=tags)
        return
    from kvguard.kernels.scatter_tags import torch_op

    torch_op.scatter_tags(page_tag=page_tag, pages=pages, tags=tags)
