"""Trials of misled writes: every fault x KV dtype x weights x page size, in an engine with all that writes besides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from kvguard.fault_injection.faults.write_fault import WRITE_PROOF_SETS
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.plan import PAGE_SIZES, CampaignPlan, Deck, deal_clean_runs, deal_group

WRITES = "writes"
"""The group of faults on the command line, and the traffic of clean runs that belong to it."""
WRITE_KV_DTYPES = ("fp32", "fp8_e4m3")
WRITE_WEIGHTS = ("fp32", "int4")
"""What a campaign of misled writes takes where all are asked for; others must be asked for by name."""
WRITE_PAGE_SIZES = PAGE_SIZES
WRITE_COUNTS = (420, 24)
"""Trials and clean runs: every fault meets every set-up three times, and every set-up has two clean runs."""
TRAFFICS = 4
"""So many traffics per campaign: golden runs are shared among trials."""
NO_SUCH_CELL: dict[tuple[str, int], str] = {("offset-shifted", 1): "a page of one token has one offset"}
"""(fault, page size) -> why there is nothing to break; the only source of `unsupported` outcomes here."""


def build_write_plan(
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    backend: str = "torch",
    faults: Sequence[str] = tuple(WRITE_FAULTS),
    kv_dtypes: Sequence[str] = WRITE_KV_DTYPES,
    weights: Sequence[str] = WRITE_WEIGHTS,
    page_sizes: Sequence[int] = WRITE_PAGE_SIZES,
) -> CampaignPlan:
    """Deal trials so that every fault meets every set-up once before any meets it twice.

    Each fault deals its proof sets from a deck of its own. A trial each for what cannot be made comes on top.
    ValueError if nothing is left that can be.
    """
    rng = random.Random(f"write-campaign-{seed}")
    setups = list(itertools.product(kv_dtypes, weights, page_sizes))
    cards = [(fault, setup) for fault in faults for setup in setups if (fault, setup[2]) not in NO_SUCH_CELL]
    absent = [(fault, size) for fault in faults for size in page_sizes if (fault, size) in NO_SUCH_CELL]
    if not cards:
        fault, size = absent[0]
        raise ValueError(f"fault {fault!r} cannot be made with pages of {size}: {NO_SUCH_CELL[fault, size]}")
    deck = Deck(cards, rng)
    dealt = [deck.deal() for _ in range(trials)]
    # What cannot be made comes last, once each, so that it is listed with its reason.
    first = (kv_dtypes[0], weights[0])
    dealt += [(fault, (*first, size)) for fault, size in absent if trials]
    proof_decks = {fault: Deck(list(WRITE_PROOF_SETS), rng) for fault in faults}
    planned = deal_group(rng, dealt, proof_decks, seed=seed, traffics=TRAFFICS)
    return CampaignPlan(
        seed=seed,
        engine="embedded",
        model="recall",
        backend=backend,
        trials=planned,
        clean_runs=deal_clean_runs(rng, setups, clean_runs, traffic=WRITES),
    )
