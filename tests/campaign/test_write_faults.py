"""Misled writes, guard off: each fault makes the write that it says, and changes what somebody gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.engine.step import MAIN_POOL, SKIP_SLOT
from kvguard.fault_injection.engine.window import WINDOW_POOL
from kvguard.fault_injection.faults.pages import Injection
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.mixed_traffic import mixed_traffic
from kvguard.fault_injection.plan import Cell, TrialPlan
from kvguard.fault_injection.results import MISSED
from kvguard.fault_injection.runs import Run, first_step
from kvguard.fault_injection.targets.embedded import EmbeddedTarget
from kvguard.fault_injection.targets.write_runs import WriteRuns, golden_run, mixed_config, windowed_model
from kvguard.fault_injection.targets.write_watch import WriteWatch
from kvguard.fault_injection.traffic import drive
from kvguard.fault_injection.trial import run_trial
from kvguard.fault_injection.write_plan import NO_SUCH_CELL

CASES = [(fault, size) for fault in WRITE_FAULTS for size in (1, 16, 64) if (fault, size) not in NO_SUCH_CELL]
BLAMELESS = ("padding-into-live-page", "skip-slot-wrapped", "dummy-batch-writes")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(eq=False)
class Scene:
    """The engine's state at the forward for which a fault went live, and the bytes that it hit."""

    injection: Injection
    requests: list[str]
    owners: list[str | None]
    positions: list[int]
    slots: list[int]
    last_slots: list[int]
    pages: dict[str, list[int]]
    table_rows: dict[str, list[int]]
    handed_out: list[int]
    size: int
    pool_slots: int
    before: dict[int, Tensor] = field(default_factory=dict)
    after: dict[int, Tensor] = field(default_factory=dict)

    def right_slot(self, token: int) -> int:
        """Where the token belongs, by its request's own pages."""
        owner, position = self.owners[token], self.positions[token]
        if owner is None:
            return SKIP_SLOT
        return self.pages[owner][position // self.size] * self.size + position % self.size

    def holders(self, slot: int) -> set[str]:
        """Who has the slot's page."""
        return {name for name, pages in self.pages.items() if slot // self.size in pages}


def play(fault: str, page_size: int, seed: int) -> tuple[Scene, Run]:
    """Run the traffic with the fault and no guard; what it was like when the fault went live."""
    config = mixed_config(kv_dtype="fp32", page_size=page_size, tight=False)
    engine, run, scenes = Engine(windowed_model("fp32"), config), Run(), list[Scene]()
    kind = WRITE_FAULTS[fault]
    watch = WriteWatch(kind, seed, run, first_step(kind, seed), recites=True)
    in_window = fault == "stale-window-entry"
    last: list[int] = []

    def look(running: Engine, batch: list[Sequence]) -> None:
        nonlocal last
        tensors = running.tensors
        assert tensors is not None
        name, pool = (WINDOW_POOL, running.window.pool) if in_window and running.window else (MAIN_POOL, running.pool)
        slots = tensors.slots[name].tolist()
        if run.live_step == running.step_index and not scenes and run.injection is not None:
            starts = tensors.query_start.tolist()
            owners: list[str | None] = []
            for place, count in enumerate(b - a for a, b in zip(starts, starts[1:], strict=False)):
                owners += [tensors.requests[place] if place < len(tensors.requests) else None] * count
            table = running.window.block_table if in_window and running.window else running.block_table
            active = running.scheduler.running
            scene = Scene(
                injection=run.injection,
                requests=tensors.requests,
                owners=owners,
                positions=tensors.positions.tolist(),
                slots=slots,
                last_slots=last,
                pages={s.id: list(s.window_pages if in_window else s.pages) for s in active},
                table_rows={s.id: table[s.row].tolist() for s in active},
                handed_out=list(pool.handed_out),
                size=page_size,
                pool_slots=config.num_pages * page_size,
            )
            scene.before = {slot: bytes_at(running, slot, in_window) for slot in slots if slot >= 0}
            scenes.append(scene)
        if batch:
            last = slots

    def after_step(running: Engine) -> None:
        if scenes and not scenes[0].after:
            scenes[0].after = {slot: bytes_at(running, slot, in_window) for slot in scenes[0].before}

    engine.at_schedule.append(watch.at_schedule)
    engine.at_launch += [watch.at_launch, look]
    assert drive(engine, mixed_traffic(1000 + seed % 4), max_steps=300, after_step=[after_step])
    assert scenes, f"{fault} never went live"
    run.outputs = {name: (output.token_ids, output.error) for name, output in engine.outputs.items()}
    return scenes[0], run


def bytes_at(engine: Engine, slot: int, in_window: bool) -> Tensor:
    """Keys and values of all layers in one slot."""
    kv = engine.window_kv if in_window else engine.kv
    return torch.stack([pages.flatten(0, 1)[slot].clone() for pages in (*kv.keys, *kv.values)])


def one_token(scene: Scene) -> tuple[str, int, int]:
    """The only token that was misled: whose, its right slot, its wrong one."""
    ((token, (before, after)),) = scene.injection.slots.items()
    owner = scene.owners[token]
    assert owner is not None and before == scene.right_slot(token)
    return owner, before, after


def changed_hands(scene: Scene) -> None:
    """Somebody else's page, which has been handed out more than once; the offset is the token's own."""
    owner, before, after = one_token(scene)
    assert owner not in scene.holders(after) and set(scene.injection.victims) <= scene.holders(after) != set()
    assert scene.handed_out[after // scene.size] > 1 and before % scene.size == after % scene.size


def padding(scene: Scene) -> None:
    """A lane behind the requests of a batch writes into a page of the victim."""
    ((lane, (before, after)),) = scene.injection.slots.items()
    assert scene.requests and scene.owners[lane] is None and before == SKIP_SLOT
    assert set(scene.injection.victims) <= scene.holders(after) != set()


def wrapped(scene: Scene) -> None:
    """Every lane that wrote nowhere writes to the last slot, and its page is in use."""
    lanes = [token for token, owner in enumerate(scene.owners) if owner is None]
    assert scene.injection.slots == {lane: (SKIP_SLOT, scene.pool_slots - 1) for lane in lanes}
    assert set(scene.injection.victims) <= scene.holders(scene.pool_slots - 1) != set()


def dummy(scene: Scene) -> None:
    """No request is in the batch, and lanes of it write into live pages."""
    assert scene.requests == [] and scene.injection.slots
    assert all(scene.holders(after) for _, after in scene.injection.slots.values())


def complete(scene: Scene) -> None:
    """A full page of its own that nobody else has, at the offset of the token."""
    owner, before, after = one_token(scene)
    assert scene.holders(after) == {owner} and before % scene.size == after % scene.size
    assert scene.pages[owner].index(after // scene.size) < scene.pages[owner].index(before // scene.size)


def shared(scene: Scene) -> None:
    """A page that the writer shares, with the victims among others."""
    owner, _, after = one_token(scene)
    victims = set(scene.injection.victims)
    assert victims and owner not in victims and scene.holders(after) >= {owner, *victims}


def shifted(scene: Scene) -> None:
    """The right page, the wrong offset."""
    _, before, after = one_token(scene)
    assert before // scene.size == after // scene.size and before != after


def swapped(scene: Scene) -> None:
    """Two requests' tokens, each to the other's slot."""
    (one, (first, to)), (other, (second, back)) = scene.injection.slots.items()
    assert (to, back) == (second, first) and scene.owners[one] != scene.owners[other]
    assert first == scene.right_slot(one) and second == scene.right_slot(other)


def past_the_end(scene: Scene) -> None:
    """The slot behind the last one of the request's last page."""
    owner, _, after = one_token(scene)
    assert after == (scene.pages[owner][-1] + 1) * scene.size


def replayed(scene: Scene) -> None:
    """The whole mapping is that of the forward before."""
    assert scene.slots == scene.last_slots != [scene.right_slot(token) for token in range(len(scene.slots))]


def stale_window(scene: Scene) -> None:
    """The windowed row names a page of somebody else where it is written, and the slots follow it."""
    (owner,) = {scene.owners[token] for token in scene.injection.slots}
    assert owner is not None
    for token, (before, after) in scene.injection.slots.items():
        column = scene.positions[token] // scene.size
        assert before == scene.right_slot(token) and scene.table_rows[owner][column] == after // scene.size
        assert owner not in scene.holders(after) != set() and scene.handed_out[after // scene.size] > 1


def twice(scene: Scene) -> None:
    """One page is in two places: of two requests, or of one."""
    places = [name for name, pages in scene.pages.items() for page in pages if page == scene.injection.page]
    assert len(places) == 2 and not scene.injection.slots


SAID: dict[str, Callable[[Scene], None]] = {
    "stale-slot-mapping": changed_hands,
    "padding-into-live-page": padding,
    "skip-slot-wrapped": wrapped,
    "dummy-batch-writes": dummy,
    "write-to-complete-page": complete,
    "write-to-shared-page": shared,
    "offset-shifted": shifted,
    "slots-swapped": swapped,
    "write-past-the-end": past_the_end,
    "slots-replayed": replayed,
    "stale-window-entry": stale_window,
    "double-free": twice,
}


@pytest.mark.parametrize("fault,page_size", CASES)
def test_a_fault_makes_the_write_that_it_says(fault: str, page_size: int) -> None:
    """By the engine's own lists: the named tokens go where the fault says, all others where they belong."""
    scene, run = play(fault, page_size, seed=1 + page_size % 2)
    SAID[fault](scene)
    misled = scene.injection.slots
    for token, slot in enumerate(scene.slots):
        assert slot == (misled[token][1] if token in misled else scene.right_slot(token)) or fault == "double-free"
    for _, after in misled.values():
        if after >= 0:
            assert not torch.equal(scene.before[after], scene.after[after]), "the forward did not write there"
    blamed = {scene.owners[token] for token in misled} - {None}
    assert (fault in BLAMELESS) == (not run.affected)
    assert run.affected == blamed or fault == "double-free" and run.affected <= set(scene.pages)
    assert (
        fault in ("slots-swapped", "double-free")
        or run.affected.isdisjoint(scene.injection.victims)
        or all(scene.holders(after) <= blamed for _, after in misled.values())
    )


@pytest.mark.parametrize("fault,page_size", [case for case in CASES if case[1] == 16])
def test_a_fault_that_is_undone_at_once_leaves_no_trace(fault: str, page_size: int) -> None:
    """`undo` right behind `inject` puts slots, rows and lists back: everybody gets what they get without a fault."""
    config = mixed_config(kv_dtype="fp32", page_size=page_size, tight=False)
    engine, kind = Engine(windowed_model("fp32"), config), WRITE_FAULTS[fault]
    done: list[Injection] = []

    def break_and_repair(running: Engine, *_: object) -> None:
        made = kind(seed=1, target=EmbeddedTarget(running))
        if running.step_index >= 4 and not done:
            injection = made.inject()
            if injection is not None:
                made.undo(injection)
                done.append(injection)

    if kind.before_forward:
        engine.at_launch.append(break_and_repair)
    else:
        engine.at_schedule.append(break_and_repair)
    engine.at_schedule.append(lambda running: kind(seed=1, target=EmbeddedTarget(running)).prepare())
    assert drive(engine, mixed_traffic(1001), max_steps=300)
    assert done
    golden = golden_run("fp32", "fp32", page_size, 1001, False, False)
    assert {name: (o.token_ids, o.error) for name, o in engine.outputs.items()} == golden.outputs


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_most_misled_writes_change_what_somebody_gets(fault: str) -> None:
    """Without a guard they are real; where somebody else's slot is hit, that one is mostly harmed."""
    size = 16
    potent = harmed = victims = 0
    for seed in range(8):
        golden = golden_run("fp32", "fp32", size, 1000 + seed % 4, False, False)
        cell = Cell(engine="embedded", fault=fault, kv_dtype="fp32", weights="fp32", page_size=size)
        plan = TrialPlan(index=0, cell=cell, traffic_seed=1000 + seed % 4, fault_seed=7919 * seed + 13)
        off = WriteRuns(plan, backend="torch", proofs="none").off()
        assert off.injection is not None and off.live_step > 0 and not off.crash
        potent += off.outputs != golden.outputs
        others = [name for name in off.injection.victims if name not in off.affected]
        victims += bool(others)
        harmed += any(off.outputs[name] != golden.outputs[name] for name in others)
    print(f"{fault}: {potent} of 8 potent, {harmed} of {victims} victims harmed")
    # One slot of a page that is fixed beforehand often says nothing that is recited: half is what it makes.
    assert potent >= (4 if fault == "skip-slot-wrapped" else 5)
    assert 2 * harmed >= victims


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_a_guard_without_proofs_finds_none_of_them(fault: str) -> None:
    """Detections come from the proofs, not from the harness; where nobody is to blame, silence is a miss, too."""
    cell = Cell(engine="embedded", fault=fault, kv_dtype="fp32", weights="fp32", page_size=16)
    plan = TrialPlan(index=0, cell=cell, traffic_seed=1001, fault_seed=3)
    result = run_trial(plan, model="recall", backend="torch", proofs="none")
    assert result.outcome == MISSED and result.detected_by == () and not result.aborted and not result.proven
