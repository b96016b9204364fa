"""The guard in the set-ups that vLLM runs in: a healthy run has an unguarded run's tokens, a fault has one victim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import register
from tests.vllm.scenarios import Outcome, Spec, execute, run_apart
from tests.vllm.tiny import ARCHITECTURES, unguarded, write_checkpoint

FAULT_STEP = 25
TENSOR_PARALLEL = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

# name -> architecture, options, environment, rank whose block table is broken; those that cannot share this process
APART: dict[str, tuple[str, dict[str, Any], dict[str, str], int]] = {
    "v2": ("llama", {"runner": "v2"}, {}, 0),
    "hybrid-v2-async": ("gemma3", {"runner": "v2", "asynchronous": True}, {}, 0),
    "v1-tp2-async": ("llama", {"asynchronous": True, "extra": {"tensor_parallel_size": 2}}, TENSOR_PARALLEL, 1),
    "v2-tp2": ("llama", {"runner": "v2", "extra": {"tensor_parallel_size": 2}}, TENSOR_PARALLEL, 1),
    "engine-core-process": ("llama", {}, OWN_PROCESS, 0),
    # Once Numba is imported vLLM 0.32.0 cannot start another engine in the same process.
    "ngram": ("llama", {"extra": {"speculative_config": NGRAM}}, {}, 0),
}
SETUPS = APART | {
    "async": ("llama", {"asynchronous": True}, {}, 0),
    "chunked-prefill": ("llama", {"max_num_batched_tokens": 48}, {}, 0),
    "preemption": ("llama", {"num_blocks": 14}, {}, 0),
    "preemption-async": ("llama", {"num_blocks": 14, "asynchronous": True}, {}, 0),
    "sliding-window": ("mistral", {}, {}, 0),
    "sliding-window-async": ("mistral", {"asynchronous": True}, {}, 0),
    "hybrid": ("gemma3", {}, {}, 0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of a tiny checkpoint per architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: str(write_checkpoint(folder / name, architecture=name)) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def golden(models: dict[str, str]) -> dict[str, list[list[list[Any]]]]:
    """Answers of an unguarded engine (V1) per architecture: every set-up must give the same tokens in float32."""
    answers = {}
    for name, model in models.items():
        with unguarded():
            outcome = execute(Spec(model=model, seeds=[1, 2]))
        assert outcome.workers == [[False, "", 0]]
        answers[name] = outcome.answers
    return answers


def run(spec: Spec, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """In this process where that is possible: an engine starts five times faster there."""
    if name in APART:
        return run_apart(spec, folder)
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    register()
    return execute(spec)


@pytest.mark.parametrize("name", SETUPS)
def test_healthy_traffic_is_unchanged_and_a_fault_has_one_victim(
    name: str, models: dict[str, str], golden: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same traffic with and without the guard, then once more with one entry of one row broken."""
    architecture, options, environment, rank = SETUPS[name]
    spec = Spec(
        model=models[architecture],
        options=options,
        environment=environment,
        seeds=[2, 1],
        fault_step=FAULT_STEP,
        fault_rank=rank,
    )
    outcome = run(spec, name, tmp_path, monkeypatch)
    world = options.get("extra", {}).get("tensor_parallel_size", 1)
    assert outcome.workers == [[True, "", world]] * world
    want_first, want_last = golden[architecture][1], golden[architecture][0]
    assert outcome.answers[0] == want_first
    ended = [place for place, (reason, _, _) in enumerate(outcome.answers[1]) if reason == "error"]
    assert len(ended) == 1, outcome.answers[1]
    for place, (answer, wanted) in enumerate(zip(outcome.answers[1], want_last, strict=True)):
        if place not in ended:
            assert answer == wanted
            continue
        assert answer[1].startswith("kvguard kvg-") and "null page" in answer[1]
        assert answer[2] == wanted[2][: len(answer[2])] and len(answer[2]) < len(wanted[2])
    if environment is OWN_PROCESS:
        return
    assert outcome.ahead == 0 and (outcome.rejected > 0) == (name == "ngram")
    assert outcome.kinds == ["null-entry"]
    assert outcome.armed and outcome.ok and outcome.free_blocks == outcome.blocks - 1
    assert outcome.counters["steps_verified"] == outcome.counters["steps_seen"] > 0
    assert outcome.counters["guard_faults"] == outcome.counters["adapter_errors"] == 0
