"""A row of the block table that two requests of a step are to read proves neither of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs, Verifier
from kvguard.violation import Proof
from tests.core.support import MAIN, TAG_ONLY, Rig, aborted
from tests.kernels.interpreted import interpreting

POOLS = (MAIN, PoolSpec(name="state", num_pages=12, page_size=None, null_page=None))


def three(backend: str, **options: Any) -> Rig:
    """Three requests with pages in two pools, and room for a token."""
    rig = Rig(*POOLS, backend="torch" if backend == "triton" else backend, **options)
    rig.verifier = Verifier(rig.guard.setup, backend=backend)
    rig.start("a", "b", "c")
    for page, request in enumerate("abc", 1):
        rig.allocate(request, page)
        rig.allocate(request, page, pool="state")
    return rig


def run(rig: Rig, names: list[str], rows: list[int], known_to: str) -> Any:
    """A step whose rows are known to the scheduler, or to the model runner alone; one token each. Its judgement."""
    slots, starts = np.array([5 + 4 * place for place in range(len(names))]), np.arange(len(names) + 1)
    arrays = rig._wrap({"slots": slots, "starts": starts, "lengths": np.full(len(names), 2)})  # type: ignore[dict-item]
    given = {
        name: PoolInputs(
            table=table,
            slot_mapping=arrays["slots"] if name == "main" else None,
            query_start=arrays["starts"] if name == "main" else None,
            lengths=arrays["lengths"] if name == "main" else None,
        )
        for name, table in rig._wrap(rig.tables).items()
    }
    size = len(names)
    of_host = rows if known_to == "scheduler" else [0] * size
    delta = rig.guard.step(names, of_host, [2] * size, [1] * size)
    found = rig.verifier.check(delta, given, table_rows=None if known_to == "scheduler" else rows)
    judgement = rig.judge(found)
    return judgement, slots.tolist()


@pytest.mark.parametrize("known_to", ["scheduler", "runner"])
@pytest.mark.parametrize("backend", ["numpy", "torch", "triton"])
def test_both_requests_of_a_row_are_ended_and_the_third_goes_on(backend: str, known_to: str) -> None:
    """The one whose row it is would read it after it was neutralised for the other: neither emits a token."""
    with interpreting():
        rig = three(backend)
        assert run(rig, ["a", "b", "c"], [0, 1, 2], known_to)[0].clean
        judgement, slots = run(rig, ["a", "b", "c"], [0, 0, 2], known_to)
        assert aborted(judgement) == judgement.withheld == {"a", "b"}
        assert slots == [-1, -1, 13], "neither writes"
        assert rig.tables["main"][:3, 0].tolist() == [0, 2, 3]


@pytest.mark.parametrize("backend", ["numpy", "torch", "triton"])
def test_rows_that_stay_shared_stay_unproven(backend: str) -> None:
    """Another step that says something else, with the same rows: the device flags both again."""
    with interpreting():
        rig = three(backend, on_violation="observe")
        for further in range(2):
            rig.allocate("c", 5 + further)
            delta = rig.guard.step(["a", "b", "c"], [0] * 3, [2] * 3)
            inputs = {name: PoolInputs(table=table) for name, table in rig._wrap(rig.tables).items()}
            assert rig.verifier.check(delta, inputs, table_rows=[0, 0, 2]).flagged_rows() == [0, 1]


@pytest.mark.parametrize("backend", ["numpy", "torch", "triton"])
def test_the_write_check_alone_ends_both(backend: str) -> None:
    """No digest is looked at: who may write nowhere writes nowhere."""
    with interpreting():
        rig = three(backend, proofs=frozenset({Proof.WRITE_SLOT}))
        assert run(rig, ["a", "b", "c"], [0, 1, 2], "runner")[0].clean
        judgement, slots = run(rig, ["a", "b", "c"], [1, 1, 2], "runner")
        assert aborted(judgement) == {"a", "b"} and slots == [-1, -1, 13]


def test_a_request_that_is_listed_twice_shares_its_row_with_nobody() -> None:
    """Two places of one request, in its own row."""
    rig = three("numpy", proofs=TAG_ONLY)
    delta = rig.guard.step(["a", "a", "b"], [0, 0, 1], [2, 2, 2])
    assert rig.judge(rig.check(delta)).clean


def test_rows_that_no_longer_clash_are_proven_again() -> None:
    """What was spoilt is gone with the next step's words; a step that says the same is as unproven."""
    rig = three("torch", proofs=TAG_ONLY, on_violation="observe")
    given = {name: PoolInputs(table=torch.from_numpy(table)) for name, table in rig.tables.items()}
    delta = rig.guard.step(["a", "b", "c"], [0, 0, 0], [2, 2, 2])
    first = rig.verifier.check(delta, given, table_rows=[0, 1, 1])
    again = rig.guard.step_again(0)
    assert again is not None
    second = rig.verifier.check_again(again)
    assert second is not None
    third = rig.verifier.check(rig.guard.step(["a", "b", "c"], [0, 0, 0], [2, 2, 2]), given, table_rows=[0, 1, 2])
    assert [found.flagged_rows() for found in (first, second, third)] == [[1, 2], [1, 2], []]
