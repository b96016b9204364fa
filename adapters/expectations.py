"""What an adapter expects of its engine, and how it refuses what it does not know; the same for every engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Unsupported(RuntimeError):
    """kvguard cannot see enough of this engine to guard it; the message says what and names the version."""


class Expectations:
    """Of one engine, by its name and a function that says its version."""

    def __init__(self, engine: str, version: Callable[[], str]) -> None:
        self._engine, self._version = engine, version

    def refuse(self, what: str) -> Unsupported:
        """The error that says `what` is not covered."""
        return Unsupported(f"kvguard cannot guard this {self._engine} {self._version()}: {what}")

    def require(self, owner: Any, *names: str) -> None:
        """Every name is an attribute of `owner`, an object or a class. Raises Unsupported."""
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            kind = owner if isinstance(owner, type) else type(owner)
            raise self.refuse(f"{kind.__name__} has no {', '.join(missing)}")

    def require_parameters(self, function: Any, *names: str) -> None:
        """The function's first parameters carry these names, in this order. Raises Unsupported."""
        found = [name for name in inspect.signature(function).parameters if name != "self"][: len(names)]
        if found != list(names):
            raise self.refuse(f"{getattr(function, '__qualname__', function)} takes {found}, expected {list(names)}")
