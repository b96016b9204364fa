"""Which trials a campaign runs: cells of engine x fault x KV dtype x weights x page size x proofs, spread evenly.

Cells of vLLM have a model runner and a way of scheduling besides; those of SGLang (`sglang_plan.py`) have a loop.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.faults.write_fault import WRITE_PROOF_SETS
from kvguard.fault_injection.targets.vllm_writes import VLLM_WRITE_FAULTS

KV_DTYPES = ("fp32", "bf16", "fp8_e4m3", "fp8_e5m2")
WEIGHTS = ("fp32", "bf16", "int4")
PAGE_SIZES = (1, 16, 64)
PROOF_SETS = ("all", "tag", "control_plane")
PHASES = ("single", "pd")
"""One engine for prompts and tokens, or a prefill and a decode worker; see `phases_plan.py` for the latter."""
LEVEL = "tags"
SCENARIO_LEVEL = "scenarios"
"""Level of the cells whose `fault` is the name of a replayed public bug: see `scenarios/`. The guard's is `keys`."""
ENGINES = ("embedded", "vllm", "sglang")
SMOLLM2_KV_DTYPES = ("fp32", "bf16", "fp8_e4m3")
SMOLLM2_WEIGHTS = ("bf16", "int4")
SMOLLM2_PAGE_SIZES = (16, 64)
"""What a campaign on SmolLM2 in the embedded engine takes where all are asked for; others must be asked for by name.

A page of one token is not among them: the model says what stands in its prompt twice, and hardly misses one token.
"""
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

    runner, scheduling  of vLLM: a value of RUNNERS and of SCHEDULINGS; of SGLang: "" and a value of LOOPS; else ""
    phases  a value of PHASES; of `pd`, KV dtype and weights are the decode worker's
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
    phases: str = "single"

    @property
    def fault_label(self) -> str:
        """How tables name the fault: one that is injected after a hand-over is another row."""
        return f"P/D {self.fault}" if self.phases == "pd" and self.fault in PAGE_FAULTS else self.fault


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """One trial: a cell, and the seeds of its traffic and of its injection."""

    index: int
    cell: Cell
    traffic_seed: int
    fault_seed: int


@dataclass(frozen=True, kw_only=True)
class CleanPlan:
    """One clean run: no fault, guard on, against the same traffic with the guard off.

    traffic  "": that of trials of page faults; `writes`: that of misled writes, in their engine
    scenario  "": none; else a replayed public bug, whose input it is, without the bug
    """

    index: int
    kv_dtype: str
    weights: str
    page_size: int
    traffic_seed: int
    engine: str = "embedded"
    runner: str = ""
    scheduling: str = ""
    phases: str = "single"
    traffic: str = ""
    scenario: str = ""


@dataclass(frozen=True, kw_only=True)
class CampaignPlan:
    """Everything a campaign runs; the same seed and options give the same plan.

    left_out  what was asked for with everything else and cannot run on this machine, a reason each
    """

    seed: int
    engine: str
    model: str
    backend: str
    trials: tuple[TrialPlan, ...]
    clean_runs: tuple[CleanPlan, ...]
    left_out: tuple[str, ...] = ()


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
    pair_deck, storage_deck = Deck(pairs, rng), Deck(storage, rng)
    planned = []
    for index in range(trials):
        fault, proofs = pair_deck.deal()
        kv_dtype, weight, page_size = storage_deck.deal()
        cell = Cell(engine=engine, fault=fault, kv_dtype=kv_dtype, weights=weight, page_size=page_size, proofs=proofs)
        # A few traffic seeds per storage cell: golden runs are shared among trials.
        traffic_seed = seed * 1000 + rng.randrange(2)
        planned.append(TrialPlan(index=index, cell=cell, traffic_seed=traffic_seed, fault_seed=rng.randrange(1 << 30)))
    return CampaignPlan(
        seed=seed,
        engine=engine,
        model=model,
        backend=backend,
        trials=tuple(planned),
        clean_runs=deal_clean_runs(rng, storage, clean_runs),
    )


def vllm_weights(model: str, kv_dtype: str) -> tuple[str, ...]:
    """Weights that go with a KV dtype in vLLM, whose KV cache has the model's dtype unless it is fp8."""
    if model == "smollm2":
        return ("bf16", "int4") if kv_dtype != "fp32" else ()
    return ("fp32",) if kv_dtype == "fp32" else ("bf16",)


def deal_clean_runs(
    rng: random.Random,
    storage: Sequence[tuple[str, str, int]],
    count: int,
    *,
    first_index: int = 0,
    phases: str = "single",
    traffic: str = "",
) -> tuple[CleanPlan, ...]:
    """Clean runs of the embedded engine, dealt evenly over (KV dtype, weights, page size)."""
    deck, clean = Deck(storage, rng), []
    for index in range(first_index, first_index + count):
        kv_dtype, weights, page_size = deck.deal()
        clean.append(
            CleanPlan(
                index=index,
                kv_dtype=kv_dtype,
                weights=weights,
                page_size=page_size,
                traffic_seed=rng.randrange(1 << 30),
                phases=phases,
                traffic=traffic,
            )
        )
    return tuple(clean)


def deal_group(
    rng: random.Random,
    dealt: Iterable[tuple[str, tuple[str, str, int]]],
    proof_decks: Mapping[str, Deck[str]],
    *,
    seed: int,
    traffics: int,
    level: str = LEVEL,
) -> tuple[TrialPlan, ...]:
    """Trials of a group of faults in the embedded engine: `dealt` (fault, (KV dtype, weights, page size)), in order.

    traffics  so many per campaign: golden runs are shared among trials
    """
    planned = []
    for index, (fault, (kv_dtype, weights, page_size)) in enumerate(dealt):
        cell = Cell(
            engine="embedded",
            fault=fault,
            kv_dtype=kv_dtype,
            weights=weights,
            page_size=page_size,
            proofs=proof_decks[fault].deal(),
            level=level,
        )
        traffic_seed = seed * 1000 + rng.randrange(traffics)
        planned.append(TrialPlan(index=index, cell=cell, traffic_seed=traffic_seed, fault_seed=rng.randrange(1 << 30)))
    return tuple(planned)


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
    level: str = LEVEL,
    traffic: str = "",
    proof_sets: Mapping[str, Sequence[str]] | None = None,
) -> CampaignPlan:
    """Deal trials so that every fault meets every set-up once before any meets it twice.

    level: of all cells; traffic: of clean runs; proof_sets: as in `deal_setups`, by default those of misled writes.
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
    return deal_setups(
        "vllm",
        rng,
        setups,
        faults,
        UNSUPPORTED,
        seed=seed,
        trials=trials,
        clean_runs=clean_runs,
        model=model,
        proof_sets=proof_sets or dict.fromkeys(VLLM_WRITE_FAULTS, WRITE_PROOF_SETS),
        level=level,
        traffic=traffic,
    )


def deal_setups(
    engine: str,
    rng: random.Random,
    setups: Sequence[Mapping[str, Any]],
    faults: Sequence[str],
    unsupported: Mapping[tuple[str, str], str],
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    model: str,
    proof_sets: Mapping[str, Sequence[str]] | None = None,
    level: str = LEVEL,
    traffic: str = "",
) -> CampaignPlan:
    """The plan of a campaign inside a serving engine: every fault meets every set-up once before any meets it twice.

    setups       fields of a Cell; unsupported: (fault, proofs) that is dealt to no trial, as `UNSUPPORTED`
    proof_sets   fault -> with which proofs it is tried, where not with those of `PROOF_SETS`
    """
    sets = {fault: (proof_sets or {}).get(fault, PROOF_SETS) for fault in faults}
    proof_decks = {
        fault: Deck([proofs for proofs in sets[fault] if (fault, proofs) not in unsupported], rng) for fault in faults
    }
    deck = Deck(list(itertools.product(faults, setups)), rng)
    planned = []
    for index in range(trials):
        fault, setup = deck.deal()
        cell = Cell(engine=engine, fault=fault, proofs=proof_decks[fault].deal(), level=level, **setup)
        # Two traffics per campaign: golden runs are shared among trials.
        traffic_seed = seed * 1000 + rng.randrange(2)
        planned.append(TrialPlan(index=index, cell=cell, traffic_seed=traffic_seed, fault_seed=rng.randrange(1 << 30)))
    clean_deck = Deck(list(setups), rng)
    clean = tuple(
        CleanPlan(
            index=index, engine=engine, traffic_seed=rng.randrange(1 << 30), traffic=traffic, **clean_deck.deal()
        )
        for index in range(clean_runs)
    )
    return CampaignPlan(seed=seed, engine=engine, model=model, backend="torch", trials=tuple(planned), clean_runs=clean)


def build_own_plan(
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    faults: Sequence[str] = tuple(PAGE_FAULTS),
    proof_sets: Sequence[str] = PROOF_SETS,
) -> CampaignPlan:
    """Deal trials for somebody's own engine: every fault x proofs pair once before any comes twice.

    Pairs that prove nothing come last, one trial each, so that they are listed as unsupported with their reason.
    """
    rng = random.Random(f"own-campaign-{seed}")
    pairs = list(itertools.product(faults, proof_sets))
    deck = Deck([pair for pair in pairs if pair not in UNSUPPORTED], rng)
    dealt = [deck.deal() for _ in range(trials)] + [pair for pair in pairs if pair in UNSUPPORTED and trials]
    planned = [
        TrialPlan(
            index=index,
            cell=Cell(engine="own", fault=fault, kv_dtype="", weights="", page_size=0, proofs=proofs),
            traffic_seed=seed * 1000 + rng.randrange(2),
            fault_seed=rng.randrange(1 << 30),
        )
        for index, (fault, proofs) in enumerate(dealt)
    ]
    clean = [
        CleanPlan(index=index, engine="own", kv_dtype="", weights="", page_size=0, traffic_seed=rng.randrange(1 << 30))
        for index in range(clean_runs)
    ]
    return CampaignPlan(seed=seed, engine="own", model="", backend="", trials=tuple(planned), clean_runs=tuple(clean))


T = TypeVar("T")


class Deck(Generic[T]):
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
