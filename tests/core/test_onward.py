"""Decode where pages are crossed, made in one call: the same books and messages as by the calls one after the other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.config import GuardConfig
from kvguard.content_key import ContentDomain
from kvguard.kernels.mixing import mix
from kvguard.messages import StepDelta
from kvguard.page_table import Promise
from kvguard.pools import PoolSpec
from tests.core.decoding_twins import DecodingTwins, KeyedTwins, changes, standing
from tests.core.support import MAIN, Rig, aborted, flag
from tests.core.twins import said

onward_module = importlib.import_module("kvguard.onward")


IN_C = onward_module.advance
"""None where kvguard was installed without a C compiler; test_packaging.py says whether it should be there."""


@pytest.fixture(autouse=True, params=["python", "c"] if IN_C is not None else ["python"])
def made_in_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool] | None:
    """Everything below holds with the inner half in Python and in C. Of each call of the latter: was it usual?"""
    if IN_C is None or request.param == "python":
        monkeypatch.setattr(onward_module, "advance", None)
        return None
    advance, made = IN_C, list[bool]()

    def noted(*args: Any) -> Any:
        done = advance(*args)
        made.append(done is not NotImplemented)
        return done

    monkeypatch.setattr(onward_module, "advance", noted)
    return made


def test_onward_is_what_the_calls_one_by_one_come_to(made_in_c: list[bool] | None) -> None:
    """Random decode: the same deltas, books, histories, judgements and counters, and many steps were made in a call."""
    made = 0
    calls = ["step"] * 14 + ["judge"] * 13 + ["start", "start", "finish", "publish", "rewind", "compare"]

    @given(st.integers(0, 2**32), st.lists(st.sampled_from(calls), min_size=40, max_size=160))
    @settings(max_examples=120, deadline=None, derandomize=True, database=None)
    def run(seed: int, chosen: list[str]) -> None:
        nonlocal made
        twins = DecodingTwins(seed)
        for call in ["start", "start", *chosen]:
            if call != "step" or len(twins.in_flight) < 3:
                getattr(twins, call)()
        twins.compare()
        made += twins.onward

    run()
    assert made > 300
    assert made_in_c is None or sum(made_in_c) > made


def test_onward_is_what_the_calls_come_to_where_contents_are_checked(made_in_c: list[bool] | None) -> None:
    """The same bindings, and the same refusals of what a request is not known to hold."""
    made = 0
    calls = ["step"] * 14 + ["judge"] * 13 + ["start", "start", "finish", "publish", "compare"]
    for seed in range(60):
        twins = KeyedTwins(seed)
        for call in ["start", "start", *twins.rng.choices(calls, k=120)]:
            if call != "step" or len(twins.in_flight) < 3:
                getattr(twins, call)()
        twins.compare()
        made += twins.onward
    assert made > 300
    assert made_in_c is None or sum(made_in_c) > made


def decoding(**options: Any) -> Rig:
    """Two requests, one of which needs another page next; their last step is verified."""
    rig = Rig(**options)
    rig.start("a", "b", "idle")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4)
    rig.allocate("idle", 9, 10)
    for ends, starts in (([7, 5], [0, 0]), ([8, 6], [7, 5])):
        assert rig.judge(rig.check(rig.guard.step(["a", "b"], [0, 1], ends, starts))).clean
    return rig


def onward(rig: Rig, grown: list[tuple[int, int]], published: Any = ()) -> StepDelta | None:
    """The step made in one call; its pages go into the block table."""
    delta = rig.guard.step_onward(grown, published)
    for row, page in grown if delta is not None else ():
        rig._append(("a", "b")[row], [page], None)
    return delta


def test_a_page_is_taken_checked_and_given_back(made_in_c: list[bool] | None) -> None:
    """The tag change reaches the device before the check, and the page is held as any other."""
    rig = decoding()
    delta = onward(rig, [(0, 5)])
    assert delta is not None and not delta.again and changes(delta)
    assert rig.guard._books.pending[delta.step].next_tag == rig.guard._books.tags.upcoming
    assert rig.judge(rig.check(delta)).clean
    assert rig.guard.pages("a") == [1, 2, 5]
    again = rig.guard.step_again()
    assert again is not None and rig.judge(rig.check(again)).clean
    assert rig.guard.allocate("b", [5]) == [], "it is a's"
    assert made_in_c in (None, [True])


def test_a_page_that_nobody_told_the_books_of_is_found() -> None:
    """The row reads another page than the one that it was promised."""
    rig = decoding()
    delta = onward(rig, [(0, 5)])
    assert delta is not None
    flag(rig, "a")
    assert aborted(rig.judge(rig.check(delta))) == {"a"}


def test_a_page_published_by_the_step_that_fills_it_is_kept_by_its_verdict(made_in_c: list[bool] | None) -> None:
    """Promised until the step is judged; revoked where the step is flagged."""
    for flagged in (False, True):
        rig = decoding()
        first = onward(rig, [(0, 5)])
        assert first is not None and rig.judge(rig.check(first)).clean
        delta = onward(rig, [], [(1, 1, "key")])
        assert delta is not None and delta.again, "nothing that the device sees has changed"
        assert rig.guard.page_state(4) == "promised"
        if flagged:
            flag(rig, "b")
        assert aborted(rig.judge(rig.check(delta))) == ({"b"} if flagged else set())
        assert rig.guard.page_state(4) == ("allocated" if flagged else "complete")
    assert made_in_c in (None, [True] * 4)


def test_a_page_that_an_earlier_step_filled_is_kept_by_that_one_or_complete(made_in_c: list[bool] | None) -> None:
    """With steps in flight its last token is known late: the step that wrote it answers for it."""
    rig = decoding()
    first = onward(rig, [(0, 5)], [(0, 1, "whole")])
    assert first is not None and rig.guard.page_state(2) == "complete", "the step before wrote it, and is verified"
    second = rig.guard.step_again()
    assert second is not None
    pending = [rig.check(first), rig.check(second)]
    third = onward(rig, [(1, 6)], [(1, 1, "late")])
    assert third is not None
    states = [rig.guard.page_state(4)]
    for found in (*pending, rig.check(third)):
        assert rig.judge(found).clean
        states.append(rig.guard.page_state(4))
    assert states == ["promised", "promised", "complete", "complete"]
    assert made_in_c in (None, [True] * 2)


def test_a_step_in_flight_answers_for_its_own_row(made_in_c: list[bool] | None) -> None:
    """A page that it has filled is kept or not as its writer's row there is proven, whoever else is flagged."""
    for flagged, state in (("a", "complete"), ("b", "allocated")):
        rig = decoding()
        first = onward(rig, [(0, 5)])
        second = rig.guard.step_again()
        assert first is not None and second is not None
        pending = rig.check(first)
        flag(rig, flagged)
        pending_two = rig.check(second)
        third = onward(rig, [(1, 6)], [(1, 1, "late")])
        assert third is not None and rig.guard.page_state(4) == "promised"
        assert [row for row, _ in rig.guard._books.pending[second.step].promises] == [1]
        assert rig.judge(pending).clean
        assert aborted(rig.judge(pending_two)) == {flagged}
        assert rig.guard.page_state(4) == state
    assert made_in_c in (None, [True] * 4)


def test_a_cached_page_that_nobody_holds_is_taken_over_as_it_is(made_in_c: list[bool] | None) -> None:
    """What it held ends with it: its key finds it no more, and who was promised it is told from its new owner."""
    rig = decoding()
    rig.guard.publish("idle", 0, "cached")
    books = rig.guard._books
    assert rig.judge(rig.check(rig.guard.step(["a", "b", "idle"], [0, 1, 2], [8, 6, 8], [8, 6, 0]))).clean
    rig.guard.finish("idle")
    for ends in ([8, 6], [8, 6]):
        step = rig.guard.step(["a", "b"], [0, 1], ends, ends)
        rig.judge(rig.check(step))
    tag = books.tables[0].tag(9)
    assert rig.guard.page_state(9) == "complete" and tag
    assert onward(rig, [(0, 9)]) is not None
    record = books.tables[0].record(9)
    assert record.former == ("cached", tag) and record.publication is None and record.tag != tag
    assert rig.guard.page_state(9) == "allocated" and record.holders == {"a"}


def test_terms_that_were_not_summed_yet_are_in_the_digest() -> None:
    """A ledger that nobody asked for its digest since it grew."""
    rig = decoding()
    ledger = rig.guard._books.state("a").ledgers[0]
    ledger._digest, ledger._summed = mix(ledger._key, 0, ledger.tag(0)), 1
    delta = onward(rig, [(0, 5)])
    assert delta is not None and rig.judge(rig.check(delta)).clean


def test_rows_of_which_nobody_said_where_they_write_go_as_far_as_their_pages() -> None:
    """And no further."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4, 6, 7)
    for end in (7, 8):
        assert rig.judge(rig.check(rig.guard.step(["a", "b"], [0, 1], [end, end]))).clean
    assert onward(rig, [(0, 5)]) is not None
    assert [rig.guard.step_again() is not None for _ in range(4)] == [True, True, True, False], "it ends at 12"


def _other_tag(rig: Rig) -> None:
    rig.guard._books.tables[0].record(3).tag += 1


def _promised(rig: Rig) -> None:
    rig.guard._books.tables[0].record(3).promise = Promise("main", 3, 0, rig.guard._books.state("b"), 4)


def _stall(rig: Rig) -> None:
    rig.guard._books.state("b").stalled = True


NOT_ONWARD: dict[str, tuple[Callable[[Rig], Any], list[tuple[int, int]], list[tuple[int, int, Hashable]]]] = {
    "a page that another request holds": (lambda rig: None, [(0, 9)], []),
    "the null page": (lambda rig: None, [(0, 0)], []),
    "a page outside the pool": (lambda rig: None, [(0, MAIN.num_pages)], []),
    "one page for two": (lambda rig: None, [(0, 5), (1, 5)], []),
    "two pages for one": (lambda rig: None, [(0, 5), (0, 6)], []),
    "a row that needs a page and gets none": (lambda rig: None, [(1, 5)], []),
    "a page that is published already": (lambda rig: rig.guard.publish("b", 0, "old"), [(0, 5)], [(1, 0, "key")]),
    "a page that is published twice": (lambda rig: None, [(0, 5)], [(1, 0, "key"), (1, 0, "other")]),
    "a page that the step does not fill": (lambda rig: None, [(0, 5)], [(1, 1, "key")]),
    "a column that is not there": (lambda rig: None, [(0, 5)], [(1, 7, "key")]),
    "a request that is condemned": (lambda rig: rig.guard._books.marked.add(rig.guard._books.state("a")), [(0, 5)], []),
    "a ledger that has changed": (lambda rig: rig.allocate("b", 6), [(0, 5)], []),
    "a page in quarantine": (lambda rig: rig.guard._books.quarantine_page(0, 20), [(0, 5)], []),
    "a gap at the end": (lambda rig: _gap(rig), [(0, 5)], []),
    "a page that the row has no more": (_other_tag, [(0, 5)], [(1, 0, "key")]),
    "a tag that changes": (lambda rig: rig.guard._books.tables[0].take_writer(9), [(0, 5)], []),
    "violations that have other consequences now": (lambda rig: _observe(rig), [(0, 5)], []),
    "a page that is promised already": (_promised, [(0, 5)], [(1, 0, "key")]),
}


def _observe(rig: Rig) -> None:
    rig.guard._books.config = GuardConfig.load(seed=7, on_violation="observe")


def _gap(rig: Rig) -> None:
    rig.guard.skip("a", 1)
    delta = rig.guard.step(["a", "b"], [0, 1], [8, 6], [8, 6])
    rig.judge(rig.check(delta))


@pytest.mark.parametrize("case", NOT_ONWARD)
def test_whatever_takes_a_closer_look_is_left_to_the_long_way(case: str) -> None:
    """None is answered, no number is taken, and the books are as they were."""
    rig = decoding()
    prepare, grown, published = NOT_ONWARD[case]
    prepare(rig)
    before, step = standing(rig.guard), rig.guard._books.step
    assert rig.guard.step_onward(grown, published) is None
    assert standing(rig.guard) == before and rig.guard._books.step == step


def test_a_step_without_rows_takes_the_long_way() -> None:
    """As `step_again` has it: there is nothing that could be a token further."""
    rig = Rig()
    rig.guard.step([], [], [], [])
    assert rig.guard.step_again() is None and rig.guard.step_onward([]) is None
    assert rig.guard._books.step == 1


def test_what_is_made_in_passing_has_all_that_its_class_has(made_in_c: list[bool] | None) -> None:
    """A record and a promise that C made lack no field that their class would set, today or once it has another one."""
    rig = decoding()
    first = onward(rig, [(0, 5)])
    assert first is not None and rig.judge(rig.check(first)).clean
    assert 5 in rig.guard._books.tables[0]._records and onward(rig, [], [(1, 1, "key")]) is not None
    record, promised = (rig.guard._books.tables[0].record(page) for page in (5, 4))
    assert promised.promise is not None and made_in_c in (None, [True] * 2)
    for made in (record, promised.promise):
        assert [name for name in type(made).__slots__ if not hasattr(made, name)] == []


def test_a_request_that_is_listed_twice_takes_the_long_way() -> None:
    """Each of its rows would take the page."""
    rig = Rig()
    rig.start("a")
    rig.allocate("a", 1, 2)
    for end, start in ((7, 0), (8, 7)):
        rig.guard.step(["a", "a"], [0, 1], [end] * 2, [start] * 2)
    assert rig.guard.step_onward([(0, 5), (1, 6)]) is None


def test_a_page_ahead_does_not_move_the_floor() -> None:
    """The row goes on within the page that it writes; in the next one its floor is another."""
    rig = decoding()
    assert onward(rig, [(0, 5), (1, 6)]) is not None
    assert rig.guard.step_again() is not None, "b stands at 8, with a page ahead"
    assert rig.guard.step_again() is None


def test_what_was_kept_of_the_batch_is_kept_up_to_date() -> None:
    """A step made in full behind one that was made in a call finds nothing to do, and can be made again."""
    rig = decoding()
    delta = onward(rig, [(0, 5)])
    assert delta is not None
    with pytest.raises(ValueError, match="read-only"):
        delta.packed[0] = 1
    long = rig.guard.step(["a", "b"], [0, 1], [10, 8], [9, 7])
    assert np.shares_memory(long.packed, delta.packed), "no row had to be looked at"
    assert said(long)[1:] == said(delta)[1:]
    rig.guard.allocate("b", [6])
    rig.guard.step(["a", "b"], [0, 1], [11, 9], [10, 8])
    assert rig.guard.step_again() is not None, "a has room up to 12"


def test_a_stalled_request_publishes_nothing_in_passing() -> None:
    """What it writes is not known to be whole: the long way makes a promise that is never kept."""
    rig = decoding()
    assert onward(rig, [(0, 5)]) is not None
    _stall(rig)
    assert rig.guard.step_onward([], [(1, 1, "key")]) is None


def test_a_page_that_is_promised_is_not_taken_in_passing() -> None:
    """Its promise has to be revoked first."""
    rig = decoding()
    books = rig.guard._books
    books.tables[0].record(20).promise = Promise("main", 20, 0, books.state("b"), 4)
    assert rig.guard.step_onward([(0, 20)]) is None
    assert rig.guard.step_onward([(0, 21)]) is not None


@pytest.mark.parametrize("tokens", [None, 7, 8])
def test_a_page_is_published_in_passing_with_what_it_holds(tokens: int | None) -> None:
    """Where the request is not known to hold as much, nothing is done: the long way says why."""
    rig = Rig(level="keys")
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    domain = ContentDomain(model="m")
    if tokens is not None:
        rig.guard.identify("a", domain, list(range(tokens)))
    for end, start in ((6, 0), (7, 6)):
        assert rig.judge(rig.check(rig.guard.step(["a"], [0], [end], [start]))).clean
    delta = rig.guard.step_onward([], [(0, 1, "key")])
    assert (delta is not None) == (tokens == 8)
    binding = rig.guard._books.tables[0].record(2).content
    assert (binding is not None) == (tokens == 8)
    if delta is not None and binding is not None:
        assert binding.key.tokens == 8 and binding.domain == domain and binding.publisher == "a"
        assert rig.judge(rig.check(delta)).clean and rig.guard.page_state(2) == "complete"
    assert rig.guard.violations == ()


def test_several_pools_take_the_long_way() -> None:
    """There a row may need a page of another pool."""
    rig = Rig(MAIN, PoolSpec(name="other", num_pages=32, page_size=4))
    rig.start("a")
    for pool in rig.pools:
        rig.allocate("a", 1, 2, pool=pool.name)
    for end, start in ((7, 0), (8, 7)):
        rig.guard.step(["a"], [0], [end], [start])
    assert rig.guard.step_onward([(0, 5)]) is None
    assert np.count_nonzero(rig.tables["main"][0]) == 2


def test_several_pools_take_the_long_way_though_nothing_is_taken() -> None:
    """Rows of another pool may have gone on, too."""
    rig = Rig(MAIN, PoolSpec(name="other", num_pages=32, page_size=4))
    rig.start("a")
    for pool in rig.pools:
        rig.allocate("a", 1, 2, pool=pool.name)
    for end in (5, 6):
        rig.guard.step(["a"], [0], [end], [end - 1])
    assert rig.guard.step_onward([]) is None
    assert rig.guard.step_again() is not None
