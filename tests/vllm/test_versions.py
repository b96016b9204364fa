"""Older releases of vLLM: the guard attaches, changes no token of healthy traffic, and ends the victim of a fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.tiny import write_checkpoint
from tests.vllm.version_smoke import FAULT_STEP, VICTIM
from tools.run_older_vllm import unpacked

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.28.0", "0.30.0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_release_is_guarded(version: str, checkpoint: Path) -> None:
    """Every step is verified, tokens equal an unguarded run, and a broken table row ends one request."""
    folder = unpacked(version)
    smoke = [sys.executable, "-m", "tools.run_older_vllm", version, "-m", "tests.vllm.version_smoke", str(checkpoint)]
    done = subprocess.run(smoke, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith(version) and Path(found["file"]).is_relative_to(folder)
    assert found["clean"] == found["plain"]
    counts = found["clean_counts"]
    assert counts["steps_verified"] == counts["steps_seen"] > 50
    assert counts["violations"] == counts["guard_faults"] == counts["adapter_errors"] == 0
    golden = found["plain"][0]
    for place, (answer, wanted) in enumerate(zip(found["faulty"], golden, strict=True)):
        if place != VICTIM:
            assert answer == wanted, place
            continue
        finish_reason, stop_reason, tokens = answer
        assert finish_reason == "error" and stop_reason.startswith("kvguard kvg-")
        assert tokens == wanted[2][: len(tokens)] and FAULT_STEP - 3 <= len(tokens) < len(wanted[2])
    assert found["after"] == found["plain"][1]
    assert found["violations"] == 1 and found["reset"]
    assert len(found["front_end"]) == 4, found["front_end"]
