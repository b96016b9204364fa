"""C extensions, where they were built, and from this very source.

An editable install keeps an extension that was built earlier when the sources beside it change. So each says which
interface it was built for; one that says another is left alone, and Python does its work.
"""

from __future__ import annotations

import importlib
from types import ModuleType

INTERFACE = 1
"""Raised, here and in kernels/interface.h, with every change of what the C functions are given or of what they do."""

EXTENSIONS = ("kvguard.kernels.host_check._native", "kvguard._onward", "kvguard._steps")


def extension(name: str) -> ModuleType | None:
    """One of EXTENSIONS; None where it was not built, was built for another machine, or from an older source."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return module if getattr(module, "INTERFACE", None) == INTERFACE else None
