"""What happens to requests and pages in a real vLLM beside plain decoding: sharing, preemption, resets, hand-overs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import register
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from tests.vllm.tiny import traffic, unguarded, write_checkpoint

STEP = 25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def golden(checkpoint: Path) -> dict[int, list[Answer]]:
    """Answers of an unguarded engine."""
    with unguarded():
        engine = VllmEngine(VllmOptions(model=checkpoint))
    assert engine.guard_side is None
    return {seed: engine.generate(*traffic(seed)) for seed in (1, 2)}


@pytest.fixture
def level() -> str:
    """At which a test is guarded, unless it is run at several."""
    return "tags"


both_levels = pytest.mark.parametrize("level", ["tags", "keys"])


@pytest.fixture
def start(checkpoint: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Start a guarded engine."""
    monkeypatch.setenv("KVGUARD_LEVEL", level)

    def start_engine(**options: Any) -> VllmEngine:
        register()
        engine = VllmEngine(VllmOptions(model=checkpoint, **options))
        assert engine.guard_side is not None
        return engine

    return start_engine


def kinds(engine: VllmEngine) -> list[str]:
    return [str(violation.kind) for violation in engine.guard_side.guard.violations]


def assert_clean(engine: VllmEngine) -> None:
    health = engine.guard_side.guard.health()
    assert kinds(engine) == [] and health.ok
    assert health.counters["steps_verified"] == health.counters["steps_seen"] > 0
    assert health.counters["adapter_errors"] == 0


def before_call(owner: Any, name: str, number: int, action: Callable[[], None]) -> None:
    """Run the action once, right before the `number`-th call of a method from now."""
    original, count = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def break_row(engine: VllmEngine, place: int) -> None:
    """The first entry of a running request's row names the null block."""
    batch = engine.runner.input_batch
    row = batch.req_id_to_index[engine.scheduler.running[place].request_id]
    batch.block_table.block_tables[0].block_table.np[row, 0] = 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("twins", [2, 3])
def test_a_flagged_writer_takes_along_who_shares_its_step(
    start: Callable[..., VllmEngine], twins: int, asynchronous: bool
) -> None:
    """Equal prompts in one step: the first writes pages that the others adopt before they are computed."""
    engine = start(asynchronous=asynchronous, max_num_batched_tokens=512)
    prompt = [(7 * token) % 251 for token in range(80)]
    other = [(11 * token) % 241 for token in range(70)]
    prompts, tokens = [prompt] * twins + [other], [12] * twins + [12]
    healthy = engine.generate(prompts, tokens)
    assert_clean(engine)
    assert [answer.token_ids for answer in healthy[:twins]] == [healthy[0].token_ids] * twins
    assert engine.scheduler.reset_prefix_cache()
    # After the runner learnt of the new requests, before it prepares what attention reads.
    update, first = engine.runner._update_states, True

    def breaking(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        result = update(*args, **kwargs)
        if first:
            first = False
            break_row(engine, 0)
        return result

    engine.runner._update_states = breaking
    answers = engine.generate(prompts, tokens)
    for answer in answers[:twins]:
        assert answer.finish_reason == "error" and answer.token_ids == ()
    assert answers[twins] == healthy[twins]
    assert kinds(engine) == ["null-entry"] + ["writer-flagged"] * (twins - 1)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate(prompts, tokens) == healthy


def test_a_request_preempted_while_its_flagged_step_is_in_flight_emits_nothing(
    start: Callable[..., VllmEngine], golden: dict[int, list[Answer]]
) -> None:
    """Its pages are gone when the verdict arrives, but the token of that step is unproven all the same."""
    engine = start(asynchronous=True)
    victim = 2
    before_call(engine.runner, "execute_model", STEP, lambda: break_row(engine, victim))

    def preempt() -> None:
        request = engine.scheduler.running.pop(victim)
        engine.scheduler._preempt_request(request, time.monotonic())

    before_call(engine.scheduler, "schedule", STEP + 1, preempt)
    answers = engine.generate(*traffic(1))
    assert kinds(engine) == ["null-entry"]
    for place, (answer, wanted) in enumerate(zip(answers, golden[1], strict=True)):
        if place != victim:
            assert answer == wanted
            continue
        assert answer.finish_reason == "error"
        assert answer.stop_reason is not None and answer.stop_reason.startswith("kvguard kvg-")
        assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)] and len(answer.token_ids) <= STEP
    assert engine.generate(*traffic(2)) == golden[2]


@both_levels
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_reset_with_running_requests_is_healthy(
    start: Callable[..., VllmEngine], golden: dict[int, list[Answer]], asynchronous: bool
) -> None:
    """All requests are preempted, the cache is emptied, they compute their tokens again."""
    engine = start(asynchronous=asynchronous)
    before_call(
        engine.scheduler, "schedule", STEP, lambda: engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    )
    answers = engine.generate(*traffic(1))
    assert_clean(engine)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in golden[1]]


def test_sleep_wake_and_new_weights_release_the_quarantine(
    start: Callable[..., VllmEngine], golden: dict[int, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a violation pages are in quarantine; sleep empties it, and reloading the weights is healthy."""
    monkeypatch.setenv("KVGUARD_CONTROL_PLANE", "false")
    engine = start()

    def free_under_user() -> None:
        request = engine.scheduler.running[2]
        manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        block = manager.req_to_blocks[request.request_id][1]
        engine.pool._maybe_evict_cached_block(block)
        block.ref_cnt = 1
        engine.pool.free_blocks([block])

    before_call(engine.scheduler, "schedule", STEP, free_under_user)
    engine.generate(*traffic(1))
    guard = engine.guard_side.guard
    assert kinds(engine) and guard.health().quarantined_pages > 0
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    assert guard.health().quarantined_pages == 0
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert engine.generate(*traffic(1)) == golden[1]
    engine.llm.collective_rpc("reload_weights")
    assert engine.llm.reset_prefix_cache()
    assert engine.generate(*traffic(2)) == golden[2]
    assert guard.health().ok


def test_a_reset_releases_a_block_that_was_given_back_in_quarantine(
    start: Callable[..., VllmEngine], golden: dict[int, list[Answer]]
) -> None:
    """A suspect block that its owner gives back stays out of the free queue until vLLM empties its cache."""
    engine = start()
    # Its last block is never full, so that it is not kept for the cache when the request ends.
    prompt, tokens = [(5 * token) % 249 for token in range(40)], 12
    answer = engine.generate([prompt], [tokens])

    def suspect_last_block() -> None:
        request = engine.scheduler.running[0]
        blocks = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        assert engine.guard_side.guard._books.quarantine_page(0, blocks[request.request_id][-1].block_id)

    before_call(engine.scheduler, "schedule", 5, suspect_last_block)
    assert engine.generate([prompt], [tokens]) == answer
    usable = engine.pool.num_gpu_blocks - 1
    assert engine.pool.get_num_free_blocks() == usable - 1
    assert engine.scheduler.reset_prefix_cache()
    assert engine.pool.get_num_free_blocks() == usable
    assert engine.generate(*traffic(2)) == golden[2]
    assert_clean(engine)


@both_levels
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_next_turn_of_a_talk_is_healthy(start: Callable[..., VllmEngine], busy: bool) -> None:
    """With asynchronous scheduling vLLM publishes the last full block of a request in the update that ends it."""
    engine = start(asynchronous=True)
    other = [(13 * token) % 239 for token in range(50)]
    hits = 0
    look_up = engine.scheduler.kv_cache_manager.get_computed_blocks

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal hits
        result = look_up(*args, **kwargs)
        hits = max(hits, result[1])
        return result

    engine.scheduler.kv_cache_manager.get_computed_blocks = counted
    for length, tokens in ((60, 5), (59, 6), (63, 2), (61, 5)):
        prompt = [(length * token + 3) % 251 for token in range(length)]
        answer = engine.generate([prompt], [tokens])[0]
        if busy:
            engine.generate([other], [3])
        hits = 0
        talk = [*prompt, *answer.token_ids, 7, 8, 9]
        again = engine.generate([talk], [4])[0]
        assert again.finish_reason == "length"
        assert hits == 64 or (length + tokens) % 32 != 1
        assert_clean(engine)
    assert engine.guard_side._published == {}


@both_levels
@pytest.mark.parametrize("twins", [1, 2])
def test_blocks_that_a_connector_failed_to_load_are_computed_again(
    twins: int, start: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    """vLLM leaves their entries in the cache: who took them in the same step, or comes later, has them rightly."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    from tests.vllm import late_connector

    ensure_kv_transfer_shutdown()
    engine = start(
        max_num_batched_tokens=512,
        extra={
            "kv_transfer_config": {
                "kv_connector": "FailingConnector",
                "kv_connector_module_path": "tests.vllm.late_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
            }
        },
    )
    prompt = [(7 * token + 5) % 251 for token in range(130)]
    stored = engine.generate([prompt], [4])
    assert engine.scheduler.reset_prefix_cache()
    late_connector.FailingConnector.failing = True
    assert engine.generate([prompt] * twins, [4] * twins) == stored * twins
    assert not late_connector.FailingConnector.failing, "one load has failed"
    assert_clean(engine)
    for turn in range(3):
        assert engine.generate([[*prompt, turn + 1, turn + 1]], [3])[0].finish_reason == "length"
    assert_clean(engine)


def test_an_engine_may_be_driven_from_one_thread_after_another(
    start: Callable[..., VllmEngine], golden: dict[int, list[Answer]]
) -> None:
    """As in a thread pool or a notebook; vLLM allows it."""
    from concurrent.futures import ThreadPoolExecutor

    engine = start()
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(engine.generate, *traffic(1)).result() == golden[1]
    assert_clean(engine)


def refuse_once_loaded(engine: VllmEngine) -> None:
    """As if the pool were full: each request is refused blocks once, when its KV has been loaded."""
    manager = engine.scheduler.kv_cache_manager
    allocate, refused = manager.allocate_slots, set()

    def refusing(request: Any, *args: Any, **kwargs: Any) -> Any:
        holds = manager.coordinator.single_type_managers[0].req_to_blocks.get(request.request_id)
        if holds and request.request_id not in refused and request.num_output_tokens == 0:
            refused.add(request.request_id)
            return None
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = refusing


@both_levels
@pytest.mark.parametrize(
    ("connector", "full"),
    [("ExampleConnector", False), ("LateConnector", False), ("LateConnector", True)],
    ids=["ExampleConnector", "LateConnector", "LateConnector-full"],
)
def test_kv_that_a_connector_loads_is_healthy(
    connector: str, full: bool, start: Callable[..., VllmEngine], golden: dict[int, list[Answer]], tmp_path: Path
) -> None:
    """Prefill in one engine, decode in another: blocks are filled by the connector, not by a step of theirs.

    The late one loads while its requests wait, and their blocks are published when no step of theirs has run; where
    the pool is full just then, they are not even scheduled in that step, and others may take the blocks before them.
    """

    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()

    def transfer(name: str) -> dict[str, Any]:
        return {
            "kv_transfer_config": {
                "kv_connector": name,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
                **({"kv_connector_module_path": "tests.vllm.late_connector"} if name == "LateConnector" else {}),
            }
        }

    producer = start(extra=transfer("ExampleConnector"))
    assert producer.generate(*traffic(1)) == golden[1]
    assert_clean(producer)
    # vLLM keeps one connector per worker process; this one stands in for two.
    ensure_kv_transfer_shutdown()
    consumer = start(extra=transfer(connector))
    loaded: list[int] = []
    match = consumer.scheduler.connector.get_num_new_matched_tokens

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = match(*args, **kwargs)
        loaded.append(result[0] or 0)
        return result

    consumer.scheduler.connector.get_num_new_matched_tokens = counted
    if full:
        refuse_once_loaded(consumer)
    assert consumer.generate(*traffic(1)) == golden[1]
    assert sum(loaded) > 64, "the second engine took KV from the first"
    # Once more: what was published when it arrived is adopted now.
    assert consumer.generate(*traffic(1)) == golden[1]
    assert_clean(consumer)
