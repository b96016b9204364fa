"""Healthy traffic of everything that writes, for long: nothing is flagged, and the guard changes no token."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.judging import WRITER_COUNTS
from kvguard.fault_injection.mixed_traffic import TENANTS
from kvguard.fault_injection.targets.write_runs import mixed_config, mixed_pools, windowed_model
from kvguard.fault_injection.traffic import endless_traffic
from tests.soaking import assert_found_nothing

SOAKS = [(1, "keys", 1_500), (16, "keys", 4_000), (16, "tags", 400)]
"""Page size, level, steps; with pages of one token the bookkeeping of a step takes many times as long."""


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "level", "steps"), SOAKS)
def test_it_is_clean_and_changes_no_token(page_size: int, level: str, steps: int) -> None:
    """Padding, dummy batches, rejected drafts, windows that move on, early publications and tenants raise nothing."""
    torch.set_num_threads(1)
    seed = int(os.environ.get("KVGUARD_TEST_SEED", "12"))
    print(f"soak seed {seed} (KVGUARD_TEST_SEED)")
    model, config = windowed_model("fp32"), mixed_config(kv_dtype="fp32", page_size=page_size, tight=True)
    # As in production: what runs follows from the level.
    settings = GuardConfig.default(seed=seed, level=level)
    guard = PagedGuard(mixed_pools(config), config=settings, backend="torch")
    plain, guarded = Engine(model, config), Engine(model, config, guard)
    traffic = endless_traffic(seed)
    for step in range(steps):
        for name, request in next(traffic) if len(guarded.scheduler.waiting) < 12 else []:
            for engine in (plain, guarded):
                if request is None:
                    engine.abort(name)
                else:
                    engine.submit(replace(request, tenant=TENANTS[len(request.prompt) % len(TENANTS)]))
        plain.step()
        guarded.step()
        assert not guard.violations, (step, guard.violations[0])
    assert {name: (output.tokens, output.error) for name, output in plain.outputs.items()} == {
        name: (output.tokens, output.error) for name, output in guarded.outputs.items()
    }
    counts = guarded.scheduler.counts
    print(counts)
    assert counts == plain.scheduler.counts and len(guarded.outputs) > steps // 20
    # A page of one token is written as a whole.
    assert all(getattr(counts, name) > 0 for name in WRITER_COUNTS if name != "partly_written" or page_size > 1)
    assert min(counts.preemptions, counts.evictions, counts.prefix_hits, counts.client_aborts) > 0
    assert min(counts.promised_hits, counts.tenant_hits, counts.cached_tokens) > 0
    assert_found_nothing(guard._guard, level)
    health = guard.health()
    assert health.ok and health.quarantined_pages == 0
    assert health.counters["steps_verified"] == health.counters["steps_seen"] > steps // 2
