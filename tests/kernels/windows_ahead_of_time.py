"""Compiles the Triton kernels of windows without a GPU, like `ahead_of_time`: a program of its own.

    python -m tests.kernels.windows_ahead_of_time cuda:90
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvguard.kernels.pair_windows import triton_op as pair_op
from kvguard.kernels.verify_windows import triton_op as verify_op
from tests.kernels.ahead_of_time import resources

WINDOWS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "pair, fresh": (pair_op, pair_op.pair_kernel, {"PAGE_SIZE": 64, "FRESH": True}),
    "pair, of tokens": (pair_op, pair_op.pair_kernel, {"PAGE_SIZE": 1, "FRESH": True}),
    "pair, handed over": (pair_op, pair_op.pair_kernel, {"PAGE_SIZE": 64, "FRESH": False}),
    "verify, tokens": (
        verify_op, verify_op.windows_kernel, {"PAGE_SIZE": 1, "ENFORCE": True, "QUERIES": False, "SLOTS": True}
    ),
    "verify, pages": (
        verify_op, verify_op.windows_kernel, {"PAGE_SIZE": 64, "ENFORCE": True, "QUERIES": True, "SLOTS": True}
    ),
    "verify, only observed": (
        verify_op, verify_op.windows_kernel, {"PAGE_SIZE": 64, "ENFORCE": False, "QUERIES": True, "SLOTS": True}
    ),
}  # fmt: skip
NARROW_POINTERS = ("table", "lengths")


def main(name: str) -> None:
    """`name`: cuda:CAPABILITY or hip:ARCHITECTURE."""
    backend, _, architecture = name.partition(":")
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    found = {}
    for variant, (module, fn, constants) in WINDOWS.items():
        parameters = [parameter for parameter in fn.params if not parameter.is_constexpr]
        assert all(parameter.do_not_specialize_on_alignment for parameter in parameters)
        assert all(parameter.do_not_specialize for parameter in parameters if parameter.name in module.SCALARS)
        types = {pointer: "*i32" if pointer in NARROW_POINTERS else "*i64" for pointer in module.POINTERS}
        types |= dict.fromkeys(module.SCALARS, "i64")
        constants = {"BLOCK": module.BLOCK} | constants
        assert [*types, *constants] == [parameter.name for parameter in fn.params]
        source = ASTSource(fn=fn, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        found[variant] = resources(triton.compile(source, target=target, options={"num_warps": module.WARPS}))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
