"""What every test shares: hypothesis draws the same examples in every run of the same tree."""

from __future__ import annotations

from hypothesis import Phase, settings

# A test command that decides what lands must say the same twice, and a mutation that one run in ten lets live is no
# proof. Its examples follow from the test's own source; `--hypothesis-profile=explore` draws new ones every time.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
# For tools/mutate.py: that a test fails is all it wants to know, not the smallest example of it.
settings.register_profile("mutation", derandomize=True, deadline=None, phases=(Phase.explicit, Phase.generate))
settings.load_profile("repeatable")
