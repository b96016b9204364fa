"""The short way in C and the long way: the same verdicts, evidence and neutralising, in steps sound and broken."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvguard.kernels.verify_pages.torch_op as pages_torch
import kvguard.step_arrays as step_arrays
from kvguard.kernels.host_check import is_built
from kvguard.kernels.verify_pages import layout
from kvguard.messages import StepDelta, Verdicts
from kvguard.pools import PoolSpec
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier
from tests.core.support import MAIN, TAG_ONLY
from tests.core.test_write_slots import WriteRig

REQUESTS = ("a", "b", "c")
FAULTS = ("table", "vacant", "slot", "lost", "padding", "null", "writer", "mirror")
built = pytest.mark.skipif(not is_built(), reason="NATIVE CHECK NOT TESTED: kvguard was installed without a C compiler")


class EnforcingRig(WriteRig):
    """Its checks redirect and neutralise or do not, while the guard only observes, so that no request is ended."""

    enforce = False

    def checked(self, delta: StepDelta, **arrays: Any) -> PendingVerdicts:
        return super().checked(delta._replace(enforce=self.enforce), **arrays)


class Ways:
    """The same steps three times: in C where that is there, in torch alone, and by the oracle."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        observe = {"on_violation": "observe", "breaker_violations": 0, "steps_in_flight_max": 64, **settings}
        self.rigs = [EnforcingRig(backend=backend, **observe) for backend in ("torch", "torch", "numpy")]
        # None of the second one's pools has a short way in C.
        vars(self.rigs[1].verifier._arrays)["bind"] = lambda reads, writes: None
        self.done = dict.fromkeys(REQUESTS, 0)
        self.free = list(range(1, 31))
        self.rng.shuffle(self.free)
        self.seen: Counter[str] = Counter()
        for rig in self.rigs:
            rig.start(*REQUESTS)

    def each(self, act: Callable[[EnforcingRig], Any]) -> list[Any]:
        return [act(rig) for rig in self.rigs]

    def step(self) -> None:
        """Some requests write a few tokens more; perhaps something is broken."""
        rng, spans = self.rng, {}
        for name in rng.sample(REQUESTS, rng.randint(1, 3)):
            stop = self.done[name] + rng.randint(1, 3)
            while self.rigs[0].full_length(name) < stop and self.free:
                page = self.free.pop()
                self.each(lambda rig, name=name, page=page: rig.allocate(name, page))  # type: ignore[misc]
            if stop <= self.rigs[0].full_length(name):
                spans[name] = (self.done[name], stop)
        if not spans:
            return
        padding = rng.randint(0, 2)
        enforce = rng.random() < 0.5
        for rig in self.rigs:
            rig.padding, rig.enforce = padding, enforce
        slots = self.rigs[0].mapping(spans)
        undo = self.spoil(rng.choice(FAULTS), slots, spans) if rng.random() < 0.5 else None
        pending = self.each(lambda rig: rig.start_step(spans, list(slots)))
        repeats = undo is None and rng.random() < 0.7
        again: list[Any] = [rig.guard.step_again(0) if repeats else None for rig in self.rigs]
        self.compare(pending)
        if all(delta is not None for delta in again):
            fault = rng.choice(("table", "null", "vacant", "mirror"))
            undo = self.spoil(fault, slots, spans) if rng.random() < 0.5 else None
            self.compare([rig.verifier.check_again(delta) for rig, delta in zip(self.rigs, again, strict=True)])
            self.seen["again"] += 1
        if undo is not None:
            undo()
        for name, (_, stop) in spans.items():
            self.done[name] = stop

    def spoil(self, fault: str, slots: list[int], spans: dict[str, tuple[int, int]]) -> Callable[[], None]:
        """Break the next check of every rig in the same way; answers what mends it."""
        rng, name = self.rng, self.rng.choice(list(spans))
        row, column = self.rigs[0].rows[name], self.rng.randrange(self.rigs[0].columns[name, "main"])
        tables = [rig.tables["main"].copy() for rig in self.rigs]
        page = int(tables[0][row, column])
        if fault == "slot":
            slots[rng.randrange(len(slots))] = rng.randrange(-2, 140)
        elif fault == "lost":
            slots[rng.randrange(len(slots))] = -1
        elif fault == "padding":
            slots.append(rng.randrange(4, 128))
        elif fault in ("table", "null"):
            self.each(lambda rig: rig.write(name, column, 31 if fault == "table" else 0))
        mirrors: list[tuple[Any, int, int]] = []
        if fault in ("vacant", "mirror", "writer"):
            for rig in self.rigs:
                mirror = (rig.verifier._writers if fault == "writer" else rig.verifier._tags)["main"]
                right = int(mirror[page])
                spoilt = 0 if fault == "vacant" else right + 1
                mirror[page] = spoilt
                mirrors.append((mirror, right, spoilt))

        def mend() -> None:
            for rig, table in zip(self.rigs, tables, strict=True):
                rig.tables["main"][:] = table
            for mirror, right, spoilt in mirrors:
                # The step itself may have brought the right word.
                if int(mirror[page]) == spoilt:
                    mirror[page] = right

        self.seen[fault] += 1
        return mend

    def compare(self, pending: list[PendingVerdicts | None]) -> None:
        """Verdicts, evidence and what was neutralised."""
        found = [one for one in pending if one is not None]
        assert len(found) == len(self.rigs)
        assert not found[1].clean and not found[2].clean
        self.seen["short way"] += found[0].clean
        flagged = [one.flagged_rows() for one in found]
        verdicts = [said(one.resolve()) for one in found]
        assert verdicts[0] == verdicts[1] == verdicts[2] and flagged[0] == flagged[1] == flagged[2]
        assert found[0].clean == verdicts[2]["clean"] or not is_built()
        self.seen["clean" if verdicts[2]["clean"] else "flagged"] += 1
        self.seen["enforced"] += bool(flagged[0]) and self.rigs[0].enforce
        tables = self.each(lambda rig: rig.tables["main"].tolist())
        slots = self.each(lambda rig: rig.slots.tolist())
        assert tables[0] == tables[1] == tables[2] and slots[0] == slots[1] == slots[2]
        for rig, one in zip(self.rigs, found, strict=True):
            rig.judge(one)


def said(verdicts: Verdicts) -> dict[str, Any]:
    """What verdicts say, to be compared."""
    return {
        "step": verdicts.step,
        "records": None if verdicts.records is None else verdicts.records.tolist(),
        "writes": None if verdicts.writes is None else verdicts.writes.tolist(),
        "clean": verdicts.clean,
        "evidence": {
            pool: [(one.row, one.entries.tolist()) for one in rows] for pool, rows in verdicts.evidence.items() if rows
        },
    }


@pytest.mark.parametrize("settings", [{}, {"proofs": TAG_ONLY}], ids=["all", "reads only"])
def test_random_steps_are_judged_alike_with_the_short_way_and_without(settings: dict[str, Any]) -> None:
    """Steps of random requests and lengths, with padding lanes, half of them broken; steps that are repeated."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        ways = Ways(seed, **settings)
        for _ in range(10):
            ways.step()
        seen += ways.seen
    assert min(seen[name] for name in ("clean", "flagged", "enforced", "again", *FAULTS)) > 20, seen
    if is_built():
        assert seen["short way"] == seen["clean"] > 200, seen


def clean_rig(*pools: PoolSpec, **settings: Any) -> tuple[WriteRig, Callable[[], PendingVerdicts]]:
    """A rig on torch with two requests that have written five tokens, and a call that makes the next step."""
    rig = WriteRig(*pools, backend="torch", on_violation="observe", **settings)
    rig.start("a", "b")
    for pool in rig.pools:
        rig.allocate("a", 1, 2, pool=pool.name)
        rig.allocate("b", 3, 4, pool=pool.name)
    stop = 5

    def advance() -> PendingVerdicts:
        nonlocal stop
        stop += 1
        return rig.start_step({"a": (stop - 1, stop), "b": (stop - 1, stop)})

    if not pools:
        assert rig.write_step({"a": (0, 5), "b": (0, 5)}).clean
    return rig, advance


@built
def test_a_clean_step_needs_no_look_at_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told from the flag, and the record says the same to whoever looks."""
    rig, advance = clean_rig()
    pending = advance()
    assert pending.clean and pending.evidence == {} and isinstance(pending.record, torch.Tensor)
    assert pending.view.tolist() == pending.record.tolist()
    assert pending._replace(view=None, clean=False).resolve().clean
    assert (pending.record[:, :, layout.FLAGS] == 0).all()
    monkeypatch.setattr(np, "count_nonzero", lambda array: 1 / 0)
    assert pending.resolve().clean and pending.flagged_rows() == []
    assert rig.guard.judge(pending.resolve()).clean


@built
def test_a_flagged_step_has_no_flag_of_a_clean_one() -> None:
    """Nor does one that follows it, before the fault is mended; after it does."""
    rig, advance = clean_rig()
    before, rig.tables["main"][0, 0] = rig.tables["main"][0, 0], 30
    pending = advance()
    assert not pending.clean and pending.view is None and pending.flagged_rows() == [0]
    assert [one.row for one in pending.resolve().evidence["main"]] == [0]
    assert not advance().clean
    rig.tables["main"][0, 0] = before
    assert advance().clean


@built
def test_each_step_has_a_record_of_its_own() -> None:
    """However late the verdicts of a clean step are read, they are those of that step."""
    _, advance = clean_rig(steps_in_flight_max=9)
    steps = [advance() for _ in range(3)]
    assert len({one.view.ctypes.data for one in steps}) == 3
    assert all(one.view.ctypes.data == one.record.data_ptr() for one in steps)


@built
def test_one_pool_that_is_not_clean_sends_all_the_long_way() -> None:
    """Of two pools, whichever is broken: the other's records are those of a clean one, and the step is flagged."""
    other = PoolSpec(name="other", num_pages=32, page_size=4)
    for broken in (None, "main", "other"):
        rig, _ = clean_rig(MAIN, other, proofs=TAG_ONLY)
        if broken is not None:
            rig.tables[broken][1, 0] = 30
        pending = rig.launch("a", "b")
        assert pending.clean is (broken is None)
        flags = pending.resolve().records
        assert flags is not None
        wanted = [[0, 0], [0, 0]]
        if broken is not None:
            wanted[0 if broken == "main" else 1][1] = layout.FLAG_DIGEST | layout.FLAG_VACANT
        assert flags[:, :, layout.FLAGS].tolist() == wanted


@built
def test_what_is_not_checked_is_not_clean() -> None:
    """A pool of which nobody says what is written: its records say "not checked", and so the step is not clean."""
    rig, _ = clean_rig(MAIN, PoolSpec(name="state", num_pages=32, page_size=None))
    slots, starts = torch.tensor([8, 16]), torch.tensor([0, 1, 2])
    given: dict[str, Any] = {"slot_mapping": slots, "query_start": starts, "lengths": torch.tensor([5, 5])}
    inputs = {name: PoolInputs(table=table, **given) for name, table in rig._wrap(rig.tables).items()}
    delta = rig.guard.step(["a", "b"], [0, 1], [5, 5], [4, 4])
    pending = rig.verifier.check(delta, inputs)
    assert not pending.clean
    writes = pending.resolve().writes
    assert writes is not None and (writes[1, :, layout.FLAGS] == layout.NOT_CHECKED).all()


@built
@pytest.mark.parametrize("way", ["device", "no extension", "numpy"])
def test_the_long_way_is_open(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tensors on a device, without the extension, and for the oracle: no short way, no flag, the same verdicts."""
    if way == "device":
        monkeypatch.setattr(pages_torch, "on_host", lambda tensor: False)
    elif way == "no extension":
        monkeypatch.setattr(step_arrays, "bind", lambda reads, writes: None)
    rig, advance = clean_rig()
    if way == "numpy":
        rig.verifier, rig.backend = Verifier(rig.guard.setup, backend="numpy"), "numpy"
        rig.verifier._step = rig.guard._books.step
        rig.verifier._tags["main"][:] = [rig.guard._books.tables[0].tag(page) for page in range(32)]
    pending = advance()
    assert not pending.clean and pending.view is None and set(pending.evidence) == {"main"}
