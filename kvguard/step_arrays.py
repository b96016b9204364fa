"""Array making for the Verifier: what differs between NumPy, torch on a CPU and torch on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvguard.kernels.host_check import BoundCheck, bind
from kvguard.staging import Uploads

if TYPE_CHECKING:
    from kvguard.verifier import PoolInputs


def _each(view: Callable[[Any], Any], given: PoolInputs) -> PoolInputs:
    names = ("table", "slot_mapping", "query_start", "query_row", "lengths")
    return replace(given, **{name: view(getattr(given, name)) for name in names})


class NumpyArrays:
    """Array making for the numpy backend: the device is the host."""

    def zeros(self, length: int) -> Any:
        return np.zeros(length, np.int64)

    def apart(self, stacked: Any) -> list[Any]:
        return list(stacked)

    def on_host(self, array: Any) -> bool:
        """False: this backend is the oracle, which takes no short way."""
        return False

    def cells(self, array: Any) -> Any:
        """None: this backend is the oracle, which takes no short way."""
        return None

    def bind(self, reads: Mapping[str, Any] | None, writes: Mapping[str, Any] | None) -> BoundCheck | None:
        """None: this backend is the oracle, which takes no short way."""
        return None

    def full(self, shape: tuple[int, ...], value: int) -> Any:
        return np.full(shape, value, np.int64)

    def buffer(self, words: int) -> tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]:
        memory = np.zeros(words, np.int64)
        return memory, memory

    def send(self, device: Any, host: Any, words: int) -> None:
        """The same memory."""

    def accept(self, given: PoolInputs) -> PoolInputs:
        """Tensors on the CPU are taken as NumPy views of the same memory."""

        def view(array: Any) -> Any:
            return array if array is None or isinstance(array, np.ndarray) else array.numpy()

        return _each(view, given)


class TorchArrays:
    """Array making on a torch device; uploads do not wait."""

    def __init__(self, device: Any) -> None:
        import torch

        from kvguard.kernels.verify_pages import torch_op

        self._torch = torch
        self._device = torch.device(device)
        self._uploads = Uploads(self._device)
        self.upload = self._uploads.upload
        self._torch_op = torch_op

    def on_host(self, array: Any) -> bool:
        """Whether a look at its values waits for nothing."""
        return self._torch_op.on_host(array)

    def cells(self, array: Any) -> Any:
        """The tensor's memory, as `kvguard._steps` takes it; None where it is not the host's."""
        return array.numpy().data if self.on_host(array) else None

    def apart(self, stacked: Any) -> list[Any]:
        return list(stacked.unbind(0))

    def bind(self, reads: Mapping[str, Any] | None, writes: Mapping[str, Any] | None) -> BoundCheck | None:
        """The short way for host memory, see `kvguard.kernels.host_check`."""
        looked_at = reads["table"] if reads is not None else writes["slot_mapping"] if writes is not None else None
        return bind(reads, writes) if looked_at is not None and self.on_host(looked_at) else None

    def zeros(self, length: int) -> Any:
        return self._torch.zeros(length, dtype=self._torch.int64, device=self._device)

    def full(self, shape: tuple[int, ...], value: int) -> Any:
        return self._torch.full(shape, value, dtype=self._torch.int64, device=self._device)

    def accept(self, given: PoolInputs) -> PoolInputs:
        """NumPy arrays are taken as tensors of the same memory, which only a CPU can share."""

        def view(array: Any) -> Any:
            if not isinstance(array, np.ndarray):
                return array
            if self._device.type != "cpu":
                raise ValueError(f"a NumPy block table cannot be checked on {self._device}: give the engine's tensors")
            return self._torch.from_numpy(array)

        return _each(view, given)

    def buffer(self, words: int) -> tuple[Any, np.ndarray[Any, np.dtype[np.int64]]]:
        host = np.zeros(words, np.int64)
        if self._device.type == "cpu":
            return self._torch.from_numpy(host), host
        return self._torch.empty(words, dtype=self._torch.int64, device=self._device), host

    def send(self, device: Any, host: Any, words: int) -> None:
        """A CPU shares the memory."""
        if self._device.type != "cpu":
            self._uploads.send(device[:words], host[:words])
