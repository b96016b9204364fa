"""What a reviewer broke at the front door: cancelled runs, narrow terminals, odd folders, other people's settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvguard.config import ConfigError, GuardConfig
from kvguard.fault_injection.plan import build_plan
from kvguard.fault_injection.results import CampaignResults, TrialResult
from kvguard.fault_injection.run_folder import RunFolder, RunFolderError, plan_toml, read_plan
from kvguard.fault_injection.terminal import show_results
from tests.campaign.test_command import QUICK, campaign


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_cancelled_campaign_leaves_no_process_and_keeps_its_history(tmp_path: Path, name: str) -> None:
    """Whatever ends the parent ends its workers; a signal that can be caught leaves one line and the history."""
    command = [sys.executable, "-m", "kvguard", "campaign", "--workers", "2", "--runs-dir", str(tmp_path / "runs")]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that starts the tests in the background ignores SIGINT for them, and Python leaves that as it is.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        history: list[Path] = []
        while not (history and history[0].stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.2)
            history = list((tmp_path / "runs").glob("*.partial/history.jsonl"))
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "no worker was started"
        process.send_signal(getattr(signal, name))
        _, errors = process.communicate(timeout=60)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []
        assert history[0].stat().st_size > 0
        if name != "SIGKILL":
            assert process.returncode == 130
            assert "interrupted after" in errors and ".partial" in errors and "Traceback" not in errors
    finally:
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize("columns", [60, 80, 100, 131, 132, 200])
def test_no_terminal_is_too_narrow_for_the_figures(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table drops columns where there is no room; it never cuts a name or a number."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    plan = build_plan(seed=1, trials=216, clean_runs=0)
    trials = [
        TrialResult(index=t.index, cell=t.cell, traffic_seed=1, fault_seed=1, outcome="detected", potent=True)
        for t in plan.trials
    ]
    data = {"clean_runs_contained": {}, "clean_runs": 0, "false_positives": 0, "detected": 216, "trials": 216}
    data |= {"potent": 216, "miss_rate_upper_95": 0.01, "seed": 1, "wall_s": 1.0}
    show_results(CampaignResults(trials=trials), data, Path("runs/x"))
    out = capsys.readouterr().out
    table = out.split("trials detected")[0]
    assert "…" not in table
    for word in ("out-of-range-entry", "control_plane", "216"):
        assert word in table


def test_an_early_closed_pipe_keeps_the_verdict(tmp_path: Path) -> None:
    """`kvguard campaign | head -1` is still 0 when all is proven."""
    command = f"{sys.executable} -m kvguard campaign {' '.join(QUICK)} | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "0", result.stderr
    assert "Traceback" not in result.stderr


def test_the_environment_has_no_say_in_a_trial(tmp_path: Path) -> None:
    """A breaker set to observe after one violation, or a report folder, changes nothing in a campaign's results."""
    reports = tmp_path / "reports"
    settings = {
        "KVGUARD_BREAKER_VIOLATIONS": "1",
        "KVGUARD_BREAKER_ACTION": "observe",
        "KVGUARD_ON_VIOLATION": "observe",
        "KVGUARD_REPORT_DIR": str(reports),
    }
    result = campaign(*QUICK, "--json", cwd=tmp_path, **settings)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["detected"] == 6 and not reports.exists()
    assert campaign("--replay", "0", cwd=tmp_path, KVGUARD_LEVEL="bogus").returncode == 2


def test_two_campaigns_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    """Making the folder is the test for a free name."""
    folders = [RunFolder(tmp_path, 1) for _ in range(4)]
    assert len({folder.path for folder in folders}) == 4
    finals = {folder.complete() for folder in folders}
    assert len(finals) == 4 and (tmp_path / "latest").resolve() in finals


def test_a_latest_that_is_no_link_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A file or folder named `latest` is somebody's: it is neither overwritten nor found out at the end."""
    (tmp_path / "latest").write_text("keep")
    with pytest.raises(RunFolderError, match="no link to a run"):
        RunFolder(tmp_path, 1)
    assert (tmp_path / "latest").read_text() == "keep"


@pytest.mark.parametrize(
    "old,new",
    [("stale-row", "nosuch"), ('"fp32"', '"fp4"'), ("page_size = 16", "page_size = 0"), ('"torch"', '"cuda"')],
)
def test_a_plan_of_another_release_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """A plan with a value that this release does not have is one clear error, not a traceback."""
    plan = build_plan(
        seed=1, trials=2, clean_runs=0, faults=["stale-row"], kv_dtypes=["fp32"], weights=["fp32"], page_sizes=[16]
    )
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    (tmp_path / "plan.toml").write_text(plan_toml(plan).replace(old, new))
    with pytest.raises(RunFolderError, match="not a plan of this release"):
        read_plan(tmp_path)


def test_a_broken_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    """Truncated weights, nonsense in config.json and a model that is too short are refused before anything runs."""
    model = tmp_path / "model"
    model.mkdir()
    source = Path(__file__).resolve().parents[2] / "fault_injection" / "engine" / "recall"
    config = json.loads((source / "config.json").read_text())
    weights = (source / "model.safetensors").read_bytes()
    for changes, data in (
        ({}, weights[:1000]),
        ({}, b""),
        ({"num_attention_heads": None}, weights),
        ({"max_position_embeddings": 64}, weights),
        ({"rope_scaling": "x"}, weights),
    ):
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        (model / "model.safetensors").write_bytes(data)
        result = campaign(*QUICK, "--model", str(model), cwd=tmp_path)
        assert result.returncode == 2, (changes, result.stderr)
        assert len(result.stderr.strip().splitlines()) == 1 and "cannot use model" in result.stderr


@pytest.mark.parametrize(
    "name,text",
    [
        ("a.yaml", "? [a]\n: b\n"),
        ("a.yaml", "{{a: 1}: b}\n"),
        ("a.yaml", "seed: 2001-99-99\n"),
        ("a.yaml", "seed: !!int x\n"),
        ("a.yaml", "[" * 3000),
        ("a.toml", "a = " + "[" * 3000),
    ],
)
def test_a_config_file_that_breaks_its_parser_is_a_config_error(tmp_path: Path, name: str, text: str) -> None:
    """Unhashable keys, impossible dates and bottomless nesting are ConfigErrors that name the file."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match="a.yaml|a.toml"):
        GuardConfig.load(path)


def test_the_default_backend_needs_no_torch() -> None:
    """The README's lines work on the base install: without torch the oracle backend is chosen."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvguard.adapters.generic import PagedGuard; from kvguard.pools import PoolSpec\n"
        "import numpy as np; from kvguard.verifier import PoolInputs\n"
        "g = PagedGuard([PoolSpec(num_pages=8)], backend='numpy'); g.start('a'); g.allocate('a', [3])\n"
        "p = g.before_forward(['a'], [0], [5], PoolInputs(table=np.array([[4]], np.int32)))\n"
        "print([a.request for a in g.after_forward(p).aborts])\n"
    )
    env = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "['a']"
