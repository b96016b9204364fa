"""Where an array lies and how it is laid out, for torch tensors and CuPy arrays alike; and arrays beside another one.

Nothing here looks at a value, so nothing waits for a device.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def address(array: Any) -> int:
    """Where the first element of a torch tensor or CuPy array lies."""
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)


def item_bytes(array: Any) -> int:
    """Size of an element."""
    return int(array.element_size() if hasattr(array, "element_size") else array.itemsize)


def strides(array: Any) -> tuple[int, ...]:
    """Strides in elements."""
    if hasattr(array, "stride"):
        return tuple(array.stride())
    return tuple(stride // array.itemsize for stride in array.strides)


def is_dense(array: Any) -> bool:
    """No gaps between the elements, in C order."""
    if 0 in array.shape:
        return True
    wanted = 1
    for size, stride in zip(reversed(array.shape), reversed(strides(array)), strict=True):
        if size > 1 and stride != wanted:
            return False
        wanted *= size
    return True


def require_dense(**arrays: Any) -> None:
    """ValueError that names the first array with gaps; None is no array."""
    for name, array in arrays.items():
        if array is not None and not is_dense(array):
            raise ValueError(f"{name} must have no gaps")


def require_contents(content: Any, page_content: Any, count: int, pages: int) -> None:
    """ValueError unless both are None, or hold two lanes for each of `count` rows or columns and of `pages` pages."""
    if (content is None) != (page_content is None):
        raise ValueError("content and page_content must be given together")
    if content is not None and (tuple(content.shape), tuple(page_content.shape)) != ((count, 2), (pages, 2)):
        raise ValueError(f"content must have two lanes for each of {count}, page_content for each of {pages} pages")


def words_from(base: Any, array: Any) -> int:
    """The offset of `array` from `base` in int64 words, whatever lies between: addresses are flat.

    ValueError unless both are int64 and `array` has no gaps.
    """
    if item_bytes(base) != 8 or item_bytes(array) != 8 or not is_dense(array):
        raise ValueError("expected an int64 array without gaps")
    return (address(array) - address(base)) // 8


def upload_beside(array: Any, host: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """`host` on the device of `array`, enqueued on its stream; CUDA stages so small a copy before the call returns."""
    if hasattr(array, "data_ptr"):
        import torch

        return torch.from_numpy(host).to(array.device, non_blocking=True)
    import cupy

    with array.device:
        return cupy.asarray(host)


def zeros_beside(array: Any, words: int) -> Any:
    """int64 [words] of zeros on the device of `array`."""
    if hasattr(array, "data_ptr"):
        import torch

        return torch.zeros(words, dtype=torch.int64, device=array.device)
    import cupy

    with array.device:
        return cupy.zeros(words, cupy.int64)
