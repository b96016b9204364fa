"""Healthy traffic through a real vLLM, for long: nothing is flagged, and the guard changes no token."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import register
from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
from tests.soaking import assert_found_nothing
from tests.vllm.tiny import unguarded, write_checkpoint

STEPS = int(os.environ.get("KVGUARD_TEST_STEPS", "20000"))
SEED = int(os.environ.get("KVGUARD_TEST_SEED", "7"))

SOAKS: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("llama", {"level": "tags"}, 1.0),
    "llama-async": ("llama", {"level": "tags", "asynchronous": True}, 0.2),
    "hybrid": ("gemma3", {"level": "tags", "num_blocks": 32}, 0.05),
    "llama-keys": ("llama", {}, 0.35),
    "llama-keys-async": ("llama", {"asynchronous": True}, 0.25),
    "sliding-window-keys-async": ("mistral", {"asynchronous": True}, 0.1),
    "hybrid-keys": ("gemma3", {"num_blocks": 32}, 0.1),
}
"""Name -> architecture, options, and what part of STEPS it runs; at level `keys`, which has all that `tags` has.

Both are long: steps in which pages are crossed are made in another way at `tags`, where no tokens have to be learnt.
"""
SALTS = (None, None, "red", "blue")


def counting(owner: Any, name: str, counts: Counter[str], what: str, amount: Any = lambda result: 1) -> None:
    """Count a method's calls, or what its results amount to."""
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        counts[what] += amount(result)
        return result

    setattr(owner, name, counted)


def soak(engine: VllmEngine, counts: Counter[str], steps: int) -> dict[str, tuple[str | None, tuple[int, ...]]]:
    """Arrivals, twins, shared prefixes, repeats and client aborts for some steps; answers of what finished."""
    from vllm import SamplingParams

    llm, pool = engine.llm_engine, engine.pool
    counting(engine.scheduler, "_preempt_request", counts, "preemptions")
    counting(engine.scheduler.kv_cache_manager, "get_computed_blocks", counts, "prefix_hits", lambda r: r[1] > 0)
    counting(engine.scheduler.kv_cache_manager, "get_computed_blocks", counts, "hit_tokens", lambda r: r[1])
    counting(pool, "_maybe_evict_cached_block", counts, "evictions", bool)
    rng = random.Random(SEED)
    prefixes = [[rng.randrange(256) for _ in range(96)] for _ in range(3)]
    recent: list[list[int]] = []
    live: list[str] = []
    answers: dict[str, tuple[str | None, tuple[int, ...]]] = {}
    for _ in range(steps):
        while len(live) < 10 and rng.random() < 0.35:
            if recent and rng.random() < 0.3:
                prompt = rng.choice(recent)
            else:
                prompt = rng.choice(prefixes)[: rng.randrange(97)] if rng.random() < 0.5 else []
                prompt = prompt + [rng.randrange(256) for _ in range(rng.randrange(1, 90))]
            recent = [*recent[-7:], prompt]
            salt = rng.choice(SALTS)
            for _ in range(2 if rng.random() < 0.25 else 1):
                name = f"q{counts['requests']}"
                counts["requests"] += 1
                tokens = rng.randrange(1, 120)
                parameters = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
                given: Any = {"prompt_token_ids": prompt} if salt is None else {
                    "prompt_token_ids": prompt, "cache_salt": salt,
                }  # fmt: skip
                llm.add_request(name, given, parameters)
                live.append(name)
        if live and rng.random() < 0.02:
            llm.abort_request([live.pop(rng.randrange(len(live)))])
            counts["client_aborts"] += 1
        for output in llm.step():
            if output.finished:
                completion = output.outputs[0]
                # The next turn of the same talk may come: its prompt begins with this one and its answer.
                recent = [*recent[-7:], [*output.prompt_token_ids, *completion.token_ids, 7][:280]]
                counts["cached_tokens"] += output.num_cached_tokens or 0
                answers[output.request_id] = (completion.finish_reason, tuple(completion.token_ids))
                if output.request_id in live:
                    live.remove(output.request_id)
        counts["steps_full"] += pool.get_num_free_blocks() <= 0.05 * pool.num_gpu_blocks
    return answers


@pytest.mark.parametrize("name", SOAKS)
def test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is nearly full most of the time: preemptions, evictions, hits, aborts, and not one violation."""
    architecture, settings, part = SOAKS[name]
    settings, level = dict(settings), settings.get("level", "keys")
    settings.pop("level", None)
    steps = int(STEPS * part)
    print(f"seed {SEED}, {steps} steps (KVGUARD_TEST_SEED, KVGUARD_TEST_STEPS)")
    options = VllmOptions(
        model=write_checkpoint(tmp_path, architecture=architecture),
        **({"num_blocks": 20, "max_num_batched_tokens": 384} | settings),
    )
    plain_counts: Counter[str] = Counter()
    with unguarded():
        plain_engine = VllmEngine(options)
        assert plain_engine.guard_side is None
        plain = soak(plain_engine, plain_counts, steps)
    monkeypatch.setenv("KVGUARD_LEVEL", level)
    register()
    engine = VllmEngine(options)
    counts: Counter[str] = Counter()
    guarded = soak(engine, counts, steps)
    print(dict(counts), f"{len(guarded)} requests compared")
    guard = engine.guard_side.guard
    assert guarded == plain and counts == plain_counts
    assert_found_nothing(guard, level)
    happened = ("preemptions", "evictions", "prefix_hits", "cached_tokens", "client_aborts", "steps_full")
    assert min(counts[what] for what in happened) > 0 and len(guarded) > steps / 50, counts
    health = guard.health()
    # With asynchronous scheduling the last step is still in flight.
    assert health.ok and health.in_flight == bool(settings.get("asynchronous"))
    assert health.counters["steps_verified"] + health.in_flight == health.counters["steps_seen"] > steps * 0.9
