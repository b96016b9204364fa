"""Break the vLLM adapter on purpose, one check at a time: a test must go red."""

from __future__ import annotations

import pytest

from kvguard.fault_injection.targets.vllm_engine import ENVIRONMENT
from tools.mutate import Outcome, run_all
from tools.mutations_vllm import VLLM_MUTATIONS
from tools.warm_python import PRELOADED

pytestmark = pytest.mark.mutation

IMPORTED = (
    *PRELOADED,
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
"""What takes seconds, and is vLLM's own: each test forks from there."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All mutations, run once, one at a time; the unmutated copy was green."""
    found = run_all(VLLM_MUTATIONS, 1, preloaded=IMPORTED, environment=ENVIRONMENT)
    return {outcome.name: outcome for outcome in found}


@pytest.mark.parametrize("name", [mutation.name for mutation in VLLM_MUTATIONS])
def test_a_test_goes_red(name: str, outcomes: dict[str, Outcome]) -> None:
    """Whoever takes this out is told."""
    assert outcomes[name].error is None
    assert outcomes[name].red is not None, f"{name} survived"
