"""Launch a CuPy RawKernel on arrays of torch or CuPy, on the stream that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvguard.kernels.arrays import address


def launch_kernel(
    kernel_of: Callable[[int], Any], grid: tuple[int, int, int], threads: int, arrays: tuple[Any, ...]
) -> None:
    """Enqueue `kernel_of(device index)` with the addresses of `arrays` as its arguments; does not wait."""
    import cupy

    pointers = tuple(np.uint64(address(array)) for array in arrays)
    if not hasattr(arrays[0], "data_ptr"):
        with arrays[0].device:
            kernel_of(arrays[0].device.id)(grid, (threads, 1, 1), pointers)
        return
    import torch

    cuda: Any = torch.cuda
    index = arrays[0].device.index
    index = cuda.current_device() if index is None else index
    with cupy.cuda.Device(index), cupy.cuda.ExternalStream(cuda.current_stream(index).cuda_stream, index):
        kernel_of(index)(grid, (threads, 1, 1), pointers)
