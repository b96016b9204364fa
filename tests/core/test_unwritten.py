"""Tokens that a request takes for computed, and that nobody has written in the pages it holds."""

from __future__ import annotations

from typing import Any

import pytest

from kvguard.judge import Judgement
from kvguard.violation import Action, Kind, Proof
from tests.core.support import MAIN, Rig, aborted, kinds
from tests.core.test_contents import HITS, PROMPT, WINDOW, both, enter, keyed, published, refused


def first_step(rig: Rig, request: str, start: int, end: int) -> Judgement:
    """A step of the request that writes tokens [start, end)."""
    delta = rig.guard.step([request], [rig.rows[request]], [end], [start])
    return rig.judge(rig.check(delta))


def reader(proofs: Any = None, *, told: bool = True, **settings: Any) -> Rig:
    """b took two cached pages of four tokens and has two of its own behind them."""
    rig = published(proofs, **settings)
    if told:
        rig.guard.all_is_told()
    enter(rig, "b", [*PROMPT, 7, 8])
    assert rig.adopt("b", *HITS[:2]) == 2
    rig.allocate("b", 11, 12)
    return rig


@both
@pytest.mark.parametrize("start", [0, 5, 8])
def test_a_first_step_may_start_within_what_was_adopted(proofs: Any, start: int) -> None:
    """Computing again what is cached is no reading of what nobody wrote; later steps start where this one ended."""
    rig = reader(proofs)
    enter(rig, "c", PROMPT[:4])
    rig.allocate("c", 13)
    assert first_step(rig, "b", start, 12).clean
    delta = rig.guard.step(["c", "b"], [rig.rows["c"], rig.rows["b"]], [4, 14], [0, 12])
    assert rig.judge(rig.check(delta)).clean


@both
@pytest.mark.parametrize("start", [9, 12])
def test_a_first_step_behind_what_was_adopted_ends_its_request(proofs: Any, start: int) -> None:
    """Its own third page holds what a former owner left there: no token of it leaves, and nobody takes the page."""
    rig = reader(proofs)
    assert rig.guard.publish("b", 2, "k2b")
    enter(rig, "d", [*PROMPT, 9])
    assert rig.adopt("d", *HITS[:2], ("k2b", 11)) == 3
    judgement = first_step(rig, "b", start, 14)
    assert aborted(judgement) == {"b", "d"} and judgement.evict == (("main", 11),)
    assert kinds(judgement) == {"b": Kind.CONTENT_UNWRITTEN, "d": Kind.WRITER_FLAGGED}
    (violation,) = [found for found in judgement.violations if found.request == "b"]
    assert (violation.proof, violation.action) == (Proof.CONTENT_KEY, Action.ABORTED)
    assert f"starts at token {start}, what it was given ends at 8" in violation.detail


def test_it_is_looked_for_only_where_an_engine_tells_all() -> None:
    """Not below level keys, and not where pages may be filled by ways that the guard is not told of."""
    assert first_step(reader(told=False), "b", 12, 14).clean
    tags = Rig()
    tags.guard.all_is_told()
    tags.start("b")
    tags.allocate("b", 1, 2)
    assert first_step(tags, "b", 4, 8).clean
    observed = reader(on_violation="observe")
    assert not first_step(observed, "b", 12, 13).aborts
    assert first_step(observed, "b", 13, 14).clean and len(observed.guard.violations) == 1


def run_both(rig: Rig, start: int, start_b: int, end_b: int) -> Judgement:
    """A step of c, four tokens from `start` on, and of b."""
    delta = rig.guard.step(["c", "b"], [rig.rows["c"], rig.rows["b"]], [start + 4, end_b], [start, start_b])
    return rig.judge(rig.check(delta))


def test_a_first_step_that_was_only_observed_is_none_the_next_time() -> None:
    """Once violations have consequences again, later steps are judged by what they read, and by nothing else."""
    rig = reader(breaker_violations=1, breaker_action="observe")
    assert rig.guard.vet_range("b", 99, 2), "what trips the breaker"
    assert not first_step(rig, "b", 12, 13).aborts and rig.guard.violations[-1].action is Action.OBSERVED
    rig.guard.reset()
    enter(rig, "c", PROMPT[:4])
    rig.allocate("c", 13)
    assert run_both(rig, 0, 13, 14).clean and len(rig.guard.violations) == 2


def test_a_step_behind_a_first_one_that_is_in_flight_is_no_first_step() -> None:
    """Where it starts is what the one before writes, whoever else comes into the batch meanwhile."""
    rig = reader()
    enter(rig, "c", PROMPT[:4])
    rig.allocate("c", 13)
    first = rig.check(rig.guard.step(["b"], [rig.rows["b"]], [12], [8]))
    second = rig.check(rig.guard.step(["c", "b"], [rig.rows["c"], rig.rows["b"]], [4, 14], [0, 12]))
    assert rig.judge(first).clean and rig.judge(second).clean


def test_what_a_store_has_loaded_counts() -> None:
    """As far as its copies were completed."""
    rig = reader()
    assert rig.guard.vet_loaded("b", ["k2", "k3"], ["k2"], 2) == 1
    assert refused(rig) == [Kind.CONTENT_NOT_LOADED]
    assert first_step(rig, "b", 12, 14).clean
    rig = reader()
    assert rig.guard.vet_loaded("b", ["k2", "k3", "k4"], ["k3"], 2) == 0
    assert refused(rig) == [Kind.CONTENT_NOT_LOADED], "what comes behind the first one is not asked for"
    rig = reader()
    assert rig.guard.vet_loaded("b", ["k2"], ["k2"], 2) == 1
    rig.guard.preempt("b")
    rig.guard.resume("b")
    rig.columns["b", "main"] = 0
    rig.allocate("b", 13, 14, 15)
    assert aborted(first_step(rig, "b", 8, 12)) == {"b"}, "what it had before it was preempted is gone"


def test_a_part_of_a_page_counts_as_that_part() -> None:
    """The third page was published with two of its four tokens."""
    for start, ends in ((10, set()), (11, {"b"})):
        rig = keyed()
        rig.guard.all_is_told()
        enter(rig, "w", PROMPT[:10])
        rig.allocate("w", 1, 2, 3)
        for column, key, tokens in ((0, "k0", None), (1, "k1", None), (2, "part", 10)):
            assert rig.guard.publish("w", column, key, tokens=tokens)
        assert rig.run("w", ends={"w": 10}).clean
        enter(rig, "b", [*PROMPT[:10], 5, 6])
        assert rig.adopt("b", ("k0", 1), ("k1", 2), ("part", 3)) == 3
        assert aborted(first_step(rig, "b", start, 12)) == ends


@pytest.mark.parametrize("order", [(MAIN, WINDOW), (WINDOW, MAIN)], ids=["last", "first"])
def test_every_pool_must_hold_them(order: tuple[Any, ...]) -> None:
    """Columns behind a window need nothing; where one pool has less than another, the lesser counts."""
    for start, ends in ((8, set()), (12, {"b"})):
        rig = keyed(*order)
        rig.guard.all_is_told()
        enter(rig, "w")
        rig.allocate("w", 1, 2, 3, pool="main")
        rig.allocate("w", 1, 2, 3, pool="window")
        for column in range(3):
            assert rig.guard.publish("w", column, f"k{column}", pool="main")
            assert rig.guard.publish("w", column, f"k{column}", pool="window")
        assert rig.run("w").clean
        enter(rig, "b", [*PROMPT, 4])
        assert rig.adopt("b", *HITS, pool="main") == 3
        rig.guard.skip("b", 1, pool="window")
        rig.columns["b", "window"] = 1
        assert rig.adopt("b", HITS[1], pool="window") == 1
        rig.allocate("b", 8, pool="window")
        assert aborted(first_step(rig, "b", start, 12)) == ends


def test_a_lookup_must_have_pages_for_the_tokens_that_it_reports() -> None:
    """Refused where it is taken, and nobody is aborted; not looked at below level keys."""
    rig = published()
    enter(rig, "b")
    assert not rig.guard.vet_range("b", 8, 2) and not rig.guard.vet_range("b", 5, 2)
    assert rig.guard.vet_range("b", 9, 2)
    assert refused(rig) == [Kind.CONTENT_UNWRITTEN] and rig.guard.violations[0].column == 2
    tags = Rig()
    tags.start("b")
    assert not tags.guard.vet_range("b", 9, 2)
    lenient = published(on_violation="observe")
    enter(lenient, "b")
    assert not lenient.guard.vet_range("b", 9, 2) and len(lenient.guard.violations) == 1
