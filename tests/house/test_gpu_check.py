"""`bench/gpu_check.sh` and the model that it is held against, as far as they can be looked at without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu_model import ALLOWED_OVER_FLOOR, floor_of


def gpu_check(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        ["bash", str(root / "bench" / "gpu_check.sh"), *arguments],
        env={**env, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_dry_run_goes_through_every_part(root: Path, tmp_path: Path) -> None:
    """On a CPU the script compares, replays, measures and writes its JSON; what is missing is said loudly."""
    done = gpu_check(root, "--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("gpu-cpu-dry-run-*.json")
    data = json.loads(path.read_text())
    assert data["agreement"]["triton"] >= 32 and data["agreement"]["torch"] >= 32
    assert data["graphs"]["triton"]
    assert {row["backend"] for row in data["checks"]} == {"torch", "triton"}
    assert all(row["median_us"] > 0 and row["read_bytes"] > 0 for row in data["checks"])
    assert all(value > 0 for value in data["host_step_us"].values()) and len(data["host_step_us"]) == 4
    assert data["environment"]["commit"] and data["environment"]["seed"]
    assert "CUPY NOT CHECKED" in done.stdout


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_not_measured(root: Path, tmp_path: Path) -> None:
    """A backend that differs from the oracle ends the check with status 1 and no figures."""
    (tmp_path / "sitecustomize.py").write_text(
        "import kvguard.kernels.mixing as mixing\nmixing.FINAL_MULTIPLIER_1 ^= 2\n"
    )
    script = root / "bench" / "gpu_check.py"
    done = subprocess.run(
        [sys.executable, str(script), "--dry-run", "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "WRONG RESULT" in done.stderr, done.stderr[-2000:]
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_it_says_so(root: Path) -> None:
    """No GPU is no result: one line, status 2."""
    done = gpu_check(root, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--dry-run" in done.stderr


def test_the_floor_is_12_bytes_a_page_and_a_launch() -> None:
    """Worked by hand: 256 rows of 64k tokens in pages of 16 are 1,048,576 pages, 12.6 MB, 4.19 us at 3 TB/s."""
    floor = floor_of(256, 65536, 16, copy_tb_s=3.0, launch_us=3.0)
    assert (floor.pages, floor.floor_bytes) == (1_048_576, 12_582_912)
    assert floor.floor_us == pytest.approx(4.194304 + 3.0)
    assert floor.limit_us == pytest.approx(1.3 * floor.floor_us) and ALLOWED_OVER_FLOOR == 1.3
    assert floor_of(1, 17, 16, copy_tb_s=1.0, launch_us=0.0).pages == 2


def test_the_table_in_the_documentation_is_the_models(root: Path) -> None:
    """docs/performance.md holds what `python bench/gpu_model.py` prints."""
    command = [sys.executable, str(root / "bench" / "gpu_model.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (root / "docs" / "performance.md").read_text(encoding="utf-8")
