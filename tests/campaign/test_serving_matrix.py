"""`bench/serving_matrix.py --quick`: what its figures must hold to, whatever the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quick_matrix_is_consistent(tmp_path: Path) -> None:
    """JSON is all of standard output; half the bytes hold twice the tokens; bf16 agrees with itself; guards checked."""
    command = [sys.executable, str(ROOT / "bench" / "serving_matrix.py"), "--quick", "--json"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_LEVEL")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    plain, small = report["cells"]
    assert (plain["kv_dtype"], plain["weights"], small["kv_dtype"], small["weights"]) == ("bf16", "bf16", "fp8", "int4")
    # 30 layers, 3 KV heads of 64, key and value; two bytes and one.
    assert (plain["page_bytes"], small["page_bytes"]) == (32 * 30 * 3 * 64 * 2 * 2, 32 * 30 * 3 * 64 * 2)
    for cell in (plain, small):
        assert cell["tokens_fit"] == 8 * 2**20 // cell["page_bytes"] * 32
        assert cell["guard"]["steps_seen"] == cell["guard"]["steps_verified"] > 0 == cell["guard"]["violations"]
        assert cell["tokens_per_s"]["off"] > 0 < cell["p95_ms"]["tags"]
    assert plain["agreement"]["equal_share"] == 1 and plain["agreement"]["first_divergence_min"] == 8
    assert 0.2 < small["agreement"]["equal_share"] <= 1
    assert {"cpu", "cores", "vectors"} <= report["machine"].keys() and report["load_before"] >= 0
