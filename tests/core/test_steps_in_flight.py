"""Steps in flight: what finishes, moves on or goes wrong while verdicts are still on their way."""

from __future__ import annotations

import pytest

from kvguard.page_table import PageState
from kvguard.violation import Kind
from tests.core.support import TAG_ONLY, Rig, aborted, flag, kinds, promised


@pytest.mark.parametrize("leave", ["finish", "preempt"])
def test_a_writer_that_leaves_with_its_step_in_flight_keeps_its_promise(leave: str) -> None:
    """The step still runs in stream order: adopters are clean, and so is a page that was published in flight."""
    rig = promised()
    pending = rig.launch("w", "b")
    assert rig.guard.publish("w", 2, "k2")
    assert rig.adopt("d", ("k2", 3)) == 1
    getattr(rig.guard, leave)("w")
    assert rig.judge(pending).clean
    assert rig.guard.page_state(3) is PageState.COMPLETE
    assert rig.run("b", "c", "d").clean


def test_a_writer_flagged_after_it_left_still_takes_its_dependents() -> None:
    """The client of w went away while its step was in flight; the step fails, so b and c are unproven."""
    rig = promised()
    flag(rig, "w")
    pending = rig.launch("w", "b")
    rig.guard.finish("w")
    judgement = rig.judge(pending)
    assert judgement.withheld == {"w", "b"}
    assert aborted(judgement) == {"b", "c"}, "w is over already"


@pytest.mark.parametrize("leave", ["finish", "preempt"])
def test_a_dependent_that_left_breaks_its_own_promises_too(leave: str) -> None:
    """w is flagged in the step in which b wrote a page for d from w's page: b is gone, d must go too."""
    rig = promised()
    assert rig.guard.publish("b", 2, "k2")
    rig.adopt("d", ("k2", 4))
    flag(rig, "w")
    pending = rig.launch("w", "b", "d")
    getattr(rig.guard, leave)("b")
    judgement = rig.judge(pending)
    assert judgement.withheld == {"w", "b", "d"}
    assert {"d"} <= aborted(judgement)
    assert ("b" in aborted(judgement)) is (leave == "preempt")


def test_a_dependent_that_was_preempted_before_it_ran_starts_afresh() -> None:
    """It gave the promised pages back and has no step in flight: the writer's fault is none of its business."""
    rig = promised()
    rig.guard.preempt("b")
    flag(rig, "w")
    pending = rig.launch("w")
    assert aborted(rig.judge(pending)) == {"w", "c"}
    rig.guard.resume("b")
    rig.columns["b", "main"] = 0
    rig.allocate("b", 10, 11)
    assert rig.run("b").clean


def test_a_request_of_the_same_name_is_not_aborted_for_its_predecessor() -> None:
    """An id that is used again while a step of its first bearer is in flight belongs to someone else now."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1)
    rig.write("a", 0, 9)
    pending = rig.launch("a")
    rig.guard.finish("a")
    rig.guard.retire([1])
    rig.guard.start("a")
    judgement = rig.judge(pending)
    assert judgement.withheld == {"a"} and aborted(judgement) == set()
    rig.columns.clear()
    rig.allocate("a", 2)
    assert rig.run("a").clean


@pytest.mark.parametrize("depth", [2, 3])
def test_pages_freed_and_reused_while_earlier_steps_are_in_flight_are_healthy(depth: int) -> None:
    """The free and the reuse take effect in stream order, after the steps that still read the page."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    in_flight = [rig.launch("a") for _ in range(depth - 1)]
    rig.guard.finish("a")
    assert rig.guard.retire([1, 2]).reusable == [1, 2]
    rig.allocate("b", 2, 1)
    in_flight.append(rig.launch("b"))
    assert all(rig.judge(pending).clean for pending in in_flight)
    assert rig.run("b").clean


@pytest.mark.parametrize("depth", [2, 3])
def test_a_device_that_runs_behind_the_host_sees_the_same(depth: int) -> None:
    """Deltas made ahead and applied later, each with the block table of its own step, give the same verdicts."""
    rig = Rig(proofs=TAG_ONLY)
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    queue = []
    for step in range(depth):
        if step == depth - 1:
            rig.guard.retire([2])
            rig.allocate("b", 2)
        queue.append((rig.delta("a", "b"), {name: table.copy() for name, table in rig.tables.items()}))
    checked = [rig.check(delta, tables) for delta, tables in queue]
    judgements = [rig.judge(pending) for pending in checked]
    assert [judgement.withheld for judgement in judgements] == [frozenset()] * (depth - 1) + [{"a"}]


def test_steps_in_flight_of_an_aborted_request_are_withheld_though_clean() -> None:
    """Its row was repaired before the next launch, but the first step's writes are lost: no token of either leaves."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3)
    rig.write("a", 1, 7)
    first = rig.launch("a", "b")
    rig.write("a", 0, 1)
    rig.write("a", 1, 2)
    second, third = rig.launch("a", "b"), rig.launch("b")
    assert rig.judge(first).withheld == {"a"}
    rig.guard.finish("a")
    judgement = rig.judge(second)
    assert judgement.withheld == {"a"} and not judgement.violations and not judgement.aborts
    assert rig.judge(third).clean


def test_steps_in_flight_of_dependents_are_withheld_though_clean() -> None:
    """An adopter launched one step after its writer is withheld when the writer's verdict comes back bad."""
    rig = promised()
    flag(rig, "w")
    first, second = rig.launch("w"), rig.launch("b", "c")
    assert aborted(rig.judge(first)) == {"w", "b", "c"}
    assert rig.judge(second).withheld == {"b", "c"}


def test_promises_of_the_next_step_fall_with_the_writer() -> None:
    """What a flagged writer promised for its next step in flight is not kept by that step."""
    rig = Rig()
    rig.start("w", "b")
    rig.allocate("w", 1, 2)
    rig.write("w", 0, 9)
    first = rig.launch("w", ends={"w": 4})
    rig.write("w", 0, 1)
    rig.guard.publish("w", 1, "k1")
    second = rig.launch("w")
    rig.adopt("b", ("k1", 2))
    assert aborted(rig.judge(first)) == {"w", "b"}
    assert rig.judge(second).withheld == {"w"}
    assert rig.guard.page_state(2) is PageState.ALLOCATED


def test_rewind_takes_back_promises_past_the_confirmed_length() -> None:
    """Rejected speculation leaves page 1 complete and revokes page 2; its adopter, in flight or not, is unproven."""
    rig = promised()
    first = rig.launch("w", "c")
    second = rig.launch("b")
    rig.guard.rewind("w", 5)
    assert rig.judge(first).clean
    assert rig.guard.page_state(1) is PageState.COMPLETE
    assert kinds(rig.judge(second)) == {"b": Kind.WRITER_NEVER_RAN}
    assert rig.run("w", "c").clean


def test_rewind_takes_back_promises_that_were_not_scheduled() -> None:
    """A later step writes other tokens there: it must not keep a promise for the rejected ones."""
    rig = promised()
    rig.guard.rewind("w", 4)
    judgement = rig.run("w", "b", "c")
    assert kinds(judgement) == {"b": Kind.WRITER_NEVER_RAN}
    assert judgement.withheld == {"b"}


def test_rewind_unpublishes_what_only_the_writer_holds() -> None:
    """Complete pages past the confirmed length leave the cache, those before it stay, and so do shared ones."""
    rig = Rig()
    rig.start("w", "b")
    rig.allocate("w", 1, 2, 3)
    rig.run("w")
    for column in range(3):
        rig.guard.publish("w", column, column)
    rig.adopt("b", (0, 1), (1, 2))
    rig.guard.rewind("w", 4)
    states = [rig.guard.page_state(page) for page in (1, 2, 3)]
    assert states == [PageState.COMPLETE, PageState.COMPLETE, PageState.ALLOCATED]
    assert rig.guard.publish("w", 2, "again")
    assert rig.guard.page_state(3) is PageState.PROMISED, "its tokens have to be computed again"


def test_progress_of_a_former_life_does_not_count() -> None:
    """A step judged after preemption and resumption confirms nothing for the pages of the new life."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1)
    pending = rig.launch("a")
    rig.guard.preempt("a")
    rig.guard.retire([1])
    rig.guard.resume("a")
    rig.columns.clear()
    rig.allocate("a", 2)
    assert rig.judge(pending).clean
    rig.guard.publish("a", 0, "k")
    assert rig.guard.page_state(2) is PageState.PROMISED


@pytest.mark.parametrize("leave", ["preempt", "finish"])
def test_a_new_life_starts_with_nothing_computed(leave: str) -> None:
    """What was computed before a preemption, or under the same name before, completes no page of the new life."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1)
    assert rig.run("a").clean
    getattr(rig.guard, leave)("a")
    rig.guard.retire([1])
    if leave == "finish":
        rig.guard.start("a")
    rig.columns.clear()
    rig.allocate("a", 2)
    rig.guard.publish("a", 0, "k")
    assert rig.guard.page_state(2) is PageState.PROMISED
    assert rig.run("a").clean
    assert rig.guard.page_state(2) is PageState.COMPLETE


def test_an_abandoned_step_breaks_its_promises() -> None:
    """The forward failed: its requests are named, its promises broken, and adopters in flight are unproven."""
    rig = promised()
    rig.launch("w")
    second = rig.launch("b")
    assert rig.guard.abandon(1) == ["w"]
    assert rig.guard.abandon(1) == []
    assert kinds(rig.judge(second)) == {"b": Kind.WRITER_NEVER_RAN}
    assert kinds(rig.run("c")) == {"c": Kind.WRITER_NEVER_RAN}


def test_abandoning_a_later_step_leaves_earlier_ones_to_be_judged() -> None:
    """Step 2 failed to launch while step 1 is in flight: steps 1 and 3 are judged as ever."""
    rig = promised()
    first = rig.launch("w", "b")
    rig.launch("c")
    assert rig.guard.abandon(2) == ["c"]
    third = rig.launch("w")
    assert rig.judge(first).clean
    assert rig.judge(third).clean


def test_a_page_that_moves_on_does_not_break_a_step_in_flight() -> None:
    """Writer and adopter left, their page was taken over: the step that both ran in is healthy in stream order."""
    rig = promised()
    pending = rig.launch("w", "b", "c")
    for request in ("w", "b", "c"):
        rig.guard.finish(request)
    assert rig.guard.retire([2]).reusable == [2]
    assert rig.allocate("d", 1, 2) == [1, 2]
    assert rig.judge(pending).clean
    assert rig.guard.page_state(1) is rig.guard.page_state(2) is PageState.ALLOCATED


def test_taking_a_promised_page_back_breaks_the_promise() -> None:
    """With only the tag proof on, a promised page freed before its step ran leaves its adopters unproven."""
    rig = promised(proofs=TAG_ONLY)
    rig.guard.retire([1])
    assert rig.guard.page_state(1) is PageState.VACANT
    assert set(kinds(rig.run("c")).values()) == {Kind.WRITER_NEVER_RAN}


def test_rewind_keeps_the_progress_of_a_later_step_in_flight() -> None:
    """One of 5 tokens was rejected; the step launched behind it, to 9, writes up to 8: column 1 is complete then."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    first, second = rig.launch("a", ends={"a": 5}), rig.launch("a", ends={"a": 9})
    assert rig.judge(first).clean
    rig.guard.rewind("a", 4)
    assert rig.judge(second).clean
    assert rig.guard.publish("a", 1, "k1") and rig.guard.publish("a", 2, "k2", tokens=9)
    assert rig.guard.page_state(2) is PageState.COMPLETE
    assert rig.guard.page_state(3) is PageState.PROMISED, "the ninth token was never written"


def test_a_page_that_is_complete_after_a_rewind_is_published_as_such_at_once() -> None:
    """8 of 9 tokens are confirmed while the next step is in flight: column 1 at page size 4 is complete."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    first, second = rig.launch("a", ends={"a": 9}), rig.launch("a", ends={"a": 12})
    assert rig.judge(first).clean
    rig.guard.rewind("a", 8)
    assert rig.guard.publish("a", 1, "k1") and rig.guard.publish("a", 2, "k2", tokens=11)
    assert rig.guard.page_state(2) is PageState.COMPLETE
    assert rig.guard.page_state(3) is PageState.PROMISED
    assert rig.judge(second).clean
    assert rig.guard.page_state(3) is PageState.COMPLETE, "the step in flight wrote its eleventh token"


def test_two_rewinds_shift_a_step_in_flight_twice() -> None:
    """Each takes away what it rejects of what is verified; one that rejects nothing of it caps what is in flight."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    first, second = rig.launch("a", ends={"a": 8}), rig.launch("a", ends={"a": 12})
    assert rig.judge(first).clean
    rig.guard.rewind("a", 7)
    rig.guard.rewind("a", 6)
    assert rig.judge(second).clean
    assert rig.guard.publish("a", 2, "ten", tokens=10)
    assert rig.guard.page_state(3) is PageState.COMPLETE
    assert rig.guard.publish("a", 2, "eleven", tokens=11)
    assert rig.guard.page_state(3) is PageState.PROMISED
    third = rig.launch("a", ends={"a": 12})
    rig.guard.rewind("a", 11)
    assert rig.judge(third).clean
    assert rig.guard.publish("a", 2, "twelve")
    assert rig.guard.page_state(3) is PageState.PROMISED


def test_rewind_leaves_steps_of_a_former_life_and_of_others_alone() -> None:
    """Only steps of this request since it was last preempted ran behind the rejected tokens."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4)
    assert rig.run("a", "b").clean
    pending = rig.launch("a", "b")
    ends = rig.guard._books.pending[pending.step].ends
    rig.guard.rewind("b", 6)
    assert ends == [8, 6]
    rig.guard.preempt("a")
    rig.guard.rewind("a", 2)
    assert ends == [8, 6]
    assert rig.judge(pending).clean


def test_rewind_takes_back_promises_that_a_step_in_flight_would_keep() -> None:
    """The tokens past the confirmed length are other ones than those that were promised, though a step writes there."""
    rig = promised()
    assert rig.run("w", ends={"w": 5}).clean
    pending = rig.launch("w", "b", ends={"w": 9})
    rig.guard.rewind("w", 4)
    judgement = rig.judge(pending)
    assert kinds(judgement) == {"b": Kind.WRITER_NEVER_RAN}
    assert rig.guard.page_state(1) is PageState.COMPLETE
    assert rig.guard.page_state(2) is PageState.ALLOCATED


@pytest.mark.parametrize("later", [1, 2])
def test_abandoning_a_step_withholds_the_later_steps_of_its_requests(later: int) -> None:
    """They read what the failed forward did not write; steps of other requests are judged as ever."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2, 3)
    rig.allocate("b", 4)
    failed = rig.launch("a", ends={"a": 4})
    behind = [rig.launch("a", "b", ends={"a": 8 + 4 * index}) for index in range(later)]
    assert rig.guard.abandon(failed.step) == ["a"]
    judgement = rig.judge(behind[0])
    (violation,) = judgement.violations
    assert (violation.request, violation.kind) == ("a", Kind.WRITER_NEVER_RAN)
    assert f"step {failed.step} of this request was abandoned" in violation.detail
    assert judgement.withheld == aborted(judgement) == {"a"}
    for pending in behind[1:]:
        assert rig.judge(pending).withheld == {"a"}


def test_abandoning_a_step_leaves_earlier_steps_and_later_lives_alone() -> None:
    """What ran before it was written, and a request that was preempted since starts over."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4)
    first = rig.launch("a", "b", ends={"a": 4})
    second = rig.launch("a", "b")
    rig.guard.preempt("b")
    rig.guard.retire([3, 4])
    rig.guard.resume("b")
    rig.columns["b", "main"] = 0
    rig.allocate("b", 5)
    third = rig.launch("b")
    assert rig.guard.abandon(second.step) == ["a", "b"]
    assert rig.judge(first).clean and rig.judge(third).clean
    assert rig.run("a", "b").clean


def test_what_an_abandoned_step_was_to_write_is_no_longer_on_its_way() -> None:
    """With nothing else in flight the request's scheduled length falls back to the verified one."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    assert rig.run("a", ends={"a": 4}).clean
    books, state = rig.guard._books, rig.guard._books.state("a")
    second, third = rig.launch("a", ends={"a": 8}), rig.launch("a", ends={"a": 12})
    rig.guard.abandon(third.step)
    assert books.scheduled_tokens(state) == 8, "a step is in flight"
    rig.guard.abandon(second.step)
    assert books.scheduled_tokens(state) == 4
