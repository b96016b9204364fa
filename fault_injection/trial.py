"""One trial: the same traffic without a fault, with it and no guard, with it and the guard, and with client aborts.

What had to happen is worked out from the engine's state alone; what did happen, from what its clients saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.model import ForwardBatch, LlamaModel, WeightFormat
from kvguard.fault_injection.engine.pool import NULL_PAGE
from kvguard.fault_injection.engine.recall.tokenizer import decode
from kvguard.fault_injection.engine.scheduler import Counts, Sequence
from kvguard.fault_injection.faults.pages import PAGE_FAULTS, Injection, PageFault
from kvguard.fault_injection.plan import UNSUPPORTED as UNSUPPORTED_CELLS
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import (
    DETECTED,
    MISSED,
    NOT_INJECTED,
    UNSUPPORTED,
    CleanResult,
    Leak,
    TrialResult,
)
from kvguard.fault_injection.targets.embedded import EmbeddedTarget
from kvguard.fault_injection.traffic import (
    Arrival,
    PromptMaker,
    drive,
    recall_prompt,
    token_prompts,
    trial_traffic,
)
from kvguard.pools import PoolSpec
from kvguard.report import report_text
from kvguard.violation import Action, Proof, Violation

RECALL_FOLDER = Path(__file__).parent / "engine" / "recall"
MAX_STEPS = 300
EARLY_STEPS, LATE_STEPS = range(3, 7), range(5, 13)
"""When a fault is first tried: early enough that somebody still arrives after it, where it needs that."""
_PROOFS = {
    "all": frozenset(Proof),
    "tag": frozenset({Proof.TAG}),
    "control_plane": frozenset({Proof.CONTROL_PLANE}),
    "none": frozenset(),
}


@dataclass
class Run:
    """What one run of the engine left behind.

    outputs      request -> (token ids, error)
    emitted      request -> step of each token
    guard_trouble  why the guard of this run proves nothing: it failed, or steps went unverified; "" if it is sound
    crash        what stopped the engine, "" if it came to its end
    """

    outputs: dict[str, tuple[tuple[int, ...], str | None]] = field(default_factory=dict)
    emitted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended_step: dict[str, int] = field(default_factory=dict)
    promised_adoptions: list[tuple[int, str, str]] = field(default_factory=list)
    violations: tuple[Violation, ...] = ()
    injection: Injection | None = None
    injected_step: int = -1
    live_step: int = -1
    detected_step: int = -1
    affected: frozenset[str] = frozenset()
    counts: Counts = field(default_factory=Counts)
    guard_trouble: str = ""
    crash: str = ""


@lru_cache(maxsize=8)
def load_model(model: str, weights: WeightFormat) -> LlamaModel:
    """`recall`, or a folder with a Hugging Face Llama checkpoint. FileNotFoundError / ValueError as the loader says."""
    return LlamaModel.from_pretrained(RECALL_FOLDER if model == "recall" else Path(model), weights)


def check_model(model: str, weights: str) -> None:
    """Load a model and run it once. Raises what the loader raises, or ValueError if it cannot carry the traffic."""
    loaded = load_model(model, weights)
    needed = engine_config(kv_dtype="fp32", page_size=16, tight=False).max_tokens
    if loaded.config.layers < 1 or loaded.config.max_positions < needed:
        raise ValueError(
            f"it has {loaded.config.layers} layers and {loaded.config.max_positions} positions; the campaign needs at "
            f"least 1 and {needed}"
        )
    kv = loaded.new_kv(num_pages=2, page_size=8, dtype="fp32")
    tokens = torch.arange(8) % loaded.config.vocab_size
    batch = ForwardBatch(
        token_ids=tokens,
        positions=torch.arange(8),
        query_start=(0, 8),
        seq_lens=(8,),
        block_table=torch.ones((1, 1), dtype=torch.int32),
        slot_mapping=torch.arange(8, 16),
    )
    if not bool(loaded.forward(batch, kv).isfinite().all()):
        raise ValueError("its logits are not finite")


def prompt_maker(model: str, loaded: LlamaModel) -> PromptMaker:
    """How traffic becomes token ids: the recall tokenizer, or ids of the model's vocabulary."""
    return recall_prompt if model == "recall" else token_prompts(loaded.config.vocab_size)


def engine_config(*, kv_dtype: str, page_size: int, tight: bool) -> EngineConfig:
    """Room for five requests of the trial traffic; `tight` for three, so that healthy runs preempt and evict."""
    tokens = 3 * 144 if tight else 5 * 160
    kv: KVDtype = kv_dtype  # type: ignore[assignment]
    return EngineConfig(
        num_pages=1 + -(-tokens // page_size),
        page_size=page_size,
        kv_dtype=kv,
        max_rows=6,
        token_budget=160,
        max_tokens=192,
    )


def make_guard(config: EngineConfig, *, proofs: str, backend: str, seed: int) -> PagedGuard:
    """The guard of a trial: default policy, replayable tags, and only the named proofs."""
    pool = PoolSpec(num_pages=config.num_pages, page_size=config.page_size, null_page=NULL_PAGE)
    settings = GuardConfig.default(seed=seed)
    return PagedGuard([pool], config=settings, backend=backend, proofs=_PROOFS[proofs])


class _Watch:
    """Injects the fault at the first suitable step and notes the first forward for which it is live."""

    def __init__(self, fault: type[PageFault], seed: int, run: Run, first_step: int) -> None:
        self._fault, self._seed, self._run, self._first_step = fault, seed, run, first_step

    def at_schedule(self, engine: Engine) -> None:
        run = self._run
        if run.injection is None and engine.step_index >= self._first_step:
            run.injection = self._fault(seed=self._seed, target=EmbeddedTarget(engine)).inject()
            if run.injection is not None:
                run.injected_step = engine.step_index

    def at_launch(self, engine: Engine, batch: list[Sequence]) -> None:
        run = self._run
        if run.injection is not None and run.live_step < 0:
            if run.injection.live_when(frozenset(sequence.id for sequence in batch)):
                run.live_step = engine.step_index
                run.affected = run.injection.affected()


class _DetectionStep:
    """Notes the engine's step in which the guard first reported anything: guards count only steps with work."""

    def __init__(self, guard: PagedGuard, run: Run) -> None:
        self._guard, self._run = guard, run

    def after_step(self, engine: Engine) -> None:
        if self._run.detected_step < 0 and self._guard.violations:
            self._run.detected_step = engine.step_index


class _ClientAborts:
    """The control: clients of the aborted requests leave at the very step in which the guard ended them."""

    def __init__(self, aborts: dict[str, int]) -> None:
        self._aborts = aborts

    def after_step(self, engine: Engine) -> None:
        for request, step in self._aborts.items():
            if step == engine.step_index:
                engine.abort(request)


def run_engine(
    model: LlamaModel,
    config: EngineConfig,
    arrivals: list[Arrival],
    *,
    guard: PagedGuard | None = None,
    fault: type[PageFault] | None = None,
    fault_seed: int = 0,
    client_aborts: dict[str, int] | None = None,
) -> Run:
    """Drive one engine through the traffic and collect what its clients saw."""
    run = Run()
    engine = Engine(model, config, guard)
    if fault is not None:
        steps = EARLY_STEPS if fault.needs_arrival else LATE_STEPS
        watch = _Watch(fault, fault_seed, run, steps[fault_seed % len(steps)])
        engine.at_schedule.append(watch.at_schedule)
        engine.at_launch.append(watch.at_launch)
    after = [] if client_aborts is None else [_ClientAborts(client_aborts).after_step]
    if guard is not None:
        after.append(_DetectionStep(guard, run).after_step)
    try:
        if not drive(engine, arrivals, max_steps=MAX_STEPS, after_step=after):
            run.crash = f"not done after {MAX_STEPS} steps"
    except Exception as error:
        # An unguarded engine with a broken pool may fall over: that is an effect of the fault, not of the harness.
        if fault is None or guard is not None:
            raise
        run.crash = f"{type(error).__name__}: {error}"
    for name, output in engine.outputs.items():
        run.outputs[name] = (output.token_ids, output.error)
        run.emitted[name] = tuple(emitted.step for emitted in output.tokens)
        run.ended_step[name] = output.ended_step
    run.promised_adoptions = engine.scheduler.promised_adoptions
    run.counts = engine.scheduler.counts
    if guard is not None:
        run.violations = guard.violations
        run.guard_trouble = _guard_trouble(guard)
    return run


def _guard_trouble(guard: PagedGuard) -> str:
    """A guard that fell over, or was called wrongly, would pass every clean run."""
    health = guard.health()
    counters = health.counters
    if not health.armed or counters["guard_faults"] or counters["adapter_errors"]:
        return f"the guard failed ({counters['guard_faults']} faults, {counters['adapter_errors']} adapter errors)"
    if not 0 < counters["steps_seen"] == counters["steps_verified"]:
        return f"{counters['steps_seen']} steps seen, {counters['steps_verified']} verified"
    return ""


@lru_cache(maxsize=512)
def golden_run(
    model: str, weights: str, kv_dtype: str, page_size: int, traffic_seed: int, tight: bool, client_aborts: bool
) -> Run:
    """The same traffic without fault and guard; shared by all trials that need it."""
    loaded = load_model(model, weights)
    arrivals = trial_traffic(traffic_seed, prompt_maker(model, loaded), client_aborts=client_aborts)
    return run_engine(loaded, engine_config(kv_dtype=kv_dtype, page_size=page_size, tight=tight), arrivals)


def run_trial(plan: TrialPlan, *, model: str, backend: str, proofs: str | None = None) -> TrialResult:
    """Run one trial; `proofs` overrides the cell's, which tests use to switch off both."""
    cell = plan.cell
    chosen = proofs or cell.proofs
    if (cell.fault, cell.proofs) in UNSUPPORTED_CELLS:
        return _result(plan, outcome=UNSUPPORTED, reason=UNSUPPORTED_CELLS[cell.fault, cell.proofs])
    loaded = load_model(model, cell.weights)
    config = engine_config(kv_dtype=cell.kv_dtype, page_size=cell.page_size, tight=False)
    arrivals = trial_traffic(plan.traffic_seed, prompt_maker(model, loaded))
    fault = PAGE_FAULTS[cell.fault]
    golden = golden_run(model, cell.weights, cell.kv_dtype, cell.page_size, plan.traffic_seed, False, False)
    off = run_engine(loaded, config, arrivals, fault=fault, fault_seed=plan.fault_seed)
    guard = make_guard(config, proofs=chosen, backend=backend, seed=plan.fault_seed)
    on = run_engine(loaded, config, arrivals, guard=guard, fault=fault, fault_seed=plan.fault_seed)
    return _judge(plan, golden, off, on, loaded, config, arrivals, readable=model == "recall")


def _result(plan: TrialPlan, **fields: object) -> TrialResult:
    return TrialResult(
        index=plan.index,
        cell=plan.cell,
        traffic_seed=plan.traffic_seed,
        fault_seed=plan.fault_seed,
        **fields,  # type: ignore[arg-type]
    )


def _judge(
    plan: TrialPlan,
    golden: Run,
    off: Run,
    on: Run,
    model: LlamaModel,
    config: EngineConfig,
    arrivals: list[Arrival],
    *,
    readable: bool,
) -> TrialResult:
    injection = on.injection
    if injection is None:
        return _result(plan, outcome=NOT_INJECTED, reason="the engine offered no suitable victim")
    aborted = {v.request: v for v in on.violations if v.action is Action.ABORTED and v.request is not None}
    affected = _affected(on)
    # A refusal proves something only about the page that was broken, or the request that it was broken for.
    concerned = {injection.page}
    refused = [v for v in on.violations if v.action is Action.REFUSED and v.page in concerned]
    strays = [v for v in on.violations if v.action is Action.REFUSED and v.page not in concerned]

    def differing_from(reference: Run) -> list[str]:
        bystanders = [name for name in on.outputs if name not in affected and name not in aborted]
        return [name for name in bystanders if on.outputs[name] != reference.outputs.get(name)]

    changed = differing_from(golden)
    if changed and aborted and plan.cell.kv_dtype + plan.cell.weights != "fp32fp32":
        # A smaller batch alone can change the last bits of bf16 and quantised arithmetic: compare with such a batch.
        leave = {name: on.ended_step[name] for name in aborted}
        changed = differing_from(run_engine(model, config, arrivals, client_aborts=leave))
    late = 0
    for name in affected:
        kept = on.outputs[name][0]
        late += sum(step >= on.live_step for step in on.emitted[name])
        # What the client got before must be what it would have got anyway.
        late += kept != golden.outputs[name][0][: len(kept)]
    if on.guard_trouble:
        outcome, reason = MISSED, on.guard_trouble
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
        false_positives=(*sorted(set(aborted) - affected), *(f"{v.kind} of page {v.page}" for v in strays)),
        leak=_leak(injection, golden, off, on, arrivals) if readable else None,
        report=report_text(on.violations[0]) if on.violations else "",
    )


def _affected(run: Run) -> set[str]:
    """Who had to be aborted: everyone who would read the bad page when it went live, and their dependents.

    A dependent took, in that very step, a page that an affected request was about to write. Nobody is affected by a
    fault that the control plane refused before it went live.
    """
    affected = set(run.affected)
    grown = True
    while grown:
        dependents = {
            reader
            for step, reader, writer in run.promised_adoptions
            if step == run.live_step and writer in affected and reader not in affected
        }
        affected |= dependents
        grown = bool(dependents)
    return affected


def _leak(injection: Injection, golden: Run, off: Run, on: Run, arrivals: list[Arrival]) -> Leak | None:
    """The most telling request: the first victim if its output changed, else any whose output did."""
    changed = [name for name in off.outputs if off.outputs[name][0] != golden.outputs[name][0]]
    if not changed:
        return None
    victim = next((name for name in injection.victims if name in changed), changed[0])
    prompts = {arrival.request.id: arrival.request.prompt for arrival in arrivals}
    tokens, error = on.outputs[victim]
    return Leak(
        victim=victim,
        prompt=decode(prompts[victim]),
        golden=decode(golden.outputs[victim][0]),
        guard_off=decode(off.outputs[victim][0]),
        guard_on=decode(tokens),
        error=error or "",
    )


def run_clean(plan: CleanPlan, *, model: str, backend: str) -> CleanResult:
    """Healthy traffic in a tight pool, guard on, against the same with the guard off."""
    loaded = load_model(model, plan.weights)
    config = engine_config(kv_dtype=plan.kv_dtype, page_size=plan.page_size, tight=True)
    golden = golden_run(model, plan.weights, plan.kv_dtype, plan.page_size, plan.traffic_seed, True, True)
    arrivals = trial_traffic(plan.traffic_seed, prompt_maker(model, loaded), client_aborts=True)
    guard = make_guard(config, proofs="all", backend=backend, seed=plan.traffic_seed)
    run = run_engine(loaded, config, arrivals, guard=guard)
    return CleanResult(
        index=plan.index,
        kv_dtype=plan.kv_dtype,
        weights=plan.weights,
        page_size=plan.page_size,
        traffic_seed=plan.traffic_seed,
        violations=tuple(violation.message for violation in run.violations),
        guard_trouble=run.guard_trouble,
        requests_changed=tuple(name for name, output in run.outputs.items() if output != golden.outputs.get(name)),
        preemptions=run.counts.preemptions,
        evictions=run.counts.evictions,
        prefix_hits=run.counts.prefix_hits,
        promised_hits=run.counts.promised_hits,
        client_aborts=run.counts.client_aborts,
        steps=run.counts.steps,
    )


__all__ = ["Cell", "Run", "golden_run", "load_model", "run_clean", "run_engine", "run_trial"]
