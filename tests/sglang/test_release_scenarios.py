"""Public bugs on the unmodified SGLang that is installed."""

from __future__ import annotations

import pytest

from kvguard.fault_injection.campaign import run_campaign
from kvguard.fault_injection.results import CampaignResults
from kvguard.fault_injection.scenarios.plan import scenario_plan
from kvguard.fault_injection.scenarios.registry import scenarios_of
from kvguard.fault_injection.scenarios.scenario import Scenario
from tests.campaign.test_write_campaign import options

HERE = scenarios_of("sglang")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> CampaignResults:
    """All of them in one worker, which imports SGLang once."""
    log = tmp_path_factory.mktemp("scenarios") / "engine.log"
    return run_campaign(scenario_plan(options(fault="all", engine="sglang"), ()), workers=1, engine_log=log)


@pytest.mark.parametrize("scenario", HERE, ids=lambda scenario: scenario.name)
def test_a_bug_of_the_release_is_found(scenario: Scenario, results: CampaignResults) -> None:
    """Guard off, tokens come from KV that is not theirs; guard on, none do, by the proof of the table."""
    trials = [trial for trial in results.trials if trial.cell.fault == scenario.name]
    assert {trial.cell.proofs for trial in trials} == set(scenario.proof_sets)
    for trial in trials:
        assert trial.proven and trial.potent, (trial.cell.proofs, trial.reason, trial.bystanders_changed)
        assert str(scenario.proof) in trial.detected_by
    (control,) = [run for run, plan in zip(results.clean, HERE, strict=True) if plan is scenario]
    assert control.clean and control.steps > 5, (control.violations, control.requests_changed, control.guard_trouble)
