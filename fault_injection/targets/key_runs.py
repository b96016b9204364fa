"""The runs of a trial of a wrong cache key: an embedded engine with tenants, adapters and an external store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.faults.keys import KEY_FAULTS, KeyFault
from kvguard.fault_injection.key_plan import KEY_PROOFS
from kvguard.fault_injection.key_traffic import TOKENS_MAX, UPDATE_STEP, key_traffic
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.runs import PROOFS, Run
from kvguard.fault_injection.targets.embedded_runs import engine_config, load_model, pool_of, prompts_of, run_engine
from kvguard.fault_injection.targets.key_watch import KeyWatch

__all__ = ["KeyRuns", "clean_runs", "key_config", "key_guard"]

MODEL = "recall"


def key_config(*, kv_dtype: str, page_size: int) -> EngineConfig:
    """Room for four requests of the traffic: pages are evicted, to the external store, and come back."""
    made = engine_config(kv_dtype=kv_dtype, page_size=page_size, tight=False)
    return replace(made, num_pages=1 + -(-640 // page_size), max_tokens=TOKENS_MAX, external_store=True)


def key_guard(config: EngineConfig, *, proofs: str, backend: str, seed: int) -> PagedGuard:
    """A guard at level `keys` with default policy, replayable tags, and only the named proofs."""
    settings = GuardConfig.default(seed=seed, level="keys")
    return PagedGuard([pool_of(config)], config=settings, backend=backend, proofs=PROOFS[proofs])


def _prepared(fault: type[KeyFault] | None, seed: int, *, update: bool) -> Callable[[Engine, Run], Callable[[], None]]:
    """Watch an engine, put the fault in, and change the weights on the way if that is asked for."""

    def change_weights(engine: Engine) -> None:
        if engine.step_index == UPDATE_STEP:
            engine.update_weights()

    def prepare(engine: Engine, run: Run) -> Callable[[], None]:
        watch = KeyWatch(engine, fault, seed, run, first_step=1)
        engine.at_schedule.append(watch.at_schedule)
        if update:
            engine.at_schedule.append(change_weights)
        return watch.finish

    return prepare


@lru_cache(maxsize=64)
def golden_run(
    weights: str, kv_dtype: str, page_size: int, traffic_seed: int, update: bool, client_aborts: bool
) -> Run:
    """The same traffic without fault and guard; shared by all trials that need it."""
    config = key_config(kv_dtype=kv_dtype, page_size=page_size)
    arrivals = key_traffic(traffic_seed, client_aborts=client_aborts)
    return run_engine(load_model(MODEL, weights), config, arrivals, prepare=_prepared(None, 0, update=update))


class KeyRuns:
    """Implements `TrialRuns`; `proofs` names a set of `KEY_PROOFS`, or of `PROOFS`."""

    def __init__(self, plan: TrialPlan, *, backend: str, proofs: str) -> None:
        cell = plan.cell
        self._plan, self._backend = plan, backend
        self._proofs = KEY_PROOFS.get(proofs, proofs)
        self._model = load_model(MODEL, cell.weights)
        self._config = key_config(kv_dtype=cell.kv_dtype, page_size=cell.page_size)
        self._arrivals = key_traffic(plan.traffic_seed)
        self._fault = KEY_FAULTS[cell.fault]
        self.exact = cell.kv_dtype == cell.weights == "fp32"
        self.text = prompts_of(MODEL, self._model.config.vocab_size).text
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        cell = self._plan.cell
        seed = self._plan.traffic_seed
        return golden_run(cell.weights, cell.kv_dtype, cell.page_size, seed, self._fault.needs_update, False)

    def off(self) -> Run:
        return self._with_fault(None)

    def on(self) -> Run:
        seed = self._plan.fault_seed
        return self._with_fault(key_guard(self._config, proofs=self._proofs, backend=self._backend, seed=seed))

    def control(self, aborts: dict[str, int]) -> Run:
        update = _prepared(None, 0, update=self._fault.needs_update)
        return run_engine(self._model, self._config, self._arrivals, client_aborts=aborts, prepare=update)

    def _with_fault(self, guard: PagedGuard | None) -> Run:
        prepare = _prepared(self._fault, self._plan.fault_seed, update=self._fault.needs_update)
        return run_engine(self._model, self._config, self._arrivals, guard=guard, prepare=prepare)


def clean_runs(plan: CleanPlan, *, backend: str) -> tuple[Run, Run]:
    """Healthy traffic with client aborts and a weight update: guard off, guard on at level `keys`."""
    golden = golden_run(plan.weights, plan.kv_dtype, plan.page_size, plan.traffic_seed, True, True)
    config = key_config(kv_dtype=plan.kv_dtype, page_size=plan.page_size)
    guard = key_guard(config, proofs="keys", backend=backend, seed=plan.traffic_seed)
    arrivals = key_traffic(plan.traffic_seed, client_aborts=True)
    model = load_model(MODEL, plan.weights)
    return golden, run_engine(model, config, arrivals, guard=guard, prepare=_prepared(None, 0, update=True))
