"""When an engine's plug-in guards at all: only where somebody has asked for it."""

from __future__ import annotations

import os

VARIABLES = ("KVGUARD_LEVEL", "KVGUARD_CONFIG")


def asked_for() -> bool:
    """Whether the environment configures kvguard. Without that a plug-in returns at once, whatever is installed."""
    return any(os.environ.get(name) for name in VARIABLES)
