"""Trials of two phases: page faults in the decode worker after a hand-over, and faults of the hand-over itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
from kvguard.fault_injection.plan import (
    PROOF_SETS,
    UNSUPPORTED,
    CampaignPlan,
    Cell,
    CleanPlan,
    Deck,
    TrialPlan,
    deal_clean_runs,
)

PHASE_STORAGE = (("fp8_e4m3", "int4"), ("fp8_e5m2", "int4"), ("fp32", "fp32"))
"""KV dtype and weights of the decode worker; beside the last one the prefill worker is float32, too, else bfloat16."""
PHASE_PROOF_SETS = (*PROOF_SETS, "transfer")
TRANSFER_UNSUPPORTED: dict[tuple[str, str], str] = {
    (name, proofs): fault.uncovered
    for name, fault in TRANSFER_FAULTS.items()
    if fault.uncovered
    for proofs in PHASE_PROOF_SETS
} | {
    (name, proofs): "only the checks of a transfer, on either side, look at what this fault breaks"
    for name, fault in TRANSFER_FAULTS.items()
    if not fault.uncovered
    for proofs in PHASE_PROOF_SETS
    if proofs not in fault.proofs
}
"""(fault, proofs) -> why this combination proves nothing, as `UNSUPPORTED`."""


def phase_pairs(faults: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(fault, proofs) of page faults after a hand-over, and of faults of the hand-over."""
    pages = [(name, proofs) for name in PAGE_FAULTS if name in faults for proofs in PROOF_SETS]
    transfers = [(name, proofs) for name in TRANSFER_FAULTS if name in faults for proofs in PHASE_PROOF_SETS]
    return (
        [pair for pair in pages if pair not in UNSUPPORTED],
        [pair for pair in transfers if pair not in TRANSFER_UNSUPPORTED],
    )


def phase_storage(kv_dtypes: Sequence[str], weights: Sequence[str]) -> list[tuple[str, str]]:
    """Which of PHASE_STORAGE these options leave."""
    return [(kv_dtype, weight) for kv_dtype, weight in PHASE_STORAGE if kv_dtype in kv_dtypes and weight in weights]


def deal_phase_trials(
    *,
    seed: int,
    first_index: int,
    page_trials: int,
    transfer_trials: int,
    faults: Sequence[str],
    storage: Sequence[tuple[str, str]],
    page_sizes: Sequence[int],
) -> tuple[TrialPlan, ...]:
    """`page_trials` trials of page faults after a hand-over, then `transfer_trials` of faults of the hand-over.

    Every fault and set of proofs gets its share, and so does every storage, as in `build_plan`. None of a kind that
    `faults` does not name.
    """
    rng = random.Random(f"phases-{seed}")
    setups = [(*kinds, page_size) for kinds in storage for page_size in page_sizes]
    planned: list[TrialPlan] = []
    for pairs, count in zip(phase_pairs(faults), (page_trials, transfer_trials), strict=True):
        if not pairs:
            continue
        pair_deck, setup_deck = Deck(pairs, rng), Deck(setups, rng)
        for _ in range(count):
            fault, proofs = pair_deck.deal()
            kv_dtype, weights, page_size = setup_deck.deal()
            cell = Cell(
                engine="embedded",
                fault=fault,
                kv_dtype=kv_dtype,
                weights=weights,
                page_size=page_size,
                proofs=proofs,
                phases="pd",
            )
            planned.append(
                TrialPlan(
                    index=first_index + len(planned),
                    cell=cell,
                    traffic_seed=seed * 1000 + rng.randrange(2),
                    fault_seed=rng.randrange(1 << 30),
                )
            )
    return tuple(planned)


def deal_phase_clean_runs(
    *, seed: int, first_index: int, count: int, storage: Sequence[tuple[str, str]], page_sizes: Sequence[int]
) -> tuple[CleanPlan, ...]:
    """`count` clean runs over the storages."""
    rng = random.Random(f"phases-clean-{seed}")
    setups = [(*kinds, page_size) for kinds in storage for page_size in page_sizes]
    return deal_clean_runs(rng, setups, count, first_index=first_index, phases="pd")


def add_phases(
    plan: CampaignPlan,
    *,
    page_trials: int,
    transfer_trials: int,
    clean_runs: int,
    faults: Sequence[str],
    storage: Sequence[tuple[str, str]],
    page_sizes: Sequence[int],
) -> CampaignPlan:
    """The plan with trials and clean runs of two phases behind its own; the same seed gives the same."""
    trials = deal_phase_trials(
        seed=plan.seed,
        first_index=len(plan.trials),
        page_trials=page_trials,
        transfer_trials=transfer_trials,
        faults=faults,
        storage=storage,
        page_sizes=page_sizes,
    )
    clean = deal_phase_clean_runs(
        seed=plan.seed,
        first_index=len(plan.clean_runs),
        count=clean_runs,
        storage=storage,
        page_sizes=page_sizes,
    )
    return replace(plan, trials=(*plan.trials, *trials), clean_runs=(*plan.clean_runs, *clean))
