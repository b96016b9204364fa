"""A step that only goes on by a token is made, checked and judged the short way, and says what the long way says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.config import GuardConfig
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs, Verifier
from tests.core.support import TAG_ONLY, Rig, aborted, flag
from tests.core.twins import Twins, said
from tests.kernels.interpreted import interpreting

SIZE = 4
POOLS = (PoolSpec(name="main", num_pages=64, page_size=SIZE), PoolSpec(name="other", num_pages=64, page_size=2 * SIZE))


def steady(**options: Any) -> Rig:
    """Two requests with room for two more tokens, their last step verified."""
    rig = Rig(**options)
    rig.start("a", "b", "idle")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4)
    rig.allocate("idle", 9)
    assert rig.run("a", "b", ends={"a": 6, "b": 6}).clean
    return rig


def test_another_step_says_what_the_long_way_says() -> None:
    """Step numbers go on, nothing is gathered again, and progress is counted."""
    rig, other = steady(), steady()
    for further in (1, 2):
        delta = rig.guard.step_again()
        assert delta is not None and delta.again
        long = other.delta("a", "b", ends={"a": 6 + further, "b": 6 + further})
        assert said(delta) == said(long) and not long.again
        pending = rig.verifier.check_again(delta)
        assert pending is not None and rig.judge(pending).clean
        assert rig.guard.scheduled_tokens("a") == 6 + further
    assert rig.guard.health().counters["rows_verified"] == 6
    assert rig.guard.step_again() is None, "the third token needs another page"


def test_steps_in_flight_count_before_they_are_verified() -> None:
    """Two steps that went on, the first verified: what is scheduled and what is computed differ by one token."""
    rig = steady()
    deltas = [rig.guard.step_again(), rig.guard.step_again()]
    for delta in deltas:
        assert delta is not None
    assert rig.guard.scheduled_tokens("b") == 8
    first = rig.verifier.check_again(deltas[0])  # type: ignore[arg-type]
    assert first is not None and rig.judge(first).clean
    assert rig.guard._books.state("b").computed == 7


def _retire_idle(rig: Rig) -> None:
    rig.guard.finish("idle")
    rig.delta("a", "b", ends={"a": 6, "b": 6})
    rig.guard.retire([9])


CHANGES: dict[str, Callable[[Rig], Any]] = {
    "a page is taken": lambda rig: rig.allocate("a", 5),
    "a page is dropped": lambda rig: rig.guard.drop("b", 0, 1),
    "an idle page changes its tag": lambda rig: _retire_idle(rig),
    "a request comes": lambda rig: rig.start("c"),
    "a request goes": lambda rig: rig.guard.finish("idle"),
    "a request is preempted": lambda rig: rig.guard.preempt("idle"),
    "a publication is open": lambda rig: rig.guard.publish("a", 1, "key"),
    "tokens are taken back": lambda rig: rig.guard.rewind("b", 6),
    "the step is abandoned": lambda rig: rig.guard.abandon(rig.delta("a", "b", ends={"a": 6, "b": 6}).step),
    "violations only observed": lambda rig: rig.guard._books.__setattr__(
        "config", GuardConfig.load(seed=7, on_violation="observe")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_takes_the_long_way(change: str) -> None:
    """Nothing is made, no number is taken, and the long way works as ever."""
    rig = steady()
    CHANGES[change](rig)
    before = rig.guard._books.step
    assert rig.guard.step_again() is None
    assert rig.guard._books.step == before
    assert rig.delta("a", "b", ends={"a": 7, "b": 7}).step == before + 1


def test_a_row_that_was_flagged_is_not_made_again() -> None:
    """The request is ended: while it has not gone, no step is made with it the short way."""
    rig = steady()
    flag(rig, "a")
    assert aborted(rig.run("a", "b", ends={"a": 6, "b": 6})) == {"a"}
    assert rig.guard.step_again() is None


def test_the_step_after_a_crossing_goes_the_short_way() -> None:
    """Tag changes were made with the step that brought them; the next one says the same without them."""
    rig, other = steady(), steady()
    for each in (rig, other):
        each.allocate("a", 7)
        assert each.run("a", "b", ends={"a": 9, "b": 7}).clean
    delta = rig.guard.step_again()
    assert delta is not None
    assert all(section.tag_pages[0] == section.tag_pages[1] for section in delta.sections)
    assert said(delta) == said(other.delta("a", "b", ends={"a": 10, "b": 8}))
    pending = rig.verifier.check_again(delta)
    assert pending is not None and rig.judge(pending).clean
    assert rig.guard.step_again() is None, "b needs another page"


def test_progress_is_what_the_verified_steps_have_written() -> None:
    """A step in flight moves when tokens before it are taken back; what was verified before a fault stands."""
    rig = steady()
    deltas = [rig.guard.step_again(), rig.guard.step_again()]
    pending = [rig.verifier.check_again(delta) for delta in deltas if delta is not None]
    assert pending[0] is not None and pending[1] is not None
    assert rig.judge(pending[0]).clean
    rig.guard.rewind("a", 6)
    assert rig.judge(pending[1]).clean
    assert [rig.guard._books.state(name).computed for name in ("a", "b")] == [7, 8]
    rig = steady(on_violation="observe")
    first, second = rig.guard.step_again(), rig.guard.step_again()
    assert first is not None and second is not None
    clean = rig.check(first)
    flag(rig, "a")
    flagged = rig.check(second)
    assert rig.judge(clean).clean and rig.judge(flagged).violations
    assert [rig.guard._books.state(name).computed for name in ("a", "b")] == [7, 8]


def test_progress_beside_a_flagged_row_is_that_of_sound_requests() -> None:
    """Another row is flagged: a request that has stalled makes none, nor does one that was preempted since."""
    rig = steady(on_violation="observe")
    rig.start("c")
    rig.allocate("c", 20, 21)
    flag(rig, "a")
    assert rig.run("a", "b", "c", ends={"a": 7, "b": 7, "c": 7}).violations
    rig.write("a", 1, 2)
    # Violations have consequences from here on, and what was only observed is judged afresh.
    rig.guard._books.config = GuardConfig.load(seed=7)
    pending = rig.launch("a", "b", "c", ends={"a": 8, "b": 8, "c": 8})
    flag(rig, "b")
    later = rig.launch("a", "b", "c", ends={"a": 8, "b": 8, "c": 8})
    assert rig.judge(pending).clean
    rig.guard.preempt("c")
    assert aborted(rig.judge(later)) == {"b"}
    assert [rig.guard._books.state(name).computed for name in "abc"] == [6, 8, 0]


def test_a_row_that_the_host_suspects_is_not_repeated() -> None:
    """The step poisons what the row expects, and the next one does not: it says something else."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    guard = rig.guard
    assert guard.publish("a", 0, "key", tokens=0)
    rig.adopt("b", ("key", 1))
    assert rig.judge(rig.check(guard.step(["a"], [0], [6], [5]))).clean
    assert guard.step_again() is not None
    guard.abandon(guard._books.step)
    guard.step(["a"], [0], [3], [2])
    assert guard._books.pending[guard._books.step].suspects
    assert guard.step_again() is None


def test_launches_follow_ledgers_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same inputs, a gap in a ledger: the words of the step lie elsewhere, and kernels are told where."""
    seen: list[dict[str, Any]] = []
    rig = steady(proofs=TAG_ONLY)
    monkeypatch.setattr("kvguard.verifier.verify_pages", lambda **given: seen.append(given))
    rig.allocate("a", 5)
    given = {"main": PoolInputs(table=rig.tables["main"])}
    for gap in (False, True):
        if gap:
            rig.guard.drop("a", 1, 2)
        delta = rig.delta("a", "b", ends={"a": 9, "b": 8})
        rig.verifier.check(delta, given)
        section = delta.sections[0]
        for name in ("extent_offset", "extent_start", "extent_stop", "expected"):
            assert seen[-1][name].tolist() == delta.array(getattr(section, name)).tolist(), name


@pytest.mark.parametrize("backend", ["numpy", "triton"])
def test_a_step_that_nobody_checked_is_not_checked_again(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, then a step without any: another one like that has no verdicts of the two, and launches nothing."""
    rig = steady()
    with interpreting():
        verifier = Verifier(rig.guard.setup, backend=backend)
        verifier._step = rig.guard._books.step
        verifier.check(rig.delta("a", "b", ends={"a": 7, "b": 7}), {"main": PoolInputs(table=rig.tables["main"])})
        assert verifier.check(rig.guard.step([], [], []), {}).record is None
        empty = rig.guard.step_again(0)

        def launched(**_: Any) -> None:
            raise AssertionError("for rows that are not there it may never end")

        for name in ("fused.verify_step", "fused.verify_slots_step", "verifier.verify_pages", "verifier.verify_slots"):
            monkeypatch.setattr(f"kvguard.{name}", launched)
        assert empty is not None and verifier.check_again(empty) is None


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_check_is_made_again_only_of_the_very_next_step(backend: str) -> None:
    """A delta that changes something, one that was skipped, a verifier that has checked nothing: the long way."""
    rig = steady(backend=backend)
    table = {"main": PoolInputs(table=rig._wrap(rig.tables)["main"])}
    verifier = Verifier(rig.guard.setup, backend=rig.backend)
    verifier._step = rig.guard._books.step
    first = rig.guard.step_again()
    assert first is not None and verifier.check_again(first) is None and verifier.step == first.step - 1
    verifier.check(first, table)
    long = rig.delta("a", "b", ends={"a": 8, "b": 8})
    assert verifier.check_again(long) is None
    verifier.check(long, table)
    skipped = rig.guard.step_again(0)
    second = rig.guard.step_again(0)
    assert skipped is not None and second is not None
    assert verifier.check_again(second) is None
    assert verifier.check_again(skipped) is not None and verifier.check_again(second) is not None


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_fault_is_found_in_a_check_that_is_made_again(backend: str) -> None:
    """The table is read anew; each step has records and evidence of its own."""
    rig = steady(backend=backend)
    clean, wrong = rig.guard.step_again(), rig.guard.step_again()
    assert clean is not None and wrong is not None
    first = rig.verifier.check(clean, {"main": PoolInputs(table=rig._wrap(rig.tables)["main"])})
    rig.write("b", 1, 20)
    second = rig.verifier.check_again(wrong)
    assert second is not None
    assert rig.judge(first).clean
    assert aborted(rig.judge(second)) == {"b"}
    assert rig.row("b")[:2] == [0, 0], "the row was neutralised"


def test_the_short_way_changes_nothing() -> None:
    """Random traffic: the same deltas, judgements, progress, violations and counters, and many steps were short."""
    made = 0
    calls = ["step"] * 12 + ["judge"] * 12 + ["start", "start", "finish", "publish", "rewind", "compare"]

    @given(st.integers(0, 2**32), st.lists(st.sampled_from(calls), min_size=40, max_size=160))
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    def run(seed: int, chosen: list[str]) -> None:
        nonlocal made
        twins = Twins(seed, POOLS)
        for call in ["start", "start", *chosen]:
            if call != "step" or len(twins.in_flight) < 3:
                getattr(twins, call)()
        twins.compare()
        made += twins.again

    run()
    assert made > 300


def test_one_launch_for_all_pools_is_made_again_as_it_was() -> None:
    """Triton, interpreted: after a step with tag changes, a clean step and one with a fault, as the oracle has them."""
    with interpreting():
        rig = steady()
        table = rig.tables["main"]
        fused = Verifier(rig.guard.setup, backend="triton")
        fused._step = rig.guard._books.step
        rig.allocate("a", 7)
        crossing = rig.delta("a", "b", ends={"a": 7, "b": 7})
        mirrors = rig.verifier._tags["main"], rig.verifier._writers["main"]
        for mirror, found in zip(mirrors, (fused._tags["main"], fused._writers["main"]), strict=True):
            found.copy_(torch.from_numpy(mirror))
        again = [rig.guard.step_again(0), rig.guard.step_again(0)]
        assert again[0] is not None and again[1] is not None
        assert fused.check_again(again[0]) is None
        wrong = table.copy()
        for verifier, mine in ((rig.verifier, table), (fused, wrong)):
            pending = [verifier.check(crossing, {"main": PoolInputs(table=mine)}), verifier.check_again(again[0])]
            mine[1, 1] = 20
            pending.append(verifier.check_again(again[1]))
            flags = [found.resolve().records[0, :, 0] for found in pending if found is not None]  # type: ignore[index]
            assert [np.flatnonzero(of_step).tolist() for of_step in flags] == [[], [], [1]]
        assert np.array_equal(table, wrong)
