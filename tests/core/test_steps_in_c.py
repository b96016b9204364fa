"""The small loops of a step in C against Python, and a step that is checked like the last one."""

from __future__ import annotations

import importlib
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.kernels.scatter_tags.reference import scatter_tags
from kvguard.page_table import Promise
from tests.core.decoding_twins import standing
from tests.core.support import MAIN, Rig

torch = pytest.importorskip("torch")
books_module, onward_module, verifier_module = (
    importlib.import_module(f"kvguard.{name}") for name in ("books", "onward", "verifier")
)
in_c = pytest.mark.skipif(
    onward_module.grown_in_c is None, reason="NOT TESTED IN C: kvguard was installed without a C compiler"
)
WAYS = ["python", *(["c"] if onward_module.grown_in_c is not None else [])]


@pytest.mark.parametrize("way", WAYS)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 0, 1, 1, -1, 2])), max_size=6))
@settings(max_examples=200, deadline=None)
def test_lists_that_have_grown_by_one(way: str, rows: list[tuple[int, int]]) -> None:
    """Which, and by what; None where one has shrunk, has grown by more, or is not there."""
    names = [f"r{row}" for row in range(len(rows))]
    lists: defaultdict[str, list[Any]] = defaultdict(list)
    for name, (known, by) in zip(names, rows, strict=True):
        lists[name] = [object()] * max(0, known + by)
    lists["idle"] = [object()]
    counts = [known for known, _ in rows]
    grown = [place for place, (known, _) in enumerate(rows) if len(lists[names[place]]) == known + 1]
    odd = any(len(lists[name]) not in (known, known + 1) for name, known in zip(names, counts, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        if way == "python":
            patch.setattr(onward_module, "grown_in_c", None)
        found = onward_module.grown_by_one(names, lists, counts)
        assert found == (None if odd else [(place, lists[names[place]][-1]) for place in grown])
        assert onward_module.grown_by_one(["gone"], lists, [2]) is None and "gone" not in lists


@in_c
def test_what_is_no_list_has_not_grown() -> None:
    """An engine that keeps its blocks otherwise takes the long way; a call that makes no sense says so."""
    assert onward_module.grown_in_c(["a"], {"a": (1, 2)}, [1]) is None
    assert onward_module.grown_in_c(["a"], {"a": [1, 2]}, [1 << 70]) is None
    calls: list[Any] = [(["a"], {}, []), (("a",), {}, [1]), (["a"], None, [1]), (["a"], {})]
    for wrong in calls:
        with pytest.raises(TypeError):
            onward_module.grown_in_c(*wrong)


class Settled:
    """A guard with promises of one step, some of which are not as they were when the step was made."""

    def __init__(self, seed: int, depth: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(MAIN, recorder_events_per_page=depth)
        books = self.books = self.rig.guard._books
        self.rig.start("a", "b")
        self.promises: list[tuple[int, Promise]] = []
        for page in range(1, self.rng.randint(2, 31)):
            name = self.rng.choice("ab")
            self.rig.allocate(name, page)
            promise = Promise("main", page, books.tables[0].tag(page), books.state(name), 4, step=1)
            books.tables[0].publish(page, ("key", page), promise, name)
            odd = self.rng.random()
            if odd < 0.1:
                promise.kept = self.rng.random() < 0.5
            elif odd < 0.2:
                books.tables[0].record(page).promise = None
            elif odd < 0.25:
                books.state(name).stalled = True
            self.promises.append((0, promise))

    def stand(self) -> Any:
        return standing(self.rig.guard), [promise.kept for _, promise in self.promises]


@in_c
@pytest.mark.parametrize("depth", [0, 1, 2, 16])
def test_promises_that_are_kept(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same books and histories as one after the other in Python, whatever became of a page or a writer."""
    in_c = books_module.keep_promises
    for seed in range(60):
        found = []
        for call in (in_c, None):
            monkeypatch.setattr(books_module, "keep_promises", call)
            world = Settled(seed, depth)
            world.books.settle_verified(world.promises)
            found.append(world.stand())
        # Tags are drawn from a seed: both guards gave out the same.
        assert found[0] == found[1]


@in_c
def test_more_promises_than_one_call_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is settled as ever."""
    rig = Rig(MAIN)
    rig.start("a")
    rig.allocate("a", 1)
    books = rig.guard._books
    promises = [(0, Promise("main", 1, 0, books.state("a"), 4)) for _ in range(100)]
    assert books_module.keep_promises(books.tables[0], promises) == 32
    books.settle_verified(promises)
    assert all(promise.kept for _, promise in promises)
    calls: list[Any] = [(books.tables[0],), (books.tables[0], ()), (None, [])]
    for wrong in calls:
        with pytest.raises((TypeError, AttributeError)):
            books_module.keep_promises(*wrong)


@in_c
@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=200, deadline=None)
def test_mirrors_and_memory_of_another_step(seed: int, writes: bool) -> None:
    """`renew` is a copy with the table rows filled in, and the changes; `change_tags` is these alone."""
    rng = np.random.default_rng(seed)
    pages, changes, body = int(rng.integers(1, 20)), int(rng.integers(0, 6)), int(rng.integers(4, 12))
    packed = rng.integers(-(2**62), 2**62, body + 3 * changes)
    packed[body : body + changes] = rng.permutation(np.arange(-3, pages + 3))[:changes] if changes <= pages + 6 else 0
    spans = body, body + changes, body + 2 * changes
    start = int(rng.integers(0, body))
    rows = rng.integers(0, 9, int(rng.integers(0, body - start + 1)))
    host, before = np.full(len(packed) + 3, -5), np.full(len(packed) + 3, -5)
    tags, writers = (rng.integers(0, 99, pages) for _ in range(2))
    wanted = [tags.copy(), writers.copy()]
    scatter_tags(page_tag=wanted[0], pages=packed[slice(*spans[:2])], tags=packed[spans[1] : spans[2]])
    if writes:
        scatter_tags(page_tag=wanted[1], pages=packed[slice(*spans[:2])], tags=packed[spans[2] :])
    before[: len(packed)] = packed
    before[start : start + len(rows)] = rows
    packed.setflags(write=False)
    alone = [tags.copy(), writers.copy()]
    verifier_module.change_tags(alone[0].data, alone[1].data if writes else None, packed, *spans, changes)
    others = writers.data if writes else None
    assert verifier_module.renew(host, tags.data, others, rows, start, packed, *spans, changes)
    assert np.array_equal(host, before)
    for found in ([tags, writers], alone):
        assert all(map(np.array_equal, found, wanted))


@in_c
def test_memory_that_does_not_suffice_is_left_alone() -> None:
    """A larger step, rows that lie elsewhere, changes that are not there, mirrors of different length."""
    renew, change = verifier_module.renew, verifier_module.change_tags
    host, tags, writers, rows = np.full(8, -1), np.zeros(4, np.int64), np.zeros(4, np.int64), np.arange(2)
    packed = np.arange(8)
    assert not renew(host, tags, writers, rows, 0, np.arange(9), 0, 0, 0, 1)
    assert not renew(host, tags, writers, rows, 7, packed, 0, 0, 0, 1)
    for places in ((8, 0, 0, 1), (0, 8, 0, 1), (0, 0, 8, 1), (5, 0, 0, 4)):
        with pytest.raises(ValueError, match="not where they are"):
            renew(host, tags, writers, rows, 0, packed, *places)
        with pytest.raises(ValueError, match="not where they are"):
            change(tags, writers, packed, *places)
    with pytest.raises(ValueError, match="not where they are"):
        renew(host, tags, writers[:3], rows, 0, packed, 0, 0, 0, 1)
    for wrong in ((-1, 0, 0, 1), (0, 0, 0, None), (0, 0, 0)):
        with pytest.raises(TypeError):
            change(tags, None, packed, *wrong)
    tags.setflags(write=False)
    with pytest.raises((ValueError, BufferError)):
        change(tags, writers, packed, 0, 0, 0, 1)
    assert (host == -1).all() and not tags.any() and not writers.any()


class Further:
    """Decode with pages crossed, checked by a Verifier that goes the short way and by one that never does."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rigs = [Rig(MAIN, backend="torch", on_violation="observe", breaker_violations=0) for _ in range(2)]
        self.names = ["a", "b", "c"]
        self.tokens = {name: self.rng.randint(1, 9) for name in self.names}
        self.free = list(range(1, 32))
        self.further = self.flagged = 0
        self.inputs: list[Any] = []
        for rig in self.rigs:
            rig.start(*self.names)
        for name in self.names:
            self.take(name, -(-self.tokens[name] // 4))

    def take(self, name: str, pages: int) -> None:
        taken = [self.free.pop(0) for _ in range(pages)]
        for rig in self.rigs:
            rig.allocate(name, *taken)

    def step(self) -> None:
        """A token more for each; a page for whoever needs one, and now and then an entry that is not the row's."""
        starts = [self.tokens[name] for name in self.names]
        for name in self.names:
            self.tokens[name] += 1
        grown = [(row, self.free.pop(0)) for row, start in enumerate(starts) if start % 4 == 0]
        ends = [self.tokens[name] for name in self.names]
        broken = self.rng.random() < 0.2
        spoilt = (self.rng.randrange(3), self.rng.randrange(2), self.rng.randrange(32)) if broken else None
        found = []
        for rig in self.rigs:
            delta = rig.guard.step_onward(grown) if grown else None
            if delta is None:
                for row, page in grown:
                    rig.guard.allocate(self.names[row], [page])
                delta = rig.guard.step(self.names, [0, 1, 2], ends, starts)
            for row, page in grown:
                rig._append(self.names[row], [page], None)
            table = rig.tables["main"]
            before = table.copy()
            if spoilt is not None:
                table[spoilt[:2]] = spoilt[2]
            pending = self.checked(rig, delta)
            mirrors = [mirror["main"].tolist() for mirror in (rig.verifier._tags, rig.verifier._writers)]
            found.append((pending.resolve(), table.copy(), mirrors))
            table[:] = before
            rig.guard.judge(found[-1][0])
        (short, table, mirrors), (long, other_table, other_mirrors) = found
        assert np.array_equal(short.records, long.records) and mirrors == other_mirrors
        assert np.array_equal(table, other_table) and short.clean == long.clean
        self.flagged += not short.clean

    def checked(self, rig: Rig, delta: Any) -> Any:
        first = rig is self.rigs[0]
        pending = rig.verifier.check_further(delta) if first else None
        if pending is not None:
            self.further += 1
            return pending
        if len(self.inputs) < 2:
            self.inputs.append({"main": verifier_module.PoolInputs(table=rig._wrap(rig.tables)["main"])})
        return rig.verifier.check(delta, self.inputs[0 if first else 1], table_rows=[0, 1, 2])


@in_c
def test_a_step_that_is_checked_like_the_last_one() -> None:
    """The same records, neutralised tables and mirrors; most went the short way, broken ones among them."""
    further = flagged = 0
    for seed in range(40):
        world = Further(seed)
        for _ in range(16):
            world.step()
        further, flagged = further + world.further, flagged + world.flagged
    assert further > 400 and flagged > 50


@in_c
def test_only_the_next_step_of_the_same_rows_is_checked_like_the_last() -> None:
    """Another number, enforcement or layout, a larger step, a step behind one that was not checked: nothing is done."""
    rig = Rig(MAIN, backend="torch")
    rig.start("a", "b")
    rig.allocate("a", 1)
    rig.allocate("b", 2)
    inputs, rows = {"main": verifier_module.PoolInputs(table=rig._wrap(rig.tables)["main"])}, [0, 1]
    verifier, made = rig.verifier, iter(range(1, 100))

    def delta() -> Any:
        return rig.guard.step(["a", "b"], rows, [next(made)] * 2)

    first = delta()
    assert verifier.check_further(first) is None, "nothing was checked yet"
    assert verifier.check(first, inputs).resolve().clean
    second = delta()
    assert verifier.check_further(second) is None, "which rows are whose stands in the delta alone"
    assert verifier.check(second, inputs, table_rows=rows).resolve().clean
    third = delta()
    (section,) = third.sections
    moved = (section._replace(extent_start=section.extent_stop),)
    for other in (
        third._replace(step=4),
        third._replace(step=2),
        third._replace(enforce=not third.enforce),
        third._replace(sections=moved),
        third._replace(packed=np.zeros(10_000, np.int64)),
    ):
        assert verifier.check_further(other) is None and verifier.step == 2
    changed = third.packed.copy()
    changed[slice(*section.floor)] = 77
    pending = verifier.check_further(third._replace(packed=changed))
    assert pending is not None and pending.resolve().clean and verifier.step == 3
    fourth = delta()._replace(packed=second.packed.copy(), sections=third.sections)
    assert verifier.check_further(fourth._replace(enforce=not fourth.enforce)) is None
    assert verifier.check(fourth, inputs, table_rows=rows).resolve().clean
    assert verifier._buffer.view(section.floor).tolist() == second.array(section.floor).tolist() != [77, 77]
    # Another layout was checked since: what lay there before is compared again, though it is the same object.
    flagged = verifier.check(delta()._replace(sections=moved), inputs, table_rows=rows)
    assert not flagged.resolve().clean
    sixth = delta()._replace(sections=third.sections)
    assert verifier.check_further(sixth) is None


@in_c
def test_memory_of_a_device_is_not_renewed_here() -> None:
    """There the words go through pinned memory, in the order of the stream."""
    world = Further(3)
    world.rigs[0].verifier._arrays.on_host = lambda array: False  # type: ignore[method-assign]
    for _ in range(16):
        world.step()
    assert not world.further
