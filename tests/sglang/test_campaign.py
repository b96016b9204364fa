"""`kvguard campaign --engine sglang`: what it proves, and that it would say so if the guard did not."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import MISSED, TrialResult
from kvguard.fault_injection.sglang_plan import LOOPS, SGLANG_FAULTS
from kvguard.fault_injection.targets import sglang_runs
from kvguard.fault_injection.targets.sglang_runs import SglangRuns
from kvguard.fault_injection.targets.sglang_templates import templates
from kvguard.fault_injection.trial import run_clean, run_trial

ZEROS = ("missed", "not_injected", "false_positives", "tokens_after_fault", "bystanders_changed")
ARGUMENTS = shlex.split(os.environ.get("KVGUARD_TEST_CAMPAIGN", "--page-size 16 --kv-dtype fp8 --trials 16"))
"""Of the campaign below: every fault in both loops. Set it to "" for the default campaign."""


@pytest.fixture(autouse=True)
def new_templates() -> Iterator[None]:
    """Engines are forks of this process: what a test patches is in those started after it, and in no later one."""
    templates.close()
    yield
    templates.close()


def command(*arguments: str, cwd: Path, status: int = 0) -> dict[str, Any]:
    """Run the command in a folder of its own and return its JSON."""
    words = [sys.executable, "-m", "kvguard", "campaign", "--json", *arguments]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KVGUARD_LEVEL", "KVGUARD_CONFIG"))}
    result = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=3000, check=False)
    assert result.returncode == status, result.stderr[-3000:] + result.stdout[:500]
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_a_campaign_proves_everything_and_a_replay_the_same(tmp_path: Path) -> None:
    """Every fault meets both loops, is found in time, harms nobody else; nothing healthy is flagged."""
    data = command("--engine", "sglang", "--clean-runs", "4", *ARGUMENTS, cwd=tmp_path)
    assert data["trials"] >= 16 and data["clean_runs"] == 4
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["detected"] == data["trials"] and data["potent"] >= 0.6 * data["trials"]
    assert all(data["clean_runs_contained"][name] > 0 for name in ("evictions", "prefix_hits", "client_aborts"))
    met = {(cell["scheduling"], cell["fault"]) for cell in data["cells"]}
    assert met == {(loop, fault) for loop in LOOPS for fault in SGLANG_FAULTS}
    run = tmp_path / "runs" / "latest"
    recorded = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    (before,) = (entry for entry in recorded if entry["type"] == "trial" and entry["index"] == 2)
    again = command("--replay", "2", cwd=tmp_path)
    for key in ("outcome", "affected", "aborted", "detected_by", "injected_step", "live_step", "potent", "kinds"):
        assert again[key] == before[key], key


def trial(fault: str, *, proofs: str = "tag", loop: str = "overlap", seed: int = 3) -> TrialResult:
    cell = Cell(
        engine="sglang", fault=fault, kv_dtype="fp32", weights="fp32", page_size=16, scheduling=loop, proofs=proofs
    )
    return run_trial(TrialPlan(index=0, cell=cell, traffic_seed=3, fault_seed=seed), model="tiny", backend="torch")


def clean() -> bool:
    plan = CleanPlan(
        index=0,
        engine="sglang",
        scheduling="overlap",
        kv_dtype="fp32",
        weights="fp32",
        page_size=16,
        traffic_seed=4,
    )
    return run_clean(plan, model="tiny", backend="torch").clean


def test_a_guard_that_only_observes_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen is not enough: who reads the bad page has to be aborted, and no token of that step may leave."""
    observing = {**sglang_runs.GUARDS["tag"], "KVGUARD_ON_VIOLATION": "observe"}
    monkeypatch.setitem(sglang_runs.GUARDS, "tag", observing)
    result = trial("stale-row")
    assert result.outcome == MISSED and result.aborted == () and result.tokens_after_fault > 0, result
    assert result.detected_by == ("tag",)


def explode(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("name", ["_launch", "_judge"])
def test_a_guard_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A guard that raises disarms and lets everything through: neither a clean run nor a trial counts as proven."""
    from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard

    monkeypatch.setattr(SchedulerGuard, name, explode)
    assert not clean()
    result = trial("stale-row")
    assert result.outcome == MISSED and not result.proven


def test_a_token_that_slips_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that aborts the right request, and lets the flagged step's token out, has not proven anything."""
    from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard

    original = SchedulerGuard._abort

    def leaky(self: SchedulerGuard, batch: Any, req: Any, violation: Any) -> None:
        original(self, batch, req, violation)
        req.finished_len = None

    monkeypatch.setattr(SchedulerGuard, "_abort", leaky)
    result = trial("stale-row", loop="normal")
    assert result.aborted == result.affected and result.tokens_after_fault > 0 and not result.proven


def test_an_engine_that_is_not_guarded_is_no_guarded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs what goes wrong in a plug-in: a run that should be guarded and is not stops the harness."""
    monkeypatch.setitem(sglang_runs.GUARDS, "tag", {"KVGUARD_LEVEL": "off"})
    with pytest.raises(RuntimeError, match="unguarded"):
        trial("stale-row")


def test_every_run_starts_where_the_engine_started() -> None:
    """Unguarded runs with a fault leave the next run as it was: a run is a fork of an engine in which nothing ran."""

    def runs(fault: str) -> SglangRuns:
        cell = Cell(engine="sglang", fault=fault, kv_dtype="fp32", weights="fp32", page_size=16, scheduling="overlap")
        plan = TrialPlan(index=0, cell=cell, traffic_seed=5, fault_seed=5)
        return SglangRuns(plan, model="tiny", proofs="all")

    first = runs("stale-row").control({})
    for fault in ("double-allocation", "stale-row", "tree-owned-page-freed"):
        assert runs(fault).off().injection is not None, fault
        again = runs(fault).control({})
        assert (again.outputs, again.emitted, again.counts) == (first.outputs, first.emitted, first.counts), fault
