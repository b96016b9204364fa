"""Corners of policy that a reviewer found: re-arming after observation, failed forwards, broken log pipelines."""

from __future__ import annotations

import numpy as np
import pytest
import structlog

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.judge import Judgement
from kvguard.page_table import PageState
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs
from kvguard.violation import Kind
from tests.core.support import Rig, aborted, flag, kinds

SPEC = PoolSpec(num_pages=16, page_size=4)


def step(guard: PagedGuard, table: np.ndarray[tuple[int, int], np.dtype[np.int32]], request: str) -> Judgement:
    pending = guard.before_forward([request], [0], [4], PoolInputs(table=table))
    return guard.after_forward(pending)


def test_a_request_that_was_only_observed_is_aborted_once_the_guard_enforces_again() -> None:
    """A tripped breaker falls back to observing; after a reset the same broken row is flagged and aborted afresh."""
    config = GuardConfig(seed=1, breaker_violations=1, breaker_action="observe")
    guard = PagedGuard([SPEC], config=config, backend="numpy")
    for name in ("first", "second"):
        guard.start(name)
        guard.allocate(name, [3 if name == "first" else 4])
    assert [a.request for a in step(guard, np.array([[9]], np.int32), "first").aborts] == ["first"]
    table = np.array([[9]], np.int32)
    observed = step(guard, table, "second")
    assert observed.violations and not observed.aborts and table[0, 0] == 9
    guard.reset()
    assert [a.request for a in step(guard, table, "second").aborts] == ["second"]


def test_a_failed_forward_can_be_abandoned_and_repeated() -> None:
    """An engine whose forward raised says so, runs the same tokens again, and the guard stays armed."""
    guard = PagedGuard([SPEC], config=GuardConfig(seed=1), backend="numpy")
    guard.start("a")
    guard.allocate("a", [5])
    table = np.array([[5]], np.int32)
    pending = guard.before_forward(["a"], [0], [4], PoolInputs(table=table))
    assert guard.abandon(pending) == ["a"]
    assert step(guard, table, "a").clean
    assert guard.health().ok and guard.health().in_flight == 0


def test_publishing_a_cached_prefix_again_breaks_no_promise() -> None:
    """An adopter that publishes the whole prefix under the same keys leaves the writer's promise as it is."""
    guard = PagedGuard([SPEC], config=GuardConfig(seed=1), backend="numpy")
    for name in ("writer", "reader"):
        guard.start(name)
    guard.allocate("writer", [5])
    assert guard.publish("writer", 0, "key")
    assert guard.adopt("reader", [("key", 5)]) == 1
    assert guard.publish("reader", 0, "key")
    guard.allocate("reader", [6])
    table = np.array([[5, 0], [5, 6]], np.int32)
    pending = guard.before_forward(["writer", "reader"], [0, 1], [4, 5], PoolInputs(table=table))
    assert guard.after_forward(pending).clean


def test_a_log_pipeline_that_raises_costs_no_abort(capsys: pytest.CaptureFixture[str]) -> None:
    """structlog processors belong to the application; when one fails, the violation still ends the request."""

    def broken(logger: object, name: str, event: object) -> str:
        raise RuntimeError("disk of the log shipper is full")

    guard = PagedGuard([SPEC], config=GuardConfig(seed=1), backend="numpy")
    guard.start("a")
    guard.allocate("a", [5])
    structlog.configure(processors=[broken])
    try:
        judgement = step(guard, np.array([[7]], np.int32), "a")
    finally:
        structlog.reset_defaults()
    assert [abort.request for abort in judgement.aborts] == ["a"] and guard.health().armed
    assert "disk of the log shipper" in capsys.readouterr().err


def test_what_a_writer_publishes_after_it_was_only_observed_binds_its_adopters() -> None:
    """Armed again, the guard does not take the word of a writer whose earlier step was let through unproven."""
    rig = Rig(breaker_violations=1, breaker_action="observe")
    rig.start("w", "reader")
    rig.allocate("w", 1, 2, 3)
    assert rig.run("w", ends={"w": 8}).clean
    assert rig.guard.retire([9]).refused == [9], "trips the breaker"
    flag(rig, "w")
    observed = rig.run("w", ends={"w": 9})
    assert observed.violations and not observed.withheld
    rig.guard.reset()
    rig.write("w", 2, 3)
    assert rig.guard.publish("w", 1, "k")
    assert rig.guard.page_state(2) is PageState.PROMISED
    assert rig.adopt("reader", ("k", 2)) == 1
    assert rig.run("w").clean
    assert rig.guard._books.state("w").computed == 8, "nothing more was verified of it"
    judgement = rig.run("reader")
    assert kinds(judgement) == {"reader": Kind.WRITER_NEVER_RAN}
    assert judgement.withheld == aborted(judgement) == {"reader"}


def test_a_preempted_writer_starts_afresh_after_it_was_only_observed() -> None:
    """All its pages are computed again: what it publishes then is as good as anybody's."""
    rig = Rig(breaker_violations=1, breaker_action="observe")
    rig.start("w")
    rig.allocate("w", 1)
    assert rig.guard.retire([9]).refused == [9]
    flag(rig, "w")
    assert rig.run("w").violations
    rig.guard.reset()
    rig.guard.preempt("w")
    rig.guard.retire([1])
    rig.guard.resume("w")
    rig.columns.clear()
    rig.allocate("w", 1)
    assert rig.run("w").clean
    assert rig.guard.publish("w", 0, "k")
    assert rig.guard.page_state(1) is PageState.COMPLETE
