"""Judges a replay: harm without the guard, none with it, by the proof that had to find it, at nobody else's cost."""

from __future__ import annotations

from functools import lru_cache

from kvguard.fault_injection.judging import judge_clean
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED, NOT_INJECTED, CleanResult, Leak, TrialResult
from kvguard.fault_injection.scenarios.registry import SCENARIOS
from kvguard.fault_injection.scenarios.scenario import ALL, EMBEDDED, ReplayRun, Scenario
from kvguard.report import report_text
from kvguard.violation import Action

__all__ = ["judge_replay", "run_control", "run_scenario"]


@lru_cache(maxsize=256)
def _unguarded(name: str, bug: bool, seed: int) -> ReplayRun:
    """With and without the bug, and no guard: shared by the trials of one scenario."""
    return SCENARIOS[name].replay(bug=bug, proofs=None, backend="torch", seed=seed)


def run_scenario(plan: TrialPlan, *, backend: str, proofs: str | None = None) -> TrialResult:
    """Replay a scenario; `proofs` takes the place of the cell's, which tests use to switch off the one that counts."""
    scenario, seed = SCENARIOS[plan.cell.fault], plan.traffic_seed
    on = scenario.replay(bug=True, proofs=proofs or plan.cell.proofs, backend=backend, seed=seed)
    return judge_replay(
        plan, scenario, golden=_unguarded(scenario.name, False, seed), off=_unguarded(scenario.name, True, seed), on=on
    )


def run_control(plan: CleanPlan, *, backend: str) -> CleanResult:
    """The same input without the bug, guard on: nothing may be flagged, and nothing changed."""
    scenario, seed = SCENARIOS[plan.scenario], plan.traffic_seed
    run = scenario.replay(bug=False, proofs=ALL, backend=backend, seed=seed)
    return judge_clean(plan, _unguarded(scenario.name, False, seed), run)


def judge_replay(
    plan: TrialPlan, scenario: Scenario, *, golden: ReplayRun, off: ReplayRun, on: ReplayRun
) -> TrialResult:
    """What these runs show. `on` is with the proofs of the plan's cell."""
    expected = scenario.expected(plan.cell.proofs)
    wanted = set(scenario.ended.get(plan.cell.proofs, ()))
    aborted = {v.request: v for v in on.violations if v.action is Action.ABORTED and v.request is not None}
    found = {violation.proof for violation in on.violations}
    harm, slipped = off.harm, on.harm
    late = sum(slipped.values())
    late += sum(on.outputs[name][0] != golden.outputs[name][0][: len(on.outputs[name][0])] for name in aborted)
    others = [name for name in on.outputs if name not in aborted]
    outcome, reason = DETECTED, ""
    if golden.misread or golden.crash:
        outcome, reason = NOT_INJECTED, "without the bug somebody read KV that is not theirs: the input is no good"
    elif not harm:
        outcome, reason = NOT_INJECTED, "with the bug and no guard nobody's tokens came from KV that is not theirs"
    elif on.guard_trouble or on.crash:
        outcome, reason = MISSED, on.guard_trouble or on.crash
    elif expected not in found:
        outcome, reason = MISSED, f"not found by {expected}, but by {', '.join(sorted(map(str, found))) or 'nothing'}"
    elif wanted - set(aborted):
        outcome, reason = MISSED, f"not aborted: {', '.join(sorted(wanted - set(aborted)))}"
    live = min((min(steps) for steps in off.misread.values()), default=-1)
    told = ", ".join(f"{count} of {name}" for name, count in sorted(harm.items()))
    return TrialResult(
        index=plan.index,
        cell=plan.cell,
        traffic_seed=plan.traffic_seed,
        fault_seed=plan.fault_seed,
        outcome=outcome,
        reason=reason,
        detected_by=tuple(sorted(map(str, found))),
        kinds=tuple(sorted({str(violation.kind) for violation in on.violations})),
        potent=bool(off.crash) or off.outputs != golden.outputs,
        description=f"{scenario.story} Guard off: tokens from KV that is not theirs: {told or 'none'}. {scenario.link}",
        injected_step=1,
        live_step=live,
        detected_step=on.detected_step,
        detection_steps=max(0, on.detected_step - live) if live >= 0 and on.detected_step >= 0 else 0,
        affected=tuple(sorted(wanted)),
        aborted=tuple(sorted(aborted)),
        tokens_after_fault=late,
        bystanders_changed=tuple(sorted(name for name in others if on.outputs[name] != golden.outputs[name])),
        false_positives=tuple(sorted(set(aborted) - wanted)),
        leak=_leak(scenario, golden, off, on),
        report=report_text(on.violations[0]) if on.violations else "",
    )


def _leak(scenario: Scenario, golden: ReplayRun, off: ReplayRun, on: ReplayRun) -> Leak | None:
    """What a client would have seen whose tokens changed, where tokens are text."""
    changed = [name for name in sorted(off.harm) if off.outputs[name][0] != golden.outputs[name][0]]
    if scenario.engine != EMBEDDED or not changed:
        return None
    from kvguard.fault_injection.engine.recall.tokenizer import decode

    victim = changed[0]
    tokens, error = on.outputs[victim]
    return Leak(
        victim=victim,
        prompt=decode(on.prompts[victim]),
        golden=decode(golden.outputs[victim][0]),
        guard_off=decode(off.outputs[victim][0]),
        guard_on=decode(tokens),
        error=error or "",
    )
