"""The page table: states, holders, tag changes and what the control-plane checks answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvguard.page_table import PageState, PageTable, Promise
from kvguard.pools import PoolSpec
from kvguard.recorder import FlightRecorder
from kvguard.requests import RequestState
from kvguard.tags import VACANT, TagCounter
from kvguard.violation import Kind


def new_table(null_page: int | None = 0, depth: int = 8) -> PageTable:
    return PageTable(PoolSpec(num_pages=8, null_page=null_page), TagCounter(3), FlightRecorder(depth))


def promise_of(table: PageTable, page: int) -> Promise:
    writer = RequestState(id="writer", slot=0, incarnation=1, ledgers=())
    return Promise(pool="main", page=page, tag=table.tag(page), writer=writer, need_tokens=16)


@pytest.mark.parametrize("what", ["held", "promised", "null", "past the pool", "negative"])
def test_many_allocations_stop_before_a_page_that_needs_a_closer_look(what: str) -> None:
    """The pages before it are handed out, it and those behind it are as they were."""
    table = new_table()
    table.allocate(3, "a")
    if what == "promised":
        table.publish(3, "key", promise_of(table, 3), "a")
        table.release(3, "a")
    page = {"held": 3, "promised": 3, "null": 0, "past the pool": 8, "negative": -1}[what]
    before = table.tag(3)
    table.record(-1)
    tags = table.allocate_each([1, page, 2], ["b", "c", "d"])
    assert tags == [table.tag(1)] and table.record(1).holders == {"b"}
    assert table.tag(3) == before and table.tag(2) == VACANT and table.tag(0) == VACANT
    assert table.may_be_handed_out([1]) is False and table.may_be_handed_out([2, 4]) is True


@pytest.mark.parametrize("what", ["vacant", "never used", "held by another", "shared", "promised", "null"])
def test_many_retirements_stop_before_a_page_that_needs_a_closer_look(what: str) -> None:
    """Idle pages and the giver's own before it are vacant, it and those behind it are as they were."""
    table = new_table()
    for page, holder in ((1, "a"), (2, "b"), (3, "b" if what == "held by another" else "a"), (4, "a"), (0, "a")):
        table.allocate(page, holder)
    table.release(2, "b")
    table.release(0, "a")
    if what == "vacant":
        table.retire(3, None)
    elif what == "shared":
        table.adopt(3, "b")
    elif what == "promised":
        table.publish(3, "key", promise_of(table, 3), "a")
    page = {"never used": 7, "null": 0}.get(what, 3)
    before = table.tag(page)
    assert table.retire_idle([1, 2, page, 4], "a") == 2
    assert [table.tag(1), table.tag(2), table.tag(page)] == [VACANT, VACANT, before] and table.tag(4) != VACANT
    assert table.retire_idle([4], None) == 0 and table.retire_idle([4], "a") == 1


def test_a_page_lives_from_vacant_to_vacant() -> None:
    """Vacant, allocated, promised, complete, vacant: each state follows from what happened."""
    table = new_table()
    states = [table.record(3).state]
    table.allocate(3, "a")
    states.append(table.record(3).state)
    promise = promise_of(table, 3)
    table.publish(3, "key", promise, "a")
    states.append(table.record(3).state)
    promise.kept = True
    table.settle(promise)
    states.append(table.record(3).state)
    table.retire(3, "a")
    states.append(table.record(3).state)
    assert states == [
        PageState.VACANT,
        PageState.ALLOCATED,
        PageState.PROMISED,
        PageState.COMPLETE,
        PageState.VACANT,
    ]


def test_every_allocation_has_a_tag_of_its_own() -> None:
    """Tags differ between pages and between allocations of one page; a retired page is vacant."""
    table = new_table()
    tags = [table.allocate(page, "a") for page in (1, 2, 1)]
    assert len(set(tags)) == 3 and VACANT not in tags
    assert table.tag(1) == tags[2]
    table.retire(1, None)
    assert table.tag(1) == VACANT
    assert table.invent_tag() not in tags


def test_the_last_tag_change_of_a_step_wins() -> None:
    """Freed and allocated again between two steps, a page changes once, to its last tag."""
    table = new_table()
    table.allocate(1, "a")
    table.retire(1, "a")
    tag = table.allocate(1, "b")
    table.allocate(2, "b")
    table.retire(2, "b")
    assert table.changes == {1: tag, 2: VACANT}


def test_allocation_starts_a_page_afresh() -> None:
    """Holder, owner, publication and promise of the former life are gone."""
    table = new_table()
    table.allocate(1, "a")
    table.publish(1, "key", promise_of(table, 1), "a")
    table.adopt(1, "b")
    table.allocate(1, "c")
    record = table.record(1)
    assert (record.holders, record.owner, record.publication, record.promise) == ({"c"}, "c", None, None)


def test_retiring_hands_out_the_broken_promise_and_forgets_the_rest() -> None:
    """The open promise comes back to whoever must break it; holder, owner and publication are gone."""
    table = new_table()
    table.allocate(1, "a")
    promise = promise_of(table, 1)
    table.publish(1, "key", promise, "a")
    assert table.retire(1, "a") is promise
    record = table.record(1)
    assert (record.holders, record.owner, record.publication, record.promise) == (set(), None, None, None)


def test_a_broken_promise_takes_its_publication_along() -> None:
    """Revoked, the page can no longer be adopted; kept, it can."""
    for kept, publication in ((False, None), (True, "key")):
        table = new_table()
        table.allocate(1, "a")
        promise = promise_of(table, 1)
        table.publish(1, "key", promise, "a")
        promise.kept = kept
        table.settle(promise)
        assert table.record(1).publication == publication
        assert table.record(1).promise is None


def test_settling_leaves_a_page_alone_that_moved_on() -> None:
    """A promise of a former life of the page does not touch the publication of the present one."""
    table = new_table()
    table.allocate(1, "a")
    old = promise_of(table, 1)
    table.publish(1, "old", old, "a")
    table.allocate(1, "b")
    new = promise_of(table, 1)
    table.publish(1, "new", new, "b")
    old.kept = False
    table.settle(old)
    assert table.record(1).promise is new and table.record(1).publication == "new"


def test_pages_outside_the_pool_and_the_null_page_are_nobodys() -> None:
    """Ids below 0, past the pool and the null page are a problem of every operation."""
    table = new_table()
    for page, kind in ((-1, Kind.PAGE_OUT_OF_RANGE), (8, Kind.PAGE_OUT_OF_RANGE), (0, Kind.NULL_PAGE_USED)):
        assert table.problem_with_page(page) is kind
        assert table.problem_with_allocation(page) is kind
        assert table.problem_with_retire(page, None) is kind
        assert table.problem_with_adoption(page, "key") is kind
    assert table.problem_with_page(1) is None and table.problem_with_page(7) is None
    assert new_table(null_page=None).problem_with_page(0) is None


def test_only_a_page_without_holders_may_be_allocated() -> None:
    """A held page may not, a cached page that nobody holds may."""
    table = new_table()
    assert table.problem_with_allocation(1) is None
    table.allocate(1, "a")
    assert table.problem_with_allocation(1) is Kind.DOUBLE_ALLOCATION
    table.publish(1, "key", None, "a")
    table.release(1, "a")
    assert table.problem_with_allocation(1) is None


def test_a_page_may_be_given_back_once_and_by_its_only_holder() -> None:
    """Never owned, held by others, held by someone else, freed before: each has its own answer."""
    table = new_table()
    assert table.problem_with_retire(1, "a") is Kind.FREE_UNOWNED
    table.allocate(1, "a")
    assert table.problem_with_retire(1, "a") is None
    assert table.problem_with_retire(1, None) is Kind.FREE_WHILE_HELD
    assert table.problem_with_retire(1, "b") is Kind.FREE_UNOWNED
    table.adopt(1, "b")
    assert table.problem_with_retire(1, "a") is Kind.FREE_WHILE_HELD
    table.release(1, "b")
    table.release(1, "a")
    assert table.problem_with_retire(1, "a") is None
    table.retire(1, "a")
    assert table.problem_with_retire(1, "a") is Kind.DOUBLE_FREE


def test_a_hit_needs_the_very_key_of_the_current_publication() -> None:
    """Vacant, unpublished, published under another key, and a key of None are refused."""
    table = new_table()
    assert table.problem_with_adoption(1, "key") is Kind.ADOPT_VACANT
    table.allocate(1, "a")
    assert table.problem_with_adoption(1, "key") is Kind.ADOPT_STALE
    assert table.problem_with_adoption(1, None) is Kind.ADOPT_STALE
    table.publish(1, "key", None, "a")
    assert table.problem_with_adoption(1, "key") is None
    assert table.problem_with_adoption(1, "other") is Kind.ADOPT_STALE
    table.unpublish(1)
    assert table.problem_with_adoption(1, "key") is Kind.ADOPT_STALE


def test_held_and_live_pages_are_listed_in_order() -> None:
    """Held: some ledger has it; live: not vacant, a cached page that nobody holds included."""
    table = new_table()
    for page in (5, 2, 4):
        table.allocate(page, "a")
    table.release(4, "a")
    table.retire(2, "a")
    assert table.held_pages() == [5]
    assert table.live_pages() == [4, 5]


@pytest.mark.parametrize("depth", [0, 3])
def test_the_recorder_keeps_the_last_events_of_each_page(depth: int) -> None:
    """Of every page the last `depth` events are kept, oldest first, with step, tag and request."""
    recorder = FlightRecorder(depth)
    table = PageTable(PoolSpec(num_pages=8), TagCounter(3), recorder)
    tags = []
    for step in range(4):
        table.step = step
        tags.append(table.allocate(1, f"r{step}"))
        table.retire(1, f"r{step}")
    events = [(e.step, e.what, e.tag, e.request) for e in recorder.history("main", 1).events]
    whole = [(2, "retired", tags[2], "r2"), (3, "allocated", tags[3], "r3"), (3, "retired", tags[3], "r3")]
    assert events == whole[: depth and 3]
    assert recorder.history("main", 2).events == () and recorder.history("other", 1).events == ()


def test_a_page_remembers_its_last_publication_with_the_tag_that_it_had() -> None:
    """Retired, taken over or revoked, the page answers what its last key promised; every other key gets a new tag."""
    ways: tuple[Callable[[PageTable], object], ...] = (
        lambda table: table.retire(1, "a"),
        lambda table: table.allocate(1, "b"),
        lambda table: table.revoke(1),
    )
    for move_on in ways:
        table = new_table()
        tag = table.allocate(1, "a")
        table.publish(1, "key", None, "a")
        assert table.promised_tag(1, "key") == tag
        move_on(table)
        assert table.promised_tag(1, "key") == tag != table.tag(1)
        unknown = {table.promised_tag(1, "other"), table.promised_tag(1, None), table.promised_tag(2, "key")}
        assert len(unknown) == 3 and unknown.isdisjoint({tag, table.tag(1), VACANT})
        assert table.allocate(2, "c") not in unknown


def test_only_one_former_publication_is_remembered() -> None:
    """The one before the last is forgotten: it then promises nothing that any page could meet."""
    table = new_table()
    tags = []
    for key in ("old", "new"):
        tags.append(table.allocate(1, "a"))
        table.publish(1, key, None, "a")
        table.retire(1, "a")
    assert table.promised_tag(1, "new") == tags[1]
    assert table.promised_tag(1, "old") not in tags


def test_revoking_keeps_holders_and_owner_and_ends_the_publication() -> None:
    """A fresh tag that goes to the device; the open promise comes back to whoever must break it."""
    table = new_table()
    tag = table.allocate(1, "a")
    table.adopt(1, "b")
    promise = promise_of(table, 1)
    table.publish(1, "key", promise, "a")
    table.changes = {}
    assert table.revoke(1) is promise
    record = table.record(1)
    assert (record.holders, record.owner, record.publication, record.promise) == ({"a", "b"}, "a", None, None)
    assert table.changes == {1: record.tag} and record.tag not in (tag, VACANT)
