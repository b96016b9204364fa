"""Replays of public bugs: each does harm without the guard, and none with it, by the proof that the table names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvguard.fault_injection.plan import CleanPlan
from kvguard.fault_injection.results import DETECTED, MISSED
from kvguard.fault_injection.runs import PROOFS
from kvguard.fault_injection.scenarios.judging import run_control
from kvguard.fault_injection.scenarios.registry import SCENARIOS, scenarios_of
from kvguard.fault_injection.scenarios.scenario import EMBEDDED
from kvguard.violation import Proof
from tests.campaign.test_scenario_judging import trial

NAMES = [scenario.name for scenario in scenarios_of(EMBEDDED)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_is_found_by_its_proofs(name: str) -> None:
    """With all proofs and by each that is named alone; nothing slips out, and only the named requests are ended."""
    scenario = SCENARIOS[name]
    for proofs in scenario.proof_sets:
        result = trial(name, proofs)
        assert result.outcome == DETECTED and result.proven, (proofs, result.reason, result.false_positives)
        assert str(scenario.expected(proofs)) in result.detected_by
        assert result.aborted == tuple(sorted(scenario.ended.get(proofs, ())))
        assert result.live_step >= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_without_its_proofs_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other proof stays on; and without any proof the tokens come from KV that is not theirs again."""
    scenario = SCENARIOS[name]
    monkeypatch.setitem(PROOFS, "others", frozenset(Proof) - {scenario.proof, *scenario.alone})
    result = trial(name, in_its_place="others")
    assert result.outcome == MISSED and not {str(scenario.proof), *map(str, scenario.alone)} & set(result.detected_by)
    unproven = trial(name, in_its_place="none")
    assert unproven.outcome == MISSED and unproven.tokens_after_fault > 0 and not unproven.detected_by


@pytest.mark.parametrize("name", NAMES)
def test_the_same_input_without_the_bug_is_clean(name: str) -> None:
    """No violation, no token changed, every step verified."""
    scenario = SCENARIOS[name]
    plan = CleanPlan(
        index=0, kv_dtype="fp32", weights="fp32", page_size=scenario.page_size, traffic_seed=11, scenario=name
    )
    result = run_control(plan, backend="torch")
    assert result.clean and result.steps > 5, (result.violations, result.requests_changed, result.guard_trouble)


def test_most_of_them_change_what_clients_see() -> None:
    """Harm is measured by whose KV was read; for most bugs the output tells, too."""
    assert sum(trial(name).potent for name in NAMES) >= 0.75 * len(NAMES)


def test_the_readme_counts_them() -> None:
    """As many replays, and as many reports, as there are."""
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    reports = {scenario.link for scenario in SCENARIOS.values()}
    assert f"{len(SCENARIOS)} replays of {len(reports)} reports" in readme
