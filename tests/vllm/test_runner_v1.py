"""The guard inside a real vLLM (model runner V1, in process): healthy traffic untouched, faults end one request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import ATTACHED, register
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from kvguard.guard import Guard
from tests.vllm.tiny import traffic, unguarded, write_checkpoint

FAULT_STEP = 25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


def own_functions() -> list[Any]:
    """What kvguard could touch of vLLM's classes: every function of theirs, the constructors included."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    owners = (
        Scheduler, KVCacheManager, BlockPool, FullAttentionManager, SlidingWindowManager, RunnerV1, RunnerV2,
        OutputProcessor, RequestState,
    )  # fmt: skip
    return [(owner, name, value) for owner in owners for name, value in vars(owner).items() if callable(value)]


@pytest.fixture(scope="module")
def golden(checkpoint: Path) -> dict[int, list[Answer]]:
    """Answers of an engine for which the plug-in was loaded with nothing set, and once more at `off`."""
    with unguarded(), pytest.MonkeyPatch.context() as patch:
        before = own_functions()
        importers = list(sys.meta_path)
        register()
        patch.setenv("KVGUARD_LEVEL", "off")
        register()
        after = own_functions()
        assert len(before) == len(after) > 250
        for (owner, name, value), (_, _, now) in zip(before, after, strict=True):
            assert value is now, f"{owner.__name__}.{name}"
        assert sys.meta_path == importers
        engine = VllmEngine(VllmOptions(model=checkpoint))
        for part in (engine.scheduler, engine.scheduler.kv_cache_manager, engine.pool, engine.runner):
            assert not any(callable(value) and "guarded" in repr(value) for value in vars(part).values())
        assert getattr(engine.scheduler, ATTACHED, None) is None
        return {seed: engine.generate(*traffic(seed)) for seed in (1, 2)}


def test_off_and_unset_leave_vllms_functions_as_they_are(golden: dict[int, list[Answer]]) -> None:
    """The identity of every function, compared by the fixture before any engine is guarded here."""
    assert golden


@pytest.fixture(params=[True, False], ids=["all-proofs", "tag-only"])
def engine(
    request: pytest.FixtureRequest, checkpoint: Path, golden: dict[int, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[VllmEngine]:
    """A guarded engine, with the control plane and without."""
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    monkeypatch.setenv("KVGUARD_CONTROL_PLANE", "true" if request.param else "false")
    register()
    engine = VllmEngine(VllmOptions(model=checkpoint))
    assert getattr(engine.scheduler, ATTACHED, None) is not None
    yield engine


def guard_of(engine: VllmEngine) -> Guard:
    guard: Guard = engine.scheduler._kvguard_attached.guard
    return guard


def at_step(engine: VllmEngine, action: Callable[[], None]) -> None:
    """Run the action once, right before the engine schedules its FAULT_STEP-th step from now."""
    schedule, count = engine.scheduler.schedule, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == FAULT_STEP:
            action()
        return schedule(*args, **kwargs)

    engine.scheduler.schedule = counted


def victim_block(engine: VllmEngine) -> Any:
    """The third running request's last full block: not shared with anyone."""
    victim = engine.scheduler.running[2]
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    return manager.req_to_blocks[victim.request_id][1]


def table_of(engine: VllmEngine) -> Any:
    return engine.runner.input_batch.block_table.block_tables[0].block_table.np


def row_of(engine: VllmEngine, place: int) -> int:
    row: int = engine.runner.input_batch.req_id_to_index[engine.scheduler.running[place].request_id]
    return row


def free_under_user(engine: VllmEngine) -> None:
    block = victim_block(engine)
    engine.pool._maybe_evict_cached_block(block)
    block.ref_cnt = 1
    engine.pool.free_blocks([block])


def free_without_reuse(engine: VllmEngine) -> None:
    block = victim_block(engine)
    free_under_user(engine)
    if block.ref_cnt == 0:
        # Behind all the others: nobody takes it while the victim runs.
        engine.pool.free_block_queue.remove(block)
        engine.pool.free_block_queue.append(block)


def list_twice(engine: VllmEngine) -> None:
    block = victim_block(engine)
    engine.pool._maybe_evict_cached_block(block)
    block.ref_cnt = 0
    engine.pool.free_block_queue.prepend_n([block])


def foreign_row(engine: VllmEngine) -> None:
    table_of(engine)[row_of(engine, 2), :2] = table_of(engine)[row_of(engine, 4), :2]


def null_entry(engine: VllmEngine) -> None:
    table_of(engine)[row_of(engine, 2), 1] = 0


def out_of_range_entry(engine: VllmEngine) -> None:
    table_of(engine)[row_of(engine, 2), 1] = 4000


FAULTS = {
    "use-after-free": (free_under_user, True),
    "freed-not-reused": (free_without_reuse, True),
    "double-allocation": (list_twice, True),
    "stale-row": (foreign_row, False),
    "null-entry": (null_entry, False),
    "out-of-range-entry": (out_of_range_entry, False),
}


def test_healthy_traffic_is_verified_and_unchanged(engine: VllmEngine, golden: dict[int, list[Answer]]) -> None:
    """Every step is checked, nothing is flagged, and the tokens are those of an unguarded engine."""
    for seed, answers in golden.items():
        assert engine.generate(*traffic(seed)) == answers
    health = guard_of(engine).health()
    assert health.ok and guard_of(engine).violations == ()
    assert health.counters["steps_verified"] == health.counters["steps_seen"] > 50
    assert health.counters["adapter_errors"] == health.counters["guard_faults"] == 0
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_its_victim_or_is_refused(
    engine: VllmEngine, golden: dict[int, list[Answer]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim ends with an error after a clean prefix, or the operation is refused; everybody else is golden."""
    inject, passes_control_plane = FAULTS[fault]
    at_step(engine, lambda: inject(engine))
    answers = engine.generate(*traffic(1))
    refused = passes_control_plane and guard_of(engine).config.control_plane
    assert guard_of(engine).violations
    for place, (answer, wanted) in enumerate(zip(answers, golden[1], strict=True)):
        if place != 2 or refused:
            assert answer == wanted, place
            continue
        assert answer.finish_reason == "error" and answer.stop_reason is not None
        assert answer.stop_reason.startswith("kvguard kvg-")
        assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)]
        assert FAULT_STEP - 3 <= len(answer.token_ids) < len(wanted.token_ids)
    assert engine.scheduler.reset_prefix_cache(), "pages in quarantine must not make a reset fail"
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert engine.generate(*traffic(2)) == golden[2]
    assert guard_of(engine).health().ok
