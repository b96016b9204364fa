"""Level `keys` in a real vLLM: hits that are refused, and healthy traffic that is not."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import register
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from kvguard.violation import Action, Kind
from tests.vllm.tiny import unguarded, write_checkpoint

BLOCK = 32
PROMPT = [(7 * token + 3) % 251 for token in range(110)]
OTHER = [(11 * token + 5) % 241 for token in range(110)]
SHARED = [*PROMPT[:BLOCK], *OTHER[BLOCK:]]



@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def golden(checkpoint: Path) -> dict[str, list[Answer]]:
    """Answers of an unguarded engine."""
    with unguarded():
        engine = VllmEngine(VllmOptions(model=checkpoint))
    return {
        "alone": engine.generate([PROMPT], [8]),
        "other": engine.generate([OTHER], [8]),
        "shared": engine.generate([SHARED], [8]),
    }


@pytest.fixture
def start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Start an engine that is guarded at level `keys`, or at the one that is asked for."""

    def start_engine(level: str = "keys", **options: Any) -> VllmEngine:
        monkeypatch.setenv("KVGUARD_LEVEL", level)
        register()
        engine = VllmEngine(VllmOptions(model=checkpoint, **options))
        assert engine.guard_side.guard.wants_contents == (level == "keys")
        return engine

    return start_engine


def kinds(engine: VllmEngine) -> list[Kind]:
    assert all(violation.action is Action.REFUSED for violation in engine.guard_side.guard.violations)
    return [violation.kind for violation in engine.guard_side.guard.violations]


def assert_sound(engine: VllmEngine) -> None:
    health = engine.guard_side.guard.health()
    assert health.ok and health.counters["adapter_errors"] == health.counters["guard_faults"] == 0
    assert health.counters["steps_verified"] + health.in_flight == health.counters["steps_seen"] > 0


def before_lookup(engine: VllmEngine, action: Callable[[Any], None]) -> None:
    """Run `action(request)` once, before the next request is looked up."""
    manager = engine.scheduler.kv_cache_manager
    look_up, done = manager.get_computed_blocks, False

    def acting(request: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            action(request)
        return look_up(request, *args, **kwargs)

    manager.get_computed_blocks = acting


def hits_of(engine: VllmEngine) -> dict[str, int]:
    """Request -> cached tokens with which it was admitted, filled as the engine runs."""
    manager, found = engine.scheduler.kv_cache_manager, dict[str, int]()
    allocate = manager.allocate_slots

    def noting(request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, *args: Any, **kwargs: Any) -> Any:
        found.setdefault(request.request_id, num_new_computed_tokens)
        return allocate(request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)

    manager.allocate_slots = noting
    return found


@pytest.mark.parametrize("level", ["tags", "keys"])
def test_a_refused_hit_keeps_the_good_prefix(
    level: str, start: Callable[..., VllmEngine], golden: dict[str, list[Answer]]
) -> None:
    """The third page's entry points elsewhere: two pages are taken, the rest is computed, and statistics say so."""
    engine = start(level, extra={"disable_log_stats": False})
    scheduler, pool = engine.scheduler, engine.pool
    assert engine.generate([PROMPT], [8]) == golden["alone"]
    assert engine.generate([OTHER], [8]) == golden["other"]

    def point_elsewhere(request: Any) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        keys = [make_block_hash_with_group_id(found, 0) for found in request.block_hashes]
        assert all(pool.cached_block_hash_to_block.get_one_block(key) for key in keys[:3])
        wrong = [block for block in pool.blocks if block.block_hash is not None and block.block_hash not in keys]
        entries = pool.cached_block_hash_to_block._cache
        entries[keys[2]] = wrong[0]

    before_lookup(engine, point_elsewhere)
    found = hits_of(engine)
    manager = scheduler.kv_cache_manager
    manager.make_prefix_cache_stats()
    counted: list[Any] = []
    make = manager.make_prefix_cache_stats

    def keeping() -> Any:
        stats = make()
        counted.append(stats)
        return stats

    manager.make_prefix_cache_stats = keeping
    assert engine.generate([PROMPT], [8]) == golden["alone"]
    # A page that holds other content under another key: that is stale to the control plane, whatever is in it.
    assert kinds(engine) == [Kind.ADOPT_STALE]
    assert list(found.values()) == [2 * BLOCK]
    assert sum(stats.requests for stats in counted) == 1
    assert sum(stats.queries for stats in counted) == len(PROMPT)
    assert sum(stats.hits for stats in counted) == 2 * BLOCK
    assert "find_longest_cache_hit" not in vars(manager.coordinator) and manager.log_stats
    assert engine.generate([PROMPT], [8]) == golden["alone"] and len(kinds(engine)) == 1
    assert list(found.values())[-1] == 3 * BLOCK, "what was computed instead is found from then on"
    assert_sound(engine)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_hits_on_what_is_published_in_the_same_pass_are_compared(
    asynchronous: bool, start: Callable[..., VllmEngine], golden: dict[str, list[Answer]]
) -> None:
    """Two prompts in one step whose second pages have one hash: the second request would read the first one's KV."""
    engine = start(asynchronous=asynchronous, max_num_batched_tokens=512)
    add = engine.scheduler.add_request
    first: list[Any] = []

    def colliding(request: Any) -> None:
        if first:
            request.block_hashes[1] = first[0].block_hashes[1]
        first.append(request)
        add(request)

    engine.scheduler.add_request = colliding
    found = hits_of(engine)
    answers = engine.generate([PROMPT, SHARED], [8, 8])
    assert answers == [*golden["alone"], *golden["shared"]]
    assert kinds(engine) == [Kind.CONTENT_TOKENS]
    assert list(found.values()) == [0, BLOCK], "the first page is theirs alike"
    detail = engine.guard_side.guard.violations[0].detail
    assert first[0].request_id in detail and "64 tokens" in detail
    assert_sound(engine)


def test_a_request_that_leaves_while_it_waits_is_finished(start: Callable[..., VllmEngine]) -> None:
    """It was looked up, and never got a block: the books forget it like everybody."""
    engine = start()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    manager.allocate_slots = lambda *args, **kwargs: None
    from vllm import SamplingParams

    llm = engine.llm_engine
    llm.add_request("leaves", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=4, detokenize=False))
    llm.step()
    books = engine.guard_side.guard._books
    assert [name.rsplit("-", 1)[0] for name in books.requests] == ["leaves"]
    assert all(state.content is not None for state in books.requests.values())
    llm.abort_request(["leaves"])
    assert books.requests == {} and engine.guard_side._contents._known == {} and engine.guard_side._columns == {}
    manager.allocate_slots = allocate
    assert engine.generate([PROMPT], [4])[0].finish_reason == "length"
    assert kinds(engine) == []
    assert_sound(engine)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_new_weights_are_another_epoch(
    asynchronous: bool, start: Callable[..., VllmEngine], checkpoint: Path, tmp_path: Path
) -> None:
    """Emptied, the cache is healthy; kept, nobody takes a page of before, and who runs on publishes nothing."""
    other = write_checkpoint(tmp_path / "other", seed=5)
    with unguarded():
        wanted = VllmEngine(VllmOptions(model=other)).generate([PROMPT], [8])
    engine = start(asynchronous=asynchronous)
    core, contents = engine.core, engine.guard_side._contents
    before = engine.generate([PROMPT], [8])
    assert before != wanted
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    assert contents.epoch == 1
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate([PROMPT], [8]) == wanted and kinds(engine) == []
    core.collective_rpc("compute_weight_checksums")
    assert contents.epoch == 1
    # Once more, and the cache is kept.
    core.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
    found = hits_of(engine)
    assert engine.generate([PROMPT], [8]) == before
    assert kinds(engine) == [Kind.CONTENT_DOMAIN] and list(found.values()) == [0]
    assert "weights_epoch" in engine.guard_side.guard.violations[0].detail
    # A request that holds pages over an update goes on, and what it fills is nobody else's.
    steps = 0
    schedule = engine.scheduler.schedule

    def updating(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 10:
            core.collective_rpc("reload_weights")
        return schedule(*args, **kwargs)

    engine.scheduler.schedule = updating
    long = engine.generate([OTHER], [100])[0]
    assert len(long.token_ids) == 100 and contents.epoch == 3
    published = [block for block in engine.pool.blocks if block.block_hash is not None]
    cached = engine.pool.cached_block_hash_to_block
    in_cache = {block.block_id for block in published if cached.contain(block.block_hash, block.block_id)}
    bound = [engine.guard_side.guard._books.tables[0].record(page).content for page in in_cache]
    assert all(found is not None for found in bound)
    ends = [found.key.tokens for found in bound if found is not None and found.domain.weights_epoch == 2]
    assert max(ends) <= 4 * BLOCK
    assert len(kinds(engine)) == 1
    assert_sound(engine)


def test_sleep_that_discards_the_weights_is_another_epoch(start: Callable[..., VllmEngine]) -> None:
    """At level 1 they come back as they were, at level 2 they do not."""
    engine = start()
    answer = engine.generate([PROMPT], [4])
    epochs = []
    for level in (1, 2):
        engine.llm.sleep(level=level)
        engine.llm.wake_up()
        epochs.append(engine.guard_side._contents.epoch)
    assert epochs == [0, 1]
    engine.llm.collective_rpc("reload_weights")
    assert engine.generate([PROMPT], [4]) == answer and kinds(engine) == []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_streaming_sessions_are_healthy(asynchronous: bool, start: Callable[..., VllmEngine]) -> None:
    """Each chunk of input takes the place of the token that was sampled last; others take the session's pages."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    seed = 4
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = start(asynchronous=asynchronous)
    core = engine.core

    def send(name: str, tokens: list[int], resumable: bool = True) -> None:
        parameters = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0, ignore_eos=True, detokenize=False)
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )
        core.add_request(*core.preprocess_add_request(request))

    def drain() -> None:
        for _ in range(400):
            if not core.batch_queue and all(
                request.status.name == "WAITING_FOR_STREAMING_REQ" for request in engine.scheduler.requests.values()
            ):
                return
            core.step_fn()
        raise AssertionError("the engine did not come to rest")

    found = hits_of(engine)
    for turn in range(12):
        name = f"talk{turn % 2}"
        session = engine.scheduler.requests.get(name)
        before = [] if session is None else list(session.all_token_ids)
        send(name, [rng.randrange(256) for _ in range(rng.randrange(1, 20))])
        if before:
            now = list(engine.scheduler.requests[name].all_token_ids)
            assert now[: len(before) - 1] == before[:-1]
        drain()
        talk = engine.scheduler.requests[name]
        computed = list(talk.all_token_ids)[: talk.num_computed_tokens]
        send(f"reader{turn}", [*computed, 1], resumable=False)
        drain()
        if turn == 5:
            assert engine.scheduler.requests["talk0"].num_computed_tokens >= BLOCK
    readers = {name: tokens for name, tokens in found.items() if name.startswith("reader")}
    assert len(readers) == 12 and sum(tokens > 0 for tokens in readers.values()) >= 4, readers
    assert kinds(engine) == []
    assert_sound(engine)
