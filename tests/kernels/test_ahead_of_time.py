"""The Triton kernels, compiled for GPUs that are not here: no spills, bounded registers, 16-byte loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REGISTERS_MAX = 128
"""With 128 threads a program they leave room for four programs, 16 warps, on an NVIDIA multiprocessor, and for four
waves on each SIMD of an MI300: enough to have some thousands of page tags on their way at any time."""
HOT_REGISTERS_MAX = 96
"""The same for the variant that a usual engine gets, int32 tables without split pages: five programs, 20 warps."""
TOKEN_ROWS_REGISTERS_MAX = 80
"""The operations on token rows, which are told all they need to know in their arguments: six programs, 24 warps."""
ONE_PROGRAM_REGISTERS_MAX = {"publish_row, contents": 96}
"""Of those, what is launched as one program only: nothing waits for room beside it."""
WIDE_LOADS = {
    "cuda": {"int32": "ld.global.v4.b32", "int64": "ld.global.v2.b64"},
    "hip": {"int32": "global_load_dwordx4", "int64": "global_load_dwordx4"},
}


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_the_kernels_compile_without_spills_and_read_16_bytes_at_a_time(target: str, tmp_path: Path) -> None:
    """Every variant compiles; what the compilers say of registers, stack and loads is within bounds."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead_of_time", target],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 18
    for variant, used in found.items():
        print(target, variant, used)
        assert used["spilled"] == 0 and used["stack_bytes"] == 0, (variant, used)
        assert 0 < used["registers"] <= REGISTERS_MAX, (variant, used)
    assert found["int32"]["registers"] <= HOT_REGISTERS_MAX
    token_rows = [variant for variant in found if variant.partition(",")[0].endswith(("_row", "_rows", "_pages"))]
    assert len(token_rows) == 12
    for variant in token_rows:
        bound = ONE_PROGRAM_REGISTERS_MAX.get(variant, TOKEN_ROWS_REGISTERS_MAX)
        assert found[variant]["registers"] <= bound, (variant, found[variant])
    for variant, load in WIDE_LOADS[target.partition(":")[0]].items():
        # AMD's compiler reads neighbouring words of a descriptor together, too: count them where the rows are not.
        wide, narrow = found[variant]["loads"].get(load, 0), found["int32, any strides"]["loads"].get(load, 0)
        assert wide > narrow, (variant, found[variant]["loads"], found["int32, any strides"]["loads"])
