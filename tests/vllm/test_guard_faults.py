"""When kvguard itself fails inside vLLM, or does not recognise it: said aloud, and as `on_guard_error` wants it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from kvguard.adapters.vllm import layout
from kvguard.adapters.vllm.plugin import ATTACHED, register
from kvguard.adapters.vllm.scheduler_side import GuardFault, SchedulerSide
from kvguard.adapters.vllm.worker_side import WorkerSide
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from kvguard.verifier import Verifier
from tests.vllm.tiny import traffic, unguarded, write_checkpoint

STEP = 25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def golden(checkpoint: Path) -> list[Answer]:
    """Answers of an unguarded engine."""
    with unguarded():
        return VllmEngine(VllmOptions(model=checkpoint)).generate(*traffic(1))


@pytest.fixture
def start(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Start an engine with kvguard switched on and this `on_guard_error`."""

    def start_engine(on_guard_error: str) -> VllmEngine:
        monkeypatch.setenv("KVGUARD_LEVEL", "tags")
        monkeypatch.setenv("KVGUARD_ON_GUARD_ERROR", on_guard_error)
        register()
        return VllmEngine(VllmOptions(model=checkpoint))

    return start_engine


def failing_at(step: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """The `step`-th call raises, the others go through."""
    count = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise ZeroDivisionError("made to fail")
        return original(*args, **kwargs)

    return failing


PLACES = {
    "books": (SchedulerSide, "_payload"),
    "worker": (Verifier, "_launch"),
    "attention-backend": (None, ""),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_guard_that_fails_disarms_and_says_so(
    place: str, start: Callable[..., VllmEngine], golden: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default vLLM serves on unguarded: the same tokens, `armed` false, never reported clean."""
    owner, name = PLACES[place]
    if owner is None:
        monkeypatch.setattr(layout, "COVERED_BACKENDS", {"FLASH_ATTN": "read"})
    else:
        monkeypatch.setattr(owner, name, failing_at(STEP, getattr(owner, name)))
    with structlog.testing.capture_logs() as logs:
        engine = start("disarm")
        assert engine.generate(*traffic(1)) == golden
    health = engine.guard_side.guard.health()
    assert not health.armed and not health.ok and health.counters["guard_faults"] == 1
    # The books say it too, wherever it happened: a worker's log may lie on another machine.
    said = [entry for entry in logs if entry["event"] == "guard_fault" and "where" not in entry]
    assert all(entry["log_level"] == "critical" for entry in said)
    wanted = "CPU_ATTN is not covered" if place == "attention-backend" else "made to fail"
    assert any(wanted in str(entry.get("error")) for entry in said), said
    kept = len(engine.guard_side._published), len(engine.guard_side._key_in_pass)
    engine.generate(*traffic(2))
    assert (len(engine.guard_side._published), len(engine.guard_side._key_in_pass)) == kept
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("place", PLACES)
def test_with_abort_nothing_unproven_leaves(
    place: str, start: Callable[..., VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`on_guard_error: abort` stops the engine in the step that could not be proven."""
    owner, name = PLACES[place]
    if owner is None:
        monkeypatch.setattr(layout, "COVERED_BACKENDS", {"FLASH_ATTN": "read"})
    else:
        monkeypatch.setattr(owner, name, failing_at(STEP, getattr(owner, name)))
    engine = start("abort")
    with pytest.raises(GuardFault, match="nothing unproven may leave"):
        engine.generate(*traffic(1))


def test_a_row_flagged_while_the_guard_fails_is_ended_all_the_same(
    start: Callable[..., VllmEngine], golden: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has flagged a row, the books fail before they judge it: its token must not leave."""
    engine = start("disarm")
    guard = engine.guard_side.guard
    monkeypatch.setattr(guard, "judge", failing_at(STEP, guard.judge))
    count, execute = 0, engine.runner.execute_model

    def breaking(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == STEP:
            batch = engine.runner.input_batch
            row = batch.req_id_to_index[engine.scheduler.running[2].request_id]
            batch.block_table.block_tables[0].block_table.np[row, 0] = 0
        return execute(*args, **kwargs)

    engine.runner.execute_model = breaking
    answers = engine.generate(*traffic(1))
    assert not guard.health().armed
    assert answers[2].finish_reason == "error"
    assert answers[2].token_ids == golden[2].token_ids[: len(answers[2].token_ids)]
    assert [answer for place, answer in enumerate(answers) if place != 2] == [
        answer for place, answer in enumerate(golden) if place != 2
    ]


def test_a_vllm_that_is_not_recognised_is_left_alone_or_not_started(
    start: Callable[..., VllmEngine], golden: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at attach: a clear line with vLLM's version; then unguarded, or not at all."""
    monkeypatch.setattr(layout, "COVERED_SPECS", ("SlidingWindowSpec",))
    with structlog.testing.capture_logs() as logs:
        engine = start("disarm")
    refusal = next(entry for entry in logs if entry["event"] == "not_attached")
    assert refusal["log_level"] == "critical"
    assert "0.32.0" in refusal["reason"] and "group 0 is a FullAttentionSpec" in refusal["reason"]
    assert getattr(engine.scheduler, ATTACHED, None) is None
    assert engine.generate(*traffic(1)) == golden
    with pytest.raises(layout.Unsupported, match="FullAttentionSpec"):
        start("abort")


@pytest.mark.parametrize(
    ("section", "name", "value", "wanted"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size = 2"),
        ("parallel_config", "data_parallel_size", 4, "data_parallel_size = 4"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode_context_parallel_size = 2"),
        ("speculative_config", "method", "eagle", "speculative decoding with eagle"),
        ("model_config", "disable_cascade_attn", False, "cascade attention"),
    ],
)
def test_what_is_not_covered_is_refused_by_name(section: str, name: str, value: Any, wanted: str) -> None:
    """Parallelism and drafters: the line says which."""
    config = SimpleNamespace(**{section: SimpleNamespace(**{name: value})})
    with pytest.raises(layout.Unsupported, match=wanted):
        layout.check_configuration(config)
    layout.check_configuration(SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=8)))


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
def test_the_answer_of_a_pooling_model_carries_its_verdicts(later: bool) -> None:
    """Runner V1 answers for them in `execute_model`, on a GPU with an object whose result is fetched later."""
    result = SimpleNamespace(req_ids=["r0"])
    answer = SimpleNamespace(get_output=lambda: result) if later else result
    side: Any = None

    def execute_model(scheduler_output: Any) -> Any:
        side._pending = SimpleNamespace(resolve=lambda: "verdicts")
        return answer

    runner = SimpleNamespace(execute_model=execute_model, device="cpu")
    side = WorkerSide(runner)
    given = runner.execute_model(SimpleNamespace(_kvguard=None))
    assert (given.get_output() if later else given)._kvguard == "verdicts"
