"""From the options of `kvguard campaign --engine sglang` to a plan."""

from __future__ import annotations

from pathlib import Path

from kvguard.fault_injection.key_options import SGLANG_KEY_SETTINGS, sglang_key_faults
from kvguard.fault_injection.models import SMOLLM2
from kvguard.fault_injection.options import Options, UsageError, check_checkpoints, choose, choose_page_sizes, counts_of
from kvguard.fault_injection.plan import KV_DTYPES, WEIGHTS, CampaignPlan
from kvguard.fault_injection.sglang_plan import (
    LOOPS,
    NO_ENTRIES,
    NOT_IN_SGLANG,
    SGLANG_FAULTS,
    SGLANG_KEY_PAGE_SIZES,
    SGLANG_KV_DTYPES,
    SGLANG_PAGE_SIZES,
    SGLANG_WRITE_FAULTS,
    build_sglang_plan,
)
from kvguard.fault_injection.sglang_plan import SMOLLM2_KV_DTYPES as SGLANG_SMOLLM2_KV_DTYPES
from kvguard.fault_injection.sglang_plan import SMOLLM2_PAGE_SIZES as SGLANG_SMOLLM2_PAGE_SIZES
from kvguard.fault_injection.write_options import engine_faults

SGLANG_MISSING = (
    "SGLang is not installed here: run `make env-sglang`, then `.venv-sglang/bin/kvguard campaign --engine sglang`, "
    "or both as `make campaign-sglang`"
)


def sglang_plan(options: Options) -> CampaignPlan:
    """A campaign inside SGLang. Raises UsageError."""
    if options.phases not in ("all", "single"):
        raise UsageError("--phases: prefill and decode worker are the embedded engine's, not SGLang's")
    if options.runner != "all":
        raise UsageError("--runner: model runners are vLLM's; SGLang has two loops, --scheduling normal and overlap")
    if options.backend != "torch":
        raise UsageError(f"--backend {options.backend}: in SGLang the guard checks with torch")
    model = options.model or "tiny"
    real = model == SMOLLM2
    if "stale-cache-entry" in options.fault.split(","):
        raise UsageError(f"fault 'stale-cache-entry' cannot be made here: {NO_ENTRIES}")
    keys = sglang_key_faults(options.fault)
    if keys and model != "tiny":
        raise UsageError(f"--model {model}: wrong keys go into the tiny model, which has adapters and other weights")
    faults = keys or engine_faults(
        options.fault, "SGLang", pages=SGLANG_FAULTS, writes=SGLANG_WRITE_FAULTS, absent=NOT_IN_SGLANG
    )
    writes = not real and all(fault in SGLANG_WRITE_FAULTS for fault in faults)
    kind = "sglang smollm2" if real else "sglang keys" if keys else "sglang writes" if writes else "sglang"
    trials, clean_runs = counts_of(options, kind)
    kv_dtypes = SGLANG_SMOLLM2_KV_DTYPES if real else SGLANG_KV_DTYPES
    page_sizes = SGLANG_SMOLLM2_PAGE_SIZES if real else SGLANG_KEY_PAGE_SIZES if keys else SGLANG_PAGE_SIZES
    # SGLang takes prompts in chunks of whole pages.
    fitting = [size for size in range(1, 65) if 64 % size == 0]
    words = "1, 2, 4, 8, 16, 32 or 64 tokens in SGLang"
    try:
        plan = build_sglang_plan(
            seed=options.seed,
            trials=trials,
            clean_runs=clean_runs,
            model=model if model in ("tiny", SMOLLM2) else str(Path(model).resolve()),
            faults=faults,
            kv_dtypes=choose("KV dtype", options.kv_dtype, KV_DTYPES, everything=kv_dtypes),
            weights=choose("weights", options.weights, WEIGHTS),
            page_sizes=choose_page_sizes(options.page_size, page_sizes, fitting, words),
            loops=choose("scheduling", options.scheduling, LOOPS),
            **(SGLANG_KEY_SETTINGS if keys else {}),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    check_sglang(plan)
    return plan


def check_sglang(plan: CampaignPlan) -> None:
    """SGLang, kvguard's platform for it and the model are there. Raises UsageError."""
    from importlib.util import find_spec

    # INT4 weights are made of these when they are loaded.
    check_checkpoints(plan, {"bf16"})
    if find_spec("sglang") is None or find_spec("kvguard_sglang_cpu") is None:
        raise UsageError(SGLANG_MISSING)
