"""Promised pages: published before they are computed, adopted on trust, and taken back with everyone who trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvguard.guard import UsageError
from kvguard.messages import Verdicts
from kvguard.page_table import PageState
from kvguard.pools import PoolSpec
from kvguard.violation import Kind
from tests.core.support import MAIN, Rig, aborted, flag, kinds, promised


def test_adopting_in_the_step_of_the_writer_is_healthy() -> None:
    """vLLM does so: writer and adopters run in one step, all are clean, and the pages are complete after it."""
    rig = promised()
    assert [rig.guard.page_state(page) for page in (1, 2, 3)] == [
        PageState.PROMISED,
        PageState.PROMISED,
        PageState.ALLOCATED,
    ]
    assert rig.run("w", "b", "c").clean
    assert rig.guard.page_state(1) is rig.guard.page_state(2) is PageState.COMPLETE
    assert rig.run("b", "c").clean


def test_a_promise_is_kept_by_the_step_that_writes_its_last_token() -> None:
    """Page 1 is complete after 4 tokens, page 2 not before 8: its adopter may not run in between."""
    rig = promised()
    assert rig.run("w", "c", ends={"w": 7, "c": 8}).clean
    assert rig.guard.page_state(1) is PageState.COMPLETE
    assert rig.guard.page_state(2) is PageState.PROMISED
    assert kinds(rig.run("b")) == {"b": Kind.WRITER_NEVER_RAN}


def test_an_adopter_that_runs_before_its_writer_is_flagged_and_neutralised() -> None:
    """The page would hold a former owner's bytes; the host knows it, and the device already keeps the row away."""
    rig = promised()
    judgement = rig.run("b")
    (violation,) = judgement.violations
    assert violation.kind is Kind.WRITER_NEVER_RAN and "promised by request w" in violation.detail
    assert judgement.withheld == aborted(judgement) == {"b"}
    assert rig.row("b")[:3] == [0, 0, 0]
    assert rig.run("w", "c").clean


def test_a_flagged_writer_takes_its_dependents_along() -> None:
    """Their rows were clean on the device; their tokens are withheld, and the reports name the writer's violation."""
    rig = promised()
    flag(rig, "w")
    rig.allocate("d", 9)
    judgement = rig.run("d", "b", "w", "c")
    assert kinds(judgement) == {"w": Kind.VACANT_PAGE, "b": Kind.WRITER_FLAGGED, "c": Kind.WRITER_FLAGGED}
    assert judgement.withheld == aborted(judgement) == {"w", "b", "c"}
    writer, *dependents = judgement.violations
    assert {violation.cause for violation in dependents} == {writer.id}
    assert {violation.owner for violation in dependents} == {"w"}
    assert set(judgement.evict) == {("main", 1), ("main", 2)}
    assert rig.guard.page_state(1) is PageState.ALLOCATED, "no longer published"
    assert rig.adopt("d", ("k0", 1)) == 0


def test_dependents_of_dependents_go_too() -> None:
    """b promised a page of its own on top of w's, d adopted it: a flagged w ends all three, and nobody else."""
    rig = promised()
    assert rig.guard.publish("b", 2, "k2")
    rig.adopt("d", ("k2", 4))
    rig.start("e")
    rig.allocate("e", 6)
    flag(rig, "w")
    judgement = rig.run("w", "b", "c", "d", "e")
    assert judgement.withheld == aborted(judgement) == {"w", "b", "c", "d"}
    causes = {violation.request: violation.cause for violation in judgement.violations}
    ids = {violation.request: violation.id for violation in judgement.violations}
    assert causes == {"w": None, "b": ids["w"], "c": ids["w"], "d": ids["b"]}
    assert ("main", 4) in judgement.evict


def test_a_long_chain_of_dependents_is_followed_to_its_end() -> None:
    """Two thousand requests, each on the promise of the one before it, are all aborted with the first."""
    length = 2000
    rig = Rig(replace(Rig().pools[0], num_pages=length + 2), rows=length, columns=2, breaker_violations=0)
    names = [f"r{index}" for index in range(length)]
    rig.start(*names)
    for index, name in enumerate(names):
        if index:
            rig.adopt(name, (index - 1, index))
        rig.allocate(name, index + 1)
        rig.guard.publish(name, min(index, 1), index)
    rig.tables["main"][0, 0] = 0
    assert rig.run(*names).withheld == set(names)


def test_dependents_that_are_not_in_the_step_are_aborted_too() -> None:
    """An adopter that was not scheduled yet must not wait for a page that nobody will write."""
    rig = promised()
    flag(rig, "w")
    judgement = rig.run("w")
    assert aborted(judgement) == {"w", "b", "c"}
    assert judgement.withheld == {"w"}


def test_a_kept_promise_binds_nobody() -> None:
    """Once the page is complete, what happens to its writer is no concern of its adopters."""
    rig = promised()
    assert rig.run("w", "b", "c").clean
    flag(rig, "w")
    judgement = rig.run("w", "b", "c")
    assert judgement.withheld == {"w"}
    assert judgement.evict == ()


@pytest.mark.parametrize("leave", ["finish", "preempt"])
def test_a_writer_that_leaves_before_its_step_ran_leaves_its_adopters_unproven(leave: str) -> None:
    """Preempted or finished with nothing scheduled, it breaks its promises: adopters are flagged when they run."""
    rig = promised()
    getattr(rig.guard, leave)("w")
    judgement = rig.run("b", "c")
    assert kinds(judgement) == {"b": Kind.WRITER_NEVER_RAN, "c": Kind.WRITER_NEVER_RAN}
    assert judgement.withheld == {"b", "c"}
    assert rig.guard.adopt("d", [("k0", 1)]) == 0, "the publication is gone with the promise"


def test_publishing_by_a_condemned_writer_is_refused() -> None:
    """After its violation and before the engine ended it, nothing of it enters the cache; that is no new violation."""
    rig = Rig()
    rig.start("w", "b")
    rig.allocate("w", 1, 2)
    assert rig.run("w").clean
    assert rig.guard.publish("w", 0, "k0")
    flag(rig, "w")
    assert rig.run("w").withheld == {"w"}
    assert not rig.guard.publish("w", 0, "k0") and not rig.guard.publish("w", 1, "k1")
    assert rig.guard.page_state(2) is PageState.ALLOCATED
    assert len(rig.guard.violations) == 1


def test_a_writer_that_was_only_observed_may_publish_but_keeps_no_promise() -> None:
    """It goes on as if unguarded, so it is answered so; what it has written since is not known to be whole."""
    rig = Rig(on_violation="observe")
    rig.start("w", "b")
    rig.allocate("w", 1, 2, 3)
    assert rig.run("w", ends={"w": 4}).clean
    flag(rig, "w")
    assert kinds(rig.run("w", ends={"w": 8})) == {"w": Kind.VACANT_PAGE}
    rig.write("w", 2, 3)
    for column in (0, 1):
        assert rig.guard.publish("w", column, column)
        assert rig.guard.page_state(column + 1) is PageState.PROMISED
    rig.run("w")
    assert rig.guard.page_state(1) is rig.guard.page_state(2) is PageState.ALLOCATED
    assert rig.guard.publish("w", 1, "again")
    assert rig.guard.page_state(2) is PageState.PROMISED, "nothing more was verified of it"


@pytest.mark.parametrize("tokens", [3, 4, 6])
def test_in_a_pool_without_page_size_the_publisher_says_when_the_page_is_complete(tokens: int) -> None:
    """The state of a recurrent layer is complete at a length that only the engine knows; without it the call fails."""
    state = PoolSpec(name="state", num_pages=8, page_size=None)
    rig = Rig(MAIN, state)
    rig.start("w", "b")
    rig.allocate("w", 1, 2)
    rig.allocate("w", 5, pool="state")
    with pytest.raises(UsageError):
        rig.guard.publish("w", 0, "k", pool="state")
    assert rig.guard.page_state(5, pool="state") is PageState.ALLOCATED
    assert rig.run("w", ends={"w": 3}).clean
    assert rig.guard.publish("w", 0, "k", pool="state", tokens=tokens)
    complete = tokens <= 3
    assert rig.guard.page_state(5, pool="state") is (PageState.COMPLETE if complete else PageState.PROMISED)
    assert rig.run("w", ends={"w": 5}).clean
    complete = tokens <= 5
    assert rig.guard.page_state(5, pool="state") is (PageState.COMPLETE if complete else PageState.PROMISED)
    assert rig.run("w", ends={"w": 6}).clean
    assert rig.guard.page_state(5, pool="state") is PageState.COMPLETE


def test_a_page_may_be_published_for_less_than_all_its_tokens() -> None:
    """`tokens` counts in a pool with a page size, too: a partly filled page is complete once those are written."""
    rig = Rig()
    rig.start("w")
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 1, "k", tokens=6)
    assert rig.run("w", ends={"w": 5}).clean
    assert rig.guard.page_state(2) is PageState.PROMISED
    assert rig.run("w", ends={"w": 6}).clean
    assert rig.guard.page_state(2) is PageState.COMPLETE


def test_publishing_a_complete_page_again_under_its_key_changes_nothing() -> None:
    """An adopter that computed nothing itself publishes the prefix that it found: the page stays complete."""
    rig = promised()
    assert rig.run("w").clean
    assert rig.guard.publish("b", 0, "k0")
    assert rig.guard.page_state(1) is PageState.COMPLETE
    assert rig.guard.publish("b", 0, "other key")
    assert rig.guard.page_state(1) is PageState.PROMISED


def test_unpublishing_keeps_the_promise_for_those_who_trust_it() -> None:
    """A promised page that leaves the cache is still written by its writer: adopters are clean."""
    rig = promised()
    rig.guard.unpublish([1, 2])
    assert rig.guard.page_state(1) is PageState.ALLOCATED
    assert rig.run("w", "b", "c").clean


def test_reset_leaves_promises_between_running_requests_alone() -> None:
    """Emptying the cache does not stop a writer; with new weights everyone is flagged."""
    rig = promised()
    rig.guard.reset()
    assert rig.run("w", "b", "c").clean
    rig.guard.reset(revoke_held=True)
    assert rig.run("w", "b", "c").withheld == {"w", "b", "c"}


def test_a_writer_that_adopts_its_own_promise_depends_on_nobody() -> None:
    """Its own page under its own promise cannot outrun it."""
    rig = promised()
    rig.guard.adopt("w", [("k0", 1)])
    rig.write("w", 3, 1)
    assert rig.run("w", "b", "c", ends={"w": 16}).clean


def test_a_flagged_adopter_leaves_its_writer_alone() -> None:
    """Dependence runs one way."""
    rig = promised()
    flag(rig, "b")
    assert rig.run("w", "b", "c").withheld == {"b"}
    assert rig.guard.page_state(1) is PageState.COMPLETE


def test_observed_violations_end_nobody() -> None:
    """With on_violation = observe writer and dependents are reported and all tokens leave."""
    rig = Rig(on_violation="observe")
    rig.start("w", "b")
    rig.allocate("w", 1, 2)
    rig.guard.publish("w", 0, "k")
    rig.adopt("b", ("k", 1))
    flag(rig, "w")
    judgement = rig.run("w", "b")
    assert set(kinds(judgement)) == {"w", "b"}
    assert not judgement.withheld and not judgement.aborts


def test_verdicts_without_evidence_still_abort() -> None:
    """Evidence is kept of a few rows only; a flagged row without it is aborted all the same, unlocated."""
    rig = promised()
    rig.write("c", 1, 9)
    verdicts = rig.launch("w", "b", "c").resolve()
    judgement = rig.guard.judge(Verdicts(step=verdicts.step, records=verdicts.records))
    (violation,) = judgement.violations
    assert (violation.request, violation.kind, violation.column) == ("c", Kind.VACANT_PAGE, 1)
    assert aborted(judgement) == {"c"}
