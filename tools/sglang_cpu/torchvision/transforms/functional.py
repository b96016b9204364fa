"""Every function is there by name and says that it is not there when it is called."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"this environment has no torchvision: {name} is not there")

    return missing
