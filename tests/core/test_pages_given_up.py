"""Pages that a request gives up and goes on without: its promises on them, its trust in them, and its progress."""

from __future__ import annotations

import pytest

from kvguard.page_table import PageState
from kvguard.pools import PoolSpec
from kvguard.violation import Kind
from tests.core.support import MAIN, Rig, aborted, flag, kinds


def give_up_column_1(rig: Rig, request: str, how: str) -> None:
    """The request, which has two columns, gives up the second and draws page 9 instead."""
    if how == "truncate":
        pages = rig.guard.truncate(request, 1)
        rig.columns[request, "main"] = 1
    else:
        pages = rig.guard.drop(request, 1, 2)
    assert len(pages) == 1
    assert rig.allocate(request, 9) == [9]


def writer_and_reader() -> Rig:
    """w promised its second page, 2, which the reader adopted for its first column."""
    rig = Rig()
    rig.start("w", "reader", "other")
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 1, "k")
    assert rig.adopt("reader", ("k", 2)) == 1
    rig.allocate("reader", 4)
    return rig


each_way = pytest.mark.parametrize("how", ["truncate", "drop"])


# -- promises of the writer -------------------------------------------------------------------------------------------


@each_way
def test_the_reader_of_a_page_that_its_writer_gave_up_is_flagged(how: str) -> None:
    """The writer runs as far as it promised, but into another page: the promised one keeps a former owner's bytes."""
    rig = writer_and_reader()
    give_up_column_1(rig, "w", how)
    judgement = rig.run("w", "reader")
    assert kinds(judgement) == {"reader": Kind.WRITER_NEVER_RAN}
    assert judgement.withheld == aborted(judgement) == {"reader"}
    assert rig.guard.page_state(2) is PageState.ALLOCATED, "no longer published"
    assert rig.adopt("other", ("k", 2)) == 0


@each_way
def test_promises_on_pages_that_were_not_given_up_are_kept(how: str) -> None:
    """Giving up column 1 takes nothing from whoever reads column 0."""
    rig = writer_and_reader()
    assert rig.guard.publish("w", 0, "k0")
    assert rig.adopt("other", ("k0", 1)) == 1
    give_up_column_1(rig, "w", how)
    assert kinds(rig.run("w", "other", "reader")) == {"reader": Kind.WRITER_NEVER_RAN}
    assert rig.guard.page_state(1) is PageState.COMPLETE


@each_way
def test_a_page_given_up_with_its_step_in_flight_is_written_by_it(how: str) -> None:
    """The step that was launched writes the page in stream order: whoever adopted it is clean."""
    rig = writer_and_reader()
    pending = rig.launch("w", "reader")
    give_up_column_1(rig, "w", how)
    assert rig.judge(pending).clean
    assert rig.run("reader").clean


def test_promises_under_another_pool_are_not_taken_for_those_given_up() -> None:
    """The same page numbers and columns live in each pool on their own."""
    rig = Rig(MAIN, PoolSpec(name="local", num_pages=32, page_size=4))
    rig.start("w", "reader")
    for pool in ("main", "local"):
        rig.allocate("w", 1, 2, pool=pool)
        assert rig.guard.publish("w", 1, "k", pool=pool)
    rig.adopt("reader", ("k", 2))
    rig.adopt("reader", ("k", 2), pool="local")
    rig.guard.drop("w", 1, 2, pool="local")
    promise = rig.guard._books.tables[0].record(2).promise
    assert promise is not None and promise.kept is None
    assert rig.guard.page_state(2, pool="local") is PageState.ALLOCATED
    assert kinds(rig.run("w", "reader")) == {"reader": Kind.WRITER_NEVER_RAN}


# -- progress of the writer -------------------------------------------------------------------------------------------


def test_a_page_published_after_truncate_without_recomputation_is_a_promise() -> None:
    """What was computed past the cut is gone: the new page of column 1 is complete when it was written, not before."""
    rig = Rig()
    rig.start("w", "reader")
    rig.allocate("w", 1, 2)
    assert rig.run("w").clean
    give_up_column_1(rig, "w", "truncate")
    assert rig.guard.publish("w", 1, "k")
    assert rig.guard.page_state(9) is PageState.PROMISED
    rig.adopt("reader", ("k", 9))
    assert rig.run("w", "reader").clean
    assert rig.guard.page_state(9) is PageState.COMPLETE


@pytest.mark.parametrize("verified", [4, 8])
def test_a_step_in_flight_makes_no_progress_in_pages_that_were_drawn_after_its_launch(verified: int) -> None:
    """It writes to the pages that were cut, wherever it started: the page drawn for column 1 is not computed by it."""
    rig = Rig()
    rig.start("w", "reader")
    rig.allocate("w", 1, 2, 3)
    assert rig.run("w", ends={"w": verified}).clean
    pending = rig.launch("w")
    give_up_column_2_and_1(rig)
    assert rig.guard.publish("w", 1, "before")
    assert rig.adopt("reader", ("before", 9)) == 1
    assert rig.judge(pending).clean
    assert rig.guard.page_state(9) is PageState.PROMISED
    assert rig.guard.publish("w", 1, "after")
    assert rig.guard.page_state(9) is PageState.PROMISED
    assert kinds(rig.run("reader")) == {"reader": Kind.WRITER_NEVER_RAN}


def give_up_column_2_and_1(rig: Rig) -> None:
    assert rig.guard.truncate("w", 1) == [2, 3]
    assert rig.guard.retire([2, 3]).reusable == [2, 3]
    rig.columns["w", "main"] = 1
    assert rig.allocate("w", 9) == [9]


def test_truncating_past_the_computed_length_takes_nothing_back() -> None:
    """Only what is cut off is gone, and publications of what stays remain."""
    rig = Rig()
    rig.start("w")
    rig.allocate("w", 1, 2, 3)
    assert rig.guard.publish("w", 0, "k0")
    assert rig.run("w", ends={"w": 8}).clean
    assert rig.guard.truncate("w", 2) == [3]
    assert rig.guard.publish("w", 1, "k1")
    assert rig.guard.page_state(1) is rig.guard.page_state(2) is PageState.COMPLETE
    assert rig.guard.truncate("w", 1) == [2]
    assert rig.guard.page_state(1) is rig.guard.page_state(2) is PageState.COMPLETE


def test_the_columns_that_a_window_drops_stay_computed() -> None:
    """A sliding window moves on: the pages after it are complete as far as the request got."""
    rig = Rig()
    rig.start("w")
    rig.allocate("w", 1, 2, 3)
    assert rig.run("w").clean
    assert rig.guard.drop("w", 0, 2) == [1, 2]
    assert rig.guard.publish("w", 2, "k")
    assert rig.guard.page_state(3) is PageState.COMPLETE


# -- trust of the reader ----------------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("fate", ["flagged", "finish", "preempt"])
def test_a_reader_whose_hit_was_rolled_back_no_longer_depends_on_the_writer(how: str, fate: str) -> None:
    """It gave the promised page up before it ran: whatever becomes of the writer is none of its business."""
    rig = Rig()
    rig.start("w", "reader")
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 1, "k")
    rig.allocate("reader", 4)
    assert rig.adopt("reader", ("k", 2)) == 1
    give_up_column_1(rig, "reader", how)
    if fate == "flagged":
        flag(rig, "w")
        judgement = rig.run("w", "reader")
        assert judgement.withheld == aborted(judgement) == {"w"}
    else:
        getattr(rig.guard, fate)("w")
        assert rig.run("reader").clean


@each_way
def test_a_reader_that_gives_a_hit_up_with_its_step_in_flight_still_depends(how: str) -> None:
    """The step that was launched read the page: its token is worth what the writer's step is worth."""
    rig = Rig()
    rig.start("w", "reader")
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 1, "k")
    rig.allocate("reader", 4)
    assert rig.adopt("reader", ("k", 2)) == 1
    flag(rig, "w")
    pending = rig.launch("w", "reader")
    give_up_column_1(rig, "reader", how)
    judgement = rig.judge(pending)
    assert judgement.withheld == aborted(judgement) == {"w", "reader"}


def test_a_reader_that_gives_up_one_hit_still_depends_on_the_other() -> None:
    """Only the trust in pages that were given up ends."""
    rig = Rig()
    rig.start("w", "reader")
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 0, "k0") and rig.guard.publish("w", 1, "k1")
    assert rig.adopt("reader", ("k0", 1), ("k1", 2)) == 2
    give_up_column_1(rig, "reader", "truncate")
    flag(rig, "w")
    assert aborted(rig.run("w")) == {"w", "reader"}
