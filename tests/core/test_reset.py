"""Resets: what an engine may still do with its pages afterwards, and what no longer holds."""

from __future__ import annotations

import pytest

from kvguard.page_table import PageState
from kvguard.violation import Kind
from tests.core.support import Rig, aborted, kinds


def rig_with_idle_cached_page() -> Rig:
    """a holds 1 and 2; 5 is cached and held by nobody."""
    rig = Rig()
    rig.start("a", "c", "d")
    rig.allocate("a", 1, 2)
    rig.allocate("c", 5)
    assert rig.run("a", "c").clean
    assert rig.guard.publish("c", 0, "k")
    rig.guard.finish("c")
    return rig


@pytest.mark.parametrize("revoke_held", [False, True])
def test_idle_cached_pages_may_be_given_back_once_after_a_reset(revoke_held: bool) -> None:
    """The engine's own list of such pages is emptied after the call: once is no violation, twice is a double free."""
    rig = rig_with_idle_cached_page()
    rig.guard.reset(revoke_held=revoke_held)
    assert rig.guard.page_state(5) is PageState.VACANT
    assert rig.guard.retire([5]).reusable == [5]
    assert not rig.guard.violations
    assert rig.guard.retire([5]).refused == [5]
    assert [violation.kind for violation in rig.guard.violations] == [Kind.DOUBLE_FREE]


def test_a_page_given_back_twice_in_the_same_call_after_a_reset_is_a_double_free() -> None:
    """Once means once, in one call as in two."""
    rig = rig_with_idle_cached_page()
    rig.guard.reset()
    retired = rig.guard.retire([5, 5])
    assert (retired.reusable, retired.refused) == ([5], [5])


@pytest.mark.parametrize("control_plane", [False, True])
def test_the_leave_to_give_back_ends_when_the_page_is_allocated(control_plane: bool) -> None:
    """Handed out and given back after the reset, the page has a life of its own: its second free is a double free."""
    rig = Rig(control_plane=control_plane)
    rig.start("c", "d")
    rig.allocate("c", 5)
    rig.guard.finish("c")
    rig.guard.reset()
    assert rig.allocate("d", 5) == [5]
    rig.guard.finish("d")
    assert rig.guard.retire([5]).reusable == [5]
    assert rig.guard._books.tables[0].problem_with_retire(5, None) is Kind.DOUBLE_FREE


def test_pages_that_were_vacant_before_a_reset_may_not_be_given_back_after_it() -> None:
    """A reset forgives no double free."""
    rig = rig_with_idle_cached_page()
    assert rig.guard.retire([5]).reusable == [5]
    rig.guard.reset()
    assert rig.guard.retire([5, 9]).refused == [5, 9]
    assert [violation.kind for violation in rig.guard.violations] == [Kind.DOUBLE_FREE, Kind.FREE_UNOWNED]


def test_after_new_weights_running_requests_may_be_preempted_and_their_pages_given_back() -> None:
    """They hold their pages until then and give them back as ever: no violation."""
    rig = rig_with_idle_cached_page()
    rig.guard.reset(revoke_held=True)
    rig.guard.preempt("a")
    assert rig.guard.retire([1, 2]).reusable == [1, 2]
    rig.guard.resume("a")
    rig.columns.clear()
    assert rig.allocate("a", 2, 1) == [2, 1]
    assert rig.run("a").clean
    assert rig.guard.violations == ()


def test_pages_that_new_weights_made_invalid_are_still_held() -> None:
    """Nobody else may get them, and they may not be freed under their holder."""
    rig = rig_with_idle_cached_page()
    rig.guard.reset(revoke_held=True)
    assert rig.allocate("d", 1) == []
    assert rig.guard.retire([2]).refused == [2]
    assert [violation.kind for violation in rig.guard.violations] == [Kind.DOUBLE_ALLOCATION, Kind.FREE_WHILE_HELD]


def test_a_request_that_reads_on_after_new_weights_is_flagged_and_gives_its_pages_back_itself() -> None:
    """Its pages are stale, not foreign: nobody else has them, so that they would be lost if it kept them."""
    rig = rig_with_idle_cached_page()
    rig.guard.reset(revoke_held=True)
    judgement = rig.run("a")
    assert kinds(judgement) == {"a": Kind.STALE_PAGE} and aborted(judgement) == {"a"}
    assert judgement.aborts[0].foreign_pages == {}
    rig.guard.finish("a")
    assert rig.guard.retire([1, 2]).refused == []


def test_new_weights_end_publications_and_promises_of_held_pages() -> None:
    """A held page can no longer be found in the cache; who adopted it on a promise is flagged."""
    rig = Rig()
    rig.start("w", "b", "c")
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 0, "k0")
    assert rig.adopt("b", ("k0", 1)) == 1
    rig.guard.reset(revoke_held=True)
    assert rig.guard.page_state(1) is PageState.ALLOCATED
    assert rig.adopt("c", ("k0", 1)) == 0
    assert not rig.guard.publish("w", 0, "k0"), "the ledger's page is no longer the one it was promised"
    assert kinds(rig.run("b")) == {"b": Kind.WRITER_NEVER_RAN}
