"""Steps and messages: they cross a process boundary, none may be lost or repeated; no verdict is not a clean one."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import structlog

from kvguard.adapters.generic import GuardFault, PagedGuard
from kvguard.config import GuardConfig
from kvguard.guard import UncheckedStep
from kvguard.kernels.mixing import mix, signed64
from kvguard.kernels.verify_pages import layout
from kvguard.messages import StepDelta, Verdicts
from kvguard.pools import PoolSpec
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier
from kvguard.violation import Kind, Proof
from tests.core.support import MAIN, Rig, kinds


def two_requests(**settings: Any) -> Rig:
    rig = Rig(**settings)
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3)
    return rig


def test_a_delta_and_its_verdicts_work_across_a_process_boundary() -> None:
    """Set-up, deltas and verdicts survive pickling, and the far side finds the same fault as the near one."""
    rig = two_requests(proofs=frozenset({Proof.TAG}))
    verifier = Verifier(pickle.loads(pickle.dumps(rig.guard.setup)), backend="torch")
    import torch

    for lost in (False, True):
        if lost:
            rig.guard.retire([2])
        delta: StepDelta = pickle.loads(pickle.dumps(rig.delta("a", "b")))
        table = torch.from_numpy(rig.tables["main"].copy())
        pending = verifier.check(delta, {"main": PoolInputs(table=table)})
        verdicts: Verdicts = pickle.loads(pickle.dumps(pending.resolve()))
        judgement = rig.guard.judge(verdicts)
        assert kinds(judgement) == ({"a": Kind.VACANT_PAGE} if lost else {})
        assert table[0, :2].tolist() == ([0, 0] if lost else [1, 2])
    assert judgement.violations[0].row_entries == (1, 2)


def test_a_delta_holds_tag_changes_rows_digests_and_extents() -> None:
    """Every array of a section, read back by hand, is what the calls before it say."""
    rig = Rig(MAIN, PoolSpec(name="state", num_pages=4, page_size=None))
    rig.start("a", "b", "idle")
    rig.allocate("a", 5, 6, 7, 8)
    rig.guard.drop("a", 1, 2)
    rig.allocate("b", 9)
    rig.guard.truncate("b", 0)
    rig.guard.retire([9, 6])
    delta = rig.delta("b", "a", ends={"b": 0})
    table = rig.guard._books.tables[0]
    assert (delta.step, delta.requests, delta.enforce) == (1, ("b", "a"), True)
    section, state = delta.sections
    assert (section.pool, state.pool) == ("main", "state")
    changes = dict(zip(delta.array(section.tag_pages), delta.array(section.tag_values), strict=True))
    assert changes == {5: table.tag(5), 6: 0, 7: table.tag(7), 8: table.tag(8), 9: 0}
    assert delta.array(section.table_row).tolist() == [1, 0]
    digest = sum(mix(rig.guard.setup.digest_key, column, table.tag(5 + column)) for column in (0, 2, 3))
    assert delta.array(section.expected).tolist() == [0, signed64(digest)]
    assert delta.array(section.extent_offset).tolist() == [0, 1, 3]
    assert delta.array(section.extent_start).tolist() == [0, 0, 2]
    assert delta.array(section.extent_stop).tolist() == [0, 1, 4]
    assert section.columns == 4
    assert delta.array(state.expected).tolist() == [0, 0] and state.columns == 0
    assert delta.array(state.tag_pages).tolist() == []


def test_tag_changes_are_sent_once() -> None:
    """A step without page calls before it carries no tag changes."""
    rig = two_requests()
    lengths = []
    for _ in range(2):
        delta = rig.delta("a")
        lengths.append(len(delta.array(delta.sections[0].tag_pages)))
    assert lengths == [3, 0]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_lost_or_repeated_delta_is_refused(backend: str) -> None:
    """The device half applies deltas 1, 2, 3, ... and no other order: a mirror that missed one judges wrongly."""
    rig = two_requests(backend=backend)
    first, second, third = (rig.delta("a", "b") for _ in range(3))
    rig.check(first)
    for wrong in (first, third):
        with pytest.raises(ValueError, match="lost or repeated"):
            rig.check(wrong)
    assert rig.verifier.step == 1
    rig.check(second)
    rig.check(third)
    assert rig.verifier.step == 3


def test_a_pool_without_a_block_table_is_refused_before_anything_changes() -> None:
    """A step that names rows must bring the block table of every pool; without it nothing is applied."""
    rig = two_requests()
    delta = rig.delta("a")
    with pytest.raises(ValueError, match="no block table for pool main"):
        rig.verifier.check(delta, {})
    assert rig.judge(rig.check(delta)).clean


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_mirror_follows_the_books(backend: str) -> None:
    """After each step the device's tags are those of the books, page by page."""
    rig = two_requests(backend=backend)
    for action in (
        lambda: None,
        lambda: rig.guard.truncate("a", 1),
        lambda: rig.guard.retire([2]),
        lambda: rig.allocate("b", 2, 7),
    ):
        action()
        rig.check(rig.delta())
        mirror = rig.verifier.tags("main").tolist()
        assert mirror == [rig.guard._books.tables[0].tag(page) for page in range(32)]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_several_extents_of_many_rows_are_checked_together(backend: str) -> None:
    """Rows with one, two and no live extent share a step; each is checked where it is live and nowhere else."""
    rig = Rig(backend=backend)
    rig.start("one", "two", "none")
    rig.allocate("one", 1, 2)
    rig.allocate("two", 3, 4, 5, 6)
    rig.guard.drop("two", 1, 3)
    rig.tables["main"][rig.rows["two"], 1:3] = 31
    assert rig.run("one", "two", "none").clean
    rig.write("two", 3, 1)
    judgement = rig.run("none", "two", "one")
    assert kinds(judgement) == {"two": Kind.FOREIGN_ROW}
    assert rig.row("two")[:4] == [0, 31, 31, 0]


def test_slots_of_a_flagged_row_are_skipped() -> None:
    """The writes of a flagged row go to the engine's skip slot, its neighbours' stay."""
    rig = Rig(PoolSpec(num_pages=32, page_size=4, skip_slot=-7), proofs=frozenset({Proof.TAG}))
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3)
    rig.guard.retire([2])
    slots = np.array([8, 9, 12], np.int64)
    given = PoolInputs(table=rig.tables["main"], slot_mapping=slots, query_start=np.array([0, 2, 3], np.int64))
    rig.verifier.check(rig.delta("a", "b"), {"main": given})
    assert slots.tolist() == [-7, -7, 12]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_either_backend_takes_arrays_and_tensors_in_host_memory(backend: str, kind: str) -> None:
    """NumPy arrays and CPU tensors share their memory: a fault is found and neutralised in place, whoever owns it."""
    import torch

    rig = two_requests(proofs=frozenset({Proof.TAG}))
    verifier = Verifier(rig.guard.setup, backend=backend)
    rig.guard.retire([2])
    slots, starts = np.array([4, 5, 12], np.int64), np.array([0, 2, 3], np.int64)
    wrap: Any = torch.from_numpy if kind == "torch" else np.asarray
    inputs = PoolInputs(table=wrap(rig.tables["main"]), slot_mapping=wrap(slots), query_start=wrap(starts))
    pending = verifier.check(rig.delta("a", "b"), {"main": inputs})
    assert rig.judge(pending).withheld == {"a"}
    assert rig.row("a")[:2] == [0, 0] and slots.tolist() == [-1, -1, 12]


def test_a_row_that_was_not_checked_is_a_fault_of_the_guard() -> None:
    """A verdict that no kernel wrote, for one row or all, missing rows or pools: never a clean step."""
    for spoil in (
        lambda records: np.full_like(records, layout.NOT_CHECKED),
        lambda records: np.concatenate([records[:, :1], np.full_like(records[:, :1], layout.NOT_CHECKED)], axis=1),
        lambda records: records[:, :1],
        lambda records: records[:0],
        lambda records: None,
    ):
        rig = two_requests()
        verdicts = rig.launch("a", "b").resolve()
        assert verdicts.records is not None
        with pytest.raises(UncheckedStep):
            rig.guard.judge(Verdicts(step=verdicts.step, records=spoil(verdicts.records)))


def test_an_empty_step_and_a_guard_without_the_tag_proof_need_no_verdict() -> None:
    """Nothing was to be checked, so nothing is missing."""
    assert two_requests().run().clean
    rig = two_requests(device_check=False)
    pending = rig.launch("a", "b")
    assert pending.record is None
    assert rig.judge(pending).clean


def test_steps_are_judged_in_order_and_once() -> None:
    """Out of order, twice or never made: refused, and the right order still works."""
    rig = two_requests()
    first, second = rig.launch("a", "b"), rig.launch("a", "b")
    with pytest.raises(ValueError, match="out of order"):
        rig.judge(second)
    assert rig.judge(first).clean
    with pytest.raises(ValueError, match="not in flight"):
        rig.judge(first)
    assert rig.judge(second).clean
    with pytest.raises(ValueError, match="not in flight"):
        rig.guard.judge(Verdicts(step=9, records=None))


def test_another_thread_is_refused() -> None:
    """step and judge belong to one thread; a health endpoint may ask from any."""
    rig = two_requests()
    pending = rig.launch("a", "b")
    outcomes: list[object] = []

    def other() -> None:
        for call in (lambda: rig.delta("a"), lambda: rig.judge(pending), rig.guard.health):
            try:
                outcomes.append(call())
            except RuntimeError as error:
                outcomes.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "another one" in str(outcomes[0]) and "another one" in str(outcomes[1])
    assert outcomes[2] == rig.guard.health()
    assert rig.judge(pending).clean


def test_the_heartbeat_is_lost_once_and_comes_back() -> None:
    """More unjudged steps than allowed: not alive, said once; alive again when the verdicts have come."""
    rig = two_requests(steps_in_flight_max=2)
    with structlog.testing.capture_logs() as logs:
        pending = [rig.launch("a", "b") for _ in range(2)]
        assert rig.guard.health().alive
        pending += [rig.launch("a", "b") for _ in range(2)]
        health = rig.guard.health()
        assert not health.alive and not health.ok and health.in_flight == 4
        assert (health.counters["steps_seen"], health.counters["steps_verified"]) == (4, 0)
        for step in pending:
            rig.judge(step)
        assert rig.guard.health().ok and rig.guard.health().in_flight == 0
        pending = [rig.launch("a", "b") for _ in range(3)]
    lost = [(entry["step"], entry["in_flight"]) for entry in logs if entry["event"] == "heartbeat_lost"]
    assert lost == [(3, 3), (7, 3)]
    counters = rig.guard.health().counters
    assert (counters["rows_seen"], counters["rows_verified"]) == (14, 8)


# -- a fault of the guard itself, as an engine sees it through PagedGuard ----------------------------------------------


def paged(**settings: Any) -> tuple[PagedGuard, PoolInputs]:
    guard = PagedGuard([MAIN], config=GuardConfig.load(seed=1, **settings), backend="numpy")
    guard.start("a")
    guard.start("b")
    assert guard.allocate("a", [1]) == [1] and guard.allocate("b", [2]) == [2]
    return guard, PoolInputs(table=np.array([[1], [2]], np.int32))


def unchecked(pending: PendingVerdicts | None) -> PendingVerdicts:
    """The step as if its kernel had never run."""
    assert pending is not None
    return pending._replace(record=np.full_like(pending.record, layout.NOT_CHECKED))


def test_a_fault_of_the_guard_disarms_it_loudly_and_the_engine_goes_on() -> None:
    """With on_guard_error = disarm later calls are no-ops that let everything pass; health and the log say so."""
    guard, inputs = paged()
    pending = unchecked(guard.before_forward(["a"], [0], [4], inputs))
    with structlog.testing.capture_logs() as logs:
        assert guard.after_forward(pending).clean
    (entry,) = [entry for entry in logs if entry["event"] == "guard_fault"]
    assert entry["log_level"] == "critical" and "UncheckedStep" in entry["error"]
    assert guard.before_forward(["a"], [0], [4], inputs) is None
    assert guard.after_forward(None).clean
    assert guard.allocate("nobody", [1, 1, 99]) == [1, 1, 99]
    assert guard.adopt("nobody", [("k", 5)]) == 1
    assert guard.publish("nobody", 0, "k") is True
    assert guard.retire([1, 1]).reusable == [1, 1]
    assert guard.truncate("a", 0) == guard.drop("a", 0, 1) == guard.reset() == []
    health = guard.health()
    assert not health.armed and not health.ok and health.counters["guard_faults"] == 1
    assert guard.violations == ()


def test_a_fault_of_the_guard_can_stop_every_later_step() -> None:
    """With on_guard_error = abort the step in hand and every later one raise GuardFault, naming their requests."""
    guard, inputs = paged(on_guard_error="abort")
    first = unchecked(guard.before_forward(["a"], [0], [4], inputs))
    second = guard.before_forward(["b"], [1], [4], inputs)
    for call, requests in (
        (lambda: guard.after_forward(first), ("a",)),
        (lambda: guard.after_forward(second), ("b",)),
        (lambda: guard.before_forward(["b", "a"], [1, 0], [4, 4], inputs), ("b", "a")),
        (lambda: guard.before_forward(["a"], [0], [4], inputs), ("a",)),
    ):
        with pytest.raises(GuardFault) as raised:
            call()
        assert raised.value.requests == requests
    assert not guard.health().armed


def test_a_fault_before_the_forward_follows_the_same_setting() -> None:
    """Without a block table the check cannot run: disarmed, or GuardFault before the forward."""
    guard, _ = paged()
    assert guard.before_forward(["a"], [0], [4], {}) is None
    assert not guard.health().armed
    guard, _ = paged(on_guard_error="abort")
    with pytest.raises(GuardFault) as raised:
        guard.before_forward(["a"], [0], [4], {})
    assert raised.value.requests == ("a",)


@pytest.mark.parametrize("on_violation", ["abort", "observe"])
def test_rows_that_the_device_flagged_before_the_guard_failed_do_not_leave(on_violation: str) -> None:
    """The kernel has neutralised them: their tokens are withheld and their requests ended, unless it only observed."""
    guard, inputs = paged(on_violation=on_violation)
    inputs.table[1, 0] = 9
    first = guard.before_forward(["a"], [0], [4], inputs)
    second = guard.before_forward(["a", "b"], [0, 1], [4, 4], inputs)
    assert guard.after_forward(unchecked(first)).clean
    assert not guard.health().armed
    judgement = guard.after_forward(second)
    flagged = {"b"} if on_violation == "abort" else set()
    assert judgement.withheld == {abort.request for abort in judgement.aborts} == flagged
    assert {violation.request for violation in judgement.violations} == flagged


def test_a_record_on_its_way_is_read_only_once_it_has_arrived() -> None:
    """Where the record was sent to the host behind the check, `resolve` waits for that copy and reads nothing else."""
    import torch

    arrived = torch.zeros((1, 2, layout.RECORD_WORDS), dtype=torch.int64)

    class Event:
        def synchronize(self) -> None:
            arrived[0, 1, layout.FLAGS] = layout.FLAG_NULL

    stale = torch.full((1, 2, layout.RECORD_WORDS), layout.NOT_CHECKED)
    pending = PendingVerdicts(step=1, record=stale, on_host=(arrived, Event()))
    assert pending.flagged_rows() == [1]
    records = pending.resolve().records
    assert records is not None and records[0, :, layout.FLAGS].tolist() == [0, layout.FLAG_NULL]
    on_cpu = PendingVerdicts(step=1, record=arrived)
    assert on_cpu.depart() is on_cpu
