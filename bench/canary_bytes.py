"""Bytes that each check touches per context token and decode step, from the arrays and code that ran.

How many entries each launch of kv_canary handles is read from its own counters after a real step; what an entry
touches is counted from its plan, its sidecar and the fields that its verify kernel loads. For kvguard: from the block
table and the tags that `verify_rows` was given.
"""

from __future__ import annotations

from typing import Any

from bench.canary_watch import SETTINGS, CanaryWatch, GuardWatch, Setting
from bench.canary_world import PAGE, World, prompt

REQUESTS, CONTEXT_TOKENS = 256, 4096
PAGE_SIZES = (1, 16, 64)
LARGE_ROW = 2048
"""K, or V, of one token and layer with 8 heads of 128 values in 16 bits."""


def _decoding(watch: Any) -> tuple[World, Any]:
    world = World(watch)
    a = world.start("A", prompt(1, 14))
    return world, a


def canary_bytes(setting: Setting) -> dict[str, Any]:
    """kv_canary under one setting."""
    from sglang.kernels.ops.kv_canary import consts
    from sglang.kernels.ops.kv_canary.verify import CANARY_SLOT_BYTES, CanaryLaunchTag, VerifyPlan

    watch = CanaryWatch(setting)
    world, a = _decoding(watch)
    tokens = int(a.kv.kv_committed_len)
    before = watch.state.slot_run_counters.clone()
    world.decode(a)
    entries = (watch.state.slot_run_counters - before).tolist()
    launches = [tag for tag in CanaryLaunchTag if entries[tag] and not tag.name.startswith("SWEEP")]
    # Each launch verified every token of the context, and wrote the one that is new.
    if any(entries[tag] != tokens + 1 for tag in launches):
        raise RuntimeError(f"kv_canary's counters say {entries} for {tokens} tokens")
    checked = int(setting.token_assert)
    word = watch._output.verify_plans[0].verify_slot_indices.element_size()
    planned = VerifyPlan.allocation_bytes(1) - VerifyPlan.allocation_bytes(0)
    table = world.table.element_size()
    expected = checked * 4
    entry = (3 + checked) * word + CANARY_SLOT_BYTES
    before_it = (consts.CANARY_FIELDS_PER_SLOT - 1) * word
    sources = {point.kernel_kind: sum(part.read_bytes for part in point.real_kv_sources) for point in watch.endpoints}
    data = sum(sources[tag] for tag in launches)
    halves = sum(sources[tag] > 0 for tag in launches)
    read = 2 * table + expected + len(launches) * entry + data
    return {
        "who": f"kv_canary {setting.key}",
        "launches": [tag.name for tag in launches],
        "read": read,
        "written": planned,
        "touched": read + planned,
        "of that KV bytes": data,
        "touched with KV rows of 2048 bytes": read + planned - data + halves * LARGE_ROW,
        "predecessors, if not cached": len(launches) * before_it,
        "written per new token": len(launches) * CANARY_SLOT_BYTES,
        "sidecar per slot": len(launches) * CANARY_SLOT_BYTES,
        "formula": (
            f"read: 2 table entries of {table}"
            + (f" + expected token {expected}" if checked else "")
            + f" + {len(launches)} launches x ({3 + checked} plan words of {word} + sidecar {CANARY_SLOT_BYTES})"
            + (f" + {data} bytes of K and V of layer 0" if data else "")
            + f"; written: plan {planned}. "
            f"The predecessor's {before_it} bytes per launch are its own entry's, from cache"
        ),
    }


def guard_bytes() -> list[dict[str, Any]]:
    """kvguard at level tags, for several page sizes."""
    watch = GuardWatch("tags")
    world, a = _decoding(watch)
    world.decode(a)
    books = watch.guard.books
    table, tag = world.table.element_size(), books.page_tag.element_size()
    row = 2 * 8 + books.digest.element_size()
    found = []
    for size in (PAGE, *PAGE_SIZES):
        found.append(
            {
                "who": f"kvguard tags, pages of {size}",
                "read": table + tag / size,
                "written": 0,
                "touched": table + tag / size,
                "per row": row + 4 * 8,
                "per page in memory": sum(
                    array.element_size() for array in (books.page_tag, books.page_owner, books.page_chain)
                ),
                "formula": f"table entry {table} + tag {tag} / page size; per row {row} read and 32 written",
            }
        )
    return found


def all_bytes() -> list[dict[str, Any]]:
    """Every setting; with what a step of 256 requests of 4096 tokens touches, in MB."""
    found = [canary_bytes(setting) for setting in SETTINGS[:3]] + guard_bytes()
    for line in found:
        line["MB a step"] = round(line["touched"] * REQUESTS * CONTEXT_TOKENS / 1e6, 1)
    return found
