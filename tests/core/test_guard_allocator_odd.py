"""guard_allocator around allocators with odd habits: whatever they are given or answer, the engine gets it unharmed."""

from __future__ import annotations

import array
import uuid
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvguard.adapters.generic import AttachError, PagedGuard, guard_allocator
from kvguard.judge import Judgement
from kvguard.verifier import PoolInputs
from kvguard.violation import Kind
from tests.core.test_guard_allocator import PAGES, Manager, Plain, Seq, new_guard


class Told(Plain):
    """alloc(seq_id, n) -> list of ints, free(pages)."""

    def alloc(self, seq_id: Any, n: int = 1) -> Any:  # type: ignore[override]
        return super().alloc(n)

    def free(self, pages: Any) -> Any:
        listed = list(pages)
        super().free(listed)
        return len(listed)


def step(guard: PagedGuard, rows: dict[str, list[int]], tokens: int) -> Judgement:
    """One step of requests with these block-table rows."""
    table = np.zeros((len(rows), 8), np.int32)
    for row, pages in enumerate(rows.values()):
        table[row, : len(pages)] = pages
    ends = [tokens] * len(rows)
    return guard.after_forward(guard.before_forward(list(rows), range(len(rows)), ends, PoolInputs(table=table)))


def sound(guard: PagedGuard) -> bool:
    health = guard.health()
    return health.ok and health.counters["adapter_errors"] == 0 and health.counters["guard_faults"] == 0


@pytest.mark.parametrize("nothing", [-1, None, False, np.int64(-1)])
def test_an_answer_without_a_page_is_no_allocation(nothing: Any) -> None:
    """-1, False and None pass through, at first and after a refusal, and are no violations."""

    class Single(Told):
        def alloc(self, seq_id: str, n: int = 1) -> Any:  # type: ignore[override]
            return self.free_pages.pop(0) if self.free_pages else nothing

    allocator, guard = Single(), new_guard()
    guard_allocator(guard, allocator)
    allocator.free_pages = [1, 1]
    assert allocator.alloc("a") == 1
    assert allocator.alloc("b") is nothing, "1 was refused and there is no other"
    assert allocator.alloc("c") is nothing
    assert [violation.kind for violation in guard.violations] == [Kind.DOUBLE_ALLOCATION]
    assert sound(guard)


@pytest.mark.parametrize("nothing", [-1, [], None])
def test_an_allocator_that_gives_the_same_page_for_ever_is_asked_once_more(nothing: Any) -> None:
    """Then the engine gets what this allocator answered when it had no page, or None."""

    class Stuck(Told):
        answers: list[Any]

        def alloc(self, seq_id: str, n: int = 1) -> Any:  # type: ignore[override]
            self.calls += 1
            return self.answers.pop(0) if self.answers else [5] * n

    allocator, guard = Stuck(), new_guard()
    allocator.answers = [] if nothing is None else [nothing]
    guard_allocator(guard, allocator, count="n")
    if nothing is not None:
        assert allocator.alloc("z", 1) == nothing
    assert allocator.alloc("a", 1) == [5]
    before = allocator.calls
    assert allocator.alloc("b", 1) == nothing
    assert allocator.calls == before + 2
    assert guard.pages("b") == [] and sound(guard)


def test_an_allocator_that_invents_pages_is_not_asked_for_ever() -> None:
    """Each answer is another number outside of the pool: it ends after as many as there are pages."""

    class Inventive(Told):
        def alloc(self, seq_id: str, n: int = 1) -> int:  # type: ignore[override]
            self.calls += 1
            return 1000 + self.calls

    allocator, guard = Inventive(), new_guard()
    guard_allocator(guard, allocator)
    assert allocator.alloc("a") is None
    assert allocator.calls == PAGES + 1 and guard.health().armed


@pytest.mark.parametrize("inner_too", [False, True])
def test_drawing_again_through_nested_methods_counts_once(inner_too: bool) -> None:
    """A wrapped method that calls another one is drawn from again as it was called at first: the outer call counts."""

    class Nested(Told):
        def one(self, seq_id: str, n: int = 1) -> list[int] | None:
            return [self.free_pages.pop(0)] if self.free_pages else None

        def alloc(self, seq_id: str, n: int = 1) -> Any:  # type: ignore[override]
            return [page for _ in range(n) for page in self.one(seq_id) or []]

    allocator, guard = Nested(), new_guard()
    guard_allocator(guard, allocator, alloc=("alloc", "one") if inner_too else "alloc", count="n")
    assert allocator.alloc("a", 2) == [1, 2]
    allocator.free_pages.insert(0, 1)
    assert allocator.alloc("b", 2) == [3, 4] == guard.pages("b")
    assert len(guard.violations) == 1 and sound(guard)


def test_pages_that_go_back_are_given_with_the_request_that_free_asks_for() -> None:
    """free(seq_id, pages) is called with the request of the allocation, whatever it is called there."""

    class TwoArguments(Told):
        freed: list[Any]

        def alloc(self, req: str, n: int = 1) -> Any:  # type: ignore[override]
            return Plain.alloc(self, n)

        def free(self, seq_id: str, pages: Any) -> Any:  # type: ignore[override]
            self.freed.append(seq_id)
            Plain.free(self, pages)

    allocator, guard = TwoArguments(), new_guard()
    allocator.freed = []
    guard_allocator(guard, allocator, count="n")
    allocator.alloc("a", 13)
    allocator.free_pages.insert(1, 1)
    assert allocator.alloc("b", 3) is None
    assert allocator.freed == ["b"] and allocator.free_pages == [14, 15]
    assert len(guard.violations) == 1 and sound(guard)


class Pair(NamedTuple):
    block_id: int
    refs: int


def test_a_block_that_is_a_named_tuple_is_one_page() -> None:
    """Its other fields are no pages."""

    class Pairs(Told):
        def alloc(self, seq_id: Any, n: int = 1) -> Any:  # type: ignore[override]
            return Pair(self.free_pages.pop(0), 7)

        def free(self, block: Pair) -> None:  # type: ignore[override]
            self.free_pages.insert(0, block.block_id)

    allocator, guard = Pairs(), new_guard()
    guard_allocator(guard, allocator)
    first = allocator.alloc("a")
    allocator.free_pages.insert(0, 1)
    assert allocator.alloc("b") == Pair(2, 7) and guard.pages("b") == [2]
    guard.finish("a")
    allocator.free(first)
    assert allocator.free_pages[0] == 1 and len(guard.violations) == 1 and sound(guard)


class Own:
    """A container that wants more than its items."""

    def __init__(self, owner: str, items: list[int]) -> None:
        self.owner, self.items = owner, items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


Triple = namedtuple("Triple", "first second third")
CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "values": lambda pages: dict(enumerate(pages)).values(),
    "keys": lambda pages: dict.fromkeys(pages).keys(),
    "array": lambda pages: array.array("i", pages),
    "deque": lambda pages: deque(pages, maxlen=len(pages)),
    "named tuple": lambda pages: Triple(*pages),
    "own": lambda pages: Own("x", pages),
    "set": set,
    "2-D": lambda pages: np.array(pages).reshape(1, -1),
    "bytes": bytes,
    "range": lambda pages: range(pages[0], pages[-1] + 1),
    "scalars": lambda pages: [np.array(page) for page in pages],
}


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("container", CONTAINERS)
def test_pages_are_freed_from_any_container(container: str, refused: bool) -> None:
    """The allocator gets the engine's own object if nothing is refused, else what is left; nothing is raised."""
    allocator, guard, got = Told(), new_guard(), []

    def free(pages: Any) -> int:
        got.append(pages)
        return np.size(pages) if isinstance(pages, np.ndarray) else len(pages)

    allocator.free = free  # type: ignore[method-assign]
    guard_allocator(guard, allocator)
    allocator.alloc("a", 1)
    allocator.alloc("b", 2)
    guard.finish("b")
    if not refused:
        guard.finish("a")
    given = CONTAINERS[container]([1, 2, 3])
    assert allocator.free(given) == (2 if refused else 3)
    if refused:
        assert [int(page) for page in got[0]] == [2, 3]
        assert [violation.kind for violation in guard.violations] == [Kind.FREE_WHILE_HELD]
    else:
        assert got[0] is given and guard.violations == ()
    assert sound(guard)


def test_an_allocator_that_empties_the_list_empties_the_engines() -> None:
    """What it does to the list that it was given stays visible to whoever gave it."""

    class Emptying(Told):
        def free(self, pages: list[int]) -> None:
            while pages:
                self.free_pages.append(pages.pop())

    allocator, guard = Emptying(), new_guard()
    guard_allocator(guard, allocator)
    pages = allocator.alloc("a", 3)
    guard.finish("a")
    allocator.free(pages)
    allocator.free(pages)
    assert pages == [] and guard.violations == () and sound(guard)


def test_an_empty_free_reaches_the_allocator() -> None:
    """Its answer is the engine's."""
    allocator, guard = Told(), new_guard()
    guard_allocator(guard, allocator)
    assert allocator.free([]) == 0 and sound(guard)


@pytest.mark.parametrize(
    "lazy",
    [iter, reversed, lambda pages: (page for page in pages), lambda pages: map(int, pages)],
    ids=["iter", "reversed", "generator", "map"],
)
def test_iterators_are_vetted_and_passed_on(lazy: Callable[[list[int]], Iterator[int]]) -> None:
    """Freed pages are seen before the allocator reads them, given ones before the engine does."""

    class Lazy(Told):
        def alloc(self, seq_id: Any, n: int = 1) -> Any:  # type: ignore[override]
            return lazy(Plain.alloc(self, n) or [])

    allocator, guard = Lazy(), new_guard()
    guard_allocator(guard, allocator, count="n")
    first = allocator.alloc("a", 2)
    assert next(first) in (1, 2), "still an iterator"
    assert sorted(guard.pages("a")) == [1, 2]
    allocator.free_pages.insert(0, 1)
    assert sorted(allocator.alloc("b", 2)) == [3, 4]
    assert allocator.free(lazy([3])) is None, "held by b"
    guard.finish("b")
    assert allocator.free(lazy([3, 4])) == 2
    assert [violation.kind for violation in guard.violations] == [Kind.DOUBLE_ALLOCATION, Kind.FREE_WHILE_HELD]
    assert sorted(allocator.alloc("c", 2)) == [3, 4] and sound(guard)


@pytest.mark.parametrize("path", [None, "seq_id", 0, "seq_id.seq_id"])
def test_a_free_whose_optional_request_is_left_out_is_vetted(path: str | int | None) -> None:
    """A page that is still read is not freed, though the call does not say by whom."""

    class Optional(Told):
        def free(self, seq_id: Any = None, pages: Any = ()) -> Any:  # type: ignore[override]
            return super().free(pages)

    allocator, guard = Optional(), new_guard()
    guard_allocator(guard, allocator, request=path, freed="pages")
    name = Seq(7) if path == "seq_id.seq_id" else "7"
    pages, others = allocator.alloc(name, 2), allocator.alloc(8, 1) if path is None else [3]
    assert allocator.free(pages=pages[1:]) is None
    assert [violation.kind for violation in guard.violations] == [Kind.FREE_WHILE_HELD] and sound(guard)
    assert step(guard, {"7": pages}, 8).clean
    assert allocator.free(name, pages=[*pages[1:], *others]) == 1, "3 is not its own"
    assert not step(guard, {"7": pages}, 8).clean, "a read after its own free"


@pytest.mark.parametrize("identity", [np.int64(7), np.uint8(7), uuid.UUID(int=7), b"seven", 7, "7"])
def test_ids_of_every_kind_are_named_by_str(identity: Any) -> None:
    """The books, and before_forward, know the request by `str` of its id."""
    allocator, guard = Told(), new_guard()
    guard_allocator(guard, allocator)
    pages = allocator.alloc(identity, 2)
    assert guard.pages(str(identity)) == pages
    assert step(guard, {str(identity): pages}, 8).clean and sound(guard)


@pytest.mark.parametrize("on_guard_error", ["disarm", "abort"])
@pytest.mark.parametrize("slots", [False, True])
def test_a_request_that_nobody_knows_costs_no_other_its_check(on_guard_error: str, slots: bool) -> None:
    """Its row is left out, as an adapter error; the rows around it are checked and neutralised at their places."""
    allocator, guard = Told(), new_guard(on_guard_error=on_guard_error)
    guard_allocator(guard, allocator)
    first, second = allocator.alloc("a", 2), allocator.alloc("b", 2)
    allocator.alloc(object(), 1)
    assert guard.health().counters["adapter_errors"] == 1
    table = np.array([[9, 9], [*first], [second[0], first[0]]], np.int32)
    slot = np.arange(3, dtype=np.int64)
    inputs = PoolInputs(table=table)
    if slots:
        inputs = PoolInputs(table=table, slot_mapping=slot, query_start=np.arange(4, dtype=np.int32))
    judgement = guard.after_forward(guard.before_forward(["odd", "a", "b"], [0, 1, 2], [8, 8, 8], inputs))
    assert [abort.request for abort in judgement.aborts] == ["b"]
    assert judgement.withheld == ({"b", "odd"} if on_guard_error == "abort" else {"b"})
    assert table.tolist() == [[9, 9], first, [0, 0]]
    if slots:
        assert slot.tolist() == [0, 1, -1]
    health = guard.health()
    assert health.armed and health.counters["adapter_errors"] == 2 and health.counters["guard_faults"] == 0
    assert step(guard, {"a": first}, 8).clean


def test_what_cannot_be_wrapped_or_can_is_told_from_the_request() -> None:
    """request=0 names the one argument of a free by request; an async generator is refused."""

    class Strange:
        def alloc(self, who: str, n: int) -> list[int]:
            return [1]

        def free(self, who: str) -> None: ...

        async def later(self, seq_id: str) -> Any:
            yield 1

    allocator, guard = Strange(), new_guard()
    with guard_allocator(guard, allocator, request=0):
        allocator.alloc("a", 1)
        allocator.free("a")
        assert guard.columns("a") == -1 and sound(guard)
    with pytest.raises(AttachError, match="is a coroutine or a generator"):
        guard_allocator(guard, allocator, alloc="later", request=0)


@pytest.mark.parametrize("way", ["finish", "preempt", "neither"])
def test_pages_that_are_somebody_elses_stay_with_them_in_either_order(way: str) -> None:
    """An aborted request is finished first, as the docs say, and then freed by request: the taker keeps its page."""
    manager, guard = Manager(), new_guard()
    guard_allocator(guard, manager, alloc=("allocate", "append"), free="deallocate", pages="seq.block_table")
    victim, taker, third = Seq(1, tokens=8), Seq(2), Seq(3)
    manager.allocate(victim)
    manager.free_ids.insert(0, 1)
    manager.allocate(taker)
    judgement = step(guard, {"1": victim.block_table, "2": taker.block_table}, 4)
    assert [(abort.request, abort.foreign_pages) for abort in judgement.aborts] == [("1", {"main": (1,)})]
    if way != "neither":
        getattr(guard, way)("1")
    manager.deallocate(victim)
    assert 1 not in manager.free_ids and 2 in manager.free_ids
    manager.allocate(third)
    assert third.block_table == [2] and step(guard, {"2": taker.block_table, "3": [2]}, 4).clean
    if way == "preempt":
        guard.resume("1")
    manager.allocate(victim)
    # A request that was to be ended and is preempted instead stays withheld.
    judgement_after = step(guard, {"1": victim.block_table}, 4)
    assert judgement_after.withheld == ({"1"} if way == "preempt" else set()) and not judgement_after.violations
    assert guard.violations == (judgement.violations[0],) and sound(guard)


def test_a_free_without_pages_means_all_of_the_request() -> None:
    """free(seq_id, pages=None): called as it is, and in either order of finish and free the pages are vacant."""

    class All(Told):
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[str, list[int]] = {}

        def alloc(self, seq_id: Any, n: int = 1) -> Any:  # type: ignore[override]
            pages = super().alloc(seq_id, n)
            self.held.setdefault(seq_id, []).extend(pages)
            return pages

        def free(self, seq_id: str, pages: Any = None) -> Any:  # type: ignore[override]
            listed = self.held.pop(seq_id) if pages is None else pages
            return super().free(listed)

    allocator, guard = All(), new_guard()
    guard_allocator(guard, allocator)
    for finishes in (True, False):
        allocator.alloc("a", 2)
        if finishes:
            guard.finish("a")
        assert allocator.free("a") == 2
        assert allocator.alloc("b", 2) == [1, 2] == guard.pages("b"), "not vacant"
        assert allocator.free("b", None) == 2
        assert guard.columns("a") == guard.columns("b") == -1
    assert guard.violations == () and sound(guard)


@pytest.mark.parametrize("way", ["preempt", "finish", "finish and start", "truncate"])
def test_a_request_that_comes_back_publishes_its_pages_again(way: str) -> None:
    """Its pages were filled anew: whoever finds them in the cache adopts what they hold now."""

    class Cache(Told):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, int] = {}
            self.hits = 0

        def alloc(self, seq_id: str, keys: list[str]) -> Any:  # type: ignore[override]
            found = [self.cache[key] for key in keys if key in self.cache]
            self.hits = len(found)
            pages = found + (Plain.alloc(self, len(keys) - len(found)) or [])
            self.cache.update(zip(keys, pages, strict=True))
            return pages

        def free(self, pages: Any) -> Any:
            self.cache = {key: page for key, page in self.cache.items() if page not in pages}
            return super().free(pages)

    allocator, guard = Cache(), new_guard()
    guard_allocator(guard, allocator, hits="self.hits", keys="keys")
    pages = allocator.alloc("a", ["x", "y"])
    assert step(guard, {"a": pages}, 8).clean
    if way == "truncate":
        guard.truncate("a", 0)
    else:
        getattr(guard, way.split()[0])("a")
    allocator.free(pages)
    if way == "preempt":
        guard.resume("a")
    elif way == "finish and start":
        guard.start("a")
    pages = allocator.alloc("a", ["x", "y"])
    assert step(guard, {"a": pages}, 8).clean
    assert allocator.alloc("b", ["x", "y"]) == pages
    assert step(guard, {"a": pages, "b": pages}, 8).clean
    assert guard.violations == () and sound(guard)
