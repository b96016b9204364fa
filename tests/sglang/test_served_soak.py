"""What clients of a server send, through a real SGLang: tenants, talks, A-B-A; clean, and not a token changed.

Drafts are not among it: the guard refuses speculation in SGLang, and the NGRAM worker of 0.5.23 does not start here, as
it imports the tree kernels of sgl_kernel, which is not installed on a CPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from typing import Any

import pytest

from kvguard.fault_injection.served_traffic import TENANTS, Arrives, ServedTraffic
from tests.sglang.apart import Child
from tests.sglang.engine import Engine
from tests.sglang.scenarios import assert_clean
from tests.sglang.test_soak import counting
from tests.soaking import assert_found_nothing

SEED = int(os.environ.get("KVGUARD_TEST_SEED", "11"))
SOAKS: dict[tuple[int, bool], int] = {(1, True): 600, (16, False): 600, (64, True): 800}
"""(page size, overlap) -> steps; at level `keys`."""
HAPPENED = (
    "retractions", "evictions", "chunked", "client_aborts", "twins", "long", "short", "desk", "talk", "foreign",
    "hit desk", "hit talk", "cached tokens", "returned after eviction", *(f"hit of {tenant}" for tenant in TENANTS),
)  # fmt: skip
SURE = 16
"""So many tokens in common are no chance; with pages of one token fewer may well be cached of something else."""


def watch(engine: Engine, counts: Counter[str], tenant_of: dict[str, str]) -> None:
    """Count what SGLang makes of the traffic; a look-up counts for requests that had nothing to lose yet."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    tree = engine.scheduler.tree_cache
    match, looked_up = tree.match_prefix, set[str]()
    counting(tree, "_evict", counts, "evictions")
    counting(ScheduleBatch, "retract_decode", counts, "retractions")

    def watched_match(params: Any) -> Any:
        result = match(params)
        name = params.req.rid if params.req is not None else ""
        if name in tenant_of and name not in looked_up:
            looked_up.add(name)
            counts["cached tokens"] += int(result.device_prefix_len)
            kind = name.rstrip("0123456789")
            if result.device_prefix_len >= SURE:
                counts.update((f"hit {kind}", f"hit of {tenant_of[name]}"))
            elif kind == "return" and len(params.req.origin_input_ids) > max(SURE, engine.allocator.page_size):
                counts["returned after eviction"] += 1
        return result

    tree.match_prefix = watched_match


def soak(kept: dict[str, Any], page_size: int, overlap: bool, steps: int) -> tuple[Any, Any, Counter[str]]:
    """Tokens, ends and counts, those of hits too; in a guarded engine with nothing but clean steps."""
    # Low, so that SGLang takes in more requests than the pool holds to their end.
    engine = Engine(
        page_size=page_size,
        overlap=overlap,
        max_total_tokens=512 if page_size < 64 else 768,
        max_running_requests=12,
        schedule_conservativeness=0.05,
    )
    guarded = engine.guard is not None
    assert guarded == ("KVGUARD_LEVEL" in os.environ)
    traffic = ServedTraffic(SEED, live_max=12, prompt_max=190)
    counts, tenant_of = traffic.counts, dict[str, str]()
    watch(engine, counts, tenant_of)

    def clients(engine: Engine) -> bool:
        if engine.steps >= steps:
            return False
        for event in traffic.turn(engine.ends):
            if isinstance(event, Arrives):
                tenant_of[event.name] = event.tenant
                engine.add(event.name, event.prompt, event.tokens, exact=False, tenant=event.tenant)
            else:
                engine.abort(event.name)
        counts["chunked"] += engine.scheduler.chunked_req is not None
        return True

    engine.run(clients, turns=100 * steps)
    if guarded:
        assert_clean(engine, steps)
        assert_found_nothing(engine.guard.guard, "keys")
        assert engine.guard.contents is not None and (engine.guard.books.page_content != 0).any()
        counters = engine.guard.health().counters
        assert counters["steps_seen"] == counters["steps_verified"] == engine.steps
    return engine.tokens, {name: end["type"] for name, end in engine.ends.items()}, counts


@pytest.mark.parametrize(("page_size", "overlap"), SOAKS, ids=lambda value: str(value))
def test_served_traffic_is_clean_and_changes_no_token(page_size: int, overlap: bool) -> None:
    """Everything in HAPPENED did happen, nobody was served another tenant's pages, and nothing was flagged."""
    steps = SOAKS[page_size, overlap]
    print(f"seed {SEED}, {steps} steps (KVGUARD_TEST_SEED)")
    runs = []
    for environment in ({"SGLANG_PLUGINS": "none"}, {"KVGUARD_LEVEL": "keys"}):
        child = Child(environment)
        try:
            runs.append(child.call(soak, page_size, overlap, steps))
        finally:
            child.stop()
    tokens, ends, counts = runs[1]
    print(dict(counts), f"{len(ends)} requests compared")
    assert (tokens, ends, counts) == runs[0]
    assert [what for what in HAPPENED if not counts[what]] == [] and len(ends) > steps / 25
    assert counts["hit foreign"] == 0, "one tenant was given what another has cached"


def test_drafts_cannot_run_here() -> None:
    """The day they can, the traffic above is to have them."""
    assert importlib.util.find_spec("sgl_kernel") is None
