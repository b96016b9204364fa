"""From the options of `kvguard campaign --fault keys` to a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.key_plan import (
    KEY_COUNTS,
    KEY_KV_DTYPES,
    KEY_PROOF_SETS,
    KEY_WEIGHTS,
    KEYS,
    build_key_plan,
)
from kvguard.fault_injection.options import Options, UsageError, choose, choose_page_sizes
from kvguard.fault_injection.plan import KV_DTYPES, PAGE_SIZES, WEIGHTS, CampaignPlan
from kvguard.fault_injection.targets.sglang_keys import (
    NOT_IN_SGLANG_KEYS,
    SGLANG_KEY_FAULTS,
    SGLANG_KEY_PROOF_SETS,
)
from kvguard.fault_injection.targets.vllm_keys import NOT_IN_VLLM_KEYS, VLLM_KEY_FAULTS

__all__ = [
    "SGLANG_KEY_SETTINGS",
    "VLLM_KEY_SETTINGS",
    "keys_plan",
    "named_keys",
    "sglang_key_faults",
    "vllm_key_faults",
]

VLLM_KEY_SETTINGS: dict[str, Any] = {
    "level": KEYS,
    "traffic": KEYS,
    "proof_sets": dict.fromkeys(VLLM_KEY_FAULTS, KEY_PROOF_SETS),
}
"""What a plan of wrong keys inside vLLM has instead of that of other faults."""
SGLANG_KEY_SETTINGS: dict[str, Any] = {"level": KEYS, "traffic": KEYS, "proof_sets": SGLANG_KEY_PROOF_SETS}
"""The same inside SGLang."""


def named_keys(given: str) -> tuple[str, ...]:
    """The faults of cache keys among those that --fault names; `keys` stands for all of them."""
    names = [name.strip() for name in given.split(",")]
    return tuple(name for name in KEY_FAULTS if name in names or KEYS in names)


def vllm_key_faults(given: str) -> tuple[str, ...]:
    """Those of vLLM that --fault names, `keys` for all of them; () if it names others. Raises UsageError."""
    return _engine_key_faults(given, "vLLM", VLLM_KEY_FAULTS, NOT_IN_VLLM_KEYS)


def sglang_key_faults(given: str) -> tuple[str, ...]:
    """The same of SGLang."""
    return _engine_key_faults(given, "SGLang", SGLANG_KEY_FAULTS, NOT_IN_SGLANG_KEYS)


def _engine_key_faults(
    given: str, engine: str, made: Collection[str], absent: Mapping[str, str]
) -> tuple[str, ...]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name in absent:
            raise UsageError(f"fault {name!r} is none of {engine}'s: {absent[name]}")
    faults = tuple(name for name in made if name in names or KEYS in names)
    for name in names if faults else ():
        if name not in (*made, KEYS):
            raise UsageError(f"fault {name!r} does not go with {faults[0]!r}: give one campaign each")
    return faults


def keys_plan(options: Options) -> CampaignPlan:
    """Wrong keys go alone: their engine has tenants, adapters and a store. Raises UsageError."""
    faults = named_keys(options.fault)
    for name in (part.strip() for part in options.fault.split(",")):
        if name not in (*KEY_FAULTS, KEYS, ""):
            raise UsageError(f"fault {name!r} does not go with {faults[0]!r}: give one campaign each")
    if options.model not in (None, "recall"):
        raise UsageError(f"--model {options.model}: wrong keys go into the recall model, with adapters")
    if options.phases not in ("all", "single"):
        raise UsageError(f"--phases {options.phases}: wrong keys go into one engine")
    trials, clean_runs = KEY_COUNTS
    try:
        return build_key_plan(
            seed=options.seed,
            trials=trials if options.trials is None else options.trials,
            clean_runs=clean_runs if options.clean_runs is None else options.clean_runs,
            backend=options.backend,
            faults=faults,
            kv_dtypes=choose("KV dtype", options.kv_dtype, KV_DTYPES, everything=KEY_KV_DTYPES),
            weights=choose("weights", options.weights, WEIGHTS, everything=KEY_WEIGHTS),
            page_sizes=choose_page_sizes(options.page_size, PAGE_SIZES, range(1, 65), "1 to 64 tokens"),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
