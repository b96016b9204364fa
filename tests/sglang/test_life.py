"""Healthy life in a real SGLang: whatever it does with pages, nothing is flagged and no token changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.sglang.apart import on
from tests.sglang.engine import Client, Engine
from tests.sglang.scenarios import assert_clean, assert_whole, at_step, prompts, same_as_unguarded, send

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])


def counted(owner: Any, name: str, counts: Counter[str]) -> None:
    """Count the calls of a method."""
    original = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counting)


def talk(engine: Engine) -> None:
    """Requests that share prefixes, then the same again: most of it comes from the cache."""
    send(engine)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@LOOPS
@on()
def test_plain_traffic(engine: Engine, page_size: int, overlap: bool) -> None:
    """Chunked prefill, shared prefixes, twins; and once more with everything in the cache."""
    same_as_unguarded(engine, talk)
    first = dict(engine.tokens)
    engine.tokens = {}
    send(engine)
    engine.run()
    assert engine.tokens == first
    assert_clean(engine)


@LOOPS
@on()
def test_a_flush_between_and_a_flush_that_is_refused(engine: Engine, overlap: bool) -> None:
    """SGLang flushes only when nobody runs."""
    answers: list[bool] = []

    def scenario(engine: Engine) -> Client:
        send(engine)
        return at_step(6, lambda engine: answers.append(engine.scheduler.flush_cache()))

    same_as_unguarded(engine, scenario)
    assert answers == [False, False]
    before = engine.steps
    engine.flush()
    assert (engine.guard.books.page_tag != 0).sum() == 0 or len(engine.guard.books) == 1
    send(engine, seed=2)
    engine.run()
    assert engine.steps > before
    assert_clean(engine)


@LOOPS
@pytest.mark.parametrize("phase", ["waiting", "chunked", "running"])
@on(max_running_requests=4)
def test_a_client_goes_away(engine: Engine, phase: str, overlap: bool) -> None:
    """In the queue, between two chunks of its prompt, and while it decodes."""
    gone: list[str] = []

    def scenario(engine: Engine) -> Client:
        rids = [f"r{place}" for place in range(8)]
        for name, prompt in zip(rids, prompts(3), strict=True):
            engine.add(name, prompt, 24)
        if phase == "chunked":
            engine.add("long", [token % 240 + 5 for token in range(300)], 8)
        done: list[bool] = []

        def client(engine: Engine) -> bool:
            scheduler = engine.scheduler
            if done:
                return False
            name = None
            if phase == "waiting" and engine.tokens and scheduler.waiting_queue:
                name = scheduler.waiting_queue[-1].rid
            elif phase == "chunked" and scheduler.chunked_req is not None and scheduler.chunked_req.rid == "long":
                name = "long"
            elif phase == "running" and len(engine.tokens.get("r1", [])) > 5:
                name = "r1"
            if name is not None:
                done.append(True)
                gone.append(name)
                engine.abort(name)
            return not done

        return client

    same_as_unguarded(engine, scenario)
    assert len(gone) == 2 and gone[0] == gone[1]
    assert engine.ends[gone[0]]["type"] == "abort" and len(engine.tokens.get(gone[0], [])) < 24


@LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
@on(max_total_tokens=640, schedule_conservativeness=0.05)
def test_a_pool_that_is_too_small(engine: Engine, page_size: int, overlap: bool) -> None:
    """Requests are retracted and computed again; cached pages are evicted, and their prompts come again later."""
    counts: Counter[str] = Counter()

    def scenario(engine: Engine) -> Client:
        send(engine, seed=1, count=8, tokens=90, exact=False)
        later = iter(range(3))

        def client(engine: Engine) -> bool:
            if len(engine.ends) >= 8 and (turn := next(later, None)) is not None:
                for place, prompt in enumerate(prompts(1 + turn)):
                    engine.add(f"again-{turn}-{place}", prompt, 12)
                return True
            return False

        return client

    from sglang.srt.managers import schedule_batch

    counted(schedule_batch.ScheduleBatch, "retract_decode", counts)
    counted(engine.scheduler.tree_cache, "_evict", counts)
    same_as_unguarded(engine, scenario)
    assert counts["retract_decode"] >= 2 and counts["_evict"] > 10, counts
    assert len(engine.ends) == 32


@LOOPS
@on(disable_radix_cache=True)
def test_without_a_prefix_cache(engine: Engine, overlap: bool) -> None:
    """Chunks of a prompt are still put aside between two steps."""
    same_as_unguarded(engine, talk)


@LOOPS
@on(enable_mixed_chunk=True)
def test_prefill_and_decode_in_one_batch(engine: Engine, overlap: bool) -> None:
    """Mixed batches: rows that go on beside rows that begin."""
    modes: Counter[str] = Counter()
    original = engine.scheduler.run_batch

    def watched(batch: Any, *args: Any) -> Any:
        modes[batch.forward_mode.name] += 1
        return original(batch, *args)

    engine.scheduler.run_batch = watched

    def scenario(engine: Engine) -> Client:
        send(engine)
        return at_step(8, lambda engine: engine.add("long", [token % 240 + 5 for token in range(300)], 8))

    same_as_unguarded(engine, scenario)
    assert modes["MIXED"] > 2, modes


@LOOPS
@on(enable_priority_scheduling=True, priority_scheduling_preemption_threshold=1, max_running_requests=4)
def test_preemption_by_priority(engine: Engine, overlap: bool) -> None:
    """Somebody more important comes: a running request is retracted and computed again later."""
    counts: Counter[str] = Counter()
    from sglang.srt.managers.schedule_policy import PrefillAdder

    original = PrefillAdder.preempt_to_schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        counts["preempted"] += bool(done)
        return done

    PrefillAdder.preempt_to_schedule = watched

    def scenario(engine: Engine) -> Client:
        for place, prompt in enumerate(prompts(4, 6)):
            engine.add(f"r{place}", prompt, 30, priority=1)
        return at_step(12, lambda engine: engine.add("first", prompts(5)[0], 10, priority=100))

    same_as_unguarded(engine, scenario)
    assert counts["preempted"] >= 2


@LOOPS
@on(kv_cache_dtype="fp8_e4m3")
def test_an_fp8_cache(engine: Engine, overlap: bool) -> None:
    """The guard looks at page ids, never at bytes."""
    same_as_unguarded(engine, talk)


@on()
def test_new_weights(engine: Engine) -> None:
    """Weights from disk while idle: SGLang flushes its cache; the same weights give the same tokens."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    from tests.sglang.engine import checkpoint

    send(engine)
    engine.run()
    first = dict(engine.tokens)
    engine.tokens, engine.control = {}, []
    engine.send(UpdateWeightFromDiskReqInput(model_path=str(checkpoint()), load_format="auto"))
    engine.run()
    (answer,) = engine.control
    assert answer.success, answer.message
    send(engine)
    engine.run()
    assert engine.tokens == first
    assert_clean(engine)


@LOOPS
@on()
def test_all_clients_go_away(engine: Engine, overlap: bool) -> None:
    """At once, while some wait, one is prefilled and the others decode."""
    send(engine)

    def gone(engine: Engine) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        engine.send(AbortReq(abort_all=True))

    engine.run(at_step(7, gone))
    assert len(engine.ends) == 8
    assert_clean(engine)
    send(engine, seed=2)
    engine.run()
    assert_clean(engine)
    assert_whole(engine)


@LOOPS
@on()
def test_memory_that_is_released_and_resumed(engine: Engine, overlap: bool) -> None:
    """While idle: SGLang empties its cache first."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    send(engine)
    engine.run()
    first = dict(engine.tokens)
    engine.tokens, engine.control = {}, []
    for message in (ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput):
        engine.send(message(tags=["kv_cache"]))
        engine.run()
    assert len(engine.control) == 2
    send(engine)
    engine.run()
    assert engine.tokens == first
    assert_clean(engine)
