"""`kvguard campaign --backend triton`: the kernels for GPUs, interpreted, find in an engine what torch finds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaign.test_command import campaign

pytestmark = pytest.mark.slow

SHORT = (
    "--trials", "4", "--clean-runs", "1", "--kv-dtype", "fp32", "--weights", "fp32", "--page-size", "16",
    "--fault", "stale-row,use-after-free",
)  # fmt: skip


def verdicts(folder: Path) -> list[dict[str, Any]]:
    """What was found in each trial and clean run, in the order of the plan."""
    text = (folder / "runs" / "latest" / "history.jsonl").read_text()
    # Every violation has an id of its own.
    lines = [json.loads(line) for line in re.sub(r"kvg-\w+-\d+", "kvg", text).splitlines()]
    kept = [{key: line[key] for key in sorted(line) if not key.endswith("_s")} for line in lines]
    return sorted(kept, key=lambda line: json.dumps(line, sort_keys=True))


def test_interpreted_triton_gives_the_verdicts_of_torch(tmp_path: Path) -> None:
    """Trial for trial the same outcome, by the same proof, in the same step; worker processes interpret too."""
    found = {}
    for backend in ("torch", "triton"):
        folder = tmp_path / backend
        folder.mkdir()
        done = campaign(*SHORT, "--json", "--workers", "2", "--backend", backend, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert ("TRITON_INTERPRET=1" in done.stderr) == (backend == "triton")
        found[backend] = (json.loads(done.stdout)["cells"], verdicts(folder))
    assert found["torch"] == found["triton"]
    assert len(found["triton"][1]) == 5


def test_without_triton_it_is_one_clear_line(tmp_path: Path) -> None:
    """Where Triton is not installed the command says so and what to do, before anything runs."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'triton' else find(name, package)\n"
    )
    command = [sys.executable, "-m", "kvguard", "campaign", "--backend", "triton"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "pip install 'kvguard[triton]'" in done.stderr, done.stderr
