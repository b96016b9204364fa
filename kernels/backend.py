"""Which implementation of a kernel runs.

`numpy` is the oracle, written for reading; `torch` serves engines on a CPU and is the portable path on a GPU; `triton`
(NVIDIA and AMD) and `cupy` (NVIDIA, for engines without Triton) check all pools of a step in one launch. Nothing here
guesses at a name it does not know.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

BACKENDS = ("numpy", "torch", "triton", "cupy")
DEVICE_BACKENDS = ("triton", "cupy")
"""Those with one launch for all pools of a step."""


def default_backend(device: Any = "cpu") -> str:
    """On a CPU `torch` where it is installed, else `numpy`; on a GPU `triton` where it is installed, else `torch`.

    `device`: a torch device or its name. Nothing is imported to find out.
    """
    if importlib.util.find_spec("torch") is None:
        return "numpy"
    on_gpu = str(getattr(device, "type", device)).partition(":")[0] == "cuda"
    return "triton" if on_gpu and importlib.util.find_spec("triton") is not None else "torch"


def require_backend(name: str, device: Any) -> None:
    """ValueError, which says what to do, where `name` cannot check tensors on `device`: a torch device or its name."""
    device_type = str(getattr(device, "type", device)).partition(":")[0]
    if check_backend(name) not in DEVICE_BACKENDS:
        return
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"backend {name} needs the package {name}: pip install 'kvguard[{name}]', or take torch")
    if device_type == "cuda" or (name == "triton" and device_type == "cpu" and triton_is_interpreted()):
        return
    also = ", or TRITON_INTERPRET=1 in the environment before Triton is imported" if name == "triton" else ""
    raise ValueError(f"backend {name} checks tensors on a GPU, not on {device}: take torch{also}")


def triton_is_interpreted() -> bool:
    """Whether our Triton kernels run in Triton's interpreter, on the CPU; fixed once they are imported."""
    module = sys.modules.get("kvguard.kernels.verify_pages.triton_op")
    if module is None:
        return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    return bool(module.INTERPRETED)


def backend_of(array: Any) -> str:
    """The backend that owns `array`: `numpy` for an ndarray, `torch` for a tensor, `cupy` for a CuPy array.

    Raises TypeError for anything else.
    """
    if isinstance(array, np.ndarray):
        return "numpy"
    if type(array).__module__.split(".")[0] == "torch" or hasattr(array, "data_ptr"):
        return "torch"
    if type(array).__module__.split(".")[0] == "cupy":
        return "cupy"
    raise TypeError(f"a block table must be a numpy or cupy array or a torch tensor, not {type(array).__name__}")


def check_backend(name: str) -> str:
    """`name` itself if it is a backend of this release; ValueError with the list otherwise."""
    if name not in BACKENDS:
        raise ValueError(f"unknown kernel backend {name!r}: this release has {', '.join(BACKENDS)}")
    return name


def token_backend(array: Any, name: str | None) -> str:
    """The backend for operations on token rows: `name`, or by default that of `array`, Triton where it is on a GPU.

    ValueError for `cupy`: these operations serve engines that keep page ids on the device, and those bring Triton.
    """
    chosen = backend_of(array) if name is None else check_backend(name)
    if chosen == "cupy":
        raise ValueError("no cupy backend here: operations on token rows run on numpy, torch or triton")
    if chosen == "torch" and name is None:
        return default_backend(array.device)
    if chosen == "triton":
        require_backend(chosen, array.device)
    return chosen


TOKEN_MODULES = {"numpy": "reference", "torch": "torch_op", "triton": "triton_op"}
"""Backend of an operation on token rows -> the module that implements it, in the operation's folder."""


def token_operation(name: str, backend: str) -> Callable[..., None]:
    """The implementation of an operation on token rows, by the operation's name; `backend` from `token_backend`.

    Its packages are imported here and no earlier.
    """
    run: Callable[..., None] = getattr(_token_module(name, backend), name)
    return run


@cache
def _token_module(name: str, backend: str) -> ModuleType:
    return importlib.import_module(f"kvguard.kernels.{name}.{TOKEN_MODULES[backend]}")
