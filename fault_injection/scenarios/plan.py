"""From `kvguard campaign --scenarios` to a plan: each scenario with all proofs and with each that finds it alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvguard.fault_injection.options import VLLM_MISSING, Options, UsageError, check_backend_runs
from kvguard.fault_injection.plan import SCENARIO_LEVEL, CampaignPlan, Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import CampaignResults
from kvguard.fault_injection.scenarios.registry import SCENARIOS, scenarios_of
from kvguard.fault_injection.scenarios.scenario import Scenario

__all__ = ["scenario_plan", "scenario_records"]

UNUSED = {
    "trials": None,
    "clean_runs": None,
    "fault": "all",
    "model": None,
    "kv_dtype": "all",
    "weights": "all",
    "page_size": "all",
    "runner": "all",
    "scheduling": "all",
    "phases": "all",
}
"""Options of other campaigns, and what they are where they were not given."""


def scenario_plan(options: Options, names: Sequence[str]) -> CampaignPlan:
    """The plan: those of the engine, or the named ones. Raises UsageError, or ConfigError as `make_plan` does."""
    from kvguard.config import GuardConfig
    from kvguard.kernels.backend import BACKENDS

    GuardConfig.load()
    for name, untouched in UNUSED.items():
        if getattr(options, name) != untouched:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} does not go with --scenarios: each has its own smallest input")
    if options.engine not in ("embedded", "vllm", "sglang"):
        raise UsageError(f"unknown engine {options.engine!r}: scenarios are of embedded, vllm and sglang")
    if options.backend not in BACKENDS:
        raise UsageError(f"unknown backend {options.backend!r}: this release has {', '.join(BACKENDS)}")
    check_backend_runs(options.backend)
    chosen = _chosen(options.engine, names)
    check_releases(options.engine, chosen)
    trials = [
        TrialPlan(index=0, cell=_cell(scenario, proofs), traffic_seed=options.seed, fault_seed=options.seed)
        for scenario in chosen
        for proofs in scenario.proof_sets
    ]
    clean = [
        CleanPlan(
            index=index,
            kv_dtype="fp32",
            weights="fp32",
            page_size=scenario.page_size,
            traffic_seed=options.seed,
            engine=scenario.engine,
            scenario=scenario.name,
        )
        for index, scenario in enumerate(chosen)
    ]
    numbered = tuple(
        TrialPlan(index=index, cell=trial.cell, traffic_seed=trial.traffic_seed, fault_seed=trial.fault_seed)
        for index, trial in enumerate(trials)
    )
    return CampaignPlan(
        seed=options.seed,
        engine=options.engine,
        model="recall" if options.engine == "embedded" else "stand-in",
        backend=options.backend,
        trials=numbered,
        clean_runs=tuple(clean),
    )


def _cell(scenario: Scenario, proofs: str) -> Cell:
    return Cell(
        engine=scenario.engine,
        fault=scenario.name,
        kv_dtype="fp32",
        weights="fp32",
        page_size=scenario.page_size,
        proofs=proofs,
        level=SCENARIO_LEVEL,
    )


def _chosen(engine: str, names: Sequence[str]) -> list[Scenario]:
    if not names:
        return list(scenarios_of(engine))
    for name in names:
        if name not in SCENARIOS:
            raise UsageError(f"unknown scenario {name!r}: see docs/scenarios.md, or leave the names out for all")
        wanted = SCENARIOS[name].engine
        if wanted != engine:
            raise UsageError(f"scenario {name!r} is replayed in {wanted}: give --engine {wanted}")
    return [scenario for scenario in scenarios_of(engine) if scenario.name in names]


def check_releases(engine: str, chosen: Sequence[Scenario]) -> None:
    """The engine's release is there. Raises UsageError."""
    from kvguard.fault_injection.scenarios.older_release import OlderReleaseError, unpacked
    from kvguard.fault_injection.scenarios.releases import InstalledRelease, OlderVllm, installed
    from kvguard.fault_injection.sglang_options import SGLANG_MISSING

    if engine == "embedded":
        return
    here = installed(engine)
    if here is None:
        raise UsageError(VLLM_MISSING if engine == "vllm" else SGLANG_MISSING)
    for scenario in chosen:
        if isinstance(scenario.replay, InstalledRelease) and scenario.release != here:
            raise UsageError(f"scenario {scenario.name!r} is of {engine} {scenario.release}, here is {here}")
        if isinstance(scenario.replay, OlderVllm):
            try:
                unpacked(scenario.release)
            except OlderReleaseError as error:
                raise UsageError(str(error)) from None


def scenario_records(results: CampaignResults) -> list[dict[str, Any]]:
    """For results.json: one object per scenario that was run, whether it is proven and by what."""
    records = []
    for name in dict.fromkeys(trial.cell.fault for trial in results.trials):
        scenario, trials = SCENARIOS[name], [trial for trial in results.trials if trial.cell.fault == name]
        records.append(
            {
                "name": name,
                "link": scenario.link,
                "reported_in": scenario.reported_in,
                "family": scenario.family,
                "proof": str(scenario.proof),
                "replayed_in": scenario.place,
                "detected": all(trial.proven for trial in trials),
                "detected_by": sorted({proof for trial in trials for proof in trial.detected_by}),
                "potent": any(trial.potent for trial in trials),
            }
        )
    return records
