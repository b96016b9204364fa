"""Bring a pool's tag mirror on the device up to date: page_tag[pages] = tags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvguard.kernels.backend import DEVICE_BACKENDS, backend_of, check_backend

__all__ = ["scatter_step", "scatter_tags"]


def scatter_tags(*, page_tag: Any, pages: Any, tags: Any, backend: str | None = None) -> None:
    """Write `tags` int64 [changes] to `page_tag` int64 [num_pages] at `pages` int64 [changes], in place.

    `pages` holds no page twice (the host keeps the last change of a step) and none outside the pool: the order of
    equal indices is undefined on a device. A page outside the pool is ignored rather than written out of bounds.
    `backend`: None takes that of `page_tag`; `triton` takes torch tensors, `cupy` those on a GPU and its own arrays.
    """
    backend = backend_of(page_tag) if backend is None else check_backend(backend)
    if backend == "numpy":
        from kvguard.kernels.scatter_tags import reference

        reference.scatter_tags(page_tag=page_tag, pages=pages, tags=tags)
        return
    if backend in DEVICE_BACKENDS:
        from kvguard.kernels.scatter_tags import one_pool

        one_pool.scatter_tags(_step_of(backend), page_tag=page_tag, pages=pages, tags=tags)
        return
    from kvguard.kernels.scatter_tags import torch_op

    torch_op.scatter_tags(page_tag=page_tag, pages=pages, tags=tags)


def scatter_step(*, backend: str, pools: int, changes: int, descriptors: Any, packed: Any) -> None:
    """`scatter_tags` for all pools of a step, in one launch of `triton` or `cupy` on the stream of the caller.

    pools        pools whose tags change; changes: the most changes of any of them
    descriptors  int64 [pools, words]: `descriptor.describe_scatter` of each
    packed       int64 [words]: what the descriptors' offsets count from
    """
    if pools and changes:
        _step_of(backend)(pools=pools, changes=changes, descriptors=descriptors, packed=packed)


def _step_of(backend: str) -> Callable[..., None]:
    """The backend's `scatter_step`; its packages are imported here and no earlier."""
    if check_backend(backend) == "triton":
        from kvguard.kernels.scatter_tags import triton_op

        return triton_op.scatter_step
    if backend == "cupy":
        from kvguard.kernels.scatter_tags import cupy_op

        return cupy_op.scatter_step
    raise ValueError(f"backend {backend} has no launch for all pools of a step: use {' or '.join(DEVICE_BACKENDS)}")
