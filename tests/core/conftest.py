"""The core tests run on the defaults of GuardConfig, whatever the person who runs them has set."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> Iterator[None]:
    """No KVGUARD_* variables but those of the tests themselves."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.upper().startswith("KVGUARD_") and not name.upper().startswith("KVGUARD_TEST_"):
                patch.delenv(name)
        yield
