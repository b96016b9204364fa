"""Which implementation of a kernel runs.

`numpy` is the oracle, written for reading; `torch` serves engines on a CPU and is the portable path on a GPU.
Faster device backends join this list in releases of their own; nothing here guesses at a name it does not know.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

BACKENDS = ("numpy", "torch")


def default_backend() -> str:
    """`torch` where it is installed, else `numpy`; nothing is imported to find out."""
    return "torch" if importlib.util.find_spec("torch") is not None else "numpy"


def backend_of(array: Any) -> str:
    """The backend that owns `array`: `numpy` for an ndarray, `torch` for a tensor.

    Raises TypeError for anything else.
    """
    if isinstance(array, np.ndarray):
        return "numpy"
    if type(array).__module__.split(".")[0] == "torch" or hasattr(array, "data_ptr"):
        return "torch"
    raise TypeError(f"a block table must be a numpy array or a torch tensor, not {type(array).__name__}")


def check_backend(name: str) -> str:
    """`name` itself if it is a backend of this release; ValueError with the list otherwise."""
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}: this release has {', '.join(BACKENDS)}")
    return name
