"""The runs of a trial of a wrong cache key inside a real vLLM: tenants by cache salt, evictions, a weight update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvguard.fault_injection.key_plan import KEY_PROOFS, KEYS
from kvguard.fault_injection.key_traffic import UPDATE_STEP, cut, key_traffic, tiny_prompt
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.runs import Run, guard_trouble
from kvguard.fault_injection.targets.checkpoints import TINY, other_weights
from kvguard.fault_injection.targets.vllm_engine import VllmOptions
from kvguard.fault_injection.targets.vllm_key_watch import KeyWatchedRun
from kvguard.fault_injection.targets.vllm_keys import VLLM_KEY_FAULTS, VllmKeyFault
from kvguard.fault_injection.targets.vllm_runs import ENGINES, attach, by_client, prepare, vllm_options
from kvguard.fault_injection.targets.vllm_slate import OwnFunctions, leaked_pages
from kvguard.fault_injection.traffic import Arrival

__all__ = ["VllmKeyRuns", "clean_runs"]

POOL_TOKENS, TIGHT_TOKENS = 640, 480
"""Room for four requests of the traffic, so that pages are evicted, or for fewer, so that healthy runs preempt."""


def key_options(setup: Cell | CleanPlan, *, tight: bool) -> VllmOptions:
    """How vLLM is started for a cell."""
    tokens = TIGHT_TOKENS if tight else POOL_TOKENS
    return replace(vllm_options(setup, model=TINY, tight=tight), num_blocks=1 + -(-tokens // setup.page_size))


def key_arrivals(runner: str, seed: int, *, client_aborts: bool) -> list[Arrival]:
    """The traffic without adapters; a prompt that is cut is sent as it is after that. V2's steps are interpreted."""
    slow = runner == "v2"
    arrivals = key_traffic(
        seed,
        tiny_prompt,
        client_aborts=client_aborts,
        new_tokens=range(3, 6) if slow else range(12, 22),
        spacing=range(1, 3) if slow else range(2, 5),
    )
    found = []
    for arrival in arrivals:
        found.append(cut(replace(arrival, request=replace(arrival.request, lora=""))))
    return found


def run_keys(
    options: VllmOptions,
    arrivals: list[Arrival],
    *,
    update: bool,
    fault: type[VllmKeyFault] | None = None,
    fault_seed: int = 0,
    proofs: str | None = None,
    guard_seed: int = 0,
    taken: dict[str, list[int]] | None = None,
    client_aborts: dict[str, int] | None = None,
) -> tuple[Run, dict[str, list[int]]]:
    """Drive one engine through the traffic: what its clients saw, and how many cached tokens each request took."""
    engine = ENGINES.get(options)
    functions = OwnFunctions(engine)
    guard = None
    if proofs is not None:
        guard = attach(engine, proofs=KEY_PROOFS.get(proofs, proofs), seed=guard_seed, level=KEYS)
    watched = KeyWatchedRun(
        engine,
        arrivals,
        fault=fault,
        fault_seed=fault_seed,
        update=(UPDATE_STEP, str(other_weights())) if update else None,
        taken=taken,
        client_aborts=client_aborts,
        guard=guard,
    )
    run = watched.run
    try:
        watched.drive()
    except Exception as error:
        run.crash = f"{type(error).__name__}: {error}"
        # An unguarded engine may fall over: that is an effect of the fault, not of the harness.
        if fault is None:
            raise
    finally:
        functions.restore()
        if run.crash:
            ENGINES.drop(options)
    watched.finish()
    if guard is not None:
        run.violations = by_client(guard.violations)
        run.guard_trouble = guard_trouble(guard.health())
        if fault is None and not run.guard_trouble and leaked_pages(engine):
            run.guard_trouble = f"{leaked_pages(engine)} pages are lost"
    if update and not run.crash:
        watched.change_weights(str(options.model))
    return run, watched.taken


_golden_runs: dict[tuple[str, int, bool, bool], Run] = {}


def golden_run(options: VllmOptions, traffic_seed: int, *, update: bool, client_aborts: bool) -> Run:
    """The traffic without fault and guard; shared by all trials of this process that need it."""
    key = (repr(options), traffic_seed, update, client_aborts)
    if key not in _golden_runs:
        arrivals = key_arrivals(options.runner, traffic_seed, client_aborts=client_aborts)
        _golden_runs[key], _ = run_keys(options, arrivals, update=update)
    return _golden_runs[key]


class VllmKeyRuns:
    """Implements `TrialRuns`; `proofs` names a set of `KEY_PROOFS`, or of `PROOFS`."""

    def __init__(self, plan: TrialPlan, *, proofs: str) -> None:
        prepare(plan.cell)
        self._plan, self._proofs = plan, proofs
        self._fault = VLLM_KEY_FAULTS[plan.cell.fault]
        self._options = key_options(plan.cell, tight=False)
        self._arrivals = key_arrivals(plan.cell.runner, plan.traffic_seed, client_aborts=False)
        self._taken: dict[str, list[int]] = {}
        self.text: Callable[[tuple[int, ...]], str] | None = None
        self.exact = plan.cell.kv_dtype == plan.cell.weights == "fp32"
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        update = self._fault.needs_update
        return golden_run(self._options, self._plan.traffic_seed, update=update, client_aborts=False)

    def off(self) -> Run:
        return self._run(fault=self._fault, fault_seed=self._plan.fault_seed)[0]

    def on(self) -> Run:
        seed = self._plan.fault_seed
        run, self._taken = self._run(fault=self._fault, fault_seed=seed, proofs=self._proofs, guard_seed=seed)
        return run

    def control(self, aborts: dict[str, int]) -> Run:
        """Every request takes as many cached tokens as with fault and guard: that decides what is computed together."""
        return self._run(client_aborts=aborts, taken=self._taken)[0]

    def _run(self, **how: Any) -> tuple[Run, dict[str, list[int]]]:
        return run_keys(self._options, self._arrivals, update=self._fault.needs_update, **how)


def clean_runs(plan: CleanPlan) -> tuple[Run, Run]:
    """Healthy traffic with salts, shared prefixes, client aborts and a weight update: guard off, on at level `keys`."""
    prepare(plan)
    options = key_options(plan, tight=True)
    golden = golden_run(options, plan.traffic_seed, update=True, client_aborts=True)
    arrivals = key_arrivals(options.runner, plan.traffic_seed, client_aborts=True)
    run, _ = run_keys(options, arrivals, update=True, proofs="all", guard_seed=plan.traffic_seed)
    return golden, run
