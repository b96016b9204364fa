"""What is kept from one step to the next, and the short way of every page call, change no answer and no delta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import structlog
from hypothesis import HealthCheck, Phase, given, settings

from kvguard.guard import UsageError
from kvguard.kernels.mixing import mix, signed64
from kvguard.ledger import VECTOR_TERMS
from kvguard.messages import NO_WRITER, StepDelta
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs
from tests.core.random_world import WEIGHTS, World
from tests.core.support import MAIN, Rig, aborted

STEADY = {**WEIGHTS, "step": 60, "judge": 50, "allocate_each": 20, "start": 4, "finish": 1, "preempt": 1, "reset": 1}
OPERATIONS = [operation for operation, weight in STEADY.items() for _ in range(weight)]


class SteadyWorld(World):
    """Mostly the same requests in the same order in every step, as in decode; keeps every delta."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.deltas: list[StepDelta] = []
        self.shared = 0

    def batch(self) -> list[str]:
        return list(self.row) if self.chance(85) else super().batch()

    def step(self) -> None:
        before = len(self.unverified)
        super().step()
        if len(self.unverified) > before:
            delta = self.unverified[-1][0]
            self.shared += bool(self.deltas) and delta.packed is self.deltas[-1].packed
            self.deltas.append(delta)


class LongWayWorld(SteadyWorld):
    """Nothing is kept between steps, every request is looked at in each, and every page is looked at closely."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        table: Any = self.guard._books.tables[0]
        allocate_each = table.allocate_each

        def one_at_a_time(pages: Any, requests: Any, *, whatever: bool = False) -> list[int]:
            tags: list[int] = allocate_each(pages, requests, whatever=True) if whatever else []
            return tags

        table.allocate_each = one_at_a_time
        table.retire_idle = lambda pages, by: 0
        table.may_be_handed_out = lambda pages: False

    def step(self) -> None:
        books = self.guard._books
        books.batch = None
        books.rows.touched.update(books.requests.values())
        books.marked.update(books.requests.values())
        super().step()


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """No log lines."""

    def drop(*_: Any) -> Any:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])
    yield
    structlog.reset_defaults()


def contents(delta: StepDelta) -> list[Any]:
    """What a delta says, wherever its arrays lie."""
    said: list[Any] = [delta.step, delta.requests, delta.enforce]
    for section in delta.sections:
        spans = (
            section.tag_pages, section.tag_values, section.table_row, section.expected, section.extent_offset,
            section.extent_start, section.extent_stop,
        )  # fmt: skip
        said += [section.pool, section.columns, [delta.array(span).tolist() for span in spans]]
    return said


def histories(world: World) -> list[Any]:
    return [world.guard._books.recorder.history("main", page) for page in range(12)]


def steady(*pools: PoolSpec) -> Rig:
    rig = Rig(*pools)
    rig.start("a", "b")
    for pool in rig.pools:
        rig.allocate("a", 1, 2, pool=pool.name)
        rig.allocate("b", 3, 4, pool=pool.name)
    assert rig.run("a", "b").clean
    return rig


def test_a_step_in_which_nothing_changed_sends_the_very_same_array() -> None:
    """Arrays and sections of the step before; nobody can write into what several steps share."""
    rig = steady()
    first, second = rig.delta("a", "b"), rig.delta("a", "b")
    assert second.packed is first.packed and second.sections is first.sections and second.requests is first.requests
    assert (first.step, second.step) == (2, 3)
    with pytest.raises(ValueError, match="read-only"):
        first.packed[0] = 1


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize(
    "change", ["allocate", "drop", "gap", "no gap", "order", "names", "rows", "successors", "preempted", "other pool"]
)
def test_whatever_changes_between_two_steps_is_in_the_next_delta(change: str, quiet: bool) -> None:
    """A delta that was handed over stays as it was; the next one says what the books say now.

    After a quiet step, a change that moves no tag leaves the number of tag changes what it was.
    """
    rig = steady(MAIN, PoolSpec(name="other", num_pages=16, page_size=None))
    rig.allocate("a", 8)
    if change == "no gap":
        rig.guard.drop("a", 1, 2)
    if quiet:
        rig.delta("a", "b")
    before = rig.delta("a", "b")
    kept = contents(before)
    names, rows, ends = ["a", "b"], [0, 1], [8, 8]
    if change == "allocate":
        rig.allocate("a", 7)
    elif change == "drop":
        rig.guard.drop("b", 0, 1)
    elif change == "gap":
        rig.guard.drop("a", 1, 2)
    elif change == "no gap":
        rig.guard.drop("a", 0, 1)
    elif change == "order":
        names, rows = ["b", "a"], [1, 0]
    elif change == "names":
        names = ["b", "a"]
    elif change == "rows":
        rows = [1, 0]
    elif change == "successors":
        for name in names:
            rig.guard.finish(name)
        for name, page in zip(names, (9, 10), strict=True):
            rig.guard.start(name)
            rig.guard.allocate(name, [page])
        ends = [4, 4]
    elif change == "preempted":
        rig.guard.preempt("a")
        ends = [0, 8]
    else:
        rig.allocate("b", 5, pool="other")
    after = rig.guard.step(names, rows, ends)
    assert contents(before) == kept
    assert after.packed is not before.packed
    key = rig.guard.setup.digest_key
    for index, section in enumerate(after.sections):
        ledgers = [rig.guard._books.state(name).ledgers[index] for name in names]
        wanted = [sum(mix(key, column, tag) for column, _, tag in ledger.entries()) for ledger in ledgers]
        assert after.array(section.expected).tolist() == [signed64(digest) for digest in wanted]
        extents = [ledger.extents or [(0, 0)] for ledger in ledgers]
        assert after.array(section.extent_start).tolist() == [start for row in extents for start, _ in row]
        assert after.array(section.extent_stop).tolist() == [stop for row in extents for _, stop in row]
        assert after.array(section.extent_offset).tolist() == [0, len(extents[0]), len(extents[0]) + len(extents[1])]
        assert section.columns == max(stop for row in extents for _, stop in row)
        assert after.array(section.table_row).tolist() == rows


def test_progress_of_a_kept_batch_counts_for_this_incarnation_only() -> None:
    """A request that was preempted after its step was made has computed nothing when the verdict comes."""
    rig = steady()
    pending = rig.launch("a", "b")
    rig.guard.preempt("a")
    assert rig.judge(pending).clean
    assert [rig.guard._books.state(name).computed for name in ("a", "b")] == [0, 8]


def test_pages_for_many_requests_at_once() -> None:
    """Each request gets its own page, the places of refused ones are named, and nonsense changes nothing."""
    rig = Rig()
    rig.start("a", "b", "c")
    assert rig.guard.allocate_each(["a", "b", "a"], [1, 2, 3]) == []
    assert rig.guard.allocate_each(["a", "b", "c", "b"], [4, 2, 99, 5]) == [1, 2]
    held = {name: [page for _, page, _ in rig.guard._books.state(name).ledgers[0].entries()] for name in "abc"}
    assert held == {"a": [1, 3, 4], "b": [2, 5], "c": []}
    for requests, pages in ((["a", "nobody"], [6, 7]), (["a"], [6, 7]), (["a"], ["6"])):
        with pytest.raises(UsageError):
            rig.guard.allocate_each(requests, pages)  # type: ignore[arg-type]
    assert rig.guard.allocate("a", [6, 7]) == [6, 7]


def test_the_digest_of_many_new_columns_is_the_sum_of_their_terms() -> None:
    """A prefill's columns, gaps among them, are summed as an array; crossings one by one; the digest is the same."""
    rig = Rig(PoolSpec(name="main", num_pages=256, page_size=4), columns=128)
    rig.start("a")
    guard, ledger = rig.guard, rig.guard._books.state("a").ledgers[0]
    page = 0
    for count in (1, 2, VECTOR_TERMS - 1, VECTOR_TERMS, 60, 1):
        guard.skip("a", 1 + count % 2)
        pages = list(range(page + 1, page + count + 1))
        page += count
        assert guard.allocate("a", pages) == pages
        delta = guard.step(["a"], [0], [0])
        wanted = sum(mix(guard.setup.digest_key, column, tag) for column, _, tag in ledger.entries())
        assert delta.array(delta.sections[0].expected).tolist() == [signed64(wanted)]
        assert ledger.digest == wanted % 2**64
    assert np.array_equal(delta.array(delta.sections[0].extent_offset), [0, ledger.extent_count])


def test_inputs_that_fit_the_last_step_are_looked_at_again_for_more_rows() -> None:
    """The same object may cover two rows and not three."""
    rig = Rig()
    rig.start("a", "b", "c")
    slots, starts = np.zeros(2, np.int64), np.array([0, 1, 2], np.int64)
    given = {"main": PoolInputs(table=rig.tables["main"], slot_mapping=slots, query_start=starts)}
    assert rig.judge(rig.verifier.check(rig.delta("a", "b"), given)).clean
    with pytest.raises(ValueError, match="covers 2 batch rows, the step has 3"):
        rig.verifier.check(rig.delta("a", "b", "c"), given)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_batch_in_the_order_of_the_block_table_needs_no_list_of_places(backend: str) -> None:
    """A flagged row's slots are those at the place that its table row names."""
    rig = Rig(backend=backend)
    rig.start("a", "b")
    rig.allocate("a", 1)
    rig.allocate("b", 2)
    slots, starts = np.array([4, 8], np.int64), np.array([0, 1, 2], np.int64)
    wrapped = rig._wrap({"table": rig.tables["main"], "slots": slots, "starts": starts})  # type: ignore[dict-item]
    rig.tables["main"][0, 0], rig.tables["main"][1, 0] = 2, 31
    given = PoolInputs(
        table=wrapped["table"], slot_mapping=wrapped["slots"], query_start=wrapped["starts"], place_is_row=True
    )
    delta = rig.guard.step(["a", "b"], [0, 0], [4, 4])
    judgement = rig.judge(rig.verifier.check(delta, {"main": given}, table_rows=[1, 0]))
    assert judgement.withheld == {"a"}
    assert slots.tolist() == [4, -1]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_verdicts_and_evidence_of_a_step_are_its_own_however_late_they_are_read(backend: str) -> None:
    """Twelve steps are verified before the first verdict is read; one of them found a foreign page."""
    rig = Rig(backend=backend, on_violation="observe", steps_in_flight_max=16)
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4)
    pending = []
    for step in range(12):
        tables = {"main": rig.tables["main"].copy()}
        if step in (4, 7):
            tables["main"][0, 1] = 20 + step
        pending.append(rig.check(rig.delta("a", "b"), tables))
    found = [verdicts.resolve() for verdicts in pending]
    assert [step for step, verdicts in enumerate(found) if verdicts.evidence] == [4, 7]
    for step in (4, 7):
        evidence = found[step].evidence["main"]
        assert [(one.row, one.entries.tolist()[:2]) for one in evidence] == [(0, [1, 20 + step])]


def test_a_row_that_is_being_ended_does_not_spoil_what_later_steps_share() -> None:
    """Its expectation is unmeetable in every delta until it has ended, and no delta that left is written to."""
    rig = steady()
    rig.write("a", 1, 31)
    flagged = rig.launch("a", "b")
    healthy = rig.guard._books.batch
    assert healthy is not None and healthy.body is not None
    expected = healthy.body.tolist()
    assert aborted(rig.judge(flagged)) == {"a"}
    for _ in range(3):
        delta = rig.delta("a", "b")
        first = delta.sections[0].expected[0]
        spoilt = [word ^ 1 if place == first else word for place, word in enumerate(expected)]
        spoilt[delta.sections[0].writer[0]] = NO_WRITER
        assert delta.packed.tolist() == spoilt
        assert healthy.body.tolist() == expected


def test_held_and_quarantined_pages_are_vetted_closely() -> None:
    """Vetting refuses what may not be handed out; the question whether it would refuse anything reports nothing."""
    rig = Rig()
    rig.start("a", "b")
    rig.allocate("a", 1)
    rig.allocate("b", 2)
    assert rig.guard.may_take_over([3, 4]) and rig.guard.vet([3, 4]) == []
    for wrong in (1, 0, 32, -1):
        assert not rig.guard.may_take_over([3, wrong])
    assert rig.guard.violations == ()
    assert rig.guard.vet([3, 1, 4]) == [1]
    rig.guard.retire([2], by="b")
    assert aborted(rig.run("a", "b")) == {"b"}
    rig.guard.finish("b")
    assert rig.guard.quarantined(2)
    assert not rig.guard.may_take_over([3]) and rig.guard.vet([3, 2]) == [2]


@pytest.mark.parametrize(("enforce", "control"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_short_way_and_the_long_way_say_the_same(enforce: bool, control: bool) -> None:
    """The same random operations with nothing kept between steps give the same deltas, verdicts and histories."""
    shared = 0

    @given(st.integers(0, 2**32), st.lists(st.sampled_from(OPERATIONS), min_size=30, max_size=90))
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking two worlds at once takes minutes
    )
    def run(seed: int, operations: list[str]) -> None:
        nonlocal shared
        short = SteadyWorld(seed, enforce=enforce, control=control)
        long = LongWayWorld(seed, enforce=enforce, control=control)
        for operation in ["start", "start", "start", *operations]:
            short.perform(operation)
            long.perform(operation)
            assert histories(short) == histories(long), operation
        assert [contents(delta) for delta in short.deltas] == [contents(delta) for delta in long.deltas]
        for ours, theirs in zip(short.guard.violations, long.guard.violations, strict=True):
            assert (ours.kind, ours.request, ours.page, ours.detail) == (
                theirs.kind, theirs.request, theirs.page, theirs.detail,
            )  # fmt: skip
        shared += short.shared

    run()
    assert shared > 20, "steps in which nothing had changed"
