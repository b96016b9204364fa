"""Compiles the Triton kernels without a GPU and prints, as JSON, what a test looks at: run as a program of its own.

    python -m tests.kernels.ahead_of_time cuda:90

TRITON_INTERPRET must not be set: interpreted kernels cannot be compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvguard.kernels.publish_row import triton_op as publish_op
from kvguard.kernels.retire_pages import triton_op as retire_op
from kvguard.kernels.scatter_tags import descriptor as scatter_descriptor
from kvguard.kernels.scatter_tags import triton_op as scatter_op
from kvguard.kernels.stamp_rows import triton_op as stamp_op
from kvguard.kernels.verify_pages import descriptor, triton_op
from kvguard.kernels.verify_rows import triton_op as verify_rows_op

VARIANTS = {
    "int32": (descriptor.NARROW, True, False),
    "int64": (descriptor.WIDE, True, False),
    "int32, any strides": (descriptor.NARROW, False, False),
    "int32, split pages": (descriptor.NARROW, True, True),
    "mixed, split pages": (descriptor.MIXED, False, True),
}


def _verify_rows(page_size: int, **constants: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Module, kernel and constants of a variant of `verify_rows`."""
    constants = {
        "PAGE_SIZE": page_size, "ENFORCE": True, "SLOTS": verify_rows_op.BY_QUERY_START.value, "WRITES": True,
    } | constants  # fmt: skip
    return verify_rows_op, verify_rows_op.verify_kernel, constants


TOKEN_ROWS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "verify_rows, tokens": _verify_rows(1),
    "verify_rows, pages": _verify_rows(64),
    "verify_rows, pages, only observed": _verify_rows(64, ENFORCE=False, SLOTS=0, WRITES=False),
    "stamp_rows, decode": (
        stamp_op, stamp_op.stamp_kernel, {"PAGE_SIZE": 64, "DECODE": True, "ADOPTS": False, "CONTENT": False}
    ),
    "stamp_rows, prompts": (
        stamp_op, stamp_op.stamp_kernel, {"PAGE_SIZE": 64, "DECODE": False, "ADOPTS": True, "CONTENT": False}
    ),
    "stamp_rows, prompts of tokens": (
        stamp_op, stamp_op.stamp_kernel, {"PAGE_SIZE": 1, "DECODE": False, "ADOPTS": True, "CONTENT": False}
    ),
    "retire_pages": (
        retire_op, retire_op.retire_kernel, {"DIVISOR": 1, "LOOKS": True, "CLEARS": True, "HOLDERS": True}
    ),
    "retire_pages, tokens, first": (
        retire_op, retire_op.retire_kernel, {"DIVISOR": 64, "LOOKS": True, "CLEARS": False, "HOLDERS": False}
    ),
    "retire_pages, tokens, second": (
        retire_op, retire_op.retire_kernel, {"DIVISOR": 64, "LOOKS": False, "CLEARS": True, "HOLDERS": False}
    ),
    "stamp_rows, prompts with contents": (
        stamp_op, stamp_op.stamp_kernel, {"PAGE_SIZE": 64, "DECODE": False, "ADOPTS": True, "CONTENT": True}
    ),
    "publish_row": (publish_op, publish_op.publish_kernel, {"PAGE_SIZE": 64, "CONTENT": False}),
    "publish_row, contents": (publish_op, publish_op.publish_kernel, {"PAGE_SIZE": 64, "CONTENT": True}),
}  # fmt: skip
NARROW_POINTERS = ("table", "lengths", "first", "offset", "old", "new")
"""Those of the operations on token rows that are int32 in a usual engine."""


def compile_token_rows(target: GPUTarget, module: Any, fn: Any, constants: dict[str, Any]) -> Any:
    """The compiled kernel, one for each set of constants: nothing depends on how arrays are aligned, or on numbers."""
    parameters = [parameter for parameter in fn.params if not parameter.is_constexpr]
    assert all(parameter.do_not_specialize_on_alignment for parameter in parameters)
    assert all(parameter.do_not_specialize for parameter in parameters if parameter.name in module.SCALARS)
    types = {name: "*i32" if name in NARROW_POINTERS else "*i64" for name in module.POINTERS}
    # As the launcher types a number: by what its parameter says.
    types |= {parameter.name: parameter.annotation_type for parameter in parameters if parameter.name in module.SCALARS}
    constants = {"BLOCK": module.BLOCK} | constants
    assert [*types, *constants] == [parameter.name for parameter in fn.params]
    source = ASTSource(fn=fn, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return triton.compile(source, target=target, options={"num_warps": module.WARPS})


def compile_for(target: GPUTarget, fn: Any, pointers: tuple[str, ...], constants: dict[str, Any]) -> Any:
    """The compiled kernel, the only one of these constants: nothing may depend on how the arrays are aligned."""
    assert all(parameter.is_constexpr or parameter.do_not_specialize_on_alignment for parameter in fn.params)
    signature = dict.fromkeys(pointers, "*i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=fn, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=triton_op.launch_options(on_amd=target.backend == "hip"))


def resources(compiled: Any) -> dict[str, Any]:
    """Registers, spilled and stack bytes, and how often each kind of load occurs in a compiled kernel."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]

        def value(name: str) -> int:
            found = re.search(rf"\.{name}:\s*(\d+)", text)
            assert found is not None, name
            return int(found.group(1))

        return {
            "registers": value("vgpr_count"),
            # A scalar register that is spilled goes into a lane of a vector register, not to memory.
            "spilled": value("vgpr_spill_count"),
            "stack_bytes": value("private_segment_fixed_size"),
            "loads": Counter(re.findall(r"global_load_\w+", text)),
        }
    # What Triton's own ptxas has put into the binary.
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        done = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr))
    return {
        "registers": int(usage["REG"]),
        "spilled": int(usage["LOCAL"]),
        "stack_bytes": int(usage["STACK"]),
        "loads": Counter(re.findall(r"ld\.global[\w.:]*", compiled.asm["ptx"])),
    }


def main(name: str) -> None:
    """`name`: cuda:CAPABILITY or hip:ARCHITECTURE."""
    backend, _, architecture = name.partition(":")
    target = GPUTarget("cuda", int(architecture), 32) if backend == "cuda" else GPUTarget("hip", architecture, 64)
    found = {}
    for variant, (types, vector, split) in VARIANTS.items():
        constants = {"BLOCK": descriptor.BLOCK, "TYPES": types, "VECTOR": vector, "SPLIT_PAGES": split}
        pointers = ("descriptors", "packed", "out", "workspace")
        found[variant] = resources(compile_for(target, triton_op.verify_kernel, pointers, constants))
    constants = {"BLOCK": scatter_descriptor.BLOCK}
    compiled = compile_for(target, scatter_op.scatter_kernel, ("descriptors", "packed"), constants)
    found["scatter"] = resources(compiled)
    for variant, (module, fn, constants) in TOKEN_ROWS.items():
        found[variant] = resources(compile_token_rows(target, module, fn, constants))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
