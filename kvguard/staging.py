"""Uploads to a GPU that never wait: a ring of pinned host buffers.

From pageable memory CUDA stages a copy of up to 64 KiB before the call returns; a larger one may wait for the stream,
and with it the engine's next step. A pinned buffer is read by the device itself, later, so it must be left alone until
then: each carries an event that is recorded behind its copy. Where every buffer is still being read, another is made.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
STARTING_WORDS = 1 << 12


class Event(Protocol):
    """A place in a stream's order, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Take the place behind everything that was enqueued so far."""

    def query(self) -> bool:
        """Whether the stream has passed it; does not wait."""


class Device(Protocol):
    """What the ring asks of a device."""

    def pinned(self, words: int) -> Any:
        """A host tensor int64 [words] that the device can read."""

    def event(self) -> Event:
        """A new event, which has not been recorded."""

    def send(self, pinned: Any, target: Any) -> Any:
        """Copy to `target`, or else to a new tensor on the device, in the order of the caller's stream."""


class _Buffer:
    """A pinned tensor int64 [words], its NumPy view, and the event behind the last copy from it."""

    def __init__(self, device: Device, words: int) -> None:
        self.tensor = device.pinned(words)
        self.host: Int64 = self.tensor.numpy()
        self.event = device.event()


class PinnedRing:
    """Pinned buffers in the order of their use: as many as there are uploads on their way, made when needed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[_Buffer] = []
        self._next = 0

    def __len__(self) -> int:
        """Buffers that there are."""
        return len(self._buffers)

    def upload(self, host: Int64, target: Any = None) -> Any:
        """A device tensor int64 [words] with the contents of `host`, which may be reused at once. Does not wait.

        `target`: a device tensor int64 [words] to fill; None: a new one.
        """
        words = len(host)
        buffer = self._free(words)
        buffer.host[:words] = host
        sent = self._device.send(buffer.tensor[:words], target)
        buffer.event.record()
        return sent

    def _free(self, words: int) -> _Buffer:
        """The oldest buffer if the device is done with it, made anew if it is too small; else another one before it.

        Uploads of one stream complete in order: if the oldest is under way, so are the others.
        """
        if self._buffers and self._buffers[self._next].event.query():
            buffer = self._buffers[self._next]
            if len(buffer.host) < words:
                buffer = self._buffers[self._next] = _Buffer(self._device, _roomy(words))
        else:
            buffer = _Buffer(self._device, _roomy(words))
            self._buffers.insert(self._next, buffer)
        self._next = (self._next + 1) % len(self._buffers)
        return buffer


def _roomy(words: int) -> int:
    """The next power of two: steps grow by little, and pinning memory is slow."""
    return max(STARTING_WORDS, 1 << max(0, words - 1).bit_length())


class CudaDevice:
    """`Device` on torch's CUDA or ROCm, on the current stream of the caller."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device

    def pinned(self, words: int) -> Any:
        """See Device."""
        return self._torch.empty(words, dtype=self._torch.int64, pin_memory=True)

    def event(self) -> Event:
        """See Device."""
        cuda: Any = self._torch.cuda
        event: Event = cuda.Event()
        return event

    def send(self, pinned: Any, target: Any) -> Any:
        """See Device."""
        if target is None:
            return pinned.to(self._device, non_blocking=True)
        return target.copy_(pinned, non_blocking=True)


class Uploads:
    """Copies of host arrays on a torch device: on CUDA through a ring of pinned buffers, so that none waits."""

    def __init__(self, device: Any) -> None:
        """`device`: a torch device or its name."""
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._ring = PinnedRing(CudaDevice(self._device)) if self._device.type == "cuda" else None

    def upload(self, array: Int64) -> Any:
        """A tensor int64 [words] with the contents of `array`; on a CPU it may be the same memory."""
        if self._ring is not None:
            return self._ring.upload(array)
        # PyTorch warns of arrays that may not be written to, which packed deltas are.
        array = array if array.flags.writeable else array.copy()
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def send(self, target: Any, array: Int64) -> None:
        """Fill `target` int64 [words] on the device; `array` may be written again once this returns."""
        if self._ring is not None:
            self._ring.upload(array, target)
        else:
            target.copy_(self._torch.from_numpy(array))
