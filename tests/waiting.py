"""Which torch calls bring values of a tensor to the host, and with that wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WAITING = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "argwhere",
    "masked_select", "unique", "equal", "allclose", "__contains__", "__array__", "synchronize", "is_nonzero",
}  # fmt: skip


class Recorder(TorchFunctionMode):
    """Notes every torch call that would wait for a device; `scalars`: indexing with a tensor without dimensions too."""

    def __init__(self, *, scalars: bool = False) -> None:
        super().__init__()
        self._scalars = scalars
        self.calls = 0
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        self.calls += 1
        if name in WAITING or (name in ("__getitem__", "__setitem__") and self._reads(args[1])):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))

    def _reads(self, index: Any) -> bool:
        """A mask makes a shape of values; a tensor without dimensions is an index that the host must know."""
        tensors = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, torch.Tensor)]
        return any(part.dtype == torch.bool or (self._scalars and part.dim() == 0) for part in tensors)
