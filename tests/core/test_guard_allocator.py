"""guard_allocator: allocators of many shapes, guarded from outside, without a change to their code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvguard.adapters.generic import AttachError, GuardHalt, PagedGuard, guard_allocator
from kvguard.config import GuardConfig
from kvguard.page_table import PageState
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs
from kvguard.violation import Kind

PAGES = 16


def new_guard(**settings: Any) -> PagedGuard:
    return PagedGuard(
        [PoolSpec(num_pages=PAGES, page_size=4)], config=GuardConfig.default(**settings), backend="numpy"
    )


def state(guard: PagedGuard, page: int) -> PageState:
    answer: PageState = guard.kept(PageState.VACANT, lambda books: books.page_state(page))
    return answer


class Plain:
    """alloc(n) -> list of ints, free(pages): nobody says for whom."""

    def __init__(self) -> None:
        self.free_pages = list(range(1, PAGES))
        self.calls = 0

    def alloc(self, n: int) -> list[int] | None:
        self.calls += 1
        if n > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:n], self.free_pages[n:]
        return taken

    def free(self, pages: list[int]) -> None:
        self.free_pages = list(pages) + self.free_pages


@dataclass(eq=False)
class Block:
    block_id: int
    ref_count: int = 0


@dataclass(eq=False)
class Seq:
    seq_id: int
    tokens: int = 4
    block_table: list[int] = field(default_factory=list)


class Manager:
    """allocate(seq) fills seq.block_table, deallocate(seq) empties it."""

    def __init__(self) -> None:
        self.free_ids = list(range(1, PAGES))

    def allocate(self, seq: Seq) -> None:
        for _ in range(-(-seq.tokens // 4)):
            self.append(seq)

    def append(self, seq: Seq) -> None:
        if not self.free_ids:
            raise MemoryError("out of pages")
        seq.block_table.append(self.free_ids.pop(0))

    def deallocate(self, seq: Seq) -> None:
        self.free_ids = seq.block_table + self.free_ids
        seq.block_table = []


class Typed(Plain):
    """The same list in other clothes: `wrap` makes what alloc gives of a list, `unwrap` takes it back."""

    def __init__(self, wrap: Callable[[list[int]], Any], unwrap: Callable[[Any], list[int]]) -> None:
        super().__init__()
        self.wrap, self.unwrap = wrap, unwrap

    def take(self, request_id: str, n: int = 1) -> Any:
        return self.wrap(super().alloc(n) or [])

    def give(self, pages: Any) -> None:
        super().free(self.unwrap(pages))


def torch_tensor(pages: list[int]) -> Any:
    return pytest.importorskip("torch").tensor(pages)


SHAPES: dict[str, tuple[Callable[[list[int]], Any], Callable[[Any], list[int]]]] = {
    "int": (lambda pages: pages[0], lambda page: [page]),
    "numpy-int": (lambda pages: np.int64(pages[0]), lambda page: [int(page)]),
    "list": (list, list),
    "tuple": (tuple, list),
    "array": (np.array, lambda pages: pages.tolist()),
    "object": (lambda pages: Block(pages[0]), lambda block: [block.block_id]),
    "objects": (
        lambda pages: [Block(page) for page in pages],
        lambda blocks: [block.block_id for block in blocks],
    ),
    "other-attribute": (
        lambda pages: [SimpleNamespace(number=page) for page in pages],
        lambda blocks: [block.number for block in blocks],
    ),
    "tensor": (torch_tensor, lambda pages: pages.tolist()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_of_every_shape_are_booked_refused_and_freed(shape: str) -> None:
    """A page that is in use is refused and another one comes in its place, in the allocator's own shape."""
    wrap, unwrap = SHAPES[shape]
    single = shape in ("int", "numpy-int", "object")
    allocator, guard = Typed(wrap, unwrap), new_guard()
    guarded = guard_allocator(
        guard, allocator, alloc="take", free="give", count=None if single else "n",
        page_id="number" if shape == "other-attribute" else None,
    )  # fmt: skip
    n = 1 if single else 3
    first = allocator.take("a", n)
    assert unwrap(first) == list(range(1, n + 1)) == guard.pages("a")
    allocator.free_pages.insert(0, 1)  # the fault: page 1 is in use
    second = allocator.take("b", n)
    assert type(second) is type(first)
    assert unwrap(second) == guard.pages("b") == list(range(n + 1, 2 * n + 1))
    assert [violation.kind for violation in guard.violations] == [Kind.DOUBLE_ALLOCATION]
    guard.finish("b")
    allocator.give(second)
    assert sorted(allocator.free_pages) == list(range(n + 1, PAGES))
    assert all(state(guard, page) is PageState.VACANT for page in unwrap(second))
    allocator.give(first)  # "a" has not finished
    assert sorted(allocator.free_pages) == list(range(n + 1, PAGES)), "a page in use was freed"
    assert {violation.kind for violation in guard.violations[1:]} == {Kind.FREE_WHILE_HELD}
    assert guard.health().ok and guard.health().counters["adapter_errors"] == 0
    guarded.detach()


def test_pages_inside_of_an_answer_are_those_of_the_call() -> None:
    """Each call's pages are added to the request's, and None inside of a free list is no allocation."""
    allocator, guard = Typed(lambda pages: SimpleNamespace(blocks=pages) if pages else None, list), new_guard()
    guard_allocator(guard, allocator, alloc="take", free="give", pages="return.blocks")
    for _ in range(2):
        allocator.take("a", 2)
    assert guard.pages("a") == [1, 2, 3, 4]
    assert allocator.take("a", 99) is None and guard.health().counters["adapter_errors"] == 0


def test_a_partly_refused_free_gives_back_the_rest() -> None:
    """Of the pages that are freed together only those that may be are; where none may, the allocator is not called."""
    allocator, guard = Plain(), new_guard()
    guarded = guard_allocator(guard, allocator)
    with guarded.request("a"):
        assert allocator.alloc(2) == [1, 2]
    with guarded.request("b"):
        assert allocator.alloc(1) == [3]
        allocator.free([1, 3, 2])
    assert allocator.free_pages[:2] == [3, 4], "pages of a were freed by b"
    guard.finish("a")
    with guarded.request("c"):
        allocator.free([1, 2])
        allocator.free([2])
        allocator.free([2, 15])
    assert allocator.free_pages[:4] == [1, 2, 3, 4]
    kinds = [violation.kind for violation in guard.violations]
    assert kinds == [Kind.FREE_UNOWNED, Kind.FREE_UNOWNED, Kind.DOUBLE_FREE, Kind.DOUBLE_FREE, Kind.FREE_UNOWNED]


def test_out_of_memory_passes_through_and_changes_nothing() -> None:
    """None is no allocation, an exception is the engine's own; the request is not even started."""
    plain, guard = Plain(), new_guard()
    with guard_allocator(guard, plain, count="n").request("a"):
        assert plain.alloc(99) is None
    assert guard.columns("a") == -1
    manager, guard = Manager(), new_guard()
    guard_allocator(guard, manager, alloc=("allocate", "append"), free="deallocate", pages="seq.block_table")
    with pytest.raises(MemoryError, match="out of pages"):
        manager.allocate(Seq(7, tokens=99))
    assert guard.columns("7") == -1 and guard.violations == () and guard.health().ok


@pytest.mark.parametrize("end", ["none", "raises"])
def test_running_out_while_drawing_again_gives_everything_back(end: str) -> None:
    """The first answer held a page in use and there is no other: what was good goes back, the books are as before."""

    class Short(Plain):
        def alloc(self, n: int) -> list[int] | None:
            if n > len(self.free_pages) and end == "raises":
                raise MemoryError
            return super().alloc(n)

    allocator, guard = Short(), new_guard()
    guarded = guard_allocator(guard, allocator, count=0)
    with guarded.request("a"):
        assert allocator.alloc(13) == list(range(1, 14))
    allocator.free_pages.insert(1, 1)
    with guarded.request("b"):
        if end == "none":
            assert allocator.alloc(3) is None
        else:
            with pytest.raises(MemoryError):
                allocator.alloc(3)
        assert allocator.free_pages == [14, 15] and guard.pages("b") == []
        assert allocator.alloc(2) == [14, 15]
    assert guard.health().counters["adapter_errors"] == 0


def test_a_manager_that_fills_the_sequence_is_guarded() -> None:
    """Pages are told by the difference, nested calls count once, a free by request ends it, the name is its own."""
    manager, guard = Manager(), new_guard()
    guard_allocator(guard, manager, alloc=("allocate", "append"), free="deallocate", pages="seq.block_table")
    first, second = Seq(1, tokens=9), Seq(2)
    manager.allocate(first)
    manager.allocate(second)
    manager.append(first)
    assert guard.pages("1") == [1, 2, 3, 5] and guard.pages("2") == [4]
    manager.deallocate(first)
    assert guard.columns("1") == -1 and first.block_table == []
    assert state(guard, 1) is PageState.VACANT and state(guard, 4) is PageState.ALLOCATED
    manager.allocate(first)
    assert guard.pages("1") == first.block_table, "preempted and resumed"
    assert guard.violations == () and guard.health().ok


def test_a_page_that_cannot_be_refused_ends_its_former_holder_and_stays_with_the_new_one() -> None:
    """The manager wrote the page into its table already: the device check finds who would read a stranger's bytes."""
    manager, guard = Manager(), new_guard()
    guard_allocator(guard, manager, alloc=("allocate", "append"), free="deallocate", pages="seq.block_table")
    victim, taker = Seq(1, tokens=8), Seq(2)
    manager.allocate(victim)
    manager.free_ids.insert(0, victim.block_table[1])
    manager.allocate(taker)
    table = np.array([[1, 2], [2, 0]], np.int32)
    judgement = guard.after_forward(guard.before_forward(["1", "2"], [0, 1], [8, 4], PoolInputs(table=table)))
    assert [abort.request for abort in judgement.aborts] == ["1"]
    assert table.tolist() == [[0, 0], [2, 0]]
    manager.deallocate(victim)
    assert 1 in manager.free_ids and 2 not in manager.free_ids, "the taker's page went back with the victim"
    assert guard.after_forward(guard.before_forward(["2"], [1], [4], PoolInputs(table=table))).clean


class Caching(Manager):
    """The manager with a cache of full blocks by their tokens; freed blocks stay in it until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[Any, int] = {}
        self.refs: dict[int, int] = {}

    def allocate(self, seq: Seq) -> None:
        self.hits = 0
        for key in self.keys(seq):
            page = self.cached.get(key) if key is not None and self.hits == len(seq.block_table) else None
            if page is None:
                page = next(page for page in self.free_ids if page not in seq.block_table)
                self.cached = {key: other for key, other in self.cached.items() if other != page}
                if key is not None:
                    self.cached[key] = page
            else:
                self.hits += 1
            if page in self.free_ids:
                self.free_ids.remove(page)
            self.refs[page] = self.refs.get(page, 0) + 1
            seq.block_table.append(page)

    def keys(self, seq: Seq) -> list[Any]:
        return [("text", column) if (column + 1) * 4 <= seq.tokens else None for column in range(-(-seq.tokens // 4))]

    def deallocate(self, seq: Seq) -> None:
        for page in seq.block_table:
            self.refs[page] -= 1
            if not self.refs[page]:
                self.free_ids.append(page)
        seq.block_table = []


def test_a_prefix_cache_inside_the_allocator_is_guarded() -> None:
    """Hits are adopted under their keys, full pages published, cached pages outlive their request, eviction is seen."""
    manager, guard = Caching(), new_guard()
    guard_allocator(
        guard, manager, alloc="allocate", free="deallocate", pages="seq.block_table", hits="self.hits",
        keys=lambda call: manager.keys(call["seq"]),
    )  # fmt: skip
    inputs = PoolInputs(table=np.array([[1, 2, 3], [1, 2, 4]], np.int32))
    first, second = Seq(1, tokens=10), Seq(2, tokens=9)
    manager.allocate(first)
    assert guard.after_forward(guard.before_forward(["1"], [0], [10], inputs)).clean
    manager.allocate(second)
    assert manager.hits == 2 and guard.pages("2") == [1, 2, 4]
    assert guard.after_forward(guard.before_forward(["2"], [1], [9], inputs)).clean
    manager.deallocate(first)
    manager.deallocate(second)
    assert state(guard, 1) is PageState.COMPLETE and state(guard, 3) is PageState.VACANT
    third = Seq(3, tokens=4 * (PAGES - 1))
    manager.allocate(third)
    assert len(guard.pages("3")) == PAGES - 1 and guard.violations == () and guard.health().ok


def test_a_stale_hit_inside_the_allocator_is_flagged() -> None:
    """The cache names a page that was filled with other content since: who follows it is ended before it reads."""
    manager, guard = Caching(), new_guard()
    guard_allocator(
        guard, manager, alloc="allocate", free="deallocate", pages="seq.block_table", hits="self.hits",
        keys=lambda call: manager.keys(call["seq"]),
    )  # fmt: skip
    first = Seq(1, tokens=4)
    manager.allocate(first)
    inputs = PoolInputs(table=np.array([[1], [5]], np.int32))
    assert guard.after_forward(guard.before_forward(["1"], [0], [4], inputs)).clean
    manager.cached[("text", 0)] = 5  # nobody ever published page 5 under this key
    manager.free_ids.remove(5)
    manager.allocate(Seq(2, tokens=4))
    judgement = guard.after_forward(guard.before_forward(["1", "2"], [0, 1], [4, 4], inputs))
    assert [abort.request for abort in judgement.aborts] == ["2"]


def test_at_level_off_the_allocator_is_not_touched() -> None:
    """Its methods are the class's own; names that are wrong are still said."""
    allocator = Plain()
    guarded = guard_allocator(new_guard(level="off"), allocator)
    assert not guarded.attached and "alloc" not in vars(allocator) and "free" not in vars(allocator)
    with pytest.raises(AttachError):
        guard_allocator(new_guard(level="off"), allocator, alloc="allocate")


def test_only_the_one_object_is_wrapped_and_detaching_undoes_it() -> None:
    """Another object of the class is not guarded; what the object had itself comes back."""
    allocator, guard = Plain(), new_guard()
    allocator.free = own = lambda pages: None  # type: ignore[method-assign]
    with guard_allocator(guard, allocator) as guarded:
        assert guarded.attached and "alloc" in vars(allocator) and "alloc" not in vars(Plain())
        assert allocator.alloc.__name__ == "alloc" and allocator.free is not own
        with pytest.raises(AttachError, match="guarded already"):
            guard_allocator(new_guard(), allocator)
    assert not guarded.attached and "alloc" not in vars(allocator) and allocator.free is own
    guarded.detach()
    guard_allocator(guard, allocator).detach()


class Odd:
    __slots__ = ()
    number = 3

    def alloc(self, n: int) -> None: ...

    def free(self, n: int) -> None: ...

    async def later(self, n: int) -> None: ...

    def anything(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "allocator,names,message",
    [
        (Plain(), {"alloc": "allocate"}, "Plain.allocate does not exist; this object has: alloc, free"),
        (Plain(), {"free": "calls"}, "Plain.calls is a int, not a method"),
        (Plain(), {"request": "seq.seq_id"}, "Plain.alloc has no such argument; it has n"),
        (Plain(), {"request": 3}, r"request=3: Plain.alloc takes 1 arguments \(n\)"),
        (Plain(), {"count": "number"}, "count='number': Plain.alloc has no such argument"),
        (Plain(), {"freed": "pages.all"}, "must be an argument itself"),
        (Plain(), {"pool": "other"}, "no pool 'other': this guard has main"),
        (Plain(), {"hits": "self.hits"}, "hits and keys go together"),
        (Plain, {}, "Plain is a class"),
        (Manager(), {"alloc": "allocate", "free": "deallocate", "count": "seq"}, "count= needs"),
        (Odd(), {}, "say freed= for the argument with pages, or name the request"),
        (Odd(), {"freed": "n"}, "cannot be replaced on the object"),
        (Odd(), {"alloc": "later", "freed": "n"}, "is a coroutine"),
        (Odd(), {"alloc": "anything", "request": "seq", "freed": "n"}, "it has none by name"),
        ({}, {"alloc": "setdefault", "free": "pop"}, "no signature|cannot be replaced|say freed"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_is_replaced(
    allocator: Any, names: dict[str, Any], message: str
) -> None:
    """A missing method, an odd signature, a name that is no argument: one clear line, and the object is as it was."""
    with pytest.raises(AttachError, match=message):
        guard_allocator(new_guard(), allocator, **names)
    assert "alloc" not in getattr(allocator, "__dict__", {}) or isinstance(allocator, type)


def test_a_call_that_names_no_request_is_an_adapter_error_and_the_engine_goes_on() -> None:
    """Counted and loud, but the pages come all the same."""
    allocator, guard = Plain(), new_guard()
    guard_allocator(guard, allocator)
    assert allocator.alloc(2) == [1, 2]
    assert guard.health().armed and guard.health().counters["adapter_errors"] == 1
    manager, guard = Manager(), new_guard()
    guard_allocator(guard, manager, alloc="allocate", free="deallocate", request="seq.name", pages="seq.block_table")
    sequence = Seq(1)
    manager.allocate(sequence)
    manager.deallocate(sequence)
    assert sequence.block_table == [] and guard.health().counters["adapter_errors"] == 2 and guard.health().armed


def test_a_function_of_the_user_that_fails_costs_neither_the_call_nor_the_guard() -> None:
    """Whatever it raises is an adapter error; a halt is no error and reaches the engine."""
    manager, guard = Manager(), new_guard()
    guard_allocator(
        guard, manager, alloc="allocate", free="deallocate", request=lambda call: 1 // 0, pages="seq.block_table"
    )
    manager.allocate(Seq(1))
    assert guard.health().armed and guard.health().counters["adapter_errors"] == 1
    allocator, guard = Typed(SHAPES["int"][0], SHAPES["int"][1]), new_guard(on_violation="halt")
    guard_allocator(guard, allocator, alloc="take", free="give")
    page = allocator.take("a")
    allocator.free_pages.insert(0, page)
    with pytest.raises(GuardHalt):
        allocator.take("b")


def test_page_numbers_on_a_device_are_not_read() -> None:
    """A tensor without values stands for one on a device: an adapter error that names the other guard, no wait."""
    torch = pytest.importorskip("torch")
    allocator, guard = Typed(lambda pages: torch.empty(len(pages), dtype=torch.int64, device="meta"), list), new_guard()
    guard_allocator(guard, allocator, alloc="take", free="give")
    assert allocator.take("a", 2).shape == (2,)
    assert guard.health().counters["adapter_errors"] == 1
