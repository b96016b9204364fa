"""DevicePagedGuard: page numbers that exist only on the device, guarded without a wait."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvguard.adapters.device_pages import DevicePagedGuard, DevicePending, GuardFault, GuardHalt  # noqa: E402
from kvguard.config import GuardConfig  # noqa: E402
from kvguard.judge import Judgement  # noqa: E402
from kvguard.kernels.mixing import mix, signed64  # noqa: E402
from kvguard.kernels.verify_pages import torch_op  # noqa: E402
from kvguard.pools import PoolSpec  # noqa: E402
from kvguard.verifier import PoolInputs  # noqa: E402
from kvguard.violation import Action, Kind, Proof  # noqa: E402
from tests.waiting import Recorder  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
from slicing_allocator import SlicingAllocator  # noqa: E402

NUM_PAGES, PAGE_SIZE, ROWS, COLUMNS = 32, 4, 4, 6


@pytest.fixture(params=["host", "device"], autouse=True)
def path_of_the_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the short way for tensors in host memory, once the way that a GPU takes."""
    if request.param == "device":
        monkeypatch.setattr(torch_op, "on_host", lambda tensor: False)


class SlicingEngine:
    """Requests that grow by a token a step; the table is written from the allocator's tensors alone."""

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        self.device = device
        self.allocator = SlicingAllocator(NUM_PAGES, device)
        self.table = torch.zeros((ROWS, COLUMNS), dtype=torch.int32, device=device)
        self.slots = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.query_start = torch.arange(ROWS + 1, device=device)
        self.rows: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.columns: dict[str, int] = {}
        self.guard = DevicePagedGuard(
            PoolSpec(num_pages=NUM_PAGES, page_size=PAGE_SIZE), table_rows=ROWS, device=device,
            config=GuardConfig.default(seed=3, **settings),
        )  # fmt: skip

    def start(self, request: str, tokens: int = 6) -> None:
        self.rows[request] = min(set(range(ROWS)) - set(self.rows.values()))
        self.tokens[request], self.columns[request] = tokens, 0
        self.guard.start(request, self.rows[request])

    def grow(self, names: list[str]) -> None:
        needs = [-(-self.tokens[name] // PAGE_SIZE) - self.columns[name] for name in names]
        pages = self.allocator.alloc(sum(needs))
        assert pages is not None
        self.guard.allocate(names, needs, pages)
        for name, mine in zip(names, pages.split(needs), strict=True):  # type: ignore[no-untyped-call]
            self.table[self.rows[name], self.columns[name] : self.columns[name] + len(mine)] = mine
            self.columns[name] += len(mine)

    def launch(self) -> DevicePending | None:
        names = list(self.rows)
        for name in names:
            self.tokens[name] += 1
        self.grow(names)
        inputs = PoolInputs(table=self.table, slot_mapping=self.slots, query_start=self.query_start)
        self.slots.fill_(9)
        return self.guard.before_forward(names, [self.tokens[name] for name in names], inputs)

    def step(self) -> Judgement:
        return self.guard.after_forward(self.launch())

    def pages(self, request: str) -> Any:
        return self.table[self.rows[request], : self.columns[request]].clone()

    def end(self, request: str) -> None:
        pages = self.pages(request)
        self.guard.finish(request)
        self.guard.free(pages)
        self.allocator.free(pages)
        del self.rows[request]


def kinds(judgement: Judgement) -> list[Kind]:
    return [violation.kind for violation in judgement.violations]


def test_an_honest_engine_is_never_disturbed() -> None:
    """Requests come, grow, go and reuse each other's pages; digests are the oracle's; nothing is reported."""
    engine = SlicingEngine()
    for round_ in range(8):
        engine.start(f"r{round_}", tokens=3 + round_)
        for _ in range(3):
            assert engine.step().clean
        if len(engine.rows) == 3:
            engine.end(next(iter(engine.rows)))
    books = engine.guard._device_books
    for request, row in engine.rows.items():
        pages = [int(page) for page in engine.pages(request)]
        terms = [mix(books._key, column, int(books.page_tag[page])) for column, page in enumerate(pages)]
        assert int(books.digest[row]) == signed64(sum(terms))
    health = engine.guard.health()
    assert engine.guard.violations == () and health.ok and health.in_flight == 0
    assert health.counters["steps_seen"] == health.counters["steps_verified"] == 24
    assert health.counters["adapter_errors"] == 0


def test_a_page_handed_out_twice_ends_its_former_holder_before_it_reads() -> None:
    """The allocation is reported with page and taker; the holder's row is flagged and neutralised."""
    engine = SlicingEngine()
    engine.start("a")
    assert engine.step().clean
    stolen = int(engine.pages("a")[1])
    engine.allocator.free_pages = torch.cat([torch.tensor([stolen]), engine.allocator.free_pages])
    engine.start("b")
    judgement = engine.step()
    assert kinds(judgement) == [Kind.DOUBLE_ALLOCATION, Kind.STALE_PAGE]
    event, row = judgement.violations
    assert (event.proof, event.action, event.request, event.page) == (
        Proof.CONTROL_PLANE, Action.OBSERVED, "b", stolen,
    )  # fmt: skip
    assert (row.request, row.page, row.column, row.row_entries) == ("a", stolen, 1, (1, 2))
    assert judgement.withheld == {"a"} and [abort.request for abort in judgement.aborts] == ["a"]
    assert engine.table[0, :2].tolist() == [0, 0] and engine.table[1, 0] == stolen
    assert engine.slots.tolist() == [-1, 9, 9, 9]
    again = engine.step()
    assert again.withheld == {"a"} and not again.aborts and not again.violations


def test_a_free_under_a_reader_and_a_second_free_are_found() -> None:
    """The reader's row is flagged as vacant; freeing again is reported with its page."""
    engine = SlicingEngine()
    engine.start("a")
    engine.start("b")
    assert engine.step().clean
    engine.guard.free(engine.pages("a")[:1])
    judgement = engine.step()
    assert kinds(judgement) == [Kind.VACANT_PAGE] and judgement.withheld == {"a"}
    assert (judgement.violations[0].page, judgement.violations[0].column) == (1, 0)
    engine.guard.free(torch.tensor([20, 1]))
    engine.guard.free(torch.tensor([3, 4, 3]))
    judgement = engine.step()
    assert [v.page for v in judgement.violations if v.kind is Kind.DOUBLE_FREE] == [20, 3]
    assert Kind.VACANT_PAGE in kinds(judgement), "b held pages 3 and 4"


def test_a_page_twice_in_one_allocation_belongs_to_one_row_only() -> None:
    """The free list itself held it twice: one of the two rows is flagged in the very step."""
    engine = SlicingEngine()
    engine.start("a", tokens=3)
    engine.start("b", tokens=3)
    engine.allocator.free_pages = torch.cat([torch.tensor([7, 7]), engine.allocator.free_pages])
    judgement = engine.step()
    assert kinds(judgement)[0] is Kind.DOUBLE_ALLOCATION and judgement.violations[0].page == 7
    assert len(judgement.withheld) == 1


@pytest.mark.parametrize(
    "page,kind",
    [(0, Kind.NULL_PAGE_USED), (NUM_PAGES, Kind.PAGE_OUT_OF_RANGE), (-3, Kind.PAGE_OUT_OF_RANGE)],
)
def test_what_is_no_page_is_found(page: int, kind: Kind) -> None:
    """The null page and numbers outside of the pool, given out or taken back; nothing is stamped out of bounds."""
    engine = SlicingEngine()
    engine.start("a")
    engine.allocator.free_pages = torch.cat([torch.tensor([page]), engine.allocator.free_pages])
    judgement = engine.step()
    assert kinds(judgement)[0] is kind and judgement.withheld == {"a"}
    engine.guard.free(torch.tensor([page]))
    assert kinds(engine.step())[0] is kind
    assert engine.guard.health().armed


def test_a_cache_hit_must_hold_what_was_published() -> None:
    """Adopted under its publication a page is shared; filled with other content since, whoever adopts it is flagged."""
    engine = SlicingEngine()
    engine.start("a", tokens=7)
    assert engine.step().clean
    shared = engine.pages("a")
    entry = engine.guard.publish(shared)

    def adopt(request: str) -> None:
        engine.start(request, tokens=8)
        engine.guard.adopt(request, shared, entry)
        engine.table[engine.rows[request], :2] = shared
        engine.columns[request] = 2

    adopt("b")
    assert engine.step().clean
    engine.guard.finish("a")
    del engine.rows["a"]
    assert engine.step().clean, "pages outlive their writer"
    engine.guard.free(shared[:1])
    engine.guard.finish("b")
    del engine.rows["b"]
    adopt("vacant")
    assert kinds(engine.step())[0] is Kind.ADOPT_VACANT
    engine.guard.finish("vacant")
    del engine.rows["vacant"]
    engine.allocator.free_pages = torch.cat([shared[:1].to(torch.int64), engine.allocator.free_pages])
    engine.start("c", tokens=2)
    assert engine.step().clean
    adopt("stale")
    judgement = engine.step()
    assert kinds(judgement)[0] is Kind.ADOPT_STALE and judgement.withheld == {"stale"}


def test_pages_given_up_are_promised_no_more() -> None:
    """After truncate the row is proven up to there; a page that was not the request's own does not add up."""
    engine = SlicingEngine()
    engine.start("a", tokens=14)
    assert engine.step().clean
    tail = engine.pages("a")[2:]
    engine.guard.truncate("a", tail)
    engine.guard.free(tail)
    engine.columns["a"], engine.tokens["a"] = 2, 7
    assert engine.step().clean
    engine.guard.truncate("a", torch.tensor([30]))
    engine.columns["a"], engine.tokens["a"] = 1, 3
    assert engine.step().withheld == {"a"}


def test_reading_past_the_promise_is_found() -> None:
    """A page that reached the table without passing the guard is no page of the request."""
    engine = SlicingEngine()
    engine.start("a", tokens=3)
    assert engine.step().clean
    engine.start("b", tokens=3)
    assert engine.step().withheld == set()
    # Column 2: the first two were promised, and stay what they were.
    engine.table[0, 2] = engine.table[1, 0]
    engine.columns["a"], engine.tokens["a"] = 3, 8
    assert engine.step().withheld == {"a"}


def test_steps_in_flight_are_judged_by_the_tags_of_their_time() -> None:
    """A page freed and handed on behind a step that still reads it is healthy: both run in stream order."""
    engine = SlicingEngine()
    engine.start("a")
    first = engine.launch()
    engine.end("a")
    engine.start("b")
    second = engine.launch()
    assert engine.guard.health().in_flight == 2
    assert engine.guard.after_forward(first).clean and engine.guard.after_forward(second).clean


def test_observing_changes_nothing_and_halting_stops() -> None:
    """observe: the row stays and its token leaves; halt: raised where the verdicts are read."""
    engine = SlicingEngine(on_violation="observe")
    engine.start("a")
    engine.table[0, 0] = 5
    judgement = engine.step()
    engine.table[0, 0] = 5
    judgement = engine.step()
    assert kinds(judgement) and not judgement.withheld and not judgement.aborts and engine.table[0, 0] == 5
    engine = SlicingEngine(on_violation="halt")
    engine.start("a")
    engine.step()
    engine.table[0, 0] = 9
    with pytest.raises(GuardHalt):
        engine.step()


def test_a_call_that_makes_no_sense_changes_nothing() -> None:
    """Counted as an adapter error each; the guard stays armed and the engine is clean."""
    engine = SlicingEngine()
    engine.start("a")
    assert engine.step().clean
    guard, page = engine.guard, torch.tensor([9])
    calls: list[Callable[[], object]] = [
        lambda: guard.start("a", 1),
        lambda: guard.start("b", ROWS),
        lambda: guard.allocate(["gone"], [1], page),
        lambda: guard.allocate(["a"], [2], page),
        lambda: guard.adopt("a", page, torch.tensor([1, 2])),
        lambda: guard.truncate("a", torch.arange(9)),
        lambda: guard.reset(),
    ]
    for number, call in enumerate(calls, 1):
        call()
        assert guard.health().counters["adapter_errors"] == number
    assert engine.step().clean
    engine.end("a")
    guard.reset()
    engine.start("a")
    assert engine.step().clean and guard.health().ok


def test_off_means_off_and_a_failed_guard_says_so() -> None:
    """Level off answers every call; after a fault of its own the guard lets nothing unproven leave, as configured."""
    engine = SlicingEngine(level="off")
    engine.start("a")
    assert engine.step().clean and engine.launch() is None and not engine.guard.health().armed
    engine = SlicingEngine(on_guard_error="abort")
    engine.start("a")
    with pytest.raises(GuardFault):
        engine.guard.before_forward(["a"], [], PoolInputs(table=engine.table))
    engine = SlicingEngine()
    engine.start("a")
    pending = engine.launch()
    engine.guard._books.violate = None  # type: ignore[assignment, method-assign]
    assert pending is not None
    pending.verdicts.record[0, 0, 0] = 1
    assert engine.guard.after_forward(pending).withheld == {"a"} and not engine.guard.health().armed
    assert engine.launch() is None


@pytest.mark.parametrize("pool", [PoolSpec(num_pages=8, page_size=None), PoolSpec(num_pages=8, split=2)])
def test_a_pool_that_it_cannot_keep_is_refused(pool: PoolSpec) -> None:
    """Recurrent state and kernel pages smaller than the allocator's are said, not guessed."""
    with pytest.raises(ValueError, match="device books"):
        DevicePagedGuard(pool, table_rows=2)


DEVICES = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_no_value_is_read_in_a_step(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of several steps, healthy and faulty, over tensors without values and under a recorder: zero waits."""
    monkeypatch.setattr(torch_op, "on_host", lambda tensor: False)
    recorder, pending = Recorder(scalars=True), []
    engine = SlicingEngine(device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with recorder:
            for name in ("a", "b", "c"):
                engine.start(name)
            pending.append(engine.launch())
            entry = engine.guard.publish(engine.pages("a"))
            engine.start("d", tokens=8)
            engine.guard.adopt("d", engine.pages("a"), entry)
            engine.table[engine.rows["d"], :2] = engine.pages("a")
            engine.columns["d"] = 2
            engine.guard.truncate("b", engine.pages("b")[1:])
            engine.guard.free(engine.pages("b"))
            engine.end("c")
            pending += [engine.launch(), engine.launch()]
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert recorder.waits == [] and recorder.calls > 300
    assert all(step is not None and step.verdicts.record.device.type == device for step in pending)
    health = engine.guard.health()
    assert health.armed and health.counters["adapter_errors"] == 0
    if device != "meta":
        judged = [engine.guard.after_forward(step) for step in pending]
        assert judged[0].clean and judged[1].withheld == {"b"}
    with recorder:
        assert torch.ones(1).item() == 1 and torch.ones(2)[torch.tensor(0)] == 1
    assert recorder.waits == ["item", "__getitem__", "__bool__"], "the recorder sees what it is there for"
