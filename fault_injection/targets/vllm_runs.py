"""The runs of a trial inside a real vLLM engine, in this process; see `docs/campaign.md`.

An engine is started once per set-up and serves all its runs, golden, off, on and control; see `vllm_slate` for how it
is brought back in between. The guard is attached to the live engine for the guarded runs alone.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from kvguard.config import GuardConfig
from kvguard.fault_injection.faults.pages import PAGE_FAULTS, PageFault
from kvguard.fault_injection.mixed_traffic import clean_traffic
from kvguard.fault_injection.plan import LEVEL, Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.runs import PROOFS, Run, guard_trouble
from kvguard.fault_injection.targets.checkpoints import model_folder, prompts_of
from kvguard.fault_injection.targets.vllm import client_name
from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions, prepare_process
from kvguard.fault_injection.targets.vllm_slate import GUARD_MARK, OwnFunctions, clean_slate, leaked_pages
from kvguard.fault_injection.targets.vllm_step import StepHook
from kvguard.fault_injection.targets.vllm_watch import WatchedRun
from kvguard.fault_injection.targets.vllm_writes import VLLM_WRITE_FAULTS
from kvguard.fault_injection.traffic import Arrival, Prompts, trial_traffic

ROWS_MAX = 6
TIGHT_TOKENS, ROOMY_TOKENS = 3 * 144, 6 * 160
"""Tokens in the pool: room for three requests of the traffic, so that healthy runs preempt and evict, or for all."""
KV_CACHE_DTYPES = {"fp32": "auto", "bf16": "auto"}


def vllm_options(setup: Cell | CleanPlan, *, model: str, tight: bool) -> VllmOptions:
    """How vLLM is started for a cell."""
    tokens = TIGHT_TOKENS if tight else ROOMY_TOKENS
    return VllmOptions(
        model=model_folder(model, setup.weights),
        runner=setup.runner,  # type: ignore[arg-type]
        asynchronous=setup.scheduling == "async",
        dtype="float32" if setup.weights == "fp32" else "bfloat16",
        kv_cache_dtype=KV_CACHE_DTYPES.get(setup.kv_dtype, setup.kv_dtype),
        num_blocks=1 + -(-tokens // setup.page_size),
        block_size=setup.page_size,
        max_num_seqs=ROWS_MAX,
        max_model_len=256,
        max_num_batched_tokens=256,
    )


ENGINES_MAX = 2
"""Live engines of a process: the roomy and the tight one of a set-up. Each holds a copy of the model."""


class _Engines:
    """The engines of this process, one per set-up, each as clean as new between runs."""

    def __init__(self) -> None:
        self._engines: dict[str, VllmEngine] = {}

    def get(self, options: VllmOptions) -> VllmEngine:
        """A live engine with a clean slate. RuntimeError if even a new one is not clean."""
        name = repr(options)
        engine = self._engines.pop(name, None)
        if engine is not None and clean_slate(engine):
            engine.close()
            engine = None
        while engine is None and len(self._engines) >= ENGINES_MAX:
            self._engines.pop(next(iter(self._engines))).close()
        if engine is None:
            engine = _start(options)
            trouble = clean_slate(engine)
            if trouble:
                raise RuntimeError(f"a new engine is not as it should be: {trouble}")
        self._engines[name] = engine
        return engine

    def drop(self, options: VllmOptions) -> None:
        """The engine is in a state that nobody knows: throw it away."""
        self._engines.pop(repr(options)).close()


def prepare(setup: Cell | CleanPlan) -> None:
    """Before anything of vLLM, Triton or transformers is imported: what they decide at their import."""
    # The plug-in must not attach by itself: unguarded runs are vLLM's own code.
    for name in [name for name in os.environ if name.startswith("KVGUARD_") and not name.startswith("KVGUARD_TEST_")]:
        del os.environ[name]
    # vLLM logs the crash of an engine at length; here crashes are effects of faults, and in the results.
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    prepare_process(setup.runner)  # type: ignore[arg-type]


def _start(options: VllmOptions) -> VllmEngine:
    import torch

    torch.set_num_threads(1)
    engine = VllmEngine(options)
    if hasattr(engine.scheduler, GUARD_MARK) or hasattr(engine.runner, GUARD_MARK):
        raise RuntimeError("vLLM started guarded: unguarded runs would not be")
    return engine


ENGINES = _Engines()


def attach(engine: VllmEngine, *, proofs: str, seed: int, level: str = LEVEL) -> Any:
    """Put a new guard on the live engine, as the plug-in does with one that is being built. Returns the Guard."""
    from kvguard.adapters.vllm.layout import describe_scheduler
    from kvguard.adapters.vllm.scheduler_side import SchedulerSide
    from kvguard.adapters.vllm.worker_side import WorkerSideV1, WorkerSideV2

    scheduler, runner = engine.scheduler, engine.runner
    config = GuardConfig.default(seed=seed, level=level)
    side = SchedulerSide(scheduler, describe_scheduler(scheduler), config, proofs=PROOFS[proofs])
    side.watch_weights(engine.core)
    setattr(scheduler, GUARD_MARK, side)
    setattr(runner, GUARD_MARK, WorkerSideV2(runner) if engine.options.runner == "v2" else WorkerSideV1(runner))
    return side.guard


def run_vllm(
    options: VllmOptions,
    arrivals: list[Arrival],
    *,
    recites: bool = False,
    proofs: str | None = None,
    guard_seed: int = 0,
    fault: type[PageFault] | None = None,
    fault_seed: int = 0,
    client_aborts: dict[str, int] | None = None,
    padded: bool = False,
) -> Run:
    """Drive one engine through the traffic and collect what its clients saw.

    `proofs`: None for no guard. `padded`: batches have padding lanes, as with CUDA graphs.
    """
    engine = ENGINES.get(options)
    functions = OwnFunctions(engine)
    hook = StepHook(engine) if padded else None
    guard = None if proofs is None else attach(engine, proofs=proofs, seed=guard_seed)
    watched = WatchedRun(
        engine,
        arrivals,
        recites=recites,
        fault=fault,
        fault_seed=fault_seed,
        client_aborts=client_aborts,
        guard=guard,
        hook=hook,
    )
    run = watched.run
    try:
        watched.drive()
    except Exception as error:
        run.crash = f"{type(error).__name__}: {error}"
        # An unguarded engine with a broken pool may fall over: that is an effect of the fault, not of the harness.
        if fault is None:
            raise
    finally:
        functions.restore()
        if run.crash:
            ENGINES.drop(options)
    if guard is not None:
        run.violations = by_client(guard.violations)
        run.guard_trouble = guard_trouble(guard.health())
        if fault is None and not run.guard_trouble and leaked_pages(engine):
            run.guard_trouble = f"{leaked_pages(engine)} pages are lost"
    return run


def by_client(violations: tuple[Any, ...]) -> tuple[Any, ...]:
    """Violations under the names that clients gave their requests."""
    return tuple(v if v.request is None else replace(v, request=client_name(v.request)) for v in violations)


class VllmRuns:
    """Implements `TrialRuns`; `proofs` names a set of `PROOFS`."""

    def __init__(self, plan: TrialPlan, *, model: str, proofs: str) -> None:
        prepare(plan.cell)
        self._plan, self._proofs = plan, proofs
        self._options = vllm_options(plan.cell, model=model, tight=False)
        self._prompts = prompts_of(model, self._options.model)
        self._arrivals = _traffic(self._options, self._prompts, plan.traffic_seed)
        self._fault = (PAGE_FAULTS | VLLM_WRITE_FAULTS)[plan.cell.fault]
        self._padded = plan.cell.fault in VLLM_WRITE_FAULTS
        self.exact = plan.cell.kv_dtype == plan.cell.weights == "fp32"
        self.text = self._prompts.text
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        return golden_run(self._options, self._prompts, self._plan.traffic_seed, padded=self._padded)

    def off(self) -> Run:
        return self._run(fault=self._fault, fault_seed=self._plan.fault_seed)

    def on(self) -> Run:
        seed = self._plan.fault_seed
        return self._run(fault=self._fault, fault_seed=seed, proofs=self._proofs, guard_seed=seed)

    def control(self, aborts: dict[str, int]) -> Run:
        return self._run(client_aborts=aborts)

    def _run(self, **how: Any) -> Run:
        return run_vllm(self._options, self._arrivals, recites=self._prompts.recites, padded=self._padded, **how)


def _traffic(options: VllmOptions, prompts: Prompts, seed: int) -> list[Arrival]:
    """Shorter answers for runner V2: its interpreted steps take some thirty times as long."""
    new_tokens = range(12, 18) if options.runner == "v2" else range(18, 27)
    return trial_traffic(seed, prompts.make, new_tokens=new_tokens)


def _clean_traffic(options: VllmOptions, prompts: Prompts, seed: int) -> list[Arrival]:
    if options.runner == "v2":
        short = (range(18, 27), range(12, 18), range(3, 9))
        return clean_traffic(seed, prompts.make, requests=8, answers=short)
    return clean_traffic(seed, prompts.make)


_golden_runs: dict[tuple[str, int, bool], Run] = {}


def golden_run(options: VllmOptions, prompts: Prompts, traffic_seed: int, *, padded: bool = False) -> Run:
    """The traffic without fault and guard; shared by all trials of this process that need it."""
    key = (repr(options), traffic_seed, padded)
    if key not in _golden_runs:
        arrivals = _traffic(options, prompts, traffic_seed)
        _golden_runs[key] = run_vllm(options, arrivals, padded=padded)
    return _golden_runs[key]


def clean_runs(plan: CleanPlan, *, model: str) -> tuple[Run, Run]:
    """Mixed traffic in a tight pool with client aborts: guard off, guard on. Every other one has padded batches.

    Nobody drafts: once Numba is imported, which ngram drafts need, vLLM 0.32 starts no other engine in the process.
    """
    prepare(plan)
    options = vllm_options(plan, model=model, tight=True)
    prompts = prompts_of(model, options.model)
    padded = plan.traffic_seed % 2 == 1
    arrivals = _clean_traffic(options, prompts, plan.traffic_seed)
    golden = run_vllm(options, arrivals, padded=padded)
    return golden, run_vllm(options, arrivals, proofs="all", guard_seed=plan.traffic_seed, padded=padded)
