"""When an engine's plug-in guards at all: only where somebody has asked for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvguard.config import GuardConfig

VARIABLES = ("KVGUARD_LEVEL", "KVGUARD_CONFIG")


def asked_for() -> bool:
    """Whether the environment configures kvguard. Without that a plug-in returns at once, whatever is installed."""
    return any(os.environ.get(name) for name in VARIABLES)


def refuse_contents(config: GuardConfig, where: str) -> None:
    """ConfigError at level `keys`: `where` does not tell the guard of tokens, so that nothing could be proven of them.

    A guard that ran as a weaker one than it was asked to be would protect less than its operator believes.
    """
    if config.level == "keys":
        from kvguard.config import ConfigError

        raise ConfigError(f"level: 'keys' does not work with {where} in this release; use level: tags")
