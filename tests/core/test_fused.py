"""A Verifier with one launch for all pools: the verdicts of the oracle, few copies and launches, and nothing waits."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvguard.kernels.backend import DEVICE_BACKENDS, default_backend, require_backend
from kvguard.messages import StepDelta
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs, Verifier
from tests.core.support import MAIN, TAG_ONLY, Rig
from tests.kernels.interpreted import interpreting
from tests.waiting import Recorder

POOLS = (
    PoolSpec(name="full", num_pages=40, page_size=4),
    PoolSpec(name="pieces", num_pages=40, page_size=4, split=2),
    PoolSpec(name="state", num_pages=12, page_size=None, null_page=None),
)


def rig_of_three() -> Rig:
    """Three requests with pages in each of three pools."""
    rig = Rig(*POOLS, proofs=TAG_ONLY)
    rig.start("a", "b", "c")
    for index, request in enumerate("abc"):
        rig.allocate(request, *range(1 + 3 * index, 4 + 3 * index), pool="full")
        rig.allocate(request, *range(1 + 3 * index, 4 + 3 * index), pool="pieces")
        rig.allocate(request, 1 + index, pool="state")
    return rig


def both(rig: Rig) -> tuple[Verifier, Verifier]:
    """A Verifier with the oracle and one with Triton, for the same guard."""
    with interpreting():
        return Verifier(rig.guard.setup, backend="numpy"), Verifier(rig.guard.setup, backend="triton")


def inputs(rig: Rig, batch: int) -> dict[str, dict[str, Any]]:
    """NumPy arrays of a step for each pool; slots for all but the last."""
    given: dict[str, dict[str, Any]] = {}
    for pool in POOLS:
        given[pool.name] = {"table": rig.tables[pool.name].copy()}
        if pool.page_size is not None:
            given[pool.name] |= {
                "slot_mapping": np.arange(2 * batch),
                "query_start": np.arange(0, 2 * batch + 1, 2).astype(np.int32),
            }
    return given


def require_the_same(verifiers: tuple[Verifier, Verifier], delta: StepDelta, given: dict[str, dict[str, Any]]) -> Any:
    """Both write the same verdicts, evidence, tables, slots and tags. Returns the flags [pools, rows]."""
    results = []
    for verifier in verifiers:
        arrays = {name: {key: value.copy() for key, value in of_pool.items()} for name, of_pool in given.items()}
        with interpreting():
            pending = verifier.check(delta, {name: PoolInputs(**of_pool) for name, of_pool in arrays.items()})
        results.append((pending.resolve(), arrays, [np.asarray(verifier.tags(pool.name)) for pool in POOLS]))
    (wanted, wanted_arrays, wanted_tags), (found, found_arrays, found_tags) = results
    assert wanted.records is not None and found.records is not None
    assert np.array_equal(wanted.records, found.records)
    assert all(np.array_equal(*pair) for pair in zip(wanted_tags, found_tags, strict=True))
    for name, of_pool in wanted_arrays.items():
        for key, array in of_pool.items():
            assert np.array_equal(array, found_arrays[name][key]), (name, key)
        assert [seen.row for seen in wanted.evidence.get(name, ())] == [
            seen.row for seen in found.evidence.get(name, ())
        ]
        for one, other in zip(wanted.evidence.get(name, ()), found.evidence.get(name, ()), strict=True):
            assert np.array_equal(one.entries, other.entries)
    return wanted.records[:, :, 0]


def test_a_life_of_steps_gives_the_verdicts_of_the_oracle() -> None:
    """Allocations, frees, gaps, steps that say the same, batches of other requests, and a fault in each pool."""
    rig = rig_of_three()
    verifiers = both(rig)

    def step(*requests: str, spoil: tuple[str, int, int, int] | None = None) -> list[list[int]]:
        given = inputs(rig, len(requests))
        if spoil is not None:
            name, row, column, entry = spoil
            given[name]["table"][row, column] = entry
        flags = require_the_same(verifiers, rig.delta(*requests), given)
        return [np.flatnonzero(of_pool).tolist() for of_pool in flags]

    assert step("a", "b", "c") == [[], [], []]
    assert step("a", "b", "c") == [[], [], []]
    assert step("a", "b", "c", spoil=("full", 1, 2, 3)) == [[1], [], []]
    assert step("c", "a", spoil=("pieces", 2, 1, 3)) == [[], [0], []]
    assert step("a", "b", "c", spoil=("state", 2, 0, 1)) == [[], [], [2]]
    rig.allocate("a", 20, 21, pool="full")
    rig.allocate("a", 20, 21, pool="pieces")
    rig.guard.drop("a", 1, 3, pool="full")
    rig.allocate("b", 22, pool="pieces")
    assert step("a", "b") == [[], [], []]
    rig.guard.retire([2, 3], pool="full")
    assert step("a", "b") == [[], [], []]
    assert step("a", "b", spoil=("full", 0, 3, 2)) == [[0], [], []]
    rig.guard.retire([4], pool="full")
    assert step("a", "b", "c") == [[1], [], []]


def test_only_observed_rows_are_not_touched() -> None:
    """The same plan is not used again when flagged rows are no longer to be neutralised."""
    rig = rig_of_three()
    verifier = both(rig)[1]
    tables = {pool.name: torch.from_numpy(rig.tables[pool.name].copy()) for pool in POOLS}
    given = {name: PoolInputs(table=table) for name, table in tables.items()}
    for enforce in (True, False, True):
        tables["full"].copy_(torch.from_numpy(rig.tables["full"]))
        tables["full"][0, 0] = 9
        with interpreting():
            pending = verifier.check(rig.delta("a", "b", "c")._replace(enforce=enforce), given)
        assert pending.flagged_rows() == [0]
        assert tables["full"][0, :3].tolist() == ([0, 0, 0] if enforce else [9, 2, 3])


def test_table_rows_that_only_the_model_runner_knows() -> None:
    """They are filled in before the copy, and a step that differs in them alone is sent again."""
    rig = rig_of_three()
    verifiers = both(rig)
    with interpreting():
        for rows in ([0, 1, 2], [2, 1, 0], [2, 1, 0], [0, 1, 2]):
            tables = {name: table.copy() for name, table in rig.tables.items()}
            for name in tables:
                tables[name][rows] = rig.tables[name][:3]
            delta = rig.delta("a", "b", "c")
            for verifier in verifiers:
                given = {name: PoolInputs(table=table.copy()) for name, table in tables.items()}
                assert verifier.check(delta, given, table_rows=rows).flagged_rows() == []


def test_a_list_of_table_rows_that_is_changed_in_place_is_another_list() -> None:
    """The caller's list is its own."""
    rig = Rig(MAIN, proofs=TAG_ONLY)
    rig.start("a")
    rig.allocate("a", 5)
    rig.tables["main"][3, 0] = 7
    given, rows, verifier = {"main": PoolInputs(table=rig.tables["main"])}, [0], both(rig)[1]
    with interpreting():
        assert verifier.check(rig.delta("a"), given, table_rows=rows).flagged_rows() == []
        assert verifier.check(rig.delta("a"), given, table_rows=rows).flagged_rows() == []
        rows[0] = 3
        assert verifier.check(rig.delta("a"), given, table_rows=rows).flagged_rows() == [0]


def test_a_step_that_was_refused_can_be_checked_after_all() -> None:
    """Its tag changes are not lost: the mirror is what it was, and so is the step that is waited for."""
    rig = Rig(MAIN, proofs=TAG_ONLY)
    rig.start("a")
    rig.allocate("a", 1, 2)
    verifier, delta = both(rig)[1], rig.delta("a")
    wrong = PoolInputs(
        table=torch.from_numpy(rig.tables["main"]),
        slot_mapping=torch.zeros(2, dtype=torch.int32),
        query_start=torch.tensor([0, 2], dtype=torch.int32),
    )
    with interpreting():
        with pytest.raises(ValueError, match="int64"):
            verifier.check(delta, {"main": wrong})
        assert verifier.step == 0 and not np.asarray(verifier.tags("main")).any()
        assert verifier.check(delta, {"main": PoolInputs(table=rig.tables["main"])}).flagged_rows() == []


class Recorded:
    """In the place of a Triton kernel: what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launches.append((grid, *arguments))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Kernels that do nothing but count."""
    from kvguard.kernels.scatter_tags import triton_op as scatter
    from kvguard.kernels.verify_pages import triton_op as verify

    kernels = types.SimpleNamespace(verify=Recorded(), scatter=Recorded())
    monkeypatch.setattr(verify, "verify_kernel", kernels.verify)
    monkeypatch.setattr(scatter, "scatter_kernel", kernels.scatter)
    yield kernels


def counted(monkeypatch: pytest.MonkeyPatch, verifier: Verifier) -> list[int]:
    """Words of each upload from here on."""
    assert verifier._fused is not None
    uploads: list[int] = []
    upload = verifier._fused._upload

    def count(host: Any) -> Any:
        uploads.append(len(host))
        return upload(host)

    monkeypatch.setattr(verifier._fused, "_upload", count)
    return uploads


def test_a_step_is_one_copy_and_two_launches_at_most_and_nothing_waits(
    recorded: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step and one with tag changes: a copy and two launches; the same again: one launch and no copy."""
    rig = rig_of_three()
    verifier = both(rig)[1]
    uploads = counted(monkeypatch, verifier)
    given = {pool.name: PoolInputs(table=torch.from_numpy(rig.tables[pool.name])) for pool in POOLS}
    seen = []

    def step(*requests: str) -> None:
        delta = rig.delta(*requests)
        with Recorder(scalars=True) as recorder:
            verifier.check(delta, given)
        assert recorder.calls and recorder.waits == []
        seen.append((len(uploads), len(recorded.scatter.launches), len(recorded.verify.launches)))

    step("a", "b", "c")
    step("a", "b", "c")
    rig.allocate("b", 30, pool="pieces")
    step("a", "b", "c")
    step("a", "b", "c")
    step("a", "b")
    assert seen == [(1, 1, 1), (1, 1, 2), (2, 2, 3), (2, 2, 4), (3, 2, 5)]
    grids = [launch[0] for launch in recorded.verify.launches]
    assert grids == [(1, 3, 3)] * 4 + [(1, 2, 3)]
    assert recorded.scatter.launches[0][0] == (1, 3) and recorded.scatter.launches[1][0] == (1, 1)


def test_descriptors_go_up_only_when_they_changed(
    recorded: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that crosses a page sends its own words; another table sends the descriptors, alone or with the step."""
    rig = rig_of_three()
    verifier = both(rig)[1]
    uploads = counted(monkeypatch, verifier)
    table = {pool.name: torch.from_numpy(rig.tables[pool.name]) for pool in POOLS}
    given = {name: PoolInputs(table=tensor) for name, tensor in table.items()}
    verifier.check(rig.delta("a", "b", "c"), given)
    described = verifier._fused._plan.words.size  # type: ignore[union-attr]
    rig.allocate("b", 30, pool="pieces")
    verifier.check(rig.delta("a", "b", "c"), given)
    assert uploads[0] > described > uploads[1]
    moved = given | {"full": PoolInputs(table=table["full"].clone())}
    verifier.check(rig.delta("a", "b", "c"), moved)
    assert uploads[2:] == [described]
    # Tensors that are looked at anew but lie where they lay.
    verifier.check(rig.delta("a", "b", "c"), {name: dataclasses.replace(one) for name, one in moved.items()})
    assert len(uploads) == 3


def test_a_backend_that_cannot_run_is_refused_with_what_to_do() -> None:
    """Triton without interpreter and CuPy need a GPU; what is not installed is named."""
    rig = rig_of_three()
    with pytest.raises(ValueError, match="cupy"):
        Verifier(rig.guard.setup, backend="cupy")
    with pytest.raises(ValueError, match="not on meta: take torch"):
        require_backend("triton", "meta")
    with pytest.raises(ValueError, match="numpy, torch, triton, cupy"):
        Verifier(rig.guard.setup, backend="cuda")
    for name in ("numpy", "torch"):
        require_backend(name, "cpu")
    require_backend("triton", "cuda:1")
    assert DEVICE_BACKENDS == ("triton", "cupy")
    assert default_backend("cuda:0") == default_backend(torch.device("cuda")) == "triton"
    assert default_backend() == default_backend("cpu") == "torch"
