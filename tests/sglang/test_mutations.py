"""Break the SGLang adapter on purpose, one check at a time: a test must go red."""

from __future__ import annotations

import pytest

from tests.sglang.engine import ENVIRONMENT
from tools.mutate import Outcome, run_all
from tools.mutations_sglang import SGLANG_MUTATIONS
from tools.warm_python import PRELOADED

pytestmark = pytest.mark.mutation

IMPORTED = (
    *PRELOADED,
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
)
"""What takes seconds, and is SGLang's own: each test forks from there."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All mutations, run once, one at a time; the unmutated copy was green."""
    found = run_all(SGLANG_MUTATIONS, 1, preloaded=IMPORTED, environment=ENVIRONMENT)
    return {outcome.name: outcome for outcome in found}


@pytest.mark.parametrize("name", [mutation.name for mutation in SGLANG_MUTATIONS])
def test_a_test_goes_red(name: str, outcomes: dict[str, Outcome]) -> None:
    """Whoever takes this out is told."""
    assert outcomes[name].error is None
    assert outcomes[name].red is not None, f"{name} survived"
