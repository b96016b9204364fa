"""The runs of a trial in the embedded engine: a fresh engine for each."""

from __future__ import annotations

from collections.abc import Callable
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
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.faults.pages import PAGE_FAULTS, PageFault
from kvguard.fault_injection.faults.write_fault import WriteFault
from kvguard.fault_injection.models import SMOLLM2, smollm2_folder
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.runs import MAX_STEPS, PROOFS, Run, first_step, guard_trouble
from kvguard.fault_injection.targets.embedded import EmbeddedTarget
from kvguard.fault_injection.targets.write_watch import WriteWatch
from kvguard.fault_injection.traffic import (
    Arrival,
    Prompts,
    drive,
    recall_prompt,
    smollm2_prompts,
    token_prompts,
    trial_traffic,
)
from kvguard.pools import PoolSpec

RECALL_FOLDER = Path(__file__).parents[1] / "engine" / "recall"


@lru_cache(maxsize=8)
def load_model(model: str, weights: WeightFormat) -> LlamaModel:
    """`recall`, `smollm2`, or a folder with a Llama checkpoint. FileNotFoundError / ValueError as the loader says."""
    if model == SMOLLM2:
        return LlamaModel.from_pretrained(smollm2_folder("int4" if weights == "int4" else "bf16"), weights)
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


@lru_cache(maxsize=8)
def prompts_of(model: str, vocab_size: int) -> Prompts:
    """How traffic becomes token ids: by the model's tokenizer, or ids of its vocabulary where there is none."""
    if model == SMOLLM2:
        return smollm2_prompts(smollm2_folder("bf16"))
    if model == "recall":
        return Prompts(make=recall_prompt, text=decode, recites=True)
    return Prompts(make=token_prompts(vocab_size), recites=True)


def traffic_of(model: str, loaded: LlamaModel, seed: int, *, client_aborts: bool = False) -> list[Arrival]:
    """The traffic of a trial; shorter answers of a real model, whose steps take some fifty times as long."""
    new_tokens = range(12, 18) if model == SMOLLM2 else range(18, 27)
    make = prompts_of(model, loaded.config.vocab_size).make
    return trial_traffic(seed, make, client_aborts=client_aborts, new_tokens=new_tokens)


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


def pool_of(config: EngineConfig) -> PoolSpec:
    """The engine's pool as a guard is told of it."""
    return PoolSpec(num_pages=config.num_pages, page_size=config.page_size, null_page=NULL_PAGE)


def make_guard(config: EngineConfig, *, proofs: str, backend: str, seed: int) -> PagedGuard:
    """The guard of a trial: default policy, replayable tags, and only the named proofs."""
    settings = GuardConfig.default(seed=seed)
    return PagedGuard([pool_of(config)], config=settings, backend=backend, proofs=PROOFS[proofs])


class _Watch:
    """Injects the fault at the first suitable step and notes the first forward for which it is live."""

    def __init__(self, fault: type[PageFault], seed: int, run: Run, first_step: int, recites: bool) -> None:
        self._fault, self._seed, self._run, self._first_step = fault, seed, run, first_step
        self._recites = recites

    def at_schedule(self, engine: Engine) -> None:
        run = self._run
        if run.injection is None and engine.step_index >= self._first_step:
            run.injection = self._fault(
                seed=self._seed, target=EmbeddedTarget(engine, recites=self._recites)
            ).inject()
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
    recites: bool = True,
    client_aborts: dict[str, int] | None = None,
    prepare: Callable[[Engine, Run], Callable[[], None]] | None = None,
) -> Run:
    """Drive one engine through the traffic and collect what its clients saw. `recites` as in PageTarget.

    `prepare`: called with the engine before its first step; what it answers is called at the end.
    """
    run = Run()
    engine = Engine(model, config, guard)
    finish = None if prepare is None else prepare(engine, run)
    if fault is not None:
        watch: _Watch | WriteWatch
        when = first_step(fault, fault_seed)
        if issubclass(fault, WriteFault):
            watch = WriteWatch(fault, fault_seed, run, when, recites)
        else:
            watch = _Watch(fault, fault_seed, run, when, recites)
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
        if (fault is None and prepare is None) or guard is not None:
            raise
        run.crash = f"{type(error).__name__}: {error}"
    for name, output in engine.outputs.items():
        run.outputs[name] = (output.token_ids, output.error)
        run.emitted[name] = tuple(emitted.step for emitted in output.tokens)
        run.ended_step[name] = output.ended_step
    run.promised_adoptions = engine.scheduler.promised_adoptions
    run.counts = engine.scheduler.counts
    if finish is not None:
        finish()
    if guard is not None:
        run.violations = guard.violations
        run.guard_trouble = guard_trouble(guard.health())
    return run


@lru_cache(maxsize=512)
def golden_run(
    model: str, weights: str, kv_dtype: str, page_size: int, traffic_seed: int, tight: bool, client_aborts: bool
) -> Run:
    """The same traffic without fault and guard; shared by all trials that need it."""
    loaded = load_model(model, weights)
    arrivals = traffic_of(model, loaded, traffic_seed, client_aborts=client_aborts)
    return run_engine(loaded, engine_config(kv_dtype=kv_dtype, page_size=page_size, tight=tight), arrivals)


class EmbeddedRuns:
    """Implements `TrialRuns`; `proofs` names a set of `PROOFS`."""

    def __init__(self, plan: TrialPlan, *, model: str, backend: str, proofs: str) -> None:
        cell = plan.cell
        self._plan, self._model, self._backend, self._proofs = plan, model, backend, proofs
        self._loaded = load_model(model, cell.weights)
        self._config = engine_config(kv_dtype=cell.kv_dtype, page_size=cell.page_size, tight=False)
        self._prompts = prompts_of(model, self._loaded.config.vocab_size)
        self._arrivals = traffic_of(model, self._loaded, plan.traffic_seed)
        self._fault = PAGE_FAULTS[cell.fault]
        self.exact = cell.kv_dtype == cell.weights == "fp32"
        self.text: Callable[[tuple[int, ...]], str] | None = self._prompts.text
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        cell = self._plan.cell
        return golden_run(
            self._model, cell.weights, cell.kv_dtype, cell.page_size, self._plan.traffic_seed, False, False
        )

    def off(self) -> Run:
        return self._run(fault=self._fault)

    def on(self) -> Run:
        seed = self._plan.fault_seed
        guard = make_guard(self._config, proofs=self._proofs, backend=self._backend, seed=seed)
        return self._run(fault=self._fault, guard=guard)

    def control(self, aborts: dict[str, int]) -> Run:
        return self._run(client_aborts=aborts)

    def _run(
        self,
        *,
        fault: type[PageFault] | None = None,
        guard: PagedGuard | None = None,
        client_aborts: dict[str, int] | None = None,
    ) -> Run:
        return run_engine(
            self._loaded,
            self._config,
            self._arrivals,
            guard=guard,
            fault=fault,
            fault_seed=self._plan.fault_seed,
            recites=self._prompts.recites,
            client_aborts=client_aborts,
        )


def clean_runs(plan: CleanPlan, *, model: str, backend: str) -> tuple[Run, Run]:
    """Healthy traffic in a tight pool with client aborts: guard off, guard on."""
    loaded = load_model(model, plan.weights)
    config = engine_config(kv_dtype=plan.kv_dtype, page_size=plan.page_size, tight=True)
    golden = golden_run(model, plan.weights, plan.kv_dtype, plan.page_size, plan.traffic_seed, True, True)
    arrivals = traffic_of(model, loaded, plan.traffic_seed, client_aborts=True)
    guard = make_guard(config, proofs="all", backend=backend, seed=plan.traffic_seed)
    return golden, run_engine(loaded, config, arrivals, guard=guard)
