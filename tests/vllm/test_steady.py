"""Steady decode in a real vLLM takes the short way, and a fault in it is found all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.steady import FAULT
from tests.vllm.tiny import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_most_steps_are_short_and_a_fault_in_one_has_one_victim(
    checkpoint: Path, runner: str, scheduling: str
) -> None:
    """Three requests, a block of 32 tokens each now and then; the second one's table is broken in a short step."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.steady", runner, scheduling, str(checkpoint)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["health"] and found["healthy"] == ["length"] * 3
    assert found["steps"] * 0.7 < found["short"] <= found["steps"]
    # Six blocks are crossed in each run: few in steps in which a request comes, or the books look in full.
    assert found["crossed"] >= 6
    assert found["broken"] == ["length", "error", "length"] and found["same"] == [True, False, True]
    assert FAULT <= found["tokens"] < 60
    assert found["kinds"] == ["null-entry"]
