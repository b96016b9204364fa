"""The embedded engine is honest: batching, chunks, the prefix cache and preemption change no token."""

from __future__ import annotations

import pytest
import torch

from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.faults.pages import PAGE_FAULTS, Injection
from kvguard.fault_injection.targets.embedded import EmbeddedTarget
from kvguard.fault_injection.targets.embedded_runs import load_model, make_guard
from kvguard.fault_injection.traffic import drive, trial_traffic

ROOMY = EngineConfig(num_pages=200, page_size=8, max_rows=8, token_budget=512, max_tokens=192)
TIGHT = EngineConfig(num_pages=48, page_size=8, max_rows=6, token_budget=40, max_tokens=192)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def answers(engine: Engine) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in engine.outputs.items()}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_batching_chunks_cache_and_preemption_change_no_token(seed: int) -> None:
    """Requests served together in a tight pool, in chunks, from the cache, get what each gets alone in a fresh one."""
    model = load_model("recall", "fp32")
    arrivals = trial_traffic(seed)
    alone = {}
    for arrival in arrivals:
        engine = Engine(model, ROOMY)
        engine.submit(arrival.request)
        engine.run()
        alone[arrival.request.id] = engine.outputs[arrival.request.id].token_ids
    together = Engine(model, TIGHT)
    assert drive(together, arrivals, max_steps=400)
    assert answers(together) == alone
    counts = together.scheduler.counts
    assert min(counts.preemptions, counts.evictions, counts.prefix_hits, counts.promised_hits) > 0
    assert len(together.pool.free) + len(together.pool.idle) == TIGHT.num_pages - 1


def test_a_reset_gives_quarantined_pages_back_once() -> None:
    """After an abort a page is out of circulation; a reset of the cache returns it, and every page is there once."""
    model = load_model("recall", "fp32")
    guard = make_guard(ROOMY, proofs="tag", backend="torch", seed=1)
    engine = Engine(model, ROOMY, guard)
    injected: list[Injection] = []

    def break_something(running: Engine) -> None:
        if running.step_index >= 6 and not injected:
            injection = PAGE_FAULTS["freed-not-reused"](seed=1, target=EmbeddedTarget(running)).inject()
            injected.extend([injection] if injection is not None else [])

    engine.at_schedule.append(break_something)
    assert drive(engine, trial_traffic(1), max_steps=400)
    assert injected and guard.health().quarantined_pages == 1
    released = engine.pool.reset_cache()
    engine.kv.zero_pages(released)
    assert released == [injected[0].page]
    assert sorted(engine.pool.free) == list(range(1, ROOMY.num_pages))
    assert guard.health().quarantined_pages == 0


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_a_fault_that_is_undone_at_once_leaves_no_trace(fault: str) -> None:
    """`undo` right after `inject` repairs the engine: the run ends like one without a fault."""
    model = load_model("recall", "fp32")
    golden = Engine(model, ROOMY)
    assert drive(golden, trial_traffic(1), max_steps=400)
    engine = Engine(model, ROOMY)
    injected: list[Injection] = []

    def break_and_repair(running: Engine) -> None:
        if running.step_index >= 4 and not injected:
            broken = PAGE_FAULTS[fault](seed=1, target=EmbeddedTarget(running))
            injection = broken.inject()
            if injection is not None:
                broken.undo(injection)
                injected.append(injection)

    engine.at_schedule.append(break_and_repair)
    assert drive(engine, trial_traffic(1), max_steps=400)
    assert injected
    assert answers(engine) == answers(golden)
