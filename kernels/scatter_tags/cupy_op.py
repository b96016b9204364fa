"""`scatter_tags` for all pools of a step as one CUDA launch through CuPy."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvguard.kernels.cupy_launch import launch_kernel
from kvguard.kernels.scatter_tags import descriptor
from kvguard.kernels.scatter_tags.descriptor import ScatterWord

_SOURCE = r"""
typedef long long i64;

// Grid (blocks of changes, pools).
extern "C" __global__ void scatter_step(const i64* descriptors, const i64* packed) {
  const i64* pool = descriptors + (i64)blockIdx.y * WORDS;
  const i64 change = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (change >= pool[CHANGES]) return;
  const i64 page = packed[pool[PAGES] + change];
  if (page >= 0 && page < pool[NUM_PAGES]) ((i64*)pool[PAGE_TAG])[page] = packed[pool[TAGS] + change];
}
"""


def source() -> str:
    """The whole text, for NVRTC, nvcc or a C++ compiler with stand-ins for what CUDA adds to the language."""
    words = {word.name: int(word) for word in ScatterWord} | {"WORDS": len(ScatterWord)}
    return "".join(f"#define {name} {value}\n" for name, value in words.items()) + _SOURCE


@cache
def _kernel(device: int) -> Any:
    import cupy

    return cupy.RawKernel(source(), "scatter_step", options=("--std=c++17",))


def scatter_step(*, pools: int, changes: int, descriptors: Any, packed: Any) -> None:
    """See `kvguard.kernels.scatter_tags.scatter_step` for the contract."""
    blocks = -(-changes // descriptor.BLOCK)
    launch_kernel(_kernel, (blocks, pools, 1), descriptor.BLOCK, (descriptors, packed))
