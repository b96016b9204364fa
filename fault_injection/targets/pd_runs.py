"""The runs of a trial over two phases: a prefill worker in a process of its own, the decode worker in this one.

One prefill process serves all runs of this process, a fresh engine for each; both workers go in lock step, so that a
run is a function of its plan. KV dtype and weights of a cell are the decode worker's: the prefill worker has BF16 KV
and bf16 weights, or, where a cell is float32 throughout, float32.
"""

from __future__ import annotations

import atexit
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from kvguard.adapters.generic import PagedGuard
from kvguard.adapters.generic_transfer import TransferSource, TransferTarget
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.decode import DecodeEngine
from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.kv_wire import WireFormat
from kvguard.fault_injection.engine.model import LlamaModel, WeightFormat
from kvguard.fault_injection.engine.prefill import DECODE_WORKER, PrefillEngine
from kvguard.fault_injection.engine.prefill_process import PrefillProcess
from kvguard.fault_injection.engine.recall.tokenizer import decode
from kvguard.fault_injection.engine.scheduler import Counts, Sequence
from kvguard.fault_injection.faults.pages import PAGE_FAULTS, Injection, PageFault
from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS, TransferFault
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.runs import MAX_STEPS, PROOFS, Run, first_step, guard_trouble
from kvguard.fault_injection.targets.embedded_runs import engine_config, load_model, pool_of, prompts_of
from kvguard.fault_injection.targets.prefill_decode import DecodeTarget, PrefillTarget
from kvguard.fault_injection.traffic import Arrival, PromptMaker, drive, trial_traffic
from kvguard.transfer_manifest import TransferLink
from kvguard.violation import Violation

PREFILL_WORKER = "prefill"
TRANSFER_STEPS = range(2, 6)
"""When a fault of a transfer is first tried: transfers go on until the last request has arrived."""


def prefill_storage(kv_dtype: str, weights: str) -> tuple[KVDtype, WeightFormat]:
    """KV dtype and weights of the prefill worker beside a decode worker with these."""
    return ("fp32", "fp32") if kv_dtype == weights == "fp32" else ("bf16", "bf16")


@dataclass(frozen=True, kw_only=True)
class PrefillSpec:
    """What a run needs in the prefill process. `proofs`: a name of PROOFS, or None for a run without a guard.

    fault  name, seed and first step of a fault of this side; None for none
    """

    model: str
    weights: WeightFormat
    config: EngineConfig
    wire: WireFormat
    proofs: str | None
    backend: str
    seed: int
    key: bytes
    fault: tuple[str, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillReport:
    """What a run left behind in the prefill process; the fields of `Run` of the same names."""

    counts: Counts
    violations: tuple[Violation, ...]
    guard_trouble: str
    detected_step: int
    watched: _Watched


@dataclass(kw_only=True)
class _Watched:
    """What a watch saw, as plain data: an injection holds functions of the engine."""

    victims: tuple[str, ...] = ()
    page: int = -1
    column: int = -1
    description: str = ""
    injected_step: int = -1
    live_step: int = -1
    affected: frozenset[str] = frozenset()

    def into(self, run: Run) -> None:
        """The same in a Run."""
        if self.injected_step < 0:
            return
        affected = self.affected
        run.injection = Injection(
            victims=self.victims,
            page=self.page,
            column=self.column,
            live_when=lambda names: False,
            affected=lambda: affected,
            description=self.description,
        )
        run.injected_step, run.live_step, run.affected = self.injected_step, self.live_step, affected


class _Watch:
    """Injects the fault at the first suitable step, and notes the first moment at which it is live."""

    def __init__(self, inject: Callable[[], Injection | None], first_step: int) -> None:
        self._inject, self._first_step = inject, first_step
        self._injection: Injection | None = None
        self.seen = _Watched()

    def at_schedule(self, engine: Engine) -> None:
        if self._injection is not None or engine.step_index < self._first_step:
            return
        injection = self._injection = self._inject()
        if injection is not None:
            self.seen = _Watched(
                victims=injection.victims,
                page=injection.page,
                column=injection.column,
                description=injection.description,
                injected_step=engine.step_index,
            )

    def at_moment(self, engine: Engine, names: frozenset[str]) -> None:
        injection = self._injection
        if injection is not None and self.seen.live_step < 0 and injection.live_when(names):
            self.seen.live_step = engine.step_index
            self.seen.affected = injection.affected()

    def at_launch(self, engine: Engine, batch: list[Sequence]) -> None:
        self.at_moment(engine, frozenset(sequence.id for sequence in batch))


def _guard(pool: str, config: EngineConfig, *, proofs: str, backend: str, seed: int) -> PagedGuard:
    spec = replace(pool_of(config), name=pool)
    return PagedGuard([spec], config=GuardConfig.default(seed=seed), backend=backend, proofs=PROOFS[proofs])


class _PrefillRun:
    """Implements `ServedRun`."""

    def __init__(self, spec: PrefillSpec) -> None:
        model = load_model(spec.model, spec.weights)
        self._guard: PagedGuard | None = None
        source = None
        if spec.proofs is not None:
            # Tags and digest keys of two processes have nothing to do with each other.
            seed = spec.seed + 1
            self._guard = _guard(
                PREFILL_WORKER, spec.config, proofs=spec.proofs, backend=spec.backend, seed=seed
            )
            source = TransferSource(self._guard, TransferLink(name=PREFILL_WORKER, key=spec.key))
        self.engine = PrefillEngine(model, spec.config, spec.wire, self._guard, source)
        self._watch: _Watch | None = None
        self._detected_step = -1
        if spec.fault is not None:
            name, fault_seed, first = spec.fault
            self._watch = _watch_transfers(TRANSFER_FAULTS[name], fault_seed, first, self.engine)
        self._wrap_tick()

    def _wrap_tick(self) -> None:
        tick = self.engine.tick

        def watched() -> Any:
            parts = tick()
            if self._guard is not None and self._detected_step < 0 and self._guard.violations:
                self._detected_step = self.engine.step_index
            return parts

        self.engine.tick = watched  # type: ignore[method-assign]

    def report(self) -> PrefillReport:
        guard = self._guard
        return PrefillReport(
            counts=self.engine.scheduler.counts,
            violations=() if guard is None else guard.violations,
            guard_trouble="" if guard is None else guard_trouble(guard.health()),
            detected_step=self._detected_step,
            watched=_Watched() if self._watch is None else self._watch.seen,
        )


def serve_run(spec: PrefillSpec) -> _PrefillRun:
    """A run in the prefill process."""
    _prepare_once()
    return _PrefillRun(spec)


@lru_cache(maxsize=1)
def _prepare_once() -> None:
    from kvguard.fault_injection.campaign import _prepare_worker

    _prepare_worker()


def _watch_transfers(fault: type[TransferFault], seed: int, first: int, engine: Engine) -> _Watch:
    """A watch on the engine of the side that the fault is injected in."""
    if isinstance(engine, PrefillEngine):
        watch = _Watch(lambda: fault(seed=seed, target=PrefillTarget(engine)).inject(), first)
        engine.at_copy.append(watch.at_moment)
    else:
        assert isinstance(engine, DecodeEngine)
        watch = _Watch(lambda: fault(seed=seed, target=DecodeTarget(engine)).inject(), first)
        {"land": engine.at_land, "written": engine.at_written}[fault.moment].append(watch.at_moment)
    engine.at_schedule.append(watch.at_schedule)
    return watch


def _watch_pages(fault: type[PageFault], seed: int, engine: DecodeEngine) -> _Watch:
    watch = _Watch(
        lambda: fault(seed=seed, target=DecodeTarget(engine)).inject(), first_step(fault, seed) + engine.kv.layers
    )
    engine.at_launch.append(watch.at_launch)
    engine.at_schedule.append(watch.at_schedule)
    return watch


_process: PrefillProcess | None = None


def prefill_process() -> PrefillProcess:
    """The prefill worker of this process, started when it is first asked for, or after it died."""
    global _process
    if _process is None or not _process.alive:
        _process = PrefillProcess(serve_run)
        atexit.register(_process.close)
    return _process


@dataclass(frozen=True, kw_only=True)
class PhasesSetup:
    """One combination of both workers; `kv_dtype` and `weights` are the decode worker's."""

    model: str
    weights: str
    kv_dtype: str
    page_size: int
    tight: bool
    backend: str = "torch"

    def decode_config(self) -> EngineConfig:
        return engine_config(kv_dtype=self.kv_dtype, page_size=self.page_size, tight=self.tight)

    def decode_model(self) -> LlamaModel:
        return load_model(self.model, cast(WeightFormat, self.weights))

    def wire(self) -> WireFormat:
        config = self.decode_config()
        pages = self.decode_model().new_kv(num_pages=1, page_size=config.page_size, dtype=config.kv_dtype)
        return WireFormat.of(pages, self.model)

    def prefill_spec(self, *, proofs: str | None, seed: int, key: bytes) -> PrefillSpec:
        kv_dtype, weights = prefill_storage(self.kv_dtype, self.weights)
        return PrefillSpec(
            model=self.model,
            weights=weights,
            config=replace(self.decode_config(), kv_dtype=kv_dtype),
            wire=self.wire(),
            proofs=proofs,
            backend=self.backend,
            seed=seed,
            key=key,
        )


def run_phases(
    setup: PhasesSetup,
    arrivals: list[Arrival],
    *,
    proofs: str | None = None,
    fault: str | None = None,
    fault_seed: int = 0,
    client_aborts: dict[str, int] | None = None,
    process: PrefillProcess | None = None,
) -> Run:
    """Drive both workers through the traffic and collect what clients saw. `proofs`: None for no guard at all."""
    run = Run()
    process = process or prefill_process()
    rng = random.Random(f"link-{fault_seed}")
    key = rng.randbytes(32)
    spec = setup.prefill_spec(proofs=proofs, seed=fault_seed, key=key)
    first = TRANSFER_STEPS[fault_seed % len(TRANSFER_STEPS)]
    transfer_fault = TRANSFER_FAULTS.get(fault or "")
    if transfer_fault is not None and transfer_fault.side == "source":
        spec = replace(spec, fault=(transfer_fault.name, fault_seed, first))
    config = setup.decode_config()
    guard = target = None
    if proofs is not None:
        guard = _guard(DECODE_WORKER, config, proofs=proofs, backend=setup.backend, seed=fault_seed)
        link = TransferLink(name=DECODE_WORKER, key=key)
        target = TransferTarget(guard, link, layout=spec.wire.layout())
    process.begin(spec)
    engine = DecodeEngine(setup.decode_model(), config, process, guard, target)
    watch = None
    if transfer_fault is not None and transfer_fault.side == "sink":
        watch = _watch_transfers(transfer_fault, fault_seed, first, engine)
    elif fault in PAGE_FAULTS:
        watch = _watch_pages(PAGE_FAULTS[fault], fault_seed, engine)

    def after_step(_: Engine) -> None:
        if guard is not None and run.detected_step < 0 and guard.violations:
            run.detected_step = engine.step_index
        for name, step in (client_aborts or {}).items():
            if step == engine.step_index:
                engine.abort(name)

    try:
        if not drive(engine, arrivals, max_steps=MAX_STEPS, after_step=[after_step]):
            run.crash = f"not done after {MAX_STEPS} steps"
    except Exception as error:
        # Unguarded workers with broken pages may fall over: that is an effect of the fault, not of the harness.
        if fault is None or guard is not None:
            raise
        run.crash = f"{type(error).__name__}: {error}"
    report: PrefillReport = process.end()
    for name, output in engine.outputs.items():
        run.outputs[name] = (output.token_ids, output.error)
        run.emitted[name] = tuple(emitted.step for emitted in output.tokens)
        run.ended_step[name] = output.ended_step
    (watch.seen if watch is not None else report.watched).into(run)
    run.promised_adoptions = engine.scheduler.promised_adoptions
    run.counts = _together(engine.scheduler.counts, report.counts)
    run.hand_overs = engine.hand_overs
    if guard is not None:
        run.violations = (*report.violations, *guard.violations)
        run.guard_trouble = report.guard_trouble or guard_trouble(guard.health())
        seen = [step for step in (run.detected_step, report.detected_step) if step >= 0]
        run.detected_step = min(seen, default=-1)
    return run


def _together(here: Counts, there: Counts) -> Counts:
    """Both workers; a client that leaves is counted once."""
    return Counts(
        preemptions=here.preemptions + there.preemptions,
        evictions=here.evictions + there.evictions,
        prefix_hits=here.prefix_hits + there.prefix_hits,
        cached_tokens=here.cached_tokens + there.cached_tokens,
        promised_hits=here.promised_hits + there.promised_hits,
        client_aborts=here.client_aborts,
        steps=here.steps,
    )


def _prompts(setup: PhasesSetup) -> PromptMaker:
    return prompts_of(setup.model, setup.decode_model().config.vocab_size).make


@lru_cache(maxsize=512)
def golden_phases(setup: PhasesSetup, traffic_seed: int, client_aborts: bool) -> Run:
    """The same traffic without fault and guard; shared by all trials that need it."""
    make_prompt = _prompts(setup)
    return run_phases(setup, trial_traffic(traffic_seed, make_prompt, client_aborts=client_aborts))


class PhasesRuns:
    """Implements `TrialRuns`; `proofs` names a set of `PROOFS`."""

    def __init__(self, plan: TrialPlan, *, model: str, backend: str, proofs: str) -> None:
        cell = plan.cell
        self._plan, self._proofs = plan, proofs
        self._setup = PhasesSetup(
            model=model,
            weights=cell.weights,
            kv_dtype=cell.kv_dtype,
            page_size=cell.page_size,
            tight=False,
            backend=backend,
        )
        self._arrivals = trial_traffic(plan.traffic_seed, _prompts(self._setup))
        self.exact = cell.kv_dtype == cell.weights == "fp32"
        self.text: Callable[[tuple[int, ...]], str] | None = decode if model == "recall" else None
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        return golden_phases(self._setup, self._plan.traffic_seed, False)

    def off(self) -> Run:
        return self._run(fault=self._plan.cell.fault)

    def on(self) -> Run:
        return self._run(fault=self._plan.cell.fault, proofs=self._proofs)

    def control(self, aborts: dict[str, int]) -> Run:
        return self._run(client_aborts=aborts)

    def _run(self, **options: Any) -> Run:
        return run_phases(self._setup, self._arrivals, fault_seed=self._plan.fault_seed, **options)


def clean_runs(plan: CleanPlan, *, model: str, backend: str, proofs: str = "all") -> tuple[Run, Run]:
    """Healthy traffic in tight pools with client aborts: guards off, guards on."""
    setup = PhasesSetup(
        model=model,
        weights=plan.weights,
        kv_dtype=plan.kv_dtype,
        page_size=plan.page_size,
        tight=True,
        backend=backend,
    )
    golden = golden_phases(setup, plan.traffic_seed, True)
    arrivals = trial_traffic(plan.traffic_seed, _prompts(setup), client_aborts=True)
    return golden, run_phases(setup, arrivals, proofs=proofs, fault_seed=plan.traffic_seed)
