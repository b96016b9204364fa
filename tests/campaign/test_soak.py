"""Healthy traffic, for long: nothing is flagged, and the guard changes no token."""

from __future__ import annotations

import os

import pytest
import torch

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.targets.embedded_runs import engine_config, load_model, make_guard
from kvguard.fault_injection.traffic import endless_traffic

STEPS = 20_000


@pytest.mark.slow
def test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token() -> None:
    """20,000 steps with preemptions, evictions, prefix hits, promised hits and client aborts raise nothing."""
    torch.set_num_threads(1)
    seed = int(os.environ.get("KVGUARD_TEST_SEED", "11"))
    print(f"soak seed {seed} (KVGUARD_TEST_SEED)")
    model = load_model("recall", "fp32")
    config = engine_config(kv_dtype="fp32", page_size=8, tight=True)
    guard = make_guard(config, proofs="all", backend="torch", seed=seed)
    plain, guarded = Engine(model, config), Engine(model, config, guard)
    traffic = endless_traffic(seed)
    compared = 0
    for step in range(STEPS):
        # A queue that grows without bound would hide the pressure on pages behind waiting.
        events = next(traffic) if len(guarded.scheduler.waiting) < 12 else []
        for name, request in events:
            for engine in (plain, guarded):
                if request is not None:
                    engine.submit(request)
                else:
                    engine.abort(name)
        plain.step()
        guarded.step()
        assert not guard.violations, guard.violations[0].message
        if step % 500 == 499:
            for name in [name for name, output in plain.outputs.items() if output.ended_step >= 0]:
                left, right = plain.outputs.pop(name), guarded.outputs.pop(name)
                assert left.tokens == right.tokens and left.error == right.error, name
                compared += 1
    counts = guarded.scheduler.counts
    print(counts, f"{compared} requests compared")
    assert counts == plain.scheduler.counts
    assert counts.steps == STEPS and compared > 1000
    assert min(counts.preemptions, counts.evictions, counts.prefix_hits, counts.client_aborts) > 0
    assert counts.promised_hits > 0
    health = guard.health()
    assert health.ok and health.in_flight == 0 and health.quarantined_pages == 0
    assert health.counters["steps_verified"] == health.counters["steps_seen"] > STEPS // 2
