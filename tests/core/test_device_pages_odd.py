"""DevicePagedGuard with input that makes no sense: it costs neither the guard nor the engine anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvguard.adapters.device_pages import DevicePagedGuard  # noqa: E402
from kvguard.config import GuardConfig  # noqa: E402
from kvguard.pools import PoolSpec  # noqa: E402
from kvguard.verifier import PoolInputs  # noqa: E402
from tests.core.test_device_pages import NUM_PAGES, PAGE_SIZE, ROWS, SlicingEngine  # noqa: E402


@pytest.mark.parametrize(
    "odd",
    [torch.tensor(9), torch.tensor([[9]]), torch.tensor([9.0]), [9], 9, None],
    ids=["0-d", "2-D", "float", "list", "number", "none"],
)
def test_what_is_no_list_of_pages_reaches_neither_the_books_nor_the_engine(odd: Any) -> None:
    """An adapter error for each call, never an exception; the guard stays armed and the engine is clean."""
    engine = SlicingEngine()
    engine.start("a")
    assert engine.step().clean
    guard, page = engine.guard, torch.tensor([9])
    calls: list[Callable[[], object]] = [
        lambda: guard.allocate(["a"], [1], odd),
        lambda: guard.adopt("a", odd, page),
        lambda: guard.adopt("a", page, odd),
        lambda: guard.truncate("a", odd),
        lambda: guard.free(odd),
        lambda: guard.publish(odd),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert guard.health().counters["adapter_errors"] == number
    assert engine.step().clean and guard.health().armed and guard.violations == ()


def test_odd_counts_rows_and_ids_change_nothing() -> None:
    """A negative or broken count, a row that a live request has, an id that is no string; no pages at all are fine."""
    engine = SlicingEngine()
    engine.start("a")
    engine.start("b")
    assert engine.step().clean
    guard, pages = engine.guard, torch.tensor([9, 10])
    calls: list[Callable[[], object]] = [
        lambda: guard.allocate(["a", "b"], [3, -1], pages),
        lambda: guard.allocate(["a", "b"], [1.5, 0.5], pages),  # type: ignore[list-item]
        lambda: guard.start("c", engine.rows["a"]),
        lambda: guard.start("c", -1),
        lambda: guard.start("c", None),  # type: ignore[arg-type]
        lambda: guard.start(5, 3),  # type: ignore[arg-type]
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert guard.health().counters["adapter_errors"] == number
    guard.free(torch.tensor([]))
    guard.allocate(["a"], [0], torch.tensor([]))
    guard.allocate([], [], torch.tensor([], dtype=torch.int64))
    assert engine.step().clean and guard.health().counters["adapter_errors"] == len(calls)
    engine.end("a")
    engine.start("c")
    assert engine.step().clean, "the row is free again"


@pytest.mark.parametrize("on_guard_error", ["disarm", "abort"])
def test_a_request_that_is_not_live_costs_no_other_its_check(on_guard_error: str) -> None:
    """Its row is left out, as an adapter error; the others are checked and neutralised at their places in the batch."""
    guard = DevicePagedGuard(
        PoolSpec(num_pages=NUM_PAGES, page_size=PAGE_SIZE, null_page=0), table_rows=ROWS,
        config=GuardConfig.default(on_guard_error=on_guard_error),
    )  # fmt: skip
    for row, name in enumerate(("a", "b")):
        guard.start(name, row)
    guard.allocate(["a", "b"], [1, 1], torch.tensor([3, 4]))
    table = torch.tensor([[3], [3], [7]], dtype=torch.int32)
    slots = torch.arange(3)
    inputs = PoolInputs(table=table, slot_mapping=slots, query_start=torch.arange(4))
    judgement = guard.after_forward(guard.before_forward(["odd", "a", "b"], [4, 4, 4], inputs))
    assert [abort.request for abort in judgement.aborts] == ["b"]
    assert judgement.withheld == ({"b", "odd"} if on_guard_error == "abort" else {"b"})
    assert table.tolist() == [[3], [0], [7]] and slots.tolist() == [0, 1, -1]
    health = guard.health()
    assert health.armed and health.counters["adapter_errors"] == 1
