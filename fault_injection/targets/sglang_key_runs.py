"""The runs of a trial of a wrong key of the tree inside a real SGLang: tenants, adapters, evictions, new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvguard.fault_injection.key_plan import KEYS
from kvguard.fault_injection.key_traffic import TENANTS, cut, key_traffic, tiny_prompt
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.runs import Run
from kvguard.fault_injection.targets.checkpoints import TINY, other_weights, tiny_adapter
from kvguard.fault_injection.targets.sglang_engine import SglangEngine, SglangOptions
from kvguard.fault_injection.targets.sglang_key_watch import KeyWatchedRun
from kvguard.fault_injection.targets.sglang_keys import SGLANG_KEY_FAULTS
from kvguard.fault_injection.targets.sglang_runs import Order, run_sglang, sglang_options
from kvguard.fault_injection.traffic import Arrival

__all__ = ["KEY_GUARDS", "SglangKeyRuns", "clean_runs"]

POOL_TOKENS, TIGHT_TOKENS = 960, 448
"""Room for six requests of the traffic, so that pages are evicted, or for fewer, so that healthy runs retract."""
ANSWERS, CLEAN_ANSWERS = range(12, 22), range(28, 40)
"""Tokens that requests ask for; in clean runs they outgrow the pool."""
UPDATED_BEFORE = 3
"""The request before which the weights change: it has its head in common with the one that came last."""
_AT_KEYS = {"KVGUARD_LEVEL": KEYS}
KEY_GUARDS: dict[str, dict[str, str]] = {
    "all": _AT_KEYS,
    "keys": _AT_KEYS,
    "content_key": _AT_KEYS,
    "tag": _AT_KEYS,
    "none": _AT_KEYS,
    "tags": {"KVGUARD_LEVEL": "tags"},
}
"""Set of proofs -> the guard's configuration. `content_key`, `tag`, `none`: the harness switches the others off."""


def key_options(setup: Cell | CleanPlan, *, tight: bool) -> SglangOptions:
    """How SGLang is started for a cell: an adapter for each name of a tenant."""
    return replace(
        sglang_options(setup, model=TINY, tight=tight),
        pool_tokens=TIGHT_TOKENS if tight else POOL_TOKENS,
        adapters=tuple((name, tiny_adapter(name)) for name in TENANTS),
    )


def key_arrivals(seed: int, *, clean: bool) -> list[Arrival]:
    """The traffic; in clean runs with client aborts and longer answers."""
    answers = CLEAN_ANSWERS if clean else ANSWERS
    return [cut(arrival) for arrival in key_traffic(seed, tiny_prompt, client_aborts=clean, new_tokens=answers)]


@dataclass(frozen=True, kw_only=True)
class KeyOrder(Order):
    """The same of a run with wrong keys. update, taken: as in KeyWatchedRun."""

    recites: bool = False
    update: tuple[int, str] | None = None
    taken: dict[str, list[int]] | None = None

    def watch(self, engine: SglangEngine) -> KeyWatchedRun:
        return KeyWatchedRun(
            engine,
            self.arrivals,
            fault=self.fault,
            fault_seed=self.fault_seed,
            update=self.update,
            taken=self.taken,
            client_aborts=self.client_aborts,
        )


_golden_runs: dict[tuple[str, int], Run] = {}


def golden_run(options: SglangOptions, seed: int, arrivals: list[Arrival]) -> Run:
    """The traffic without fault and guard; shared by all trials of this process that need it."""
    key = (repr(options), seed)
    if key not in _golden_runs:
        _golden_runs[key] = run_sglang(options, KeyOrder(arrivals=arrivals))
    return _golden_runs[key]


class SglangKeyRuns:
    """Implements `TrialRuns`; `proofs` is a key of KEY_GUARDS."""

    def __init__(self, plan: TrialPlan, *, proofs: str) -> None:
        self._plan, self._proofs = plan, proofs
        self._options = key_options(plan.cell, tight=False)
        self._arrivals = key_arrivals(plan.traffic_seed, clean=False)
        self._fault = SGLANG_KEY_FAULTS[plan.cell.fault]
        self._taken: dict[str, list[int]] = {}
        self.exact = plan.cell.kv_dtype == plan.cell.weights == "fp32"
        self.text: Callable[[tuple[int, ...]], str] | None = None
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        return golden_run(self._options, self._plan.traffic_seed, self._arrivals)

    def off(self) -> Run:
        return self._run(None, fault=self._fault, fault_seed=self._plan.fault_seed)

    def on(self) -> Run:
        run = self._run(self._proofs, fault=self._fault, fault_seed=self._plan.fault_seed)
        self._taken = run.taken
        return run

    def control(self, aborts: dict[str, int]) -> Run:
        """Every request takes as many cached tokens as with fault and guard: that decides what is computed together."""
        return self._run(None, client_aborts=aborts, taken=self._taken)

    def _run(self, proofs: str | None, **how: Any) -> Run:
        return run_sglang(self._options, KeyOrder(arrivals=self._arrivals, **how), proofs=proofs, guards=KEY_GUARDS)


def clean_runs(plan: CleanPlan) -> tuple[Run, Run]:
    """Healthy traffic with tenants, adapters, client aborts and new weights: guard off, on at level `keys`."""
    options = key_options(plan, tight=True)
    arrivals = key_arrivals(plan.traffic_seed, clean=True)
    order = KeyOrder(arrivals=arrivals, update=(arrivals[UPDATED_BEFORE].step, str(other_weights())))
    return run_sglang(options, order), run_sglang(options, order, proofs="all", guards=KEY_GUARDS)
