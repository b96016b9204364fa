"""Healthy traffic through a real SGLang scheduler, for long: nothing is flagged, and the guard changes no token."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sglang.apart import Child
from tests.sglang.engine import Engine
from tests.sglang.scenarios import assert_clean
from tests.soaking import assert_found_nothing

STEPS = int(os.environ.get("KVGUARD_TEST_STEPS", "10000"))
SEED = int(os.environ.get("KVGUARD_TEST_SEED", "7"))
PARTS = {
    (1, False, "keys"): 0.4,
    (16, False, "keys"): 0.2,
    (1, True, "keys"): 0.2,
    (16, True, "keys"): 0.2,
    (16, True, "tags"): 0.06,
}
"""(page size, overlap, level) -> what part of STEPS it runs; `keys` has all that `tags` has."""
HAPPENED = ("hits", "tenant hits", "cached tokens", "evictions", "retractions", "chunked", "client_aborts", "full")
TENANTS = ("", "", "red", "blue")


def counting(owner: Any, name: str, counts: Counter[str], what: str, amount: Any = lambda result, *args: 1) -> None:
    """Count a method's calls, or what its results amount to."""
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        counts[what] += int(amount(result, *args))
        return result

    setattr(owner, name, counted)


class Traffic:
    """A client that decides by its own dice and by the turn alone, so that two runs are alike."""

    def __init__(self, counts: Counter[str], steps: int) -> None:
        self.rng = random.Random(SEED)
        self.counts, self.steps = counts, steps
        self.prefixes = [[self.rng.randrange(3, 250) for _ in range(96)] for _ in range(4)]
        self.recent: list[list[int]] = []
        self.live: list[str] = []

    def prompt(self) -> list[int]:
        """New, the beginning of a common one, or one that was there before with something added."""
        rng = self.rng
        if self.recent and rng.random() < 0.3:
            return [*rng.choice(self.recent), rng.randrange(3, 250)][:200]
        begin = rng.choice(self.prefixes)[: rng.randrange(97)] if rng.random() < 0.6 else []
        return [*begin, *(rng.randrange(3, 250) for _ in range(rng.randrange(1, 90)))]

    def __call__(self, engine: Engine) -> bool:
        rng, allocator = self.rng, engine.allocator
        if engine.steps >= self.steps:
            return False
        self.live = [name for name in self.live if name not in engine.ends]
        while len(self.live) < 14 and rng.random() < 0.5:
            prompt = self.prompt()
            self.recent = [*self.recent[-9:], prompt]
            tenant = rng.choice(TENANTS)
            for _ in range(2 if rng.random() < 0.2 else 1):
                name = f"q{self.counts['requests']:06d}"
                self.counts["requests"] += 1
                engine.add(name, prompt, rng.randrange(2, 100), exact=False, tenant=tenant)
                self.live.append(name)
        if self.live and rng.random() < 0.02:
            engine.abort(self.live.pop(rng.randrange(len(self.live))))
            self.counts["client_aborts"] += 1
        self.counts["chunked"] += engine.scheduler.chunked_req is not None
        self.counts["full"] += allocator.available_size() <= allocator.size // 20
        return True


def cached_tokens(engine: Engine) -> dict[str, int]:
    """Fills up while the engine runs: request -> tokens that SGLang told its client it took from the cache."""
    found: dict[str, int] = {}
    send, streamer = engine._sent, engine.scheduler.output_streamer

    def noted(output: Any, request: Any = None) -> Any:
        found.update(zip(getattr(output, "rids", ()), getattr(output, "cached_tokens", None) or (), strict=False))
        return send(output, request)

    streamer.send_to_detokenizer = SimpleNamespace(send_output=noted)
    return found


def soak(kept: dict[str, Any], page_size: int, overlap: bool, steps: int, level: str) -> tuple[Any, Counter[str]]:
    """What clients saw (tokens, ends, cached tokens), and counts; in a guarded engine with nothing but clean steps."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    # Low, so that SGLang takes in more requests than the pool holds to their end.
    engine = Engine(
        page_size=page_size,
        overlap=overlap,
        max_total_tokens=640,
        max_running_requests=12,
        schedule_conservativeness=0.05,
    )
    guarded = engine.guard is not None
    assert guarded == ("KVGUARD_LEVEL" in os.environ)
    counts: Counter[str] = Counter()
    tree = engine.scheduler.tree_cache
    counting(tree, "match_prefix", counts, "hits", lambda result, params: result.device_prefix_len > 0)
    counting(
        tree,
        "match_prefix",
        counts,
        "tenant hits",
        lambda result, params: result.device_prefix_len > 0 and bool(params.req and params.req.extra_key),
    )
    counting(tree, "_evict", counts, "evictions")
    counting(ScheduleBatch, "retract_decode", counts, "retractions")
    told = cached_tokens(engine)
    engine.run(Traffic(counts, steps), turns=100 * steps)
    counts["cached tokens"] = sum(told.values())
    if guarded:
        assert_clean(engine, steps)
        assert_found_nothing(engine.guard.guard, level)
        content = engine.guard.books.page_content
        assert (content is not None and bool((content != 0).any())) == (level == "keys")
        counters = engine.guard.health().counters
        assert counters["steps_seen"] == counters["steps_verified"] == engine.steps
    else:
        from kvguard.adapters.sglang.plugin import guard_of

        assert guard_of(engine.scheduler) is None
    return (engine.tokens, {name: end["type"] for name, end in engine.ends.items()}, told), counts


@pytest.mark.parametrize(("page_size", "overlap", "level"), PARTS, ids=lambda value: str(value))
def test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token(page_size: int, overlap: bool, level: str) -> None:
    """A pool that is nearly full: evictions, hits, retractions, chunks, aborts, and SGLang's own checks at the end."""
    steps = int(STEPS * PARTS[page_size, overlap, level])
    print(f"seed {SEED}, {steps} steps (KVGUARD_TEST_SEED, KVGUARD_TEST_STEPS)")
    plain, guarded = Child({"SGLANG_PLUGINS": "none"}), Child({"KVGUARD_LEVEL": level})
    try:
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(child.call, soak, page_size, overlap, steps, level) for child in (plain, guarded)]
            wanted, found = (run.result() for run in runs)
    finally:
        plain.stop()
        guarded.stop()
    (_, ends, _), counts = found
    print(dict(counts), f"{len(ends)} requests compared")
    assert found == wanted
    assert min(counts[what] for what in HAPPENED) > 0, counts
    assert counts["full"] > steps / 20 and len(ends) > steps / 50
