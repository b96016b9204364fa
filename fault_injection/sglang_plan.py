"""Which trials a campaign inside SGLang runs: page size x KV dtype x loop x fault, and what of it proves nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from kvguard.fault_injection.faults.pages import PAGE_FAULTS, PageFault
from kvguard.fault_injection.faults.trees import TREE_FAULTS
from kvguard.fault_injection.faults.write_fault import WRITE_PROOF_SETS, WriteFault
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.plan import (
    LEVEL,
    PROOF_SETS,
    UNSUPPORTED,
    WEIGHTS,
    CampaignPlan,
    deal_setups,
)

LOOPS = ("normal", "overlap")
"""The scheduler's loops; a cell has one as its scheduling."""
SGLANG_KV_DTYPES = ("fp32", "fp8_e4m3")
SGLANG_PAGE_SIZES = (1, 16, 64)
SMOLLM2_KV_DTYPES = ("bf16", "fp8_e4m3")
SMOLLM2_PAGE_SIZES = (16,)
"""What a campaign takes where all are asked for; others must be asked for by name."""
SGLANG_KEY_PAGE_SIZES = (1, 16)
"""The same of a campaign of wrong keys."""
NO_ENTRIES = (
    "SGLang's radix tree is compiled, and its nodes cannot be pointed elsewhere from outside: stale-radix-node brings "
    "the same state about through the allocator"
)
SGLANG_FAULTS: dict[str, type[PageFault]] = {
    name: fault for name, fault in (PAGE_FAULTS | TREE_FAULTS).items() if name != "stale-cache-entry"
}
_NO_PADDING = "SGLang on a CPU runs no padded batches: its graph runners pad in buffers of their own, after the check"
NOT_IN_SGLANG: dict[str, str] = {
    "padding-into-live-page": _NO_PADDING,
    "skip-slot-wrapped": _NO_PADDING,
    "dummy-batch-writes": "idle batches are those of data parallel ranks, which kvguard refuses",
    "double-free": "one call may hand the page to one request twice: double-allocation is tried instead",
    "stale-window-entry": "slots of window pages are looked up in a mapping, which verify_windows reads",
}
"""Write fault -> why it is not made inside SGLang."""
SGLANG_WRITE_FAULTS: dict[str, type[WriteFault]] = {
    name: fault for name, fault in WRITE_FAULTS.items() if name not in NOT_IN_SGLANG
}
REPORTS_ONLY = (
    "ids are on the device: what the control plane finds has taken effect and is reported with the step's verdict; "
    "whoever reads the page is aborted by the tag proof"
)
SGLANG_UNSUPPORTED: dict[tuple[str, str], str] = {
    **{(name, "control_plane"): REPORTS_ONLY for name in SGLANG_FAULTS},
    **{pair: reason for pair, reason in UNSUPPORTED.items() if pair[0] in SGLANG_FAULTS},
    **{("stale-cache-entry", proofs): NO_ENTRIES for proofs in PROOF_SETS},
}
"""(fault, proofs) -> why this combination proves nothing in SGLang, as `UNSUPPORTED`."""


def sglang_weights(model: str, kv_dtype: str) -> tuple[str, ...]:
    """Weights that go with a KV dtype: SGLang's KV cache has the model's dtype unless it is fp8."""
    if model == "smollm2":
        return ("bf16", "int4") if kv_dtype != "fp32" else ()
    return ("fp32",) if kv_dtype in ("fp32", "fp8_e4m3", "fp8_e5m2") else ("bf16",)


def build_sglang_plan(
    *,
    seed: int,
    trials: int,
    clean_runs: int,
    model: str,
    faults: Sequence[str] = tuple(SGLANG_FAULTS),
    kv_dtypes: Sequence[str] = SGLANG_KV_DTYPES,
    weights: Sequence[str] = WEIGHTS,
    page_sizes: Sequence[int] = SGLANG_PAGE_SIZES,
    loops: Sequence[str] = LOOPS,
    level: str = LEVEL,
    traffic: str = "",
    proof_sets: Mapping[str, Sequence[str]] | None = None,
) -> CampaignPlan:
    """Deal trials so that every fault meets every set-up once before any meets it twice.

    level: of all cells; traffic: of clean runs; proof_sets: as in `deal_setups`, by default those of misled writes.
    A set-up is page size x KV dtype x weights x loop. Each fault deals its proof sets from a deck of its own.
    ValueError if no set-up is left: not all weights go with all KV dtypes.
    """
    rng = random.Random(f"sglang-campaign-{seed}")
    setups = [
        {"scheduling": loop, "kv_dtype": kv_dtype, "weights": weight, "page_size": page_size}
        for loop, kv_dtype, page_size in itertools.product(loops, kv_dtypes, page_sizes)
        for weight in sglang_weights(model, kv_dtype)
        if weight in weights
    ]
    if not setups:
        fitting = "; ".join(f"{kv}: {', '.join(sglang_weights(model, kv)) or 'none'}" for kv in kv_dtypes)
        raise ValueError(f"no weights go with these KV dtypes in SGLang with model {model} ({fitting})")
    return deal_setups(
        "sglang", rng, setups, faults, SGLANG_UNSUPPORTED, seed=seed, trials=trials, clean_runs=clean_runs, model=model,
        proof_sets=proof_sets or dict.fromkeys(SGLANG_WRITE_FAULTS, WRITE_PROOF_SETS), level=level, traffic=traffic,
    )  # fmt: skip
