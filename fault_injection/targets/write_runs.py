"""The runs of a trial of a misled write: an embedded engine with everything that writes besides requests."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.engine import EngineConfig
from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.model import LlamaModel, WeightFormat
from kvguard.fault_injection.engine.window import WINDOW_POOL
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.mixed_traffic import TOKENS_MAX, mixed_traffic
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.runs import PROOFS, Run
from kvguard.fault_injection.targets.embedded_runs import RECALL_FOLDER, pool_of, prompts_of, run_engine
from kvguard.pools import PoolSpec

__all__ = ["WriteRuns", "clean_runs", "mixed_config", "mixed_guard", "mixed_pools", "windowed_model"]

MODEL = "recall"
WINDOW_TOKENS = 24
"""Of every second layer. The recall model recites all the same."""


@lru_cache(maxsize=4)
def windowed_model(weights: WeightFormat) -> LlamaModel:
    """The recall model, its second layer windowed."""
    return LlamaModel.from_pretrained(RECALL_FOLDER, weights, window=WINDOW_TOKENS)


def mixed_config(*, kv_dtype: str, page_size: int, tight: bool) -> EngineConfig:
    """Room for four or five requests of the mixed traffic; `tight` for three: healthy runs preempt and evict."""
    kv: KVDtype = kv_dtype  # type: ignore[assignment]
    return EngineConfig(
        num_pages=1 + -(-(450 if tight else 700) // page_size),
        page_size=page_size,
        kv_dtype=kv,
        max_rows=6,
        token_budget=72,
        max_tokens=TOKENS_MAX,
        padded_batches=(1, 2, 4, 8),
        dummy_every=4,
        draft_tokens=3,
        publish_ahead=True,
    )


def mixed_pools(config: EngineConfig) -> list[PoolSpec]:
    """The pool of whole layers and that of windowed ones."""
    pool = pool_of(config)
    return [pool, replace(pool, name=WINDOW_POOL)]


def mixed_guard(config: EngineConfig, *, proofs: str, backend: str, seed: int) -> PagedGuard:
    """The guard of a trial: default policy, replayable tags, and only the named proofs."""
    settings = GuardConfig.default(seed=seed)
    return PagedGuard(mixed_pools(config), config=settings, backend=backend, proofs=PROOFS[proofs])


@lru_cache(maxsize=64)
def golden_run(weights: str, kv_dtype: str, page_size: int, traffic_seed: int, tight: bool, client_aborts: bool) -> Run:
    """The same traffic without fault and guard; shared by all trials that need it."""
    model = windowed_model(weights)
    config = mixed_config(kv_dtype=kv_dtype, page_size=page_size, tight=tight)
    return run_engine(model, config, mixed_traffic(traffic_seed, client_aborts=client_aborts))


class WriteRuns:
    """Implements `TrialRuns`; `proofs` names a set of `PROOFS`."""

    def __init__(self, plan: TrialPlan, *, backend: str, proofs: str) -> None:
        cell = plan.cell
        self._plan, self._backend, self._proofs = plan, backend, proofs
        self._model = windowed_model(cell.weights)
        self._config = mixed_config(kv_dtype=cell.kv_dtype, page_size=cell.page_size, tight=False)
        self._arrivals = mixed_traffic(plan.traffic_seed)
        self._fault = WRITE_FAULTS[cell.fault]
        self.exact = cell.kv_dtype == cell.weights == "fp32"
        self.text = prompts_of(MODEL, self._model.config.vocab_size).text
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        cell = self._plan.cell
        return golden_run(cell.weights, cell.kv_dtype, cell.page_size, self._plan.traffic_seed, False, False)

    def off(self) -> Run:
        return self._with_fault(None)

    def on(self) -> Run:
        seed = self._plan.fault_seed
        return self._with_fault(mixed_guard(self._config, proofs=self._proofs, backend=self._backend, seed=seed))

    def control(self, aborts: dict[str, int]) -> Run:
        return run_engine(self._model, self._config, self._arrivals, client_aborts=aborts)

    def _with_fault(self, guard: PagedGuard | None) -> Run:
        seed = self._plan.fault_seed
        return run_engine(self._model, self._config, self._arrivals, guard=guard, fault=self._fault, fault_seed=seed)


def clean_runs(plan: CleanPlan, *, backend: str) -> tuple[Run, Run]:
    """Healthy mixed traffic in a tight pool with client aborts: guard off, guard on."""
    model = windowed_model(plan.weights)
    config = mixed_config(kv_dtype=plan.kv_dtype, page_size=plan.page_size, tight=True)
    golden = golden_run(plan.weights, plan.kv_dtype, plan.page_size, plan.traffic_seed, True, True)
    guard = mixed_guard(config, proofs="all", backend=backend, seed=plan.traffic_seed)
    arrivals = mixed_traffic(plan.traffic_seed, client_aborts=True)
    return golden, run_engine(model, config, arrivals, guard=guard)
