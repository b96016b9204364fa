"""When kvguard itself fails inside SGLang: said aloud, and as `on_guard_error` wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog.testing

from kvguard.adapters.sglang import books
from kvguard.adapters.sglang.scheduler_guard import GuardFault, SchedulerGuard
from tests.sglang.apart import on
from tests.sglang.engine import Engine
from tests.sglang.scenarios import assert_whole, at_step, null_entry, prompts, send, unguarded_tokens

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
PLACES: dict[str, tuple[Any, str, int]] = {
    "verify": (books, "verify_rows", 12),
    "stamp": (books, "stamp_rows", 12),
    "publish": (books, "publish_row", 2),
    "retire": (books, "retire_pages", 1),
    "hook": (books.TokenBooks, "stamp", 12),
    "verdict": (SchedulerGuard, "_judge", 12),
}
"""Where it fails, and in which call."""


@contextmanager
def failing(place: str) -> Iterator[None]:
    """One call of the guard's own raises, the others go through."""
    owner, name, number = PLACES[place]
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise ZeroDivisionError("made to fail")
        return original(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


def busy(engine: Engine) -> None:
    """One request ends, and gives back its pages, while others run."""
    send(engine)
    engine.add("short", prompts(2)[0], 4)


@LOOPS
@pytest.mark.parametrize("place", PLACES)
@on(alone=True)
def test_a_guard_that_fails_disarms_and_says_so(engine: Engine, place: str, overlap: bool) -> None:
    """By default SGLang serves on unguarded: the same tokens, `armed` false, one critical line, exact accounting."""
    wanted, _ = unguarded_tokens(engine, busy)
    with structlog.testing.capture_logs() as logs, failing(place):
        busy(engine)
        engine.run()
    assert engine.tokens == wanted
    health = engine.guard.health()
    assert not health.armed and not health.ok and health.counters["guard_faults"] == 1
    assert engine.guard.violations == ()
    said = [entry for entry in logs if entry["event"] == "guard_fault"]
    assert len(said) == 1 and said[0]["log_level"] == "critical" and "made to fail" in str(said[0]["error"])
    assert_whole(engine)
    # Disarmed for good: nothing is queued any more, and nothing is checked.
    seen = health.counters["steps_seen"]
    engine.tokens = {}
    busy(engine)
    engine.run()
    assert engine.tokens == wanted
    assert engine.guard.health().counters["steps_seen"] == seen and len(engine.guard.books) <= 1


@LOOPS
@pytest.mark.parametrize("place", ["verify", "hook", "verdict"])
@on(environment={"KVGUARD_LEVEL": "tags", "KVGUARD_ON_GUARD_ERROR": "abort"}, alone=True)
def test_with_abort_nothing_unproven_leaves(engine: Engine, place: str, overlap: bool) -> None:
    """`on_guard_error: abort` stops the scheduler in the step that could not be proven."""
    wanted, _ = unguarded_tokens(engine, send)
    with failing(place), pytest.raises(GuardFault, match="nothing unproven may leave"):
        send(engine)
        engine.run()
    assert all(tokens == wanted[name][: len(tokens)] for name, tokens in engine.tokens.items())
    assert all(len(tokens) < 24 for tokens in engine.tokens.values())


@LOOPS
@on(alone=True)
def test_a_fault_while_a_victim_is_being_ended(engine: Engine, overlap: bool) -> None:
    """The row was flagged, looking for the page fails: its token must not leave, whatever becomes of the guard."""
    wanted, _ = unguarded_tokens(engine, send)
    engine.guard.locate = lambda row, length: 1 / 0
    send(engine)
    engine.run(at_step(18, lambda engine: null_entry(engine, engine.request("r3"))))
    assert engine.tokens["r3"] == wanted["r3"][: len(engine.tokens["r3"])]
    assert engine.ends["r3"]["type"] == "abort" and len(engine.tokens["r3"]) < 24
    assert {name: tokens for name, tokens in engine.tokens.items() if name != "r3"} == {
        name: tokens for name, tokens in wanted.items() if name != "r3"
    }
    assert not engine.guard.armed
    # A row that the guard gave back once is SGLang's own from then on.
    assert_whole(engine)
    for _ in range(2):
        engine.tokens = {}
        send(engine)
        engine.run()
        assert engine.tokens == wanted
        assert_whole(engine)
