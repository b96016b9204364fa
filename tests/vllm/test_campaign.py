"""`kvguard campaign --engine vllm`: what it proves, and that it would say so if the guard did not."""

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

from kvguard.bookkeeping import BookKeeping, Retired
from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED, TrialResult
from kvguard.fault_injection.targets.vllm_cpu import cannot_run
from kvguard.fault_injection.trial import run_clean, run_trial
from kvguard.guard import Guard
from kvguard.judge import Judgement
from kvguard.verifier import Verifier
from tests.vllm.tiny import unguarded

ZEROS = ("missed", "not_injected", "false_positives", "tokens_after_fault", "bystanders_changed")
ARGUMENTS = shlex.split(os.environ.get("KVGUARD_TEST_CAMPAIGN", ""))
"""More arguments for the default campaign, for example `--seed 7`."""


@pytest.fixture(autouse=True)
def without_plugin() -> Iterator[None]:
    """Engines of the harness start without the plug-in, whatever an earlier test registered."""
    environment = dict(os.environ)
    with unguarded():
        yield
    os.environ.clear()
    os.environ.update(environment)


def campaign(*arguments: str, cwd: Path) -> dict[str, Any]:
    """Run the command in a folder of its own and return results.json; it must have proven everything."""
    command = [sys.executable, "-m", "kvguard", "campaign", "--engine", "vllm", "--json", *arguments]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KVGUARD_LEVEL", "KVGUARD_CONFIG"))}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=3000, check=False)
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[:500]
    data: dict[str, Any] = json.loads(result.stdout)
    return data


@pytest.mark.slow
def test_the_default_campaign_proves_everything(tmp_path: Path) -> None:
    """Every fault meets every set-up of vLLM, is found in time, harms nobody else; and nothing healthy is flagged."""
    data = campaign(*ARGUMENTS, cwd=tmp_path)
    assert data["trials"] >= 60 and data["clean_runs"] >= 10
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["detected"] == data["trials"] and data["potent"] >= 0.6 * data["trials"]
    assert all(count > 0 for count in data["clean_runs_contained"].values())
    setups = {
        (cell["runner"], cell["scheduling"], cell["kv_dtype"], cell["fault"])
        for cell in data["cells"]
        if cell["engine"] == "vllm"
    }
    left_out = cannot_run()
    kv_dtypes = tuple(kv_dtype for kv_dtype in ("fp32", "bf16", "fp8_e4m3") if kv_dtype not in left_out)
    assert data["left_out"] == [f"{name}: {left_out[name]}" for name in ("fp8_e4m3",) if name in left_out]
    assert setups == {
        (runner, scheduling, kv_dtype, fault)
        for runner in ("v1", "v2")
        for scheduling in ("sync", "async")
        for kv_dtype in kv_dtypes
        for fault in PAGE_FAULTS
    }
    run = tmp_path / "runs" / "latest"
    assert f"runner=v2-sched=async-kv={kv_dtypes[-1]}" in (run / "junit.xml").read_text()
    assert f"v2 async {kv_dtypes[-1]}" in (run / "report.html").read_text()


def test_a_replay_gives_the_recorded_outcome(tmp_path: Path) -> None:
    """One trial of a finished campaign, run again alone, in a process of its own; standard output is JSON alone."""
    kv_dtype = "bf16" if "fp8_e4m3" in cannot_run() else "fp8"
    few = ("--runner", "v1", "--kv-dtype", kv_dtype, "--fault", "stale-row,stale-cache-entry", "--trials", "4")
    data = campaign(*few, "--clean-runs", "1", cwd=tmp_path)
    assert data["trials"] == data["detected"] == 4
    recorded = [json.loads(line) for line in (tmp_path / "runs" / "latest" / "history.jsonl").read_text().splitlines()]
    again = campaign("--replay", "2", cwd=tmp_path)
    (before,) = (entry for entry in recorded if entry["type"] == "trial" and entry["index"] == 2)
    for key in ("outcome", "affected", "aborted", "detected_by", "injected_step", "live_step", "potent", "kinds"):
        assert again[key] == before[key], key


def trial(fault: str, *, proofs: str = "all", scheduling: str = "async", seed: int = 3) -> TrialResult:
    cell = Cell(
        engine="vllm",
        fault=fault,
        kv_dtype="fp32",
        weights="fp32",
        page_size=32,
        runner="v1",
        scheduling=scheduling,
    )
    plan = TrialPlan(index=0, cell=cell, traffic_seed=3, fault_seed=seed)
    return run_trial(plan, model="tiny", backend="torch", proofs=proofs)


def clean() -> bool:
    plan = CleanPlan(
        index=0,
        engine="vllm",
        runner="v1",
        scheduling="async",
        kv_dtype="fp32",
        weights="fp32",
        page_size=32,
        traffic_seed=4,
    )
    return run_clean(plan, model="tiny", backend="torch").clean


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_with_both_proofs_off_nothing_is_found(fault: str) -> None:
    """A guard without proofs detects nothing: detections come from the proofs, not from the harness."""
    result = trial(fault, proofs="none")
    assert result.outcome == MISSED and result.detected_by == () and result.aborted == (), result


@pytest.mark.parametrize("scheduling", ["sync", "async"])
@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_the_tag_proof_alone_finds_every_fault(fault: str, scheduling: str) -> None:
    """With the control plane off, each fault reaches the device and aborts exactly the affected requests."""
    result = trial(fault, proofs="tag", scheduling=scheduling)
    assert result.proven and result.detected_by == ("tag",) and result.detection_steps == 0, result
    assert result.affected and set(result.aborted) == set(result.affected)


def explode(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    "owner,name", [(Guard, "step"), (Guard, "judge"), (BookKeeping, "finish"), (Verifier, "check")]
)
def test_a_guard_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """A guard that raises disarms and lets everything through: neither a clean run nor a trial counts as proven."""
    monkeypatch.setattr(owner, name, explode)
    assert not clean()
    result = trial("stale-row")
    assert result.outcome == MISSED and not result.proven


def test_a_guard_that_skips_steps_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a verdict are counted, and a run that has any is not clean."""
    monkeypatch.setattr(Guard, "judge", lambda self, verdicts: Judgement(step=verdicts.step))
    assert not clean()


def test_a_verdict_that_comes_too_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that lets the flagged step's token out and aborts one step later has detected, but not in time."""
    original = Guard.judge

    def late(self: Guard, verdicts: Any) -> Judgement:
        judgement = original(self, verdicts)
        held: Judgement | None = getattr(self, "_held_back", None)
        self._held_back = judgement if judgement.aborts else None  # type: ignore[attr-defined]
        if held is not None:
            return held
        return Judgement(step=verdicts.step) if judgement.aborts else judgement

    monkeypatch.setattr(Guard, "judge", late)
    result = trial("stale-row", proofs="tag", scheduling="sync")
    assert result.tokens_after_fault > 0 and not result.proven


def test_a_refusal_about_another_page_is_no_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that keeps the broken page by luck and complains about another one has found nothing."""
    assert trial("freed-not-reused").outcome == DETECTED
    original = BookKeeping.retire

    def forgetful(self: BookKeeping, pages: Any, **kwargs: Any) -> Retired:
        books = self._books
        held = [page for page in pages if books.tables[0].record(page).holders]
        if not held:
            return original(self, pages, **kwargs)
        from kvguard.violation import Kind

        books.control_violation(Kind.DOUBLE_FREE, 0, (held[0] + 1) % books.tables[0].spec.num_pages, None)
        return Retired(reusable=[], refused=list(pages), quarantined=[])

    monkeypatch.setattr(BookKeeping, "retire", forgetful)
    result = trial("freed-not-reused")
    assert result.outcome != DETECTED and not result.proven and result.false_positives


def test_the_engine_is_as_new_after_every_trial() -> None:
    """An unguarded trial of each fault in turn leaves the next golden run as it was, in this engine or a new one."""
    from kvguard.fault_injection.targets.vllm_runs import VllmRuns

    cell = Cell(
        engine="vllm",
        fault="stale-row",
        kv_dtype="fp32",
        weights="fp32",
        page_size=32,
        runner="v1",
        scheduling="sync",
    )

    def runs(fault: str) -> VllmRuns:
        from dataclasses import replace

        plan = TrialPlan(index=0, cell=replace(cell, fault=fault), traffic_seed=5, fault_seed=5)
        return VllmRuns(plan, model="tiny", proofs="all")

    first = runs("stale-row").control({})
    for fault in PAGE_FAULTS:
        assert runs(fault).off().injection is not None, fault
        again = runs(fault).control({})
        assert (again.outputs, again.emitted, again.counts) == (first.outputs, first.emitted, first.counts), fault


def test_real_models_that_were_not_prepared_are_one_clear_line(tmp_path: Path) -> None:
    """`--model smollm2` before `make models` names that target and exits 2."""
    command = [sys.executable, "-m", "kvguard", "campaign", "--engine", "vllm", "--model", "smollm2"]
    env = {**os.environ, "KVGUARD_TEST_CACHE": str(tmp_path / "nothing")}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "make models" in result.stderr and len(result.stderr.splitlines()) == 1
