"""The tag proof: every way in which a block table can name a page that is not the request's own, on both backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvguard.page_table import PageState
from kvguard.pools import PoolSpec
from kvguard.violation import Action, Kind, Proof
from tests.core.support import MAIN, TAG_ONLY, Rig, aborted, kinds

pytestmark = pytest.mark.parametrize("backend", ["numpy", "torch"])


@pytest.fixture
def rig(backend: str) -> Iterator[Rig]:
    """a holds 1, 2, 3 and b holds 4, 5; only the tag proof is on, so that faulty frees take effect."""
    rig = Rig(backend=backend, proofs=TAG_ONLY)
    rig.start("a", "b", "c")
    rig.allocate("a", 1, 2, 3)
    rig.allocate("b", 4, 5)
    assert rig.run("a", "b").clean
    yield rig


def test_a_page_freed_under_a_request_is_found_before_it_is_reused(rig: Rig) -> None:
    """Freed and not handed out again, the page is vacant: its reader is aborted with column, page and history."""
    rig.guard.retire([2])
    judgement = rig.run("a", "b")
    (violation,) = judgement.violations
    assert violation.kind is Kind.VACANT_PAGE and violation.proof is Proof.TAG
    assert (violation.request, violation.column, violation.page, violation.found_tag) == ("a", 1, 2, 0)
    assert violation.action is Action.ABORTED and violation.owner is None and violation.quarantined
    assert violation.row == rig.rows["a"] and violation.step == 2
    assert violation.row_entries == violation.promised_pages == (1, 2, 3)
    assert violation.history is not None
    assert [event.what for event in violation.history.events] == ["allocated", "retired", "quarantined"]
    assert aborted(judgement) == judgement.withheld == {"a"}
    assert judgement.aborts[0].foreign_pages == {"main": (2,)}
    assert judgement.evict == (("main", 2),)


def test_a_page_handed_to_someone_else_names_its_new_owner(rig: Rig) -> None:
    """Freed under its reader and given to another, the page is stale: the report knows both tags and the owner."""
    promised = rig.guard._books.tables[0].tag(3)
    rig.guard.retire([3])
    rig.allocate("c", 3)
    judgement = rig.run("a", "b", "c")
    (violation,) = judgement.violations
    assert (violation.kind, violation.request, violation.column, violation.page) == (Kind.STALE_PAGE, "a", 2, 3)
    assert violation.owner == "c"
    assert violation.expected_tag == promised
    assert violation.found_tag == rig.guard._books.tables[0].tag(3) != promised
    assert judgement.withheld == {"a"}, "the new owner goes on"
    assert judgement.aborts[0].foreign_pages == {"main": (3,)}


def test_a_double_allocation_costs_the_earlier_claimant(rig: Rig) -> None:
    """Handed out twice, the page belongs to whom it was given last."""
    rig.allocate("c", 1)
    assert kinds(rig.run("a", "b", "c")) == {"a": Kind.STALE_PAGE}


def test_every_sharer_of_a_lost_page_is_flagged(backend: str) -> None:
    """Three requests that share a page lose it together; one that does not goes on."""
    rig = Rig(backend=backend, proofs=TAG_ONLY)
    rig.start("a", "b", "c", "d")
    rig.allocate("a", 1, 2)
    rig.allocate("d", 6)
    rig.run("a", "d")
    rig.guard.publish("a", 0, "k")
    rig.adopt("b", ("k", 1))
    rig.adopt("c", ("k", 1))
    assert rig.run("a", "b", "c", "d").clean
    rig.guard.retire([1])
    judgement = rig.run("a", "b", "c", "d")
    assert judgement.withheld == aborted(judgement) == {"a", "b", "c"}
    assert set(kinds(judgement).values()) == {Kind.VACANT_PAGE}


def test_swapped_pages_of_a_row_are_found_at_the_first_difference(rig: Rig) -> None:
    """The right pages in the wrong order are a foreign row, located from the captured block table."""
    rig.write("a", 1, 3)
    rig.write("a", 2, 2)
    judgement = rig.run("a", "b")
    (violation,) = judgement.violations
    assert (violation.kind, violation.request, violation.column, violation.page) == (Kind.FOREIGN_ROW, "a", 1, 3)
    assert violation.row_entries == (1, 3, 2) and violation.promised_pages == (1, 2, 3)
    assert violation.expected_tag == rig.guard._books.tables[0].tag(2)
    assert judgement.aborts[0].foreign_pages == {}, "all its pages are still its own"


def test_a_row_of_another_request_is_a_foreign_row(rig: Rig) -> None:
    """Reading through another request's row is found, the reader is aborted and the row's owner named."""
    rig.tables["main"][rig.rows["a"], :2] = rig.tables["main"][rig.rows["b"], :2]
    judgement = rig.run("a", "b")
    (violation,) = judgement.violations
    assert (violation.kind, violation.request, violation.column, violation.owner) == (Kind.FOREIGN_ROW, "a", 0, "b")
    assert judgement.withheld == {"a"}


def test_a_row_left_from_a_former_life_is_stale(rig: Rig) -> None:
    """A row that was not rewritten after preemption and resumption names pages that are vacant now."""
    rig.guard.preempt("a")
    rig.guard.retire([1, 2, 3])
    rig.guard.resume("a")
    rig.guard.allocate("a", [6, 7, 8])
    assert kinds(rig.run("a", "b")) == {"a": Kind.VACANT_PAGE}


@pytest.mark.parametrize(
    "entry,kind",
    [(0, Kind.NULL_ENTRY), *((entry, Kind.OUT_OF_RANGE_ENTRY) for entry in (-1, 32, 2**31 - 1))],
)
def test_null_and_out_of_range_entries_are_found_and_located(rig: Rig, entry: int, kind: Kind) -> None:
    """An entry that is nobody's page is reported with its column and its value."""
    rig.tables["main"][rig.rows["b"], 1] = entry
    judgement = rig.run("a", "b")
    (violation,) = judgement.violations
    assert (violation.kind, violation.request, violation.column, violation.page) == (kind, "b", 1, entry)
    assert judgement.withheld == {"b"}
    assert judgement.aborts[0].foreign_pages == {}


def test_a_read_past_the_ledger_is_unrecorded(rig: Rig) -> None:
    """A page that no ledger holds is read: an allocation path was missed, and its row is neutralised in that step."""
    rig.write("a", 3, 9)
    judgement = rig.run("a", "b", ends={"a": 13})
    (violation,) = judgement.violations
    assert (violation.kind, violation.request) == (Kind.UNRECORDED_PAGE, "a")
    assert "13 tokens" in violation.detail and "12" in violation.detail
    assert judgement.withheld == aborted(judgement) == {"a"}
    assert rig.row("a")[:3] == [0, 0, 0]


def test_a_request_with_no_pages_reads_nothing(rig: Rig) -> None:
    """An empty row is clean, whatever its block-table row holds, until it reads a token."""
    rig.tables["main"][rig.rows["c"]] = 99
    assert rig.run("a", "b", "c").clean
    assert kinds(rig.run("a", "b", "c", ends={"c": 1})) == {"c": Kind.UNRECORDED_PAGE}


def test_a_flagged_row_is_neutralised_and_nobody_elses_is(rig: Rig) -> None:
    """Its live entries become the null page, so that it reads nothing of its neighbour; other rows stay."""
    rig.tables["main"][rig.rows["a"], 3] = 77
    rig.guard.retire([2])
    rig.run("a", "b")
    assert rig.row("a")[:4] == [0, 0, 0, 77]
    assert rig.row("b")[:2] == [4, 5]


def test_observing_reports_and_leaves_the_row_alone(backend: str) -> None:
    """With on_violation = observe nothing is neutralised, withheld, aborted or quarantined; it is counted once."""
    rig = Rig(backend=backend, proofs=TAG_ONLY, on_violation="observe")
    rig.start("a")
    rig.allocate("a", 1, 2)
    rig.guard.retire([2])
    for _ in range(2):
        judgement = rig.run("a")
        assert not judgement.withheld and not judgement.aborts and not judgement.evict and not judgement.halt
        assert rig.row("a")[:2] == [1, 2]
    (violation,) = rig.guard.violations
    assert violation.action is Action.OBSERVED and not violation.quarantined
    health = rig.guard.health()
    assert (health.quarantined_pages, health.counters["observed"], health.counters["aborted"]) == (0, 1, 0)


def test_halting_says_so_and_withholds(backend: str) -> None:
    """With on_violation = halt the judgement tells the engine to stop, and the tokens are withheld all the same."""
    rig = Rig(backend=backend, proofs=TAG_ONLY, on_violation="halt")
    rig.start("a", "b")
    rig.allocate("a", 1)
    rig.allocate("b", 2)
    rig.guard.retire([1])
    judgement = rig.run("a", "b")
    assert judgement.halt and judgement.withheld == {"a"}
    assert judgement.violations[0].action is Action.HALTED
    again = rig.run("a", "b")
    assert again.withheld == {"a"} and not again.halt, "nothing new was found"


def test_a_quarantined_page_stays_out_until_reset(rig: Rig) -> None:
    """Not allocated, not adopted, not given back as reusable; reset returns it, and then it may be used."""
    rig.guard.retire([2])
    rig.allocate("c", 2)
    judgement = rig.run("a", "b", "c")
    assert judgement.withheld == {"a"}
    rig.guard.publish("c", 0, "k")
    rig.guard.finish("a")
    rig.start("d")
    assert rig.allocate("d", 2, 6) == [6]
    assert rig.adopt("d", ("k", 2)) == 0
    assert rig.guard.health().quarantined_pages == 1
    rig.guard.finish("c")
    retired = rig.guard.retire([2, 1])
    assert (retired.quarantined, retired.reusable) == ([2], [1])
    assert rig.guard.reset() == [2]
    assert rig.guard.health().quarantined_pages == 0
    assert rig.allocate("d", 2) == [2]
    assert rig.run("b", "d").clean


def test_reset_keeps_what_running_requests_hold(rig: Rig) -> None:
    """A quarantined page that somebody holds is let go of but not returned; publications are gone."""
    rig.guard.retire([2])
    rig.allocate("c", 2)
    rig.run("a", "b", "c")
    rig.guard.publish("b", 0, "k")
    rig.guard.finish("a")
    assert rig.guard.reset() == []
    assert rig.run("b", "c").clean
    rig.start("d")
    rig.guard.adopt("d", [("k", 4)])
    assert rig.guard.page_state(4) is PageState.ALLOCATED
    assert rig.guard.page_state(1) is PageState.VACANT


def test_new_weights_revoke_what_running_requests_hold(rig: Rig) -> None:
    """After reset(revoke_held=True) every request that reads its old pages is flagged; new pages are fine."""
    rig.guard.reset(revoke_held=True)
    rig.allocate("c", 9)
    assert kinds(rig.run("a", "b", "c")) == {"a": Kind.STALE_PAGE, "b": Kind.STALE_PAGE}


def test_pages_of_several_pools_are_proven_apart(backend: str) -> None:
    """The same page ids live in each pool on their own, and a fault names its pool."""
    local = PoolSpec(name="local", num_pages=16, page_size=4)
    state = PoolSpec(name="state", num_pages=8, page_size=None)
    rig = Rig(MAIN, local, state, backend=backend, proofs=TAG_ONLY)
    rig.start("a", "b")
    for request, pages in (("a", (1, 2)), ("b", (3, 4))):
        rig.allocate(request, *pages)
        rig.allocate(request, *pages, pool="local")
        rig.allocate(request, pages[0], pool="state")
    assert rig.run("a", "b").clean
    rig.guard.retire([4], pool="local")
    rig.guard.retire([1], pool="state")
    judgement = rig.run("a", "b")
    assert {(v.request, v.pool, v.column, v.page) for v in judgement.violations} == {
        ("a", "state", 0, 1),
        ("b", "local", 1, 4),
    }
    foreign = {abort.request: abort.foreign_pages for abort in judgement.aborts}
    assert foreign == {"a": {"state": (1,)}, "b": {"local": (4,)}}
    assert judgement.evict == (("local", 4), ("state", 1))
    assert rig.allocate("b", 1, pool="state") == [], "quarantined in this pool"
    rig.guard.finish("a")
    assert rig.guard.retire([1]).reusable == [1], "not quarantined in that one"


@pytest.mark.parametrize("split", [2, 4])
def test_kernel_pages_smaller_than_manager_pages(backend: str, split: int) -> None:
    """With split pages every piece counts: a lost page and a displaced piece are both found, in manager columns."""
    rig = Rig(PoolSpec(name="main", num_pages=16, page_size=8, split=split), backend=backend, proofs=TAG_ONLY)
    rig.start("a", "b")
    rig.allocate("a", 3, 4, 5)
    rig.allocate("b", 6, 7)
    assert rig.run("a", "b").clean
    rig.tables["main"][rig.rows["b"], 2 * split - 1] = 3 * split + 1
    rig.guard.retire([5])
    found = {v.request: (v.kind, v.column, v.page) for v in rig.run("a", "b").violations}
    assert found == {"a": (Kind.VACANT_PAGE, 2, 5), "b": (Kind.SPLIT_ENTRY, 1, 3)}
    assert rig.row("a")[: 3 * split] == [0] * 3 * split


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_page_sizes_count_in_tokens(backend: str, page_size: int) -> None:
    """A step may read up to the last token of its last page and not one more, whatever the page size."""
    rig = Rig(PoolSpec(num_pages=16, page_size=page_size), backend=backend, proofs=TAG_ONLY)
    rig.start("a", "b")
    rig.allocate("a", 1, 2, 3)
    rig.allocate("b", 4)
    assert rig.run("a", "b").clean
    assert rig.run("a", "b", ends={"a": 3 * page_size - page_size + 1}).clean
    rig.guard.retire([2])
    judgement = rig.run("a", "b", ends={"b": page_size + 1})
    assert kinds(judgement) == {"a": Kind.VACANT_PAGE, "b": Kind.UNRECORDED_PAGE}


def test_dropped_window_columns_are_not_read_and_gaps_are_kept(rig: Rig) -> None:
    """Columns that left a sliding window, and gaps, may hold anything; the columns around them are still proven."""
    assert rig.guard.drop("a", 0, 1) == [1]
    assert rig.guard.retire([1]).reusable == [1]
    rig.guard.skip("b", 2)
    rig.columns["b", "main"] = 4
    rig.allocate("b", 7)
    rig.tables["main"][rig.rows["a"], 0] = 30
    rig.tables["main"][rig.rows["b"], 2:4] = -9
    assert rig.run("a", "b").clean
    assert rig.row("b")[:5] == [4, 5, -9, -9, 7]
    rig.guard.retire([7])
    rig.guard.retire([3])
    found = {v.request: (v.column, v.page) for v in rig.run("a", "b").violations}
    assert found == {"a": (2, 3), "b": (4, 7)}


def test_a_truncated_tail_is_not_read(rig: Rig) -> None:
    """Columns given back by truncate may be freed and reused; the rest of the row is still proven."""
    assert rig.guard.truncate("a", 1) == [2, 3]
    assert rig.guard.retire([2, 3]).reusable == [2, 3]
    rig.allocate("c", 2)
    assert rig.run("a", "b", "c", ends={"a": 4}).clean
    assert kinds(rig.run("a", ends={"a": 5})) == {"a": Kind.UNRECORDED_PAGE}


@pytest.mark.parametrize("key,page,kind", [("old", 4, Kind.STALE_PAGE), ("k", 9, Kind.VACANT_PAGE)])
def test_a_wrong_cache_hit_is_found_without_the_control_plane(rig: Rig, key: str, page: int, kind: Kind) -> None:
    """A hit on other content or on a vacant page is let through by the host, and fails on the device."""
    rig.guard.publish("b", 0, "k")
    rig.start("d")
    assert rig.adopt("c", (key, page)) == rig.adopt("d", ("k", 4)) == 1
    judgement = rig.run("a", "b", "c", "d")
    assert kinds(judgement) == {"c": kind}
    assert judgement.withheld == {"c"}


def test_an_unpublished_page_is_still_its_holders(rig: Rig) -> None:
    """Leaving the cache takes nothing away from who holds the page."""
    rig.guard.publish("a", 0, "k")
    rig.guard.unpublish([1, -1, 99])
    assert rig.guard.page_state(1) is PageState.ALLOCATED
    assert rig.run("a", "b").clean


def test_a_condemned_request_is_withheld_until_it_ends_and_reported_once(rig: Rig) -> None:
    """While the engine has not ended an aborted request its tokens stay withheld, without another report."""
    rig.write("a", 1, 9)
    assert rig.run("a", "b").withheld == {"a"}
    for column in range(3):
        rig.write("a", column, column + 1)
    judgement = rig.run("a", "b")
    assert judgement.withheld == {"a"} and not judgement.violations and not judgement.aborts
    assert rig.row("a")[:3] == [0, 0, 0]
    assert rig.guard.health().counters["aborted"] == 1


def test_more_lost_pages_of_a_request_make_one_report(rig: Rig) -> None:
    """All pages it lost are quarantined, foreign and to be evicted; the report counts the others."""
    rig.guard.retire([1, 3])
    judgement = rig.run("a", "b")
    (violation,) = judgement.violations
    assert violation.column == 0 and violation.detail == "1 more of its pages are not its own"
    assert judgement.aborts[0].foreign_pages == {"main": (1, 3)}
    assert judgement.evict == (("main", 1), ("main", 3))
    assert rig.guard.retire([2]).reusable == [2]
    assert rig.guard.health().quarantined_pages == 2


def test_without_a_null_page_a_row_is_flagged_but_not_neutralised(backend: str) -> None:
    """A pool without a null page has nowhere harmless to point to; page 0 is a page like any other."""
    rig = Rig(PoolSpec(num_pages=8, page_size=4, null_page=None), backend=backend, proofs=TAG_ONLY)
    rig.start("a")
    rig.allocate("a", 0, 1)
    assert rig.run("a").clean
    rig.guard.retire([1])
    assert rig.run("a").withheld == {"a"}
    assert rig.row("a")[:2] == [0, 1]


def test_many_requests_outgrow_the_row_arrays_and_stay_apart(backend: str) -> None:
    """With more requests than the first capacity, each row is still checked against its own ledger."""
    rig = Rig(PoolSpec(num_pages=600, page_size=4), backend=backend, rows=200, proofs=TAG_ONLY)
    names = [f"r{index}" for index in range(200)]
    rig.start(*names)
    for index, name in enumerate(names):
        rig.allocate(name, 3 * index + 1, 3 * index + 2)
    assert rig.run(*names).clean
    rig.guard.retire([3 * 150 + 2])
    judgement = rig.run(*names)
    assert judgement.withheld == {"r150"}


def test_only_pages_that_are_nobodys_or_somebody_elses_are_foreign(rig: Rig) -> None:
    """Vacant or handed on, a page is out of the request's hands; handed to itself again, it gives it back as ever."""
    rig.guard.retire([1, 2])
    rig.allocate("c", 2)
    rig.guard.allocate("a", [3])
    judgement = rig.run("a", "b", "c")
    assert aborted(judgement) == {"a"}
    assert {page for _, page in judgement.evict} == {1, 2, 3}, "all of them were lost"
    assert judgement.aborts[0].foreign_pages == {"main": (1, 2)}


def test_a_page_that_is_shared_with_others_after_it_was_lost_is_foreign(rig: Rig) -> None:
    """The request holds it under a new life together with somebody else: giving it back would take it from them."""
    rig.guard.allocate("a", [3])
    rig.guard.publish("a", 3, "k")
    rig.adopt("c", ("k", 3))
    assert rig.run("a").aborts[0].foreign_pages == {"main": (3,)}


@pytest.mark.parametrize("how", ["retired", "taken-over", "retired-and-reused", "revoked"])
def test_a_stale_hit_that_is_let_through_expects_what_was_published_then(rig: Rig, how: str) -> None:
    """The ledger holds the tag that the page had under that key; however the page moved on, the row is flagged."""
    rig.guard.publish("b", 0, "k")
    former = rig.guard._books.tables[0].tag(4)
    if how == "revoked":
        rig.guard.reset(revoke_held=True)
    rig.guard.finish("b")
    if how.startswith("retired"):
        rig.guard.retire([4])
    rig.start("d")
    if how in ("taken-over", "retired-and-reused"):
        rig.allocate("d", 4)
    assert rig.adopt("c", ("k", 4)) == 1
    (violation,) = [violation for violation in rig.run("c", "d").violations if violation.request == "c"]
    assert violation.kind is (Kind.VACANT_PAGE if how == "retired" else Kind.STALE_PAGE)
    assert violation.expected_tag == former != violation.found_tag


def test_a_hit_that_nobody_ever_published_expects_what_no_page_has(rig: Rig) -> None:
    """Let through for lack of a control plane, it is flagged on a page that is in order for its holder."""
    assert rig.adopt("c", ("never", 4)) == 1
    (violation,) = rig.run("a", "b", "c").violations
    assert (violation.request, violation.kind) == ("c", Kind.STALE_PAGE)
    assert violation.expected_tag not in {rig.guard._books.tables[0].tag(page) for page in range(32)}
