"""The Triton kernel of `verify_slots`, compiled for GPUs that are not here: no spills, bounded registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REGISTERS_MAX = 80
"""As for the operations on token rows: six programs of 128 threads, 24 warps, on an NVIDIA multiprocessor."""


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"])
def test_the_kernel_of_slots_compiles_without_spills(target: str, tmp_path: Path) -> None:
    """It compiles; what the compilers say of registers and stack is within bounds."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.slots_ahead_of_time", target],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(done.stdout.splitlines()[-1])["slots"]
    print(target, used)
    assert used["spilled"] == 0 and used["stack_bytes"] == 0, used
    assert 0 < used["registers"] <= REGISTERS_MAX, used
