"""Healthy traffic through a real vLLM, for long: nothing is flagged, and the guard changes no token."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import ATTACHED, register
from tests.vllm.tiny import TinyEngine, write_checkpoint

STEPS = int(os.environ.get("KVGUARD_TEST_STEPS", "20000"))
SEED = int(os.environ.get("KVGUARD_TEST_SEED", "7"))


def soak(engine: TinyEngine, counts: Counter[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Arrivals, twins, shared prefixes, repeats and client aborts for STEPS steps; answers of what finished."""
    from vllm import SamplingParams

    llm, scheduler = engine.llm_engine, engine.scheduler
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    rng = random.Random(SEED)
    prefixes = [[rng.randrange(256) for _ in range(96)] for _ in range(3)]
    recent: list[list[int]] = []
    live: list[str] = []
    answers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for _ in range(STEPS):
        while len(live) < 10 and rng.random() < 0.35:
            if recent and rng.random() < 0.3:
                prompt = rng.choice(recent)
            else:
                prompt = rng.choice(prefixes)[: rng.randrange(97)] if rng.random() < 0.5 else []
                prompt = prompt + [rng.randrange(256) for _ in range(rng.randrange(1, 90))]
            recent = [*recent[-7:], prompt]
            for _ in range(2 if rng.random() < 0.25 else 1):
                name = f"q{counts['requests']}"
                counts["requests"] += 1
                tokens = rng.randrange(1, 120)
                parameters = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
                llm.add_request(name, {"prompt_token_ids": prompt}, parameters)
                live.append(name)
        if live and rng.random() < 0.02:
            llm.abort_request([live.pop(rng.randrange(len(live)))])
            counts["client_aborts"] += 1
        for output in llm.step():
            if output.finished:
                completion = output.outputs[0]
                answers[output.request_id] = (completion.finish_reason, tuple(completion.token_ids))
                if output.request_id in live:
                    live.remove(output.request_id)
    return answers


def unpatch(patch: pytest.MonkeyPatch) -> None:
    """An earlier test of this process may have registered the plugin: put vLLM's own constructors back for a while."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for owner in (Scheduler, GPUModelRunner):
        original = getattr(owner.__init__, "__wrapped__", None)
        if original is not None and getattr(owner.__init__, ATTACHED, False):
            patch.setattr(owner, "__init__", original)


def test_a_soak_of_healthy_traffic_is_clean_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is nearly full all the time: preemptions, aborts and prefix hits, and not one violation."""
    print(f"seed {SEED}, {STEPS} steps (KVGUARD_TEST_SEED, KVGUARD_TEST_STEPS)")
    checkpoint = write_checkpoint(tmp_path)
    options = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 384}
    monkeypatch.delenv("KVGUARD_LEVEL", raising=False)
    monkeypatch.delenv("KVGUARD_CONFIG", raising=False)
    plain_counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        unpatch(patch)
        plain_engine = TinyEngine(checkpoint, **options)
        assert getattr(plain_engine.scheduler, ATTACHED, None) is None
        plain = soak(plain_engine, plain_counts)
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    register()
    engine = TinyEngine(checkpoint, **options)
    counts: Counter[str] = Counter()
    guarded = soak(engine, counts)
    print(dict(counts), f"{len(guarded)} requests compared")
    guard = engine.scheduler._kvguard_attached.guard
    assert guard.violations == ()
    assert guarded == plain and counts == plain_counts
    assert min(counts["preemptions"], counts["client_aborts"], len(guarded)) > 0
    health = guard.health()
    assert health.ok and health.counters["steps_verified"] == health.counters["steps_seen"] > STEPS * 0.9
    assert health.counters["guard_faults"] == health.counters["adapter_errors"] == 0
