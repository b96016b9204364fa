"""Judges a trial or a clean run: what had to happen, by the engine's state alone, against what its clients saw."""

from __future__ import annotations

from kvguard.fault_injection.faults.pages import Injection
from kvguard.fault_injection.key_plan import KEYS
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.results import (
    DETECTED,
    MISSED,
    NOT_INJECTED,
    UNSUPPORTED,
    CleanResult,
    Leak,
    TrialResult,
)
from kvguard.fault_injection.runs import Run, TrialRuns
from kvguard.fault_injection.write_plan import WRITES
from kvguard.report import report_text
from kvguard.violation import Action

WRITER_COUNTS = (
    "accepted_drafts",
    "rejected_drafts",
    "partly_written",
    "padding_lanes",
    "dummy_batches",
    "window_pages_passed",
)
"""Habits that write where a careless check would not expect it: see `Counts`."""
SERVED_COUNTS = ("tenant_hits", "returns")
"""What runs of mixed traffic through vLLM or SGLang contained besides."""
UPDATE_COUNTS = ("weight_updates",)
STORE_COUNTS = ("store_hits", *UPDATE_COUNTS)
"""What runs of the traffic of cache keys contained besides; in vLLM there is no external store."""


def judge_trial(plan: TrialPlan, runs: TrialRuns) -> TrialResult:
    """Make the runs of a trial and say what they show."""
    golden, off, on = runs.golden(), runs.off(), runs.on()
    injection = on.injection
    if injection is None:
        return _result(plan, outcome=NOT_INJECTED, reason="the engine offered no suitable victim")
    aborted = {v.request: v for v in on.violations if v.action is Action.ABORTED and v.request is not None}
    affected = _affected(on)
    # A refusal proves something only about the page that was broken, or the request that it was broken for.
    concerned = {injection.page, *injection.pages}
    refused = [v for v in on.violations if v.action is Action.REFUSED and v.page in concerned]
    strays = [v for v in on.violations if v.action is Action.REFUSED and v.page not in concerned]

    def differing_from(reference: Run, names: list[str]) -> list[str]:
        return [name for name in names if on.outputs[name] != reference.outputs.get(name)]

    bystanders = [name for name in on.outputs if name not in affected and name not in aborted]
    changed = differing_from(golden, bystanders)
    if changed and not runs.exact and (aborted or (plan.cell.level == KEYS and refused)):
        # A smaller batch alone can change the last bits of bf16 and quantised arithmetic: compare with such a batch.
        # So can a request that computes what it would have taken from the cache.
        changed = differing_from(runs.control({name: on.ended_step[name] for name in aborted}), changed)
    late = 0
    for name in affected:
        kept = on.outputs[name][0]
        late += sum(step >= on.live_step for step in on.emitted[name])
        # What the client got before must be what it would have got anyway.
        late += kept != golden.outputs[name][0][: len(kept)]
    for name in on.involved & set(aborted) - affected:
        kept = on.outputs[name][0]
        late += kept != golden.outputs[name][0][: len(kept)]
    needless = set(aborted) - affected - on.involved
    if on.guard_trouble or on.crash:
        outcome, reason = MISSED, on.guard_trouble or on.crash
    elif on.live_step < 0 and not refused:
        outcome, reason = NOT_INJECTED, "the bad page was never about to be read"
    elif affected <= set(aborted) and (affected or refused):
        outcome, reason = DETECTED, ""
    else:
        outcome, reason = MISSED, f"not aborted: {', '.join(sorted(affected - set(aborted))) or 'nobody was affected'}"
    detected = on.detected_step
    return _result(
        plan,
        outcome=outcome,
        reason=reason,
        detected_by=tuple(sorted({str(v.proof) for v in on.violations})),
        kinds=tuple(sorted({str(v.kind) for v in on.violations})),
        potent=bool(off.crash) or off.outputs != golden.outputs,
        description=injection.description,
        injected_step=on.injected_step,
        live_step=on.live_step,
        detected_step=detected,
        detection_steps=max(0, detected - on.live_step) if on.live_step >= 0 and detected >= 0 else 0,
        affected=tuple(sorted(affected)),
        aborted=tuple(sorted(aborted)),
        tokens_after_fault=late,
        bystanders_changed=tuple(sorted(changed)),
        false_positives=(*sorted(needless), *(f"{v.kind} of page {v.page}" for v in strays)),
        leak=_leak(injection, golden, off, on, runs),
        report=report_text(on.violations[0]) if on.violations else "",
    )


def unsupported(plan: TrialPlan, reason: str) -> TrialResult:
    """The result of a combination that proves nothing."""
    return _result(plan, outcome=UNSUPPORTED, reason=reason)


def _result(plan: TrialPlan, **fields: object) -> TrialResult:
    return TrialResult(
        index=plan.index,
        cell=plan.cell,
        traffic_seed=plan.traffic_seed,
        fault_seed=plan.fault_seed,
        **fields,  # type: ignore[arg-type]
    )


def _affected(run: Run) -> set[str]:
    """Who had to be aborted: everyone who would read the bad page when it went live, and their dependents.

    A dependent took a page that an affected request was to write in the live step or in one that was in flight behind
    it. Nobody is affected by a fault that the control plane refused before it went live.
    """
    affected = set(run.affected)
    grown = True
    while grown:
        dependents = {
            reader
            for step, reader, writer in run.promised_adoptions
            if step >= run.live_step and writer in affected and reader not in affected
        }
        affected |= dependents
        grown = bool(dependents)
    return affected


def _leak(injection: Injection, golden: Run, off: Run, on: Run, runs: TrialRuns) -> Leak | None:
    """The most telling request: the first victim if its output changed, else any whose output did."""
    changed = [name for name in off.outputs if off.outputs[name][0] != golden.outputs[name][0]]
    if runs.text is None or not changed:
        return None
    victim = next((name for name in injection.victims if name in changed), changed[0])
    tokens, error = on.outputs[victim]
    return Leak(
        victim=victim,
        prompt=runs.text(runs.prompts[victim]),
        golden=runs.text(golden.outputs[victim][0]),
        guard_off=runs.text(off.outputs[victim][0]),
        guard_on=runs.text(tokens),
        error=error or "",
    )


def judge_clean(plan: CleanPlan, golden: Run, run: Run) -> CleanResult:
    """Healthy traffic with the guard on (`run`) against the same with the guard off (`golden`)."""
    besides = {WRITES: WRITER_COUNTS, KEYS: STORE_COUNTS}.get(plan.traffic, ())
    if plan.engine in ("vllm", "sglang"):
        # Runs of vLLM's runner V2 are too short to fill the pool and come back: see `vllm_runs`.
        served = SERVED_COUNTS[:1] if plan.runner == "v2" else SERVED_COUNTS
        besides = UPDATE_COUNTS if plan.traffic == KEYS else served
    return CleanResult(
        index=plan.index,
        engine=plan.engine,
        runner=plan.runner,
        scheduling=plan.scheduling,
        phases=plan.phases,
        hand_overs=run.hand_overs,
        kv_dtype=plan.kv_dtype,
        weights=plan.weights,
        page_size=plan.page_size,
        traffic_seed=plan.traffic_seed,
        violations=tuple(violation.message for violation in run.violations),
        guard_trouble=run.guard_trouble or run.crash,
        requests_changed=tuple(name for name, output in run.outputs.items() if output != golden.outputs.get(name)),
        preemptions=run.counts.preemptions,
        evictions=run.counts.evictions,
        prefix_hits=run.counts.prefix_hits,
        promised_hits=run.counts.promised_hits,
        client_aborts=run.counts.client_aborts,
        steps=run.counts.steps,
        writers={name: getattr(run.counts, name) for name in besides},
    )


__all__ = ["judge_clean", "judge_trial", "unsupported"]
