"""`verify_slots` for all pools of a step as one CUDA launch through CuPy, for engines without Triton.

Arrays are torch tensors on a GPU or CuPy arrays: the kernel is given their addresses, so nothing is copied. The launch
goes on the current stream of whichever library the arrays belong to.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from kvguard.kernels.cupy_launch import launch_kernel
from kvguard.kernels.verify_slots import cuda_source
from kvguard.kernels.verify_slots.descriptor import Launch


@cache
def _kernel(device: int) -> Any:
    """Compiled once per device; CuPy keeps binaries on disk."""
    import cupy

    return cupy.RawKernel(cuda_source.source(), "verify_slots_step", options=("--std=c++17",))


def verify_slots_step(*, launch: Launch, descriptors: Any, packed: Any, out: Any, workspace: Any) -> None:
    """See `kvguard.kernels.verify_slots.verify_slots_step` for the contract."""
    grid = (launch.chunks, launch.rows + 1, launch.pools)
    launch_kernel(_kernel, grid, cuda_source.THREADS, (descriptors, packed, out, workspace))
