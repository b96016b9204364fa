"""The generic adapter: a plain allocator guarded in a few lines, on NumPy alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvguard.adapters.generic import GuardHalt, PagedGuard
from kvguard.config import GuardConfig
from kvguard.guard import Retired
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs
from kvguard.violation import Kind

ROOT = Path(__file__).resolve().parents[2]
PAGE_SIZE = 4


class PlainEngine:
    """A free list, a block table and a token counter: what a small engine has, and the guard's calls in it."""

    def __init__(self, **settings: Any) -> None:
        self.free = list(range(1, 16))
        self.table = np.zeros((4, 8), np.int32)
        self.pages: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.emitted: dict[str, int] = {}
        self.guard = PagedGuard(
            [PoolSpec(num_pages=16, page_size=PAGE_SIZE)], config=GuardConfig.load(**settings), backend="numpy"
        )

    def start(self, request: str) -> None:
        self.guard.start(request)
        self.rows[request] = min(set(range(4)) - set(self.rows.values()))
        self.pages[request], self.length[request] = [], 0
        self.emitted.setdefault(request, 0)

    def grow(self, request: str) -> None:
        self.length[request] += 1
        while self.length[request] > len(self.pages[request]) * PAGE_SIZE:
            page = self.free.pop(0)
            if self.guard.allocate(request, [page]):
                self.table[self.rows[request], len(self.pages[request])] = page
                self.pages[request].append(page)

    def step(self) -> None:
        batch = list(self.rows)
        for request in batch:
            self.grow(request)
        slots = [self.pages[r][-1] * PAGE_SIZE + (self.length[r] - 1) % PAGE_SIZE for r in batch]
        self.slots = np.array(slots, np.int64)
        inputs = PoolInputs(
            table=self.table, slot_mapping=self.slots, query_start=np.arange(len(batch) + 1, dtype=np.int64)
        )
        pending = self.guard.before_forward(
            batch, [self.rows[r] for r in batch], [self.length[r] for r in batch], inputs
        )
        judgement = self.guard.after_forward(pending)
        for request in batch:
            self.emitted[request] += request not in judgement.withheld
        for abort in judgement.aborts:
            self.end(abort.request, abort.foreign_pages.get("main", ()))

    def end(self, request: str, foreign: tuple[int, ...] = ()) -> None:
        self.guard.finish(request)
        pages = [page for page in self.pages.pop(request) if page not in foreign]
        self.free += self.guard.retire(pages).reusable
        del self.rows[request]


def test_an_honest_engine_is_never_disturbed() -> None:
    """Requests come, grow, go and reuse each other's pages: every token leaves, nothing is reported."""
    engine = PlainEngine()
    for round_ in range(12):
        engine.start(f"r{round_}")
        for _ in range(5):
            engine.step()
        if len(engine.rows) == 2:
            engine.end(next(iter(engine.rows)))
    assert engine.guard.violations == ()
    assert engine.guard.health().ok
    assert sum(engine.emitted.values()) == engine.guard.health().counters["rows_verified"] == 60 + 55


def test_a_page_on_the_free_list_too_early_is_caught_when_it_is_handed_out() -> None:
    """A double allocation is refused, the engine draws another page, and both requests go on."""
    engine = PlainEngine()
    engine.start("a")
    engine.step()
    engine.free.insert(0, engine.pages["a"][0])
    engine.start("b")
    engine.step()
    assert [violation.kind for violation in engine.guard.violations] == [Kind.DOUBLE_ALLOCATION]
    assert engine.emitted == {"a": 2, "b": 1}
    assert set(engine.pages["a"]).isdisjoint(engine.pages["b"])


def test_a_read_after_the_own_free_ends_that_request_alone() -> None:
    """Its token of the step is withheld, its row and slots are neutralised, the other request keeps emitting."""
    engine = PlainEngine()
    engine.start("a")
    engine.start("b")
    engine.step()
    engine.free += engine.guard.retire(engine.pages["a"], by="a").reusable
    engine.step()
    assert engine.emitted == {"a": 1, "b": 2}
    assert list(engine.rows) == ["b"]
    assert engine.table[0].tolist() == [0] * 8
    assert engine.slots[0] == -1 and engine.slots[1] != -1
    engine.step()
    assert engine.emitted == {"a": 1, "b": 3}


def test_every_call_reaches_the_guard() -> None:
    """Preempt, resume, rewind, publish, adopt, unpublish, drop, truncate and reset do what the Guard's do."""
    engine = PlainEngine()
    guard = engine.guard
    for request in ("a", "b"):
        guard.start(request)
    assert guard.allocate("a", [1, 2, 3, 4]) == [1, 2, 3, 4]
    inputs = PoolInputs(table=np.array([[1, 2, 3, 4], [1, 5, 0, 0]], np.int32))
    assert guard.after_forward(guard.before_forward(["a"], [0], [16], inputs)).clean
    assert guard.publish("a", 0, "k0") and guard.publish("a", 1, "k1") and guard.publish("a", 2, "k2")
    guard.rewind("a", 8)
    guard.unpublish([2])
    assert guard.adopt("b", [("k0", 1), ("k1", 2)]) == 1
    guard.preempt("b")
    guard.resume("b")
    assert guard.adopt("b", [("k2", 3)]) == 0, "taken back by rewind"
    assert guard.adopt("b", [("k0", 1)]) == 1 and guard.allocate("b", [5]) == [5]
    assert guard.after_forward(guard.before_forward(["b"], [1], [8], inputs)).clean
    assert guard.drop("a", 0, 1) == [1]
    assert guard.truncate("a", 3) == [4]
    assert guard.reset(revoke_held=True) == []
    judgement = guard.after_forward(guard.before_forward(["a", "b"], [0, 1], [12, 8], inputs))
    assert judgement.withheld == {"a", "b"}
    assert {violation.kind for violation in guard.violations[-2:]} == {Kind.STALE_PAGE}


def test_halting_raises_out_of_the_step() -> None:
    """With on_violation = halt after_forward raises the violation; so does a refused operation."""
    engine = PlainEngine(on_violation="halt")
    engine.start("a")
    engine.step()
    with pytest.raises(GuardHalt):
        engine.guard.retire([9])
    engine.table[0, 0] = 9
    with pytest.raises(GuardHalt) as raised:
        engine.step()
    assert raised.value.violation.request == "a"
    assert engine.guard.health().armed, "a violation is no fault of the guard"


@pytest.mark.parametrize(
    "call,answer",
    [
        (lambda guard: guard.start("a"), None),
        (lambda guard: guard.start(7), None),
        (lambda guard: guard.resume("a"), None),
        (lambda guard: guard.rewind("gone", 3), None),
        (lambda guard: guard.preempt("gone"), None),
        (lambda guard: guard.allocate("gone", [4, 5]), [4, 5]),
        (lambda guard: guard.allocate("a", [4.0]), [4.0]),
        (lambda guard: guard.adopt("gone", [("k", 4)]), 1),
        (lambda guard: guard.adopt("a", [("k", "4")]), 1),
        (lambda guard: guard.publish("gone", 0, "k"), True),
        (lambda guard: guard.truncate("gone", 0), []),
        (lambda guard: guard.drop("gone", 0, 1), []),
        (lambda guard: guard.skip("gone", 1), None),
        (lambda guard: guard.retire([1], pool="nowhere"), Retired(reusable=[1], refused=[], quarantined=[])),
        (lambda guard: guard.reset(pool="nowhere"), []),
    ],
)
def test_a_call_that_makes_no_sense_is_counted_and_answered_as_if_unguarded(
    call: Callable[[PagedGuard], object], answer: object
) -> None:
    """An error of the adapter costs neither the guard nor the books: the engine goes on, guarded."""
    engine = PlainEngine()
    engine.start("a")
    engine.step()
    engine.guard.start("gone")
    engine.guard.finish("gone")
    assert call(engine.guard) == answer
    engine.step()
    health = engine.guard.health()
    assert health.armed and health.counters["adapter_errors"] == 1 and health.counters["guard_faults"] == 0
    assert engine.emitted == {"a": 2} and engine.guard.violations == ()


def test_a_step_that_makes_no_sense_is_a_fault_of_the_guard() -> None:
    """A step whose lists do not fit each other was not verified, whoever is to blame: the guard disarms."""
    engine = PlainEngine()
    assert engine.guard.before_forward(["nobody"], [0], [], PoolInputs(table=engine.table)) is None
    health = engine.guard.health()
    assert not health.armed and health.counters["guard_faults"] == 1 and health.counters["adapter_errors"] == 0


def test_content_is_passed_on(tmp_path: Path) -> None:
    """show_content reaches the reports."""
    engine = PlainEngine(report_dir=tmp_path, report_content=True)
    engine.guard.show_content(lambda request: f"prompt of {request}")
    engine.start("a")
    engine.guard.allocate("a", [0])
    assert "prompt of a" in next(tmp_path.glob("*.txt")).read_text()


def test_a_guard_on_numpy_never_imports_torch() -> None:
    """An engine without PyTorch can be guarded: a whole guarded run, faults and all, leaves torch unimported."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.core.test_generic_adapter import PlainEngine
engine = PlainEngine()
engine.start("a")
engine.step()
engine.table[0, 0] = 9
engine.step()
assert engine.emitted == {{"a": 1}}, engine.emitted
print([name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "cupy")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
