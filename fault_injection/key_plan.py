"""Trials of wrong cache keys: every fault x KV dtype x weights x page size, at level `keys`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.plan import PAGE_SIZES, CampaignPlan, Deck, deal_clean_runs, deal_group

KEYS = "keys"
"""The group of faults on the command line, the level, and the traffic of clean runs that belong to it."""
KEY_KV_DTYPES = ("fp32", "fp8_e4m3")
KEY_WEIGHTS = ("fp32", "int4")
"""What a campaign of wrong keys takes where all are asked for; others must be asked for by name."""
KEY_PROOF_SETS = ("all", "content_key")
KEY_PROOFS = {"all": "keys"}
"""What `all` means at level `keys`, as a name of `runs.PROOFS`."""
KEY_COUNTS = (432, 24)
"""Trials and clean runs: every fault meets every set-up three times, and every set-up has two clean runs."""
TRAFFICS = 4
"""So many traffics per campaign: golden runs are shared among trials."""


def build_key_plan(
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    backend: str = "torch",
    faults: Sequence[str] = tuple(KEY_FAULTS),
    kv_dtypes: Sequence[str] = KEY_KV_DTYPES,
    weights: Sequence[str] = KEY_WEIGHTS,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> CampaignPlan:
    """Deal trials so that every fault meets every set-up once before any meets it twice.

    Each fault deals its proof sets from a deck of its own.
    """
    rng = random.Random(f"key-campaign-{seed}")
    setups = list(itertools.product(kv_dtypes, weights, page_sizes))
    deck = Deck(list(itertools.product(faults, setups)), rng)
    proof_decks = {fault: Deck(list(KEY_PROOF_SETS), rng) for fault in faults}
    dealt = (deck.deal() for _ in range(trials))
    planned = deal_group(rng, dealt, proof_decks, seed=seed, traffics=TRAFFICS, level=KEYS)
    return CampaignPlan(
        seed=seed,
        engine="embedded",
        model="recall",
        backend=backend,
        trials=planned,
        clean_runs=deal_clean_runs(rng, setups, clean_runs, traffic=KEYS),
    )
