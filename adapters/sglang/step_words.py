"""Where a step's verdicts and events lie, on the device and on the host; used again by later steps of the same shape.

A tensor operation costs microseconds whatever its size, so a step does not make its tensors and views anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvguard.adapters.sglang.books import Operation
from kvguard.kernels.events import EVENT_WORDS
from kvguard.kernels.verify_pages import layout

SPARE_MAX = 64
"""Shapes that are kept; traffic has few, and one more costs an allocation."""


class StepWords:
    """int64 [verdicts + operations + 1, 4] on the device, with the views that a step needs, and a copy on the host.

    First the records of what rows read, then those of what they write with that of the padding, then an event of each
    operation, and last (for several ranks) whether any rank has an event.
    """

    def __init__(self, rows: int, operations: int, device: torch.device) -> None:
        self.shape = (rows, operations)
        self.verdicts = verdicts = 2 * rows + 1
        self.words = torch.empty((verdicts + operations + 1, EVENT_WORDS), dtype=torch.int64, device=device)
        self._clean = torch.zeros_like(self.words)
        self._clean[:rows] = layout.NOT_CHECKED
        self.record = self.words[:rows]
        self.writes = self.words[rows:verdicts]
        self.events = list(self.words[verdicts:-1])
        self._copy: Any = None
        self._ready: Any = None
        if device.type == "cuda":
            self._copy = torch.empty(self.words.shape, dtype=torch.int64, pin_memory=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.host: np.ndarray[Any, np.dtype[np.int64]] = (self.words if self._copy is None else self._copy).numpy()
        self.found = self.host[:, 0]
        """The first word of every record and event: 0 where nothing is wrong."""

    def reset(self) -> None:
        """Nothing was checked yet, and nothing happened. What is not checked of writes is said once, at the start."""
        self.words.copy_(self._clean)

    def depart(self) -> None:
        """Start the way to the host, behind the check."""
        if self._copy is not None:
            self._copy.copy_(self.words, non_blocking=True)
            self._ready.record()

    def arrive(self) -> None:
        """Wait until `host` holds them; the engine waits for the tokens of the same step anyway."""
        if self._ready is not None:
            self._ready.synchronize()


class WordStore:
    """StepWords that no step uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: dict[tuple[int, int], list[StepWords]] = {}

    def take(self, rows: int, operations: int) -> StepWords:
        """Clean words of this shape."""
        spare = self._spare.get((rows, operations))
        if spare:
            words = spare.pop()
        else:
            # An inference tensor could not be written again outside of inference mode.
            with torch.inference_mode(False):
                words = StepWords(rows, operations, self._device)
        words.reset()
        return words

    def give_back(self, words: StepWords) -> None:
        """Its step has been judged."""
        if len(self._spare) >= SPARE_MAX:
            self._spare.clear()
        self._spare.setdefault(words.shape, []).append(words)


class PendingStep:
    """A step on its way. rows: of the batch that were checked."""

    __slots__ = ("step", "words", "rows", "operations", "enforce")

    def __init__(self, step: int, words: StepWords, rows: int, operations: list[Operation], enforce: bool) -> None:
        self.step, self.words, self.rows, self.operations, self.enforce = step, words, rows, operations, enforce
