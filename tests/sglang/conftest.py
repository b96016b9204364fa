"""What the tests on a real SGLang share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.sglang.apart import stop_all


@pytest.fixture(scope="module", autouse=True)
def children_end_with_their_module() -> Iterator[None]:
    """Each holds a model and a KV pool."""
    yield
    stop_all()


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> Iterator[None]:
    """No KVGUARD_* variables but those of the tests themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("KVGUARD_") and not name.startswith("KVGUARD_TEST_"):
                patch.delenv(name)
        yield
