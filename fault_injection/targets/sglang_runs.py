"""The runs of a trial inside a real SGLang scheduler, each in a process of its own; see `docs/campaign.md`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.mixed_traffic import CLEAN_ANSWERS, clean_traffic
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.runs import PROOFS, Run, guard_trouble
from kvguard.fault_injection.sglang_plan import SGLANG_FAULTS, SGLANG_WRITE_FAULTS
from kvguard.fault_injection.targets.checkpoints import model_folder, prompts_of
from kvguard.fault_injection.targets.sglang_engine import SglangEngine, SglangOptions
from kvguard.fault_injection.targets.sglang_templates import templates
from kvguard.fault_injection.targets.sglang_watch import WatchedRun
from kvguard.fault_injection.traffic import Arrival, Prompts, secret, trial_traffic

ROWS_MAX = 6
TIGHT_TOKENS, ROOMY_TOKENS = 448, 2304
"""Slots of the pool, whole pages of every size: room for three requests, so that healthy runs retract and evict, or for
everything that the traffic ever writes, so that no page of the tree goes of itself."""
KV_CACHE_DTYPES = {"fp32": "auto", "bf16": "auto"}
LATE_STEPS = 34
"""When the last pair arrives: some of the first requests are over, and only the tree holds their pages."""
GUARDS: dict[str, dict[str, str]] = {
    "all": {"KVGUARD_LEVEL": "tags"},
    "tags": {"KVGUARD_LEVEL": "tags"},
    "keys": {"KVGUARD_LEVEL": "keys"},
    "tag": {"KVGUARD_LEVEL": "tags", "KVGUARD_CONTROL_PLANE": "false"},
    "control_plane": {"KVGUARD_LEVEL": "tags", "KVGUARD_DEVICE_CHECK": "false"},
    "write_slot": {"KVGUARD_LEVEL": "tags"},
}
"""Set of proofs -> the guard's configuration, in the environment before the scheduler is built."""
ALONE = {"tag", "write_slot", "content_key", "none"}
"""Sets that are of one proof, which a configuration of users cannot say: the guard is told by the harness."""


def sglang_options(setup: Cell | CleanPlan, *, model: str, tight: bool) -> SglangOptions:
    """How SGLang is started for a cell. INT4 weights are made of the bf16 checkpoint, when it is loaded."""
    int4 = setup.weights == "int4"
    return SglangOptions(
        model=model_folder(model, "bf16" if int4 else setup.weights),
        overlap=setup.scheduling == "overlap",
        dtype="float32" if setup.weights == "fp32" else "bfloat16",
        int4=int4,
        kv_cache_dtype=KV_CACHE_DTYPES.get(setup.kv_dtype, setup.kv_dtype),
        page_size=setup.page_size,
        pool_tokens=TIGHT_TOKENS if tight else ROOMY_TOKENS,
        max_running=ROWS_MAX,
        conservativeness=0.1 if tight else 1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a fork of a template is to do; pickled on its way there."""

    arrivals: list[Arrival]
    recites: bool
    fault: type[Any] | None = None
    fault_seed: int = 0
    client_aborts: dict[str, int] | None = None
    proofs: str = "all"

    def __call__(self, engine: SglangEngine) -> Run:
        """Drive the engine through the traffic. What the engine raises is in the run, as its crash."""
        import structlog

        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
        if engine.guard is not None and self.proofs in ALONE:
            engine.guard.check_only(PROOFS[self.proofs])
        watched = self.watch(engine)
        run = watched.run
        try:
            watched.drive()
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(f"that was {self.fault.name if self.fault else 'no fault'}, guard {'on' if engine.guard else 'off'}")
            run.crash = f"{type(error).__name__}: {error}"
        watched.finish()
        if engine.guard is not None:
            run.violations = tuple(engine.guard.violations)
            run.guard_trouble = guard_trouble(engine.guard.health())
        if run.injection is not None:
            # Its functions look into the engine, which ends here.
            run.injection = replace(run.injection, live_when=_nobody_asks, affected=frozenset)
        return run

    def watch(self, engine: SglangEngine) -> WatchedRun:
        """The run to be driven."""
        return WatchedRun(
            engine,
            self.arrivals,
            recites=self.recites,
            fault=self.fault,
            fault_seed=self.fault_seed,
            client_aborts=self.client_aborts,
        )


def _nobody_asks(scheduled: frozenset[str]) -> bool:
    return False


def run_sglang(
    options: SglangOptions, order: Order, *, proofs: str | None = None, guards: Mapping[str, dict[str, str]] = GUARDS
) -> Run:
    """One run in a fork of a template; `proofs`: a key of `guards`, None for no guard.

    RuntimeError for a run without a fault that ended before its traffic, with or without the guard: nothing in it was
    asked to break.
    """
    run: Run | None
    chosen = replace(order, proofs=proofs or "all")
    run, died = templates.get(options, None if proofs is None else guards[proofs]).run(chosen)
    if run is None:
        run = Run(crash=died)
    if run.crash and order.fault is None and proofs is None:
        raise RuntimeError(f"SGLang fell over without a fault: {run.crash}")
    return run


class SglangRuns:
    """Implements `TrialRuns`; `proofs` is a key of GUARDS."""

    def __init__(self, plan: TrialPlan, *, model: str, proofs: str) -> None:
        self._plan, self._proofs = plan, proofs
        self._options = sglang_options(plan.cell, model=model, tight=False)
        self._prompts = prompts_of(model, self._options.model)
        self._arrivals = sglang_traffic(plan.traffic_seed, self._prompts)
        self._fault = (SGLANG_FAULTS | SGLANG_WRITE_FAULTS)[plan.cell.fault]
        self.exact = plan.cell.kv_dtype == plan.cell.weights == "fp32"
        self.text = self._prompts.text
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        return golden_run(self._options, self._prompts, self._plan.traffic_seed)

    def off(self) -> Run:
        return self._run(None, fault=self._fault, fault_seed=self._plan.fault_seed)

    def on(self) -> Run:
        return self._run(self._proofs, fault=self._fault, fault_seed=self._plan.fault_seed)

    def control(self, aborts: dict[str, int]) -> Run:
        return self._run(None, client_aborts=aborts)

    def _run(self, proofs: str | None, **how: Any) -> Run:
        order = Order(arrivals=self._arrivals, recites=self._prompts.recites, **how)
        return run_sglang(self._options, order, proofs=proofs)


def sglang_traffic(seed: int, prompts: Prompts) -> list[Arrival]:
    """The traffic of every target, and at its end two requests at once: something new, and an early prompt again.

    The early prompt is over by then, so that the tree alone holds its pages: A, then B beside what is left of A.
    """
    arrivals = trial_traffic(seed, prompts.make, new_tokens=range(14, 20))
    # Two go on until the last pair comes: an SGLang with a fault and no guard would stop itself where it is idle.
    for index in (4, 6):
        arrivals[index] = replace(arrivals[index], request=replace(arrivals[index].request, max_new_tokens=34))
    rng = random.Random(f"sglang-traffic-{seed}")
    step = LATE_STEPS + rng.randrange(3)
    for name, prompt in (("r7", prompts.make(rng, secret(rng))), ("r8", arrivals[rng.choice((2, 3))].request.prompt)):
        request = Request(id=name, prompt=prompt, max_new_tokens=rng.choice(range(10, 16)))
        arrivals.append(Arrival(step=step, request=request))
    return arrivals


_golden_runs: dict[tuple[str, int], Run] = {}


def golden_run(options: SglangOptions, prompts: Prompts, seed: int) -> Run:
    """The traffic without fault and guard; shared by all trials of this process that need it."""
    key = (repr(options), seed)
    if key not in _golden_runs:
        _golden_runs[key] = run_sglang(options, Order(arrivals=sglang_traffic(seed, prompts), recites=prompts.recites))
    return _golden_runs[key]


def clean_runs(plan: CleanPlan, *, model: str) -> tuple[Run, Run]:
    """Mixed traffic in a tight pool with client aborts: guard off, guard on. Nobody drafts: the guard refuses it."""
    options = sglang_options(plan, model=model, tight=True)
    prompts = prompts_of(model, options.model)
    # Answers that outgrow the pool: SGLang has to retract requests.
    answers = (range(48, 72), *CLEAN_ANSWERS[1:])
    arrivals = clean_traffic(plan.traffic_seed, prompts.make, answers=answers)
    order = Order(arrivals=arrivals, recites=prompts.recites)
    return run_sglang(options, order), run_sglang(options, order, proofs="all")


__all__ = ["GUARDS", "Order", "SglangRuns", "clean_runs", "golden_run", "run_sglang", "sglang_options"]
