"""From the options of `kvguard campaign --fault writes` to a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.options import Options, UsageError, choose, choose_page_sizes
from kvguard.fault_injection.plan import KV_DTYPES, WEIGHTS, CampaignPlan
from kvguard.fault_injection.write_plan import (
    WRITE_COUNTS,
    WRITE_KV_DTYPES,
    WRITE_PAGE_SIZES,
    WRITE_WEIGHTS,
    WRITES,
    build_write_plan,
)

__all__ = ["named_writes", "engine_faults", "writes_plan"]


def named_writes(given: str) -> tuple[str, ...]:
    """The faults of where a step writes among those that --fault names; `writes` stands for all of them."""
    names = [name.strip() for name in given.split(",")]
    return tuple(name for name in WRITE_FAULTS if name in names or WRITES in names)


def writes_plan(options: Options) -> CampaignPlan:
    """Misled writes go alone: their engine does more than that of the other faults. Raises UsageError."""
    faults = named_writes(options.fault)
    for name in (part.strip() for part in options.fault.split(",")):
        if name not in (*WRITE_FAULTS, WRITES, ""):
            raise UsageError(f"fault {name!r} does not go with {faults[0]!r}: give one campaign each")
    if options.model not in (None, "recall"):
        raise UsageError(f"--model {options.model}: misled writes go into the recall model, with windowed layers")
    if options.phases not in ("all", "single"):
        raise UsageError(f"--phases {options.phases}: misled writes go into one engine")
    trials, clean_runs = WRITE_COUNTS
    try:
        return build_write_plan(
            seed=options.seed,
            trials=trials if options.trials is None else options.trials,
            clean_runs=clean_runs if options.clean_runs is None else options.clean_runs,
            backend=options.backend,
            faults=faults,
            kv_dtypes=choose("KV dtype", options.kv_dtype, KV_DTYPES, everything=WRITE_KV_DTYPES),
            weights=choose("weights", options.weights, WEIGHTS, everything=WRITE_WEIGHTS),
            page_sizes=choose_page_sizes(options.page_size, WRITE_PAGE_SIZES, range(1, 65), "1 to 64 tokens"),
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def engine_faults(
    given: str, engine: str, *, pages: Collection[str], writes: Collection[str], absent: Mapping[str, str]
) -> tuple[str, ...]:
    """The faults that --fault names for a serving engine. Raises UsageError.

    `all` stands for `pages`, `writes` for those of where a step writes. absent: fault -> why the engine has none.
    """
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name in absent:
            raise UsageError(f"fault {name!r} is none of {engine}'s: {absent[name]}")
    named = ",".join(",".join(writes) if name == WRITES else name for name in names)
    return choose("fault", named, (*pages, *writes), everything=tuple(pages))
