"""`kvguard campaign` as its users meet it: one clear line for each mistake, exit codes, files, JSON."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SMALL = ("--trials", "6", "--clean-runs", "0", "--weights", "fp32", "--page-size", "16")
QUICK = (*SMALL, "--fault", "stale-row", "--phases", "single")


def campaign(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder of its own."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
    command = [sys.executable, "-m", "kvguard", "campaign", *arguments]
    return subprocess.run(
        command, cwd=cwd, env={**env, **environment}, capture_output=True, text=True, timeout=900, check=False
    )


def earlier_run(folder: Path) -> dict[str, bytes]:
    """Plant a run and return everything below runs/."""
    run = folder / "runs" / "20260101-000000-1"
    run.mkdir(parents=True)
    (run / "results.json").write_text("{}")
    (folder / "runs" / "latest").symlink_to(run.name)
    return snapshot(folder)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / "runs").rglob("*")) if p.is_file()}


def assert_one_line_and_exit_2(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0], lines[0]
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--engine", "nosuch"), ("nosuch", "embedded")),
        (("--fault", "nosuch"), ("nosuch", "stale-row")),
        (("--fault", "stale-row,oops"), ("oops", "stale-row")),
        (("--kv-dtype", "fp4"), ("fp4", "fp8_e4m3")),
        (("--weights", "int2"), ("int2", "int4")),
        (("--page-size", "0"), ("1 to 64",)),
        (("--page-size", "x"), ("x",)),
        (("--backend", "cuda"), ("cuda", "torch")),
        (("--backend", "cupy"), ("cupy", "CPU")),
        (("--model", "/no/such/folder"), ("/no/such/folder", "recall")),
        (("--replay", "1"), ("runs/latest",)),
    ],
)
def test_a_wrong_option_is_one_clear_line(tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Usage errors exit 2, name what was wrong and what is there instead, and leave earlier runs alone."""
    before = {} if "--replay" in arguments else earlier_run(tmp_path)
    assert_one_line_and_exit_2(campaign(*arguments, cwd=tmp_path), *words)
    assert not before or snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "name,text,words",
    [
        ("guard.yaml", "level: [tags\n", ("guard.yaml",)),
        ("guard.yaml", "on_violaton: abort\n", ("on_violaton", "on_violation")),
        ("guard.toml", "level = 'everything'\n", ("level", "everything")),
        ("guard.toml", "control_plane = false\ndevice_check = false\n", ("off",)),
    ],
)
def test_a_broken_configuration_is_refused(tmp_path: Path, name: str, text: str, words: tuple[str, ...]) -> None:
    """A config file that cannot be read, or says what the guard does not know, stops the campaign before it starts."""
    before = earlier_run(tmp_path)
    (tmp_path / name).write_text(text)
    result = campaign(*QUICK, cwd=tmp_path, KVGUARD_CONFIG=name)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("limit_bytes", [0, 200, 4000])
def test_a_full_disk_is_one_clear_line(tmp_path: Path, limit_bytes: int) -> None:
    """When nothing more can be written, the message names the folder; earlier runs and `latest` stay as they were."""
    before = earlier_run(tmp_path)
    code = (
        "import resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes})); "
        f"sys.argv = ['kvguard', 'campaign', '--workers', '1', *{list(QUICK)!r}]; "
        "from kvguard.cli import main; main()"
    )
    assert resource.RLIMIT_FSIZE is not None
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    lines = [line for line in result.stderr.splitlines() if "campaign: " in line and " of " not in line]
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert len(lines) == 1 and "cannot write" in lines[0] and "--runs-dir" in lines[0]
    after = snapshot(tmp_path)
    assert {name: data for name, data in after.items() if ".partial" not in name} == before
    assert os.readlink(tmp_path / "runs" / "latest") == "20260101-000000-1"


def test_a_run_leaves_its_files_and_json_is_all_of_standard_output(tmp_path: Path) -> None:
    """A quick run writes every file, `--json` prints results.json alone, and a replay gives the recorded outcome."""
    result = campaign(*QUICK, "--json", "--seed", "5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    latest = tmp_path / "runs" / "latest"
    names = ["history.jsonl", "junit.xml", "plan.toml", "report.html", "results.json"]
    assert sorted(path.name for path in latest.iterdir()) == names
    printed = json.loads(result.stdout)
    assert printed == json.loads((latest / "results.json").read_text())
    assert printed["trials"] == printed["detected"] == 6 and printed["seed"] == 5
    history = [json.loads(line) for line in (latest / "history.jsonl").read_text().splitlines()]
    assert sorted(entry["index"] for entry in history) == list(range(6))
    assert len(tomllib.loads((latest / "plan.toml").read_text())["trial"]) == 6
    assert ElementTree.parse(latest / "junit.xml").getroot() is not None
    replayed = campaign("--replay", "2", "--json", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    recorded = next(entry for entry in history if entry["index"] == 2)
    again = json.loads(replayed.stdout)
    # Violation ids carry the process id; everything else is a function of the plan.
    for key in ("outcome", "affected", "aborted", "detected_by", "injected_step", "live_step", "potent", "kinds"):
        assert again[key] == recorded[key], key
    assert_one_line_and_exit_2(campaign("--replay", "99", cwd=tmp_path), "99")
    assert_one_line_and_exit_2(campaign("--replay", "2", "--run", "nosuch", cwd=tmp_path), "nosuch")


def test_the_same_seed_gives_the_same_results_whatever_the_workers(tmp_path: Path) -> None:
    """Results are a function of the plan: one worker or two, the counts are equal."""
    counts = []
    for workers in ("1", "2"):
        result = campaign("--trials", "12", "--clean-runs", "0", "--json", "--workers", workers, cwd=tmp_path)
        data = json.loads(result.stdout)
        counts.append({key: value for key, value in data.items() if key not in ("wall_s", "command", "run")})
    assert counts[0] == counts[1]


def test_a_campaign_with_the_oracle_backend_gives_the_same_verdicts(tmp_path: Path) -> None:
    """The NumPy oracle and torch flag the same requests in the same trials."""
    cells = []
    for backend in ("torch", "numpy"):
        arguments = ("--trials", "14", "--clean-runs", "2", "--kv-dtype", "fp32", "--weights", "fp32")
        result = campaign(*arguments, "--json", "--backend", backend, cwd=tmp_path)
        cells.append(json.loads(result.stdout)["cells"])
    assert cells[0] == cells[1]
