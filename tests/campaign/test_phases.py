"""Trials over a prefill and a decode worker: each fault of a hand-over, each proof alone, and what is not covered."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
from kvguard.fault_injection.judging import judge_clean, judge_trial
from kvguard.fault_injection.options import PHASE_COUNTS, Options, UsageError, make_plan
from kvguard.fault_injection.phases_plan import PHASE_STORAGE, TRANSFER_UNSUPPORTED
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED, UNSUPPORTED, TrialResult
from kvguard.fault_injection.run_folder import PLAN, plan_toml, read_plan
from kvguard.fault_injection.targets.pd_runs import PhasesRuns, clean_runs
from kvguard.fault_injection.trial import run_trial
from kvguard.violation import Proof
from tests.campaign.test_command import SMALL, assert_one_line_and_exit_2, campaign

COVERED = [name for name, fault in TRANSFER_FAULTS.items() if not fault.uncovered]
FP8 = ("fp8_e4m3", "int4", 16)
FP32 = ("fp32", "fp32", 16)


def plan_of(fault: str, storage: tuple[str, str, int], proofs: str, seed: int) -> TrialPlan:
    kv_dtype, weights, page_size = storage
    cell = Cell(
        engine="embedded",
        fault=fault,
        kv_dtype=kv_dtype,
        weights=weights,
        page_size=page_size,
        proofs=proofs if proofs != "none" else "all",
        phases="pd",
    )
    return TrialPlan(index=0, cell=cell, traffic_seed=seed, fault_seed=seed)


def trial(fault: str, storage: tuple[str, str, int], proofs: str, *, seed: int = 3) -> TrialResult:
    return run_trial(plan_of(fault, storage, proofs, seed), model="recall", backend="torch", proofs=proofs)


def assert_proven(result: TrialResult) -> None:
    assert result.outcome == DETECTED, result
    assert (result.tokens_after_fault, result.bystanders_changed, result.false_positives) == (0, (), ())


@pytest.mark.parametrize("fault", COVERED)
def test_the_checks_of_a_transfer_alone_find_every_fault_of_a_hand_over(fault: str) -> None:
    """With tags on the device and the control plane off; whoever is affected is ended before it decodes."""
    result = trial(fault, FP8, "transfer")
    assert_proven(result)
    assert result.detected_by == ("transfer",) and set(result.aborted) == set(result.affected)
    assert all("transfer" in kind for kind in result.kinds)
    assert (result.aborted == ()) == (fault == "repeated-transfer")


@pytest.mark.parametrize("fault", [name for name in COVERED if "control_plane" in TRANSFER_FAULTS[name].proofs])
def test_the_control_plane_refuses_a_free_of_pages_that_are_handed_over(fault: str) -> None:
    """The pages belong to a live request on either side, so that nobody need be aborted."""
    result = trial(fault, FP32, "control_plane")
    assert_proven(result)
    assert result.detected_by == ("control_plane",) and result.aborted == ()


@pytest.mark.parametrize("fault", COVERED)
def test_with_all_proofs_off_no_fault_of_a_hand_over_is_found(fault: str) -> None:
    """Detections come from the proofs, not from the harness; the same seed breaks the same thing again."""
    result = trial(fault, FP32, "none")
    assert result.outcome == MISSED and result.detected_by == () and result.aborted == (), result
    again = trial(fault, FP32, "none")
    assert (again.description, again.live_step, again.potent) == (result.description, result.live_step, result.potent)


@pytest.mark.parametrize("fault", ["stale-row", "use-after-free", "stale-cache-entry"])
def test_tags_alone_find_page_faults_in_decode_after_a_hand_over(fault: str) -> None:
    """The decode worker's own tags guard the pages that came from elsewhere, like any others."""
    result = trial(fault, FP8, "tag")
    assert_proven(result)
    assert result.detected_by == ("tag",) and result.affected and set(result.aborted) == set(result.affected)


def test_bytes_that_were_never_copied_are_not_covered_and_nobody_claims_it() -> None:
    """Every page and tag is right: a trial is unsupported, not passed, and the guard indeed sees nothing."""
    result = trial("bytes-lost", FP32, "all")
    assert result.outcome == UNSUPPORTED and "seals" in result.reason
    plan = plan_of("bytes-lost", FP32, "all", 3)
    unseen = judge_trial(plan, PhasesRuns(plan, model="recall", backend="torch", proofs="all"))
    assert unseen.outcome == MISSED and unseen.detected_by == ()


@pytest.mark.parametrize("level", ["tags", "keys"])
def test_healthy_hand_overs_are_clean_and_hit_as_often_as_without_a_guard(level: str) -> None:
    """Both workers at the level: no page is kept out of the cache, nothing is flagged, the same tokens."""
    plan = CleanPlan(index=0, kv_dtype="fp32", weights="fp32", page_size=16, traffic_seed=1001, phases="pd")
    golden, run = clean_runs(plan, model="recall", backend="torch", proofs=level)
    assert judge_clean(plan, golden, run).clean, run.violations
    assert run.counts.prefix_hits == golden.counts.prefix_hits > 0 and run.hand_overs == golden.hand_overs > 0


def options(**given: object) -> Options:
    values: dict[str, object] = {
        "seed": 1,
        "trials": None,
        "clean_runs": None,
        "fault": "all",
        "engine": "embedded",
        "model": None,
        "backend": "torch",
        "kv_dtype": "all",
        "weights": "all",
        "page_size": "all",
        "runner": "all",
        "scheduling": "all",
    }
    return Options(**{**values, **given})  # type: ignore[arg-type]


def test_the_default_plan_has_enough_trials_after_a_hand_over(tmp_path: Path) -> None:
    """At least 40 in decode after a hand-over, every pair and storage among them, and the plan survives its file."""
    plan = make_plan(options())
    phases = [trial for trial in plan.trials if trial.cell.phases == "pd"]
    after = [trial for trial in phases if trial.cell.fault in PAGE_FAULTS]
    assert len(after) == PHASE_COUNTS[0] >= 40 and len(phases) - len(after) == PHASE_COUNTS[1]
    assert [trial.index for trial in plan.trials] == list(range(len(plan.trials)))
    assert {trial.cell.fault for trial in phases} == {*PAGE_FAULTS, *COVERED}
    dealt = Counter((trial.cell.fault, trial.cell.proofs) for trial in phases)
    assert max(dealt.values()) <= 3 and not set(dealt) & set(TRANSFER_UNSUPPORTED)
    setups = {(trial.cell.kv_dtype, trial.cell.weights, trial.cell.page_size) for trial in after}
    assert setups == {(*kinds, size) for kinds, size in itertools.product(PHASE_STORAGE, (1, 16, 64))}
    assert sum(run.phases == "pd" for run in plan.clean_runs) == PHASE_COUNTS[2]
    (tmp_path / PLAN).write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan == make_plan(options())


@pytest.mark.parametrize(
    "given,single,after,during",
    [
        ({"phases": "single"}, 216, 0, 0),
        ({"phases": "pd"}, 0, 54, 32),
        ({"fault": "page-lost"}, 0, 0, 32),
        ({"fault": "stale-row"}, 216, 54, 0),
        ({"trials": 30}, 22, 5, 3),
        ({"trials": 8, "phases": "pd"}, 0, 6, 2),
        ({"kv_dtype": "bf16"}, 216, 0, 0),
    ],
)
def test_trials_are_shared_out_over_the_phases(given: dict[str, object], single: int, after: int, during: int) -> None:
    """What was given is kept to, in the proportions of the default; storages without two phases have one."""
    trials = make_plan(options(**given)).trials
    kinds = Counter((trial.cell.phases, trial.cell.fault in TRANSFER_FAULTS) for trial in trials)
    assert (kinds["single", False], kinds["pd", False], kinds["pd", True]) == (single, after, during)


@pytest.mark.parametrize(
    "given,words",
    [
        ({"fault": "bytes-lost"}, "seals"),
        ({"fault": "page-lost", "phases": "single"}, "--phases pd"),
        ({"phases": "pd", "kv_dtype": "bf16"}, "fp8_e4m3 with int4"),
        ({"phases": "three"}, "choose from single, pd"),
        ({"phases": "pd", "engine": "vllm"}, "embedded"),
    ],
)
def test_phases_that_cannot_be_are_refused(given: dict[str, object], words: str) -> None:
    """One line that says what can."""
    with pytest.raises(UsageError, match=words):
        make_plan(options(**given))


def test_a_small_campaign_over_two_phases_is_replayed(tmp_path: Path) -> None:
    """The command line, the files, and one trial again from the plan."""
    result = campaign(*SMALL, "--phases", "pd", "--json", "--workers", "1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    data = json.loads(result.stdout)
    assert data["trials"] == 6 and data["by_phases"]["pd_after"]["trials"] == 4
    assert "phases=pd-" in (tmp_path / "runs" / "latest" / "junit.xml").read_text()
    assert "P/D" in (tmp_path / "runs" / "latest" / "report.html").read_text()
    again = campaign("--replay", "5", cwd=tmp_path)
    assert again.returncode == 0 and "phases=pd" in again.stdout, again.stderr
    assert_one_line_and_exit_2(campaign("--fault", "bytes-lost", cwd=tmp_path), "bytes-lost", "seals")


def test_every_proof_has_a_set_of_its_own() -> None:
    """So that each can be shown to stand alone."""
    from kvguard.fault_injection.runs import PROOFS

    assert {next(iter(proofs)) for proofs in PROOFS.values() if len(proofs) == 1} == set(Proof)
