"""What a request has left behind it may not write again: pages that are full, and pages that it gave up."""

from __future__ import annotations

import numpy as np
import pytest

from kvguard.guard import Judgement
from kvguard.violation import Kind, Proof
from tests.core.support import kinds
from tests.core.test_write_slots import BACKENDS, PROOFS, WriteRig, only


def late(rig: WriteRig, request: str, known: int, written: int) -> Judgement:
    """A step in which the request's length is stale on the device: it writes `written` in place of `known`."""
    delta = rig.guard.step([request], [rig.rows[request]], [known + 1], [known])
    rig.slots = np.array(rig.mapping({request: (written, written + 1)}), np.int64)
    return rig.judge(rig.checked(delta, query_start=np.array([0, 1]), lengths=np.array([written + 1])))


def shared(rig: WriteRig) -> None:
    """Request a with 5 tokens written, the first page of which b reads."""
    rig.start("a", "b")
    rig.allocate("a", 1, 2, 3, 4)
    assert rig.write_step({"a": (0, 5)}).clean
    assert rig.guard.publish("a", 0, "k0")
    rig.adopt("b", ("k0", 1))
    rig.allocate("b", 5)
    assert rig.write_step({"a": (5, 6), "b": (4, 5)}).clean


@BACKENDS
@PROOFS
def test_a_page_that_was_reserved_ahead_is_complete_once_the_row_is_past_it(
    backend: str, proofs: frozenset[Proof] | None
) -> None:
    """Pages for the whole answer, for a chunk or for drafts: no change of the ledger says that a page was crossed."""
    rig = WriteRig(backend=backend, proofs=proofs)
    shared(rig)
    for position in range(6, 13):
        assert rig.write_step({"a": (position, position + 1)}).clean
    judgement = late(rig, "a", 13, 2)
    assert only(judgement).kind is Kind.WRITE_COMPLETE and rig.slots.tolist() == [-1]
    assert only(judgement).owner == "b"


def test_a_step_is_not_made_again_where_a_row_goes_on_to_the_next_page() -> None:
    """It had that page before, so that there is room; but the floor is another one, and only `step` is told of it."""
    rig = WriteRig()
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    assert rig.guard.step_again() is None
    assert rig.write_step({"a": (0, 6)}).clean
    assert rig.guard.step_again() is None
    assert rig.write_step({"a": (6, 7)}).clean
    assert rig.guard.step_again() is not None and rig.guard.step_again() is None
    rig = WriteRig()
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    # Who never says where its requests start has no floors.
    assert rig.write_step({"a": (0, 7)}, starts=False).clean
    assert [rig.guard.step_again() is not None for _ in range(6)] == [True] * 5 + [False]


@PROOFS
def test_the_first_decode_step_protects_the_prompt(proofs: frozenset[Proof] | None) -> None:
    """A prompt that ends within a page: the next token takes no page, and what is before is complete all the same."""
    rig = WriteRig(proofs=proofs)
    rig.start("a")
    rig.allocate("a", 1, 2)
    assert rig.write_step({"a": (0, 6)}).clean
    assert kinds(late(rig, "a", 6, 1)) == {"a": Kind.WRITE_COMPLETE}
    rig = WriteRig(proofs=proofs)
    rig.start("a")
    rig.allocate("a", 1, 2)
    assert rig.write_step({"a": (0, 6)}).clean
    # Within the page in which it stands drafts are written again.
    assert late(rig, "a", 7, 5).clean


@PROOFS
def test_a_floor_that_rose_without_a_new_page_goes_down_with_the_row(proofs: frozenset[Proof] | None) -> None:
    """Drafts across a page were rejected: healthy, in each of the steps that follow."""
    rig = WriteRig(proofs=proofs)
    rig.start("a")
    rig.allocate("a", 1, 2, 3)
    assert rig.write_step({"a": (0, 6)}).clean
    for start, stop in ((6, 10), (9, 12), (7, 9), (8, 10), (7, 8), (8, 12), (11, 12)):
        assert rig.write_step({"a": (start, stop)}).clean, start


@PROOFS
@pytest.mark.parametrize("cut", ["truncate", "drop"])
def test_a_page_that_was_given_up_is_not_that_of_its_column_any_more(cut: str, proofs: frozenset[Proof] | None) -> None:
    """Others hold it on; the request gets another page for the column, and two pages must not have one writer word."""
    rig = WriteRig(proofs=proofs)
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    assert rig.write_step({"a": (0, 8)}).clean
    for column, key in ((0, "k0"), (1, "k1")):
        assert rig.guard.publish("a", column, key)
    rig.adopt("b", ("k0", 1), ("k1", 2))
    rig.allocate("b", 5)
    assert rig.write_step({"b": (8, 9)}).clean
    if cut == "truncate":
        assert rig.guard.truncate("a", 1) == [2]
        rig.columns["a", "main"] = 1
        rig.allocate("a", 3)
    else:
        assert rig.guard.drop("a", 1, 2) == [2]
    judgement = rig.write_step({"a": (4, 6), "b": (9, 10)}, [2 * 4, 2 * 4 + 1, 5 * 4 + 1], starts=False)
    found = [one for one in judgement.violations if one.proof is Proof.WRITE_SLOT]
    assert [(one.kind, one.request, one.owner) for one in found] == [(Kind.WRITE_FOREIGN, "a", "b")]
    assert rig.slots.tolist() == [-1, -1, 21]


@PROOFS
def test_an_adopter_that_gives_a_page_up_leaves_it_to_its_writer(proofs: frozenset[Proof] | None) -> None:
    """A shared, partial page: the designated writer goes on filling it."""
    rig = WriteRig(proofs=proofs)
    rig.start("w", "r")
    rig.allocate("w", 1, 2)
    assert rig.write_step({"w": (0, 6)}).clean
    for column, key in ((0, "k0"), (1, "k1")):
        assert rig.guard.publish("w", column, key, tokens=4 + 2 * column)
    rig.adopt("r", ("k0", 1), ("k1", 2))
    assert rig.guard.truncate("r", 1) == [2]
    assert rig.write_step({"w": (6, 8)}).clean
