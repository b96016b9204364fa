"""The ring of pinned buffers: nothing waits, nothing is overwritten before the device has read it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from kvguard.staging import STARTING_WORDS, CudaDevice, PinnedRing


class FakeEvent:
    """A place in the fake device's stream; `query` before `record` says done, as CUDA's does."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at = device, 0

    def record(self) -> None:
        self.at = len(self.device.enqueued)

    def query(self) -> bool:
        return self.device.done >= self.at


class FakeDevice:
    """Copies are enqueued and made later, by `run`: what a buffer holds then is what arrives."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.made: list[int] = []

    def pinned(self, words: int) -> torch.Tensor:
        self.made.append(words)
        return torch.empty(words, dtype=torch.int64)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def send(self, pinned: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        target = torch.full_like(pinned, -1) if target is None else target
        self.enqueued.append((pinned, target))
        return target

    def run(self, copies: int) -> None:
        """The device gets so much further."""
        for pinned, target in self.enqueued[self.done : self.done + copies]:
            target.copy_(pinned)
        self.done = min(len(self.enqueued), self.done + copies)


def test_every_upload_arrives_as_it_was_however_far_the_device_is_behind() -> None:
    """Random sizes and a device that lags at random: each array arrives whole, though its host array is reused."""
    for number in range(30):
        rng, device = random.Random(number), FakeDevice()
        ring = PinnedRing(device)
        sent: deque[tuple[Any, np.ndarray[Any, Any]]] = deque()
        host = np.empty(3 * STARTING_WORDS, np.int64)
        for step in range(60):
            words = rng.choice([0, 1, 7, 100, STARTING_WORDS, STARTING_WORDS + 1, 3 * STARTING_WORDS])
            host[:words] = np.arange(words) + step * 10**6
            sent.append((ring.upload(host[:words]), host[:words].copy()))
            device.run(rng.choice([0, 0, 1, 1, 2, 5]))
        device.run(60)
        for tensor, wanted in sent:
            assert np.array_equal(tensor.numpy(), wanted), f"seed {number}"


def test_an_upload_fills_the_array_it_is_given() -> None:
    """A device array that stays where it is gets each step's words in the stream's order."""
    device = FakeDevice()
    ring, target = PinnedRing(device), torch.zeros(8, dtype=torch.int64)
    ring.upload(np.arange(4), target[:4])
    ring.upload(np.arange(10, 12), target[:2])
    assert target.tolist() == [0] * 8
    device.run(1)
    assert target.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    device.run(1)
    assert target.tolist() == [10, 11, 2, 3, 0, 0, 0, 0]


def test_the_ring_is_as_deep_as_the_steps_in_flight() -> None:
    """A device that keeps up needs one buffer, one that is three steps behind needs four, and then no more."""
    device = FakeDevice()
    ring = PinnedRing(device)
    for _ in range(10):
        ring.upload(np.arange(5))
        device.run(1)
    assert len(ring) == 1
    for _ in range(3):
        ring.upload(np.arange(5))
    for _ in range(20):
        ring.upload(np.arange(5))
        device.run(1)
    assert len(ring) == 4 and device.made == [STARTING_WORDS] * 4


def test_a_buffer_that_is_too_small_is_replaced() -> None:
    """Sizes are rounded up, so that a step that grows a little does not pin memory anew."""
    device = FakeDevice()
    ring = PinnedRing(device)
    for words in (10, STARTING_WORDS + 1, STARTING_WORDS + 500, 2 * STARTING_WORDS):
        ring.upload(np.zeros(words, np.int64))
        device.run(1)
    assert device.made == [STARTING_WORDS, 2 * STARTING_WORDS] and len(ring) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the fake device above stands for it")
def test_on_a_gpu() -> None:
    """The same on a real device."""
    ring = PinnedRing(CudaDevice(torch.device("cuda")))
    sent = [(ring.upload(np.arange(words)), words) for words in (1, 5000, 100_000)]
    for tensor, words in sent:
        assert tensor.cpu().tolist() == list(range(words))
