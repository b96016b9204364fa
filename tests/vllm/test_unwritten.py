"""Level `keys` in a real vLLM: tokens that are taken for cached and that no page holds for the request.

Its pages are its own, and what lies in them is what their former owners left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import register
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from kvguard.violation import Action, Kind, Proof
from tests.vllm.test_contents import BLOCK, OTHER, PROMPT, assert_sound, hits_of
from tests.vllm.tiny import unguarded, write_checkpoint

LONG = [(13 * token + 5) % 241 for token in range(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def golden(checkpoint: Path) -> dict[str, list[Answer]]:
    with unguarded():
        engine = VllmEngine(VllmOptions(model=checkpoint))
    return {"prompt": engine.generate([PROMPT], [8]), "other": engine.generate([OTHER], [8])}


@pytest.fixture
def engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> VllmEngine:
    """Guarded at level `keys`, with every page used before."""
    monkeypatch.setenv("KVGUARD_LEVEL", "keys")
    register()
    engine = VllmEngine(VllmOptions(model=checkpoint, asynchronous=asynchronous))
    engine.generate([LONG, LONG[::-1]], [4, 4])
    assert engine.guard_side.guard.violations == ()
    return engine


LOOPS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def answers_with(engine: VllmEngine, change: Callable[[Any, int], Any]) -> None:
    """vLLM's lookups answer with what `change(answer, limit)` makes of theirs."""
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    find = coordinator.find_longest_cache_hit

    def changed(hashes: Any, limit: int, *args: Any, **kwargs: Any) -> Any:
        return change(find(hashes, limit, *args, **kwargs), limit)

    coordinator.find_longest_cache_hit = changed


@LOOPS
def test_a_lookup_that_finds_more_tokens_than_pages_is_not_believed(
    engine: VllmEngine, golden: dict[str, list[Answer]]
) -> None:
    """The last page of a hit is lost on the way: the request would read what its fresh page's former owner left."""
    assert engine.generate([PROMPT], [8]) == golden["prompt"]
    answers_with(engine, lambda found, _: (tuple(blocks[:-1] for blocks in found[0]), *found[1:]))
    found = hits_of(engine)
    assert engine.generate([PROMPT], [8]) == golden["prompt"]
    violations = engine.guard_side.guard.violations
    assert {violation.kind for violation in violations} == {Kind.CONTENT_UNWRITTEN}
    assert {violation.action for violation in violations} == {Action.REFUSED}
    assert "96 tokens were reported as cached, 2 pages of 32 were given" in violations[0].detail
    assert list(found.values()) == [0]
    assert_sound(engine)


@LOOPS
def test_a_lookup_that_keeps_to_no_limit_finds_nothing(engine: VllmEngine, golden: dict[str, list[Answer]]) -> None:
    """It answers with one and the same wrong page for ever: the request computes, and vLLM goes on."""
    assert engine.generate([OTHER, PROMPT], [8, 8]) == [*golden["other"], *golden["prompt"]]
    pool = engine.pool
    page = next(block for block in pool.blocks if block.block_hash is not None)
    asked = []

    def stubborn(found: Any, limit: int) -> Any:
        asked.append(limit)
        assert len(asked) < 10, "it is asked for ever"
        return (([page],), BLOCK, *found[2:])

    answers_with(engine, stubborn)
    found = hits_of(engine)
    assert engine.generate([PROMPT[::-1]], [8])[0].finish_reason == "length"
    assert list(found.values()) == [0] and len(asked) == 2
    assert_sound(engine)


@LOOPS
def test_a_request_that_starts_behind_what_it_was_given_is_ended(
    engine: VllmEngine, golden: dict[str, list[Answer]]
) -> None:
    """vLLM takes a fresh request's first page for computed (as one that was preempted, and whose count was kept)."""
    add = engine.scheduler.add_request

    def counted(request: Any) -> None:
        if list(request.prompt_token_ids) == PROMPT:
            request.num_computed_tokens = BLOCK
        add(request)

    engine.scheduler.add_request = counted
    victim, other = engine.generate([PROMPT, OTHER], [8, 8])
    assert victim.finish_reason == "error" and victim.token_ids == ()
    assert [other] == golden["other"]
    (violation,) = engine.guard_side.guard.violations
    assert (violation.kind, violation.proof) == (Kind.CONTENT_UNWRITTEN, Proof.CONTENT_KEY)
    assert violation.action is Action.ABORTED
    assert "starts at token 32, what it was given ends at 0" in violation.detail
    engine.scheduler.add_request = add
    assert engine.generate([PROMPT], [8]) == golden["prompt"], "nothing of it is in the cache"
    assert_sound(engine)


@pytest.mark.parametrize("asynchronous", [False], ids=["sync"])
def test_without_a_cache_nothing_is_hashed(
    checkpoint: Path, golden: dict[str, list[Answer]], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can take a page of another's; what was never written is noticed all the same."""
    monkeypatch.setenv("KVGUARD_LEVEL", "keys")
    register()
    engine = VllmEngine(VllmOptions(model=checkpoint, extra={"enable_prefix_caching": False}))
    guard = engine.guard_side.guard
    monkeypatch.setattr(guard, "identify", None)
    assert engine.generate([PROMPT, OTHER], [8, 8]) == [*golden["prompt"], *golden["other"]]
    add = engine.scheduler.add_request

    def counted(request: Any) -> None:
        request.num_computed_tokens = BLOCK
        add(request)

    engine.scheduler.add_request = counted
    assert engine.generate([PROMPT], [8])[0].finish_reason == "error"
    assert [violation.kind for violation in guard.violations] == [Kind.CONTENT_UNWRITTEN]
    assert_sound(engine)
