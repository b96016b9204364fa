"""The control plane: each wrong allocator or cache operation is refused before it takes effect; nobody is aborted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvguard.guard import GuardHalt, UsageError
from kvguard.page_table import PageState
from kvguard.violation import Action, Kind, Proof
from tests.core.support import Rig


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A wrong operation on the rig that `world` builds: `attempt` answers whether it was let through.

    observed  whether the requests of the world still prove all their pages after it was let through
    """

    name: str
    kind: Kind
    attempt: Callable[[Rig], bool]
    request: str | None
    page: int
    observed: bool = True


def world(**settings: Any) -> Rig:
    """a holds 1, 2 (shared with b, published) and 3; b holds 2; 4 was freed; 5 is cached, held by nobody."""
    rig = Rig(**settings)
    rig.start("a", "b", "c")
    rig.allocate("a", 1, 2, 3)
    rig.allocate("c", 4, 5)
    rig.run("a", "c")
    assert rig.guard.publish("a", 1, "key-2") and rig.guard.publish("c", 1, "key-5")
    rig.guard.finish("c")
    assert rig.guard.retire([4]).reusable == [4]
    assert rig.adopt("b", ("key-2", 2)) == 1
    rig.start("d")
    assert rig.run("a", "b").clean
    return rig


def frees(page: int, by: str | None = None) -> Callable[[Rig], bool]:
    """Whether the guard lets the page go back to the free list."""

    def attempt(rig: Rig) -> bool:
        retired = rig.guard.retire([page], by=by)
        assert sorted(retired.reusable + retired.refused + retired.quarantined) == [page]
        return retired.reusable == [page]

    return attempt


def allocates(page: int, request: str = "d") -> Callable[[Rig], bool]:
    return lambda rig: rig.guard.allocate(request, [page]) == [page]


def adopts(key: str, page: int) -> Callable[[Rig], bool]:
    return lambda rig: rig.guard.adopt("d", [(key, page)]) == 1


def publishes_after_free(rig: Rig) -> bool:
    """a publishes its page 3 after giving it back itself."""
    assert rig.guard.retire([3], by="a").reusable == [3]
    return rig.guard.publish("a", 2, "key-3")


WRONG = [
    Wrong(name="allocates-a-held-page", kind=Kind.DOUBLE_ALLOCATION, attempt=allocates(3), request="d", page=3,
          observed=False),
    Wrong(name="allocates-its-own-page-again", kind=Kind.DOUBLE_ALLOCATION, attempt=allocates(3, "a"), request="a",
          page=3, observed=False),
    Wrong(name="allocates-the-null-page", kind=Kind.NULL_PAGE_USED, attempt=allocates(0), request="d", page=0),
    Wrong(name="allocates-past-the-pool", kind=Kind.PAGE_OUT_OF_RANGE, attempt=allocates(32), request="d", page=32),
    Wrong(name="allocates-below-the-pool", kind=Kind.PAGE_OUT_OF_RANGE, attempt=allocates(-1), request="d", page=-1),
    Wrong(name="frees-a-free-page", kind=Kind.DOUBLE_FREE, attempt=frees(4), request=None, page=4),
    Wrong(name="frees-a-page-never-owned", kind=Kind.FREE_UNOWNED, attempt=frees(9), request=None, page=9),
    Wrong(name="frees-a-page-of-another", kind=Kind.FREE_UNOWNED, attempt=frees(3, "b"), request="b", page=3,
          observed=False),
    Wrong(name="frees-a-held-page", kind=Kind.FREE_WHILE_HELD, attempt=frees(3), request=None, page=3, observed=False),
    Wrong(name="frees-a-page-another-sharer-holds", kind=Kind.FREE_WHILE_HELD, attempt=frees(2, "a"), request="a",
          page=2, observed=False),
    Wrong(name="frees-the-null-page", kind=Kind.NULL_PAGE_USED, attempt=frees(0), request=None, page=0),
    Wrong(name="frees-past-the-pool", kind=Kind.PAGE_OUT_OF_RANGE, attempt=frees(99), request=None, page=99),
    Wrong(name="adopts-a-vacant-page", kind=Kind.ADOPT_VACANT, attempt=adopts("key-4", 4), request="d", page=4),
    Wrong(name="adopts-under-another-key", kind=Kind.ADOPT_STALE, attempt=adopts("key-5", 2), request="d", page=2),
    Wrong(name="adopts-an-unpublished-page", kind=Kind.ADOPT_STALE, attempt=adopts("key-3", 3), request="d", page=3),
    Wrong(name="adopts-the-null-page", kind=Kind.NULL_PAGE_USED, attempt=adopts("key-0", 0), request="d", page=0),
    Wrong(name="adopts-past-the-pool", kind=Kind.PAGE_OUT_OF_RANGE, attempt=adopts("key", 32), request="d", page=32),
    Wrong(name="publishes-a-page-it-gave-back", kind=Kind.PUBLISH_UNOWNED, attempt=publishes_after_free, request="a",
          page=3, observed=False),
]  # fmt: skip
each_wrong = pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)


def states(rig: Rig) -> list[PageState]:
    return [rig.guard.page_state(page) for page in range(32)]


@each_wrong
def test_a_wrong_operation_is_refused_and_nobody_is_aborted(wrong: Wrong) -> None:
    """Refused, reported once with its kind, page and request; a and b still prove every page they hold."""
    rig = world()
    before = states(rig)
    assert not wrong.attempt(rig)
    (violation,) = rig.guard.violations
    assert (violation.kind, violation.page, violation.request) == (wrong.kind, wrong.page, wrong.request)
    assert violation.action is Action.REFUSED and violation.proof is Proof.CONTROL_PLANE
    if wrong.attempt is not publishes_after_free:
        assert states(rig) == before
        assert rig.run("a", "b").clean
    counters = rig.guard.health().counters
    assert (counters["refused"], counters["violations"], counters["aborted"]) == (1, 1, 0)


@each_wrong
def test_a_refused_operation_leaves_the_books_as_they_were(wrong: Wrong) -> None:
    """After a refusal every page goes through the rest of its life as if nothing had been tried."""
    rig = world()
    assert not wrong.attempt(rig)
    rig.guard.finish("a")
    assert rig.guard.retire([1]).reusable == [1]
    assert rig.guard.retire([2]).refused == [2], "b still holds it"
    rig.guard.finish("b")
    still_there = [2] if wrong.attempt is publishes_after_free else [2, 3]
    assert rig.guard.retire(still_there).reusable == still_there
    assert rig.adopt("d", ("key-5", 5)) == 1
    assert rig.allocate("d", 1, 2, 3, 4) == [1, 2, 3, 4]
    assert rig.run("d").clean
    assert len(rig.guard.violations) == 2


@each_wrong
def test_observing_lets_the_operation_through_and_counts_it(wrong: Wrong) -> None:
    """With on_violation = observe the operation passes and is counted; who lost a page by it is observed later."""
    rig = world(on_violation="observe")
    assert wrong.attempt(rig)
    (violation,) = rig.guard.violations
    assert (violation.kind, violation.action) == (wrong.kind, Action.OBSERVED)
    judgement = rig.run("a", "b")
    assert bool(judgement.violations) is not wrong.observed
    assert not judgement.withheld and not judgement.aborts and not judgement.evict
    assert rig.guard.health().counters["refused"] == 0
    assert rig.guard.health().counters["observed"] == 1 + len(judgement.violations)


@each_wrong
def test_halting_raises_and_changes_nothing(wrong: Wrong) -> None:
    """With on_violation = halt the operation raises GuardHalt with the violation, before it took effect."""
    rig = world(on_violation="halt")
    before = states(rig)
    with pytest.raises(GuardHalt) as raised:
        wrong.attempt(rig)
    assert raised.value.violation.kind is wrong.kind
    assert raised.value.violation.action is Action.HALTED
    assert raised.value.violation.id in str(raised.value)
    if wrong.attempt is not publishes_after_free:
        assert states(rig) == before
        assert rig.run("a", "b").clean


@each_wrong
def test_without_the_proof_the_operation_passes_unseen(wrong: Wrong) -> None:
    """With the control plane off nothing is refused and nothing is reported: the device proof stands alone."""
    rig = world(control_plane=False)
    assert wrong.attempt(rig)
    assert not rig.guard.violations


def test_the_right_pages_of_a_call_are_accepted_in_order() -> None:
    """One wrong page in a call does not cost the others, and the ledger holds exactly the accepted ones."""
    rig = world()
    assert rig.allocate("d", 9, 3, 10, 0, 32, 11, 9) == [9, 10, 11]
    assert rig.run("a", "b", "d").clean
    retired = rig.guard.retire([9, 4, 10, 10], by="d")
    assert (retired.reusable, retired.refused) == ([9, 10], [4, 10])


def test_hits_after_a_refused_one_are_not_taken() -> None:
    """A prefix ends at the first refused hit."""
    rig = world()
    assert rig.adopt("d", ("key-2", 2), ("wrong", 5), ("key-5", 5)) == 1
    assert rig.run("a", "b", "d").clean
    assert len(rig.guard.violations) == 1


def test_a_cached_page_that_nobody_holds_may_be_taken_over() -> None:
    """Allocating it is no fault, and its old key no longer finds it."""
    rig = world()
    assert rig.allocate("d", 5) == [5]
    assert not rig.guard.violations
    rig.start("e")
    assert rig.adopt("e", ("key-5", 5)) == 0
    assert rig.guard.violations[-1].kind is Kind.ADOPT_STALE


def test_a_republished_page_answers_to_its_new_key_only() -> None:
    """A page number that was published for other content does not satisfy a stale cache entry."""
    rig = world()
    rig.allocate("d", 5)
    rig.run("d")
    assert rig.guard.publish("d", 0, "new")
    rig.start("e")
    assert rig.adopt("e", ("key-5", 5)) == 0
    assert rig.adopt("e", ("new", 5)) == 1


def test_the_report_names_holder_and_history() -> None:
    """A refused double allocation says who holds the page and what happened to it."""
    rig = world()
    rig.guard.allocate("d", [2])
    (violation,) = rig.guard.violations
    assert violation.owner == "a, b"
    assert violation.found_tag != 0
    assert violation.history is not None
    assert [event.what for event in violation.history.events] == ["allocated", "published", "adopted"]


def test_calls_that_make_no_sense_are_errors_of_the_adapter() -> None:
    """Unknown requests and pools, a second start, an id that is no string, uneven lists: errors that change nothing."""
    rig = world()
    wrong: list[Callable[[], object]] = [
        lambda: rig.guard.start("a"),
        lambda: rig.guard.allocate("nobody", [7]),
        lambda: rig.guard.allocate("a", [7], pool="nowhere"),
        lambda: rig.guard.resume("a"),
        lambda: rig.guard.preempt("c"),
        lambda: rig.guard.rewind("c", 1),
        lambda: rig.guard.truncate("c", 0),
        lambda: rig.guard.publish("c", 0, "k"),
        lambda: rig.guard.start(7),  # type: ignore[arg-type]
        lambda: rig.guard.step(["nobody"], [0], [4]),
    ]
    for call in wrong:
        with pytest.raises(UsageError):
            call()
    with pytest.raises(ValueError):
        rig.guard.step(["a"], [0], [])
    assert rig.run("a", "b").clean, "a refused call takes no step number"


def test_what_is_reported_as_refused_was_refused_when_the_breaker_trips_on_it() -> None:
    """The violation that trips a breaker into observing is itself still refused; the next one passes."""
    for attempt in (allocates(3), frees(3), adopts("wrong", 2), publishes_after_free):
        rig = world(breaker_violations=1, breaker_action="observe")
        assert not attempt(rig)
        assert rig.guard.retire([9]).reusable == [9]
        assert [violation.action for violation in rig.guard.violations] == [Action.REFUSED, Action.OBSERVED]


@pytest.mark.parametrize("pages", [["9"], [9.0], [None], [(9, 10)], np.array([9.0]), [np.float32(9)]])
def test_page_ids_that_are_no_integers_are_errors_of_the_adapter(pages: Any) -> None:
    """Text, floats and whatever would have to be converted: refused before anything is written down."""
    rig = world()
    before = states(rig)
    for call in (
        lambda: rig.guard.allocate("d", pages),
        lambda: rig.guard.retire(pages),
        lambda: rig.guard.adopt("d", [("key-5", page) for page in pages]),
    ):
        with pytest.raises(UsageError, match="page ids must be integers"):
            call()
    assert states(rig) == before and not rig.guard.violations
    assert rig.run("a", "b", "d").clean


@pytest.mark.parametrize("pages", [np.array([9, 10]), np.array([9, 10], np.uint16), [np.int64(9), np.int32(10)]])
def test_numpy_integers_are_page_ids(pages: Any) -> None:
    """They are the same pages, and the answers are Python integers."""
    rig = world()
    accepted = rig.guard.allocate("d", pages)
    assert accepted == [9, 10] and {type(page) for page in accepted} == {int}
    rig.guard.finish("d")
    reusable = rig.guard.retire(pages).reusable
    assert reusable == [9, 10] and {type(page) for page in reusable} == {int}
