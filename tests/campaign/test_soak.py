"""Healthy traffic, for long: nothing is flagged, and the guard changes no token."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.content_calls import ContentCalls
from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.targets.embedded_runs import engine_config, load_model, pool_of
from kvguard.fault_injection.traffic import endless_traffic
from kvguard.guard import Guard
from kvguard.violation import Kind
from tests.soaking import assert_found_nothing

STEPS = {"keys": 20_000, "tags": 1_000}
WHOSE = (("northwind", ""), ("lakeside", "red"), ("", ""), ("", "red"))
"""Tenant and adapter of a request."""


@pytest.mark.slow
@pytest.mark.parametrize("level", STEPS)
def test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token(level: str) -> None:
    """Preemptions, evictions, hits of tenants, adapters and the external store, new weights: nothing is raised."""
    torch.set_num_threads(1)
    seed = int(os.environ.get("KVGUARD_TEST_SEED", "11"))
    print(f"soak seed {seed} (KVGUARD_TEST_SEED)")
    model = load_model("recall", "fp32")
    config = replace(engine_config(kv_dtype="fp32", page_size=8, tight=True), external_store=True)
    # As in production: what runs follows from the level.
    guard = PagedGuard([pool_of(config)], config=GuardConfig.default(seed=seed, level=level), backend="torch")
    plain, guarded = Engine(model, config), Engine(model, config, guard)
    traffic = endless_traffic(seed)
    compared = 0
    for step in range(STEPS[level]):
        # A queue that grows without bound would hide the pressure on pages behind waiting.
        events = next(traffic) if len(guarded.scheduler.waiting) < 12 else []
        for name, request in events:
            for engine in (plain, guarded):
                if request is not None:
                    tenant, lora = WHOSE[len(request.prompt) % len(WHOSE)]
                    engine.submit(replace(request, tenant=tenant, lora=lora))
                else:
                    engine.abort(name)
        if step % (STEPS[level] // 4) == STEPS[level] // 4 - 1:
            plain.update_weights()
            guarded.update_weights()
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
    assert counts.steps == STEPS[level] and compared > STEPS[level] // 20
    assert min(counts.preemptions, counts.evictions, counts.prefix_hits, counts.client_aborts) > 0
    assert min(counts.promised_hits, counts.tenant_hits, counts.cached_tokens, counts.store_hits) > 0
    assert_found_nothing(guard._guard, level)
    health = guard.health()
    assert health.ok and health.in_flight == 0 and health.quarantined_pages == 0
    assert health.counters["steps_verified"] == health.counters["steps_seen"] > STEPS[level] // 2


def one_in_ten(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any) -> None:
    """Every tenth call of a method answers wrong(original, self, *args) instead."""
    original, calls = getattr(owner, name), [0]

    def sometimes(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return wrong(original, self, *args, **kwargs) if calls[0] % 10 == 0 else original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, sometimes)


def test_a_guard_that_takes_sound_hits_for_wrong_ones_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit that is refused aborts nobody and changes no token."""
    wrong = Kind.CONTENT_TOKENS, "broken on purpose"
    one_in_ten(monkeypatch, ContentCalls, "_problem_with_content", lambda *_: wrong)
    monkeypatch.setitem(STEPS, "keys", 400)
    with pytest.raises(AssertionError, match="other tokens than its own"):
        test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token("keys")


def test_a_guard_that_shortens_hits_and_says_nothing_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are the same, and computed twice."""

    def shorter(original: Any, guard: Guard, request: str, hits: Any, **named: Any) -> Any:
        return original(guard, request, hits[:-1], **named)

    one_in_ten(monkeypatch, Guard, "adopt", shorter)
    monkeypatch.setitem(STEPS, "keys", 400)
    with pytest.raises(AssertionError, match=r"== Counts\("):
        test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token("keys")
