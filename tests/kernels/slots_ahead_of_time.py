"""Compiles the Triton kernel of `verify_slots` without a GPU, like `ahead_of_time`: a program of its own,
`python -m tests.kernels.slots_ahead_of_time cuda:90`."""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvguard.kernels.verify_slots import descriptor, triton_op
from tests.kernels.ahead_of_time import resources

POINTERS = ("descriptors", "packed", "out", "workspace")


def main(name: str) -> None:
    """`name`: cuda:CAPABILITY or hip:ARCHITECTURE."""
    backend, _, architecture = name.partition(":")
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    fn = triton_op.slots_kernel
    # There is one binary: nothing depends on how arrays are aligned, and every number is in a descriptor.
    assert all(parameter.is_constexpr or parameter.do_not_specialize_on_alignment for parameter in fn.params)
    assert [parameter.name for parameter in fn.params] == [*POINTERS, "BLOCK"]
    signature = dict.fromkeys(POINTERS, "*i64") | {"BLOCK": "constexpr"}
    source = ASTSource(fn=fn, signature=signature, constexprs={"BLOCK": descriptor.BLOCK})
    options = {"num_warps": triton_op.warps(on_amd=target.backend == "hip")}
    print(json.dumps({"slots": resources(triton.compile(source, target=target, options=options))}))


if __name__ == "__main__":
    main(sys.argv[1])
