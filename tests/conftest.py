"""What every test shares: hypothesis draws the same examples in each run of the same tree; long files come first."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

LONG = ("mutation", "campaign", "soak")
"""In the names of files that take minutes."""

# A test command that decides what lands must say the same twice, and a mutation that one run in ten lets live is no
# proof. Its examples follow from the test's own source; `--hypothesis-profile=explore` draws new ones every time.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
# For tools/mutate.py: that a test fails is all it wants to know, not the smallest example of it.
settings.register_profile("mutation", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file goes to one of the workers as a whole: one that takes minutes must not be the last to begin."""
    items.sort(key=lambda item: not any(word in item.path.name for word in LONG))
