"""Wild writes in a real SGLang: redirected to slot 0 before the forward, so that nobody loses what it has.

Slots are changed where SGLang's are final: right before the guard's check of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvguard.violation import Action, Kind, Proof
from tests.sglang.apart import on
from tests.sglang.engine import Engine
from tests.sglang.scenarios import assert_whole, send, unguarded_tokens, victims

SETTINGS = pytest.mark.parametrize(
    ("page_size", "overlap", "only"),
    [(1, False, False), (16, True, False), (16, False, True)],
    ids=["tokens", "pages, overlap", "pages, alone"],
)
ON = {"KVGUARD_LEVEL": "tags", "KVGUARD_BREAKER_VIOLATIONS": "1000"}
WANTED = {f"r{place}": 24 for place in range(8)}
STEP = 12
Slots = dict[int, int]
"""Place in the batch -> the slot that its token is sent to."""


def entry(engine: Engine, forward: Any, place: int, position: int) -> int:
    """The slot of a position in the row of the request at this place of the batch."""
    return int(engine.table[forward.req_pool_indices[place], position])


def into_the_next_row(engine: Engine, forward: Any) -> Slots:
    """The last token of another request is overwritten."""
    return {0: entry(engine, forward, 1, int(forward.seq_lens[1]) - 2)}


def into_the_tree(engine: Engine, forward: Any) -> Slots:
    """A token of the prompt, which others may share by now."""
    return {0: entry(engine, forward, 0, 0)}


def swapped(engine: Engine, forward: Any) -> Slots:
    """Two requests write to each other's slots."""
    here = forward.out_cache_loc.tolist()
    return {0: here[1], 1: here[0]}


def wrapped(engine: Engine, forward: Any) -> Slots:
    """Slot -1, which PyTorch takes for the last one of the buffer."""
    return {0: -1}


def past_the_pool(engine: Engine, forward: Any) -> Slots:
    """Behind everything."""
    return {0: 10**6}


def lost(engine: Engine, forward: Any) -> Slots:
    """The token's KV goes where padding goes."""
    return {0: 0}


def shifted(engine: Engine, forward: Any) -> Slots:
    """Another slot of the right page: that of the token before, or of the one behind."""
    slot, size = int(forward.out_cache_loc[0]), int(engine.allocator.page_size)
    return {0: slot - 1 if slot % size else slot + 1}


FAULTS: dict[str, tuple[Callable[[Engine, Any], Slots], Kind]] = {
    "another's": (into_the_next_row, Kind.WRITE_FOREIGN),
    "tree": (into_the_tree, Kind.WRITE_FOREIGN),
    "swapped": (swapped, Kind.WRITE_FOREIGN),
    "wrapped": (wrapped, Kind.WRITE_OUT_OF_RANGE),
    "past the pool": (past_the_pool, Kind.WRITE_OUT_OF_RANGE),
    "lost": (lost, Kind.WRITE_LOST),
    "shifted": (shifted, Kind.WRITE_SHIFTED),
}


@contextmanager
def misled(engine: Engine, fault: Callable[[Engine, Any], Slots]) -> Iterator[dict[str, Any]]:
    """In one decode step slots are what the fault says; yields who wrote, and what the check left of the slots."""
    guard, check, seen = engine.guard, engine.guard.check, dict[str, Any]()
    steps = 0

    def checking(forward: Any) -> None:
        nonlocal steps
        steps += 1
        wrong: Slots = {}
        if steps >= STEP and not seen and forward.forward_mode.is_decode() and len(forward.seq_lens) > 2:
            wrong = fault(engine, forward)
            seen["writers"] = {guard.batch.reqs[place].rid for place in wrong}
            for place, slot in wrong.items():
                forward.out_cache_loc[place] = slot
        check(forward)
        if wrong:
            seen["left"] = [int(forward.out_cache_loc[place]) for place in wrong]
            # Every engine would fault on these, or worse, where nobody redirects them.
            forward.out_cache_loc.clamp_(0, engine.allocator.size)

    guard.check = checking
    try:
        yield seen
    finally:
        del guard.check


def proofs(engine: Engine, only: bool) -> None:
    """Whether the write-slot proof has to do without the others."""
    guard = engine.guard
    guard._checks = guard._reports_events = not only


@SETTINGS
@pytest.mark.parametrize("name", FAULTS)
@on(environment=ON)
def test_a_wild_write_ends_its_writer_and_nobody_else(
    engine: Engine, name: str, page_size: int, overlap: bool, only: bool
) -> None:
    """Its token is withheld, the owner of the slot has golden tokens, and SGLang's accounting stays whole."""
    fault, kind = FAULTS[name]
    if name == "shifted" and page_size == 1:
        # A page of one token has no other offset: the slot is another's.
        kind = Kind.WRITE_FOREIGN
    golden, _ = unguarded_tokens(engine, send)
    before = len(engine.guard.violations)
    redirected = engine.guard.health().counters["writes_redirected"]
    proofs(engine, only)
    engine.tokens, engine.ends = {}, {}
    try:
        with misled(engine, fault) as seen:
            send(engine)
            engine.run()
        assert seen["left"] == [0] * len(seen["writers"])
        assert set(victims(engine, golden, WANTED)) == seen["writers"]
        found = engine.guard.violations[before:]
        assert {violation.request for violation in found} == seen["writers"]
        for violation in found:
            assert violation.proof is Proof.WRITE_SLOT and violation.action is Action.ABORTED, violation
            if not (name == "shifted" and page_size == 1):
                assert violation.kind is kind, violation
            assert "sent to slot 0 instead" in violation.detail
        assert engine.guard.health().counters["writes_redirected"] == redirected + len(seen["writers"])
        assert_whole(engine)
    finally:
        proofs(engine, False)
    engine.flush()
    engine.tokens = {}
    send(engine)
    engine.run()
    assert engine.tokens == golden and len(engine.guard.violations) == before + len(found)


@pytest.mark.parametrize("page_size", [1, 16])
@on(environment={"KVGUARD_LEVEL": "tags", "KVGUARD_WRITE_CHECK": "false"})
def test_switched_off_it_is_not_looked_for(engine: Engine, page_size: int) -> None:
    """`write_check: false` leaves slots alone; that is what the tests above are made of."""
    with misled(engine, lost) as seen:
        send(engine)
        engine.run()
    assert seen["left"] == [0] and engine.guard.violations == ()


@pytest.mark.parametrize("page_size", [1, 16])
@on(environment=ON)
def test_a_chunk_that_wrote_elsewhere_is_adopted_by_nobody(engine: Engine, page_size: int) -> None:
    """The writer's record is spoiled with its verdict: what it has put into the tree by then adds up for nobody."""
    golden, _ = unguarded_tokens(engine, send)
    guard, check, seen = engine.guard, engine.guard.check, list[str]()

    def checking(forward: Any) -> None:
        if not seen and forward.forward_mode.is_extend() and forward.out_cache_loc.shape[0] > 20:
            seen.append(guard.batch.reqs[0].rid)
            forward.out_cache_loc[3] = 10**6
        check(forward)

    guard.check = checking
    engine.tokens, engine.ends = {}, {}
    try:
        send(engine)
        engine.run()
    finally:
        del guard.check
    ended = victims(engine, golden, WANTED)
    assert seen[0] in ended
    found = guard.violations
    assert found[0].kind is Kind.WRITE_OUT_OF_RANGE and found[0].request == seen[0]
    assert "from position 3 on" in found[0].detail
    assert_whole(engine)
