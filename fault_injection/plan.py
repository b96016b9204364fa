"""Which trials a campaign runs: cells of engine x fault x KV dtype x weights x page size x proofs, spread evenly.

Cells of vLLM have a model runner and a way of scheduling besides.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvguard.fault_injection.faults.pages import PAGE_FAULTS

KV_DTYPES = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2")
WEIGHTS = ("fp32", "bf16", "int4")
PAGE_SIZES = (1, 16, 64)
PROOF_SETS = ("all", "tag", "control_plane")
LEVEL = "tags"
ENGINES = ("embedded", "vllm")
VLLM_KV_DTYPES = ("fp32", "bf16", "fp8_e4m3")
"""What a vLLM campaign takes where all are asked for; fp8_e5m2 must be asked for by name."""
VLLM_PAGE_SIZES = (32,)
RUNNERS = ("v1", "v2")
SCHEDULINGS = ("sync", "async")

UNSUPPORTED: dict[tuple[str, str], str] = {
    (name, "control_plane"): "the fault is a write to the block table in device memory: no allocator call passes it"
    for name, fault in PAGE_FAULTS.items()
    if not fault.reaches_control_plane
}
"""(fault, proofs) -> why this combination proves nothing; the only source of `unsupported` outcomes."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination. `proofs`: `all` as in production, or one proof with the others switched off.

    runner, scheduling  of vLLM: a value of RUNNERS and of SCHEDULINGS; "" for an engine that has but one
    """

    engine: str
    fault: str
    kv_dtype: str
    weights: str
    page_size: int
    proofs: str = "all"
    level: str = LEVEL
    runner: str = ""
    scheduling: str = ""


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """One trial: a cell, and the seeds of its traffic and of its injection."""

    index: int
    cell: Cell
    traffic_seed: int
    fault_seed: int


@dataclass(frozen=True, kw_only=True)
class CleanPlan:
    """One clean run: no fault, guard on, against the same traffic with the guard off."""

    index: int
    kv_dtype: str
    weights: str
    page_size: int
    traffic_seed: int
    engine: str = "embedded"
    runner: str = ""
    scheduling: str = ""


@dataclass(frozen=True, kw_only=True)
class CampaignPlan:
    """Everything a campaign runs; the same seed and options give the same plan."""

    seed: int
    engine: str
    model: str
    backend: str
    trials: tuple[TrialPlan, ...]
    clean_runs: tuple[CleanPlan, ...]


def build_plan(
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    engine: str = "embedded",
    model: str = "recall",
    backend: str = "torch",
    faults: Sequence[str] = tuple(PAGE_FAULTS),
    kv_dtypes: Sequence[str] = KV_DTYPES,
    weights: Sequence[str] = WEIGHTS,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> CampaignPlan:
    """Deal `trials` trials so that every fault x proofs pair and every storage cell gets its share.

    Faults with their proofs and storage cells (KV dtype x weights x page size) are each dealt from a shuffled deck; a
    deck is dealt out before it is shuffled again, so no value can be missed by chance once there are enough trials.
    """
    rng = random.Random(f"campaign-{seed}")
    pairs = [(fault, proofs) for fault in faults for proofs in PROOF_SETS if (fault, proofs) not in UNSUPPORTED]
    storage = list(itertools.product(kv_dtypes, weights, page_sizes))
    pair_deck, storage_deck = _Deck(pairs, rng), _Deck(storage, rng)
    planned = []
    for index in range(trials):
        fault, proofs = pair_deck.deal()
        kv_dtype, weight, page_size = storage_deck.deal()
        cell = Cell(engine=engine, fault=fault, kv_dtype=kv_dtype, weights=weight, page_size=page_size, proofs=proofs)
        # A few traffic seeds per storage cell: golden runs are shared among trials.
        traffic_seed = seed * 1000 + rng.randrange(2)
        planned.append(TrialPlan(index=index, cell=cell, traffic_seed=traffic_seed, fault_seed=rng.randrange(1 << 30)))
    clean_deck = _Deck(storage, rng)
    clean = []
    for index in range(clean_runs):
        kv_dtype, weight, page_size = clean_deck.deal()
        clean.append(
            CleanPlan(
                index=index,
                kv_dtype=kv_dtype,
                weights=weight,
                page_size=page_size,
                traffic_seed=rng.randrange(1 << 30),
            )
        )
    return CampaignPlan(
        seed=seed,
        engine=engine,
        model=model,
        backend=backend,
        trials=tuple(planned),
        clean_runs=tuple(clean),
    )


def vllm_weights(model: str, kv_dtype: str) -> tuple[str, ...]:
    """Weights that go with a KV dtype in vLLM, whose KV cache has the model's dtype unless it is fp8."""
    if model == "smollm2":
        return ("bf16", "int4") if kv_dtype != "fp32" else ()
    return ("fp32",) if kv_dtype == "fp32" else ("bf16",)


def build_vllm_plan(
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    model: str,
    faults: Sequence[str] = tuple(PAGE_FAULTS),
    kv_dtypes: Sequence[str] = VLLM_KV_DTYPES,
    weights: Sequence[str] = WEIGHTS,
    page_sizes: Sequence[int] = VLLM_PAGE_SIZES,
    runners: Sequence[str] = RUNNERS,
    schedulings: Sequence[str] = SCHEDULINGS,
) -> CampaignPlan:
    """Deal trials so that every fault meets every set-up once before any meets it twice.

    A set-up is runner x scheduling x KV dtype x weights x page size. Each fault deals its proof sets from a deck of its
    own. ValueError if no set-up is left: not all weights go with all KV dtypes.
    """
    rng = random.Random(f"vllm-campaign-{seed}")
    setups = [
        {"runner": runner, "scheduling": way, "kv_dtype": kv_dtype, "weights": weight, "page_size": page_size}
        for runner, way, kv_dtype, page_size in itertools.product(runners, schedulings, kv_dtypes, page_sizes)
        for weight in vllm_weights(model, kv_dtype)
        if weight in weights
    ]
    if not setups:
        fitting = "; ".join(f"{kv}: {', '.join(vllm_weights(model, kv)) or 'none'}" for kv in kv_dtypes)
        raise ValueError(f"no weights go with these KV dtypes in vLLM with model {model} ({fitting})")
    proof_decks = {
        fault: _Deck([proofs for proofs in PROOF_SETS if (fault, proofs) not in UNSUPPORTED], rng) for fault in faults
    }
    deck = _Deck(list(itertools.product(faults, setups)), rng)
    planned = []
    for index in range(trials):
        fault, setup = deck.deal()
        cell = Cell(engine="vllm", fault=fault, proofs=proof_decks[fault].deal(), **setup)  # type: ignore[arg-type]
        # Two traffics per campaign: golden runs are shared among trials.
        traffic_seed = seed * 1000 + rng.randrange(2)
        planned.append(TrialPlan(index=index, cell=cell, traffic_seed=traffic_seed, fault_seed=rng.randrange(1 << 30)))
    clean_deck = _Deck(setups, rng)
    clean = tuple(
        CleanPlan(index=index, engine="vllm", traffic_seed=rng.randrange(1 << 30), **clean_deck.deal())  # type: ignore[arg-type]
        for index in range(clean_runs)
    )
    return CampaignPlan(
        seed=seed, engine="vllm", model=model, backend="torch", trials=tuple(planned), clean_runs=clean
    )


T = TypeVar("T")


class _Deck(Generic[T]):
    """Deals its cards in random order and starts over when all are dealt."""

    def __init__(self, cards: Sequence[T], rng: random.Random) -> None:
        self._cards = list(cards)
        self._rng = rng
        self._left: list[T] = []

    def deal(self) -> T:
        if not self._left:
            self._left = self._cards.copy()
            self._rng.shuffle(self._left)
        return self._left.pop()
