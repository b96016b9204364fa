"""Break the vLLM adapter on purpose, one check at a time: a test must go red."""

from __future__ import annotations

import pytest

from tools.mutate import Outcome, run_all
from tools.mutations_vllm import VLLM_MUTATIONS

pytestmark = pytest.mark.mutation


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All mutations, run once, one at a time; the unmutated copy was green."""
    return {outcome.name: outcome for outcome in run_all(VLLM_MUTATIONS, workers=1, preloaded=())}


@pytest.mark.parametrize("name", [mutation.name for mutation in VLLM_MUTATIONS])
def test_a_test_goes_red(name: str, outcomes: dict[str, Outcome]) -> None:
    """Whoever takes this out is told."""
    assert outcomes[name].error is None
    assert outcomes[name].red is not None, f"{name} survived"
