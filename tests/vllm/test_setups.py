"""The guard in the set-ups that vLLM runs in: a healthy run has an unguarded run's tokens, a fault has one victim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.scenarios import Outcome, Spec, run
from tests.vllm.tiny import ARCHITECTURES, write_checkpoint

FAULT_STEP = 25
TENSOR_PARALLEL = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

# name -> architecture, options, environment, rank whose block table is broken
SETUPS: dict[str, tuple[str, dict[str, Any], dict[str, str], int]] = {
    "v2": ("llama", {"runner": "v2"}, {}, 0),
    "v2-async": ("llama", {"runner": "v2", "asynchronous": True}, {}, 0),
    "v1-async": ("llama", {"asynchronous": True}, {}, 0),
    "v1-tp2": ("llama", {"asynchronous": True, "extra": {"tensor_parallel_size": 2}}, TENSOR_PARALLEL, 1),
    "v2-tp2": ("llama", {"runner": "v2", "extra": {"tensor_parallel_size": 2}}, TENSOR_PARALLEL, 1),
    "engine-core-process": ("llama", {}, OWN_PROCESS, 0),
    "chunked-prefill": ("llama", {"max_num_batched_tokens": 48}, {}, 0),
    "preemption": ("llama", {"num_blocks": 16, "asynchronous": True}, {}, 0),
    "ngram": ("llama", {"extra": {"speculative_config": NGRAM}}, {}, 0),
    "fp8-kv": ("llama", {"kv_cache_dtype": "fp8"}, {}, 0),
    "sliding-window": ("mistral", {}, {}, 0),
    "hybrid": ("gemma3", {}, {}, 0),
    "hybrid-v2-async": ("gemma3", {"runner": "v2", "asynchronous": True}, {}, 0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of a tiny checkpoint per architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: str(write_checkpoint(folder / name, architecture=name)) for name in ARCHITECTURES}


def assert_clean(outcome: Outcome, own_process: bool) -> None:
    """Every step was verified and nothing was flagged, as far as it can be seen from here."""
    assert all(guarded and not trouble for guarded, trouble, _ in outcome.workers)
    if own_process:
        return
    assert outcome.armed and outcome.ok and outcome.kinds == []
    assert outcome.counters["steps_verified"] == outcome.counters["steps_seen"] > 0
    assert outcome.counters["guard_faults"] == outcome.counters["adapter_errors"] == 0
    assert outcome.free_blocks == outcome.blocks - 1


@pytest.mark.parametrize("name", SETUPS)
def test_healthy_traffic_is_unchanged_and_a_fault_has_one_victim(
    name: str, models: dict[str, str], tmp_path: Path
) -> None:
    """The same traffic with and without the guard, then once more with one entry of one row broken."""
    architecture, options, environment, rank = SETUPS[name]
    own_process = environment is OWN_PROCESS
    asked: dict[str, Any] = {"model": models[architecture], "options": options, "environment": environment}
    plain = run(Spec(guard=False, seeds=[1, 2], **asked), tmp_path)
    assert not any(guarded for guarded, _, _ in plain.workers)
    clean = run(Spec(seeds=[1, 2], **asked), tmp_path)
    assert clean.answers == plain.answers
    assert_clean(clean, own_process)
    world = options.get("extra", {}).get("tensor_parallel_size", 1)
    assert [ranks for _, _, ranks in clean.workers] == [world] * world
    faulty = run(Spec(seeds=[1, 2], fault_step=FAULT_STEP, fault_rank=rank, **asked), tmp_path)
    assert faulty.answers[0] == plain.answers[0]
    ended = [place for place, (reason, _, _) in enumerate(faulty.answers[1]) if reason == "error"]
    assert len(ended) == 1, faulty.answers[1]
    for place, (answer, wanted) in enumerate(zip(faulty.answers[1], plain.answers[1], strict=True)):
        if place not in ended:
            assert answer == wanted
            continue
        assert answer[1].startswith("kvguard kvg-") and "null page" in answer[1]
        assert answer[2] == wanted[2][: len(answer[2])] and len(answer[2]) < len(wanted[2])
    if not own_process:
        assert faulty.kinds == ["null-entry"] and faulty.armed
