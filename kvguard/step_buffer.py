"""The arrays of the step that is being checked, on the device: one buffer, which every step overwrites in stream order.

Kernels of earlier steps that are still queued have been given the same memory: they run before the copy that
overwrites it, for both are enqueued on the stream of the forward.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvguard.messages import NO_WRITER, StepDelta

Int64 = npt.NDArray[np.int64]
Span = tuple[int, int]
VIEWS_MAX = 1024
"""Views are kept by where they lie; a service whose batches keep changing meets many, and starts anew."""


def spoil_shared_rows(words: Int64, delta: StepDelta, table_rows: list[int] | None) -> bool:
    """Let no row of the block table pass that two requests of a step are to read: at most one of them can be right.

    Neutralising the wrong one takes the pages from the other, in the same launch or before: neither is proven.
    `words`: those of the delta, changed in place. `table_rows`: as in `StepBuffer.load`. A request that is listed twice
    shares its row with nobody. Answers whether no row was there twice.
    """
    sections = delta.sections
    if table_rows is None:
        table_rows = words[slice(*sections[0].table_row)].tolist() if sections else []
    if len(set(table_rows)) == len(table_rows):
        return True
    owners: dict[int, set[str]] = {}
    for request, row in zip(delta.requests, table_rows, strict=True):
        owners.setdefault(row, set()).add(request)
    shared = [place for place, row in enumerate(table_rows) if len(owners[row]) > 1]
    for section in sections:
        words[slice(*section.expected)][shared] ^= 1
    # Requests have one writer word, which stands once in the delta.
    for span in {section.writer for section in sections}:
        words[slice(*span)][shared] = NO_WRITER
    return False


class BufferArrays(Protocol):
    """What a StepBuffer asks of a backend."""

    def buffer(self, words: int) -> tuple[Any, Int64]:
        """An int64 array [words] on the device, and the host memory that is sent to it: the same on a CPU."""
        ...

    def send(self, device: Any, host: Int64, words: int) -> None:
        """Bring the first `words` of the host memory to the device; `host` may be overwritten once this returns."""
        ...


class StepBuffer:
    """Holds what `StepDelta.packed` says, with the model runner's table rows filled in."""

    def __init__(self, arrays: BufferArrays) -> None:
        self._arrays = arrays
        self._device: Any = None
        self._host: Int64 = np.zeros(0, np.int64)
        self._views: dict[Span, Any] = {}
        self._packed: Any = None
        self._row_spans: list[Span] = []
        self._rows: list[int] | None = None
        self._rows_distinct = False
        self._rows_array: Int64 = np.zeros(0, np.int64)

    def load(self, delta: StepDelta, table_rows: list[int] | None) -> None:
        """Send a delta's arrays; nothing is sent where they say what the last ones said.

        table_rows: the block-table row of each request, in place of those in the delta; None: those of the delta.
        """
        packed, same_rows = delta.packed, self._rows == table_rows
        row_spans = [section.table_row for section in delta.sections]
        if same_rows and self._row_spans == row_spans and self._says_that(packed):
            # Once the arrays were sent it is seen at a glance.
            self._packed = packed
            return
        words = len(packed)
        if words > len(self._host):
            self._device, self._host = self._arrays.buffer(2 * words)
            self._views.clear()
        # A failure half way must not leave an earlier step's arrays for this one's.
        self._packed = None
        self._host[:words] = packed
        if table_rows is not None:
            if not same_rows:
                self._rows_array = np.array(table_rows, np.int64)
            for start, stop in row_spans:
                self._host[start:stop] = self._rows_array
        if not (same_rows and self._rows_distinct and table_rows is not None):
            self._rows_distinct = spoil_shared_rows(self._host, delta, table_rows)
        self._arrays.send(self._device, self._host, words)
        if not same_rows:
            # A copy: the caller may change its own list in place.
            self._rows = None if table_rows is None else list(table_rows)
        self._packed, self._row_spans = packed, row_spans

    @property
    def ground(self) -> tuple[Int64, Int64, int] | None:
        """For another step of the same requests in the same table rows, whose arrays lie where those of this one do.

        The memory, the table rows that were filled in, and where. None where there is more to it than to overwrite it.
        """
        if self._packed is None or self._rows is None or not self._rows_distinct or len(self._row_spans) != 1:
            return None
        return self._host, self._rows_array, self._row_spans[0][0]

    def was_overwritten(self, packed: Int64) -> None:
        """What `ground` answered has been filled with the arrays of another step."""
        self._packed = packed

    def _says_that(self, packed: Int64) -> bool:
        """Whether the arrays that were sent last begin with what these say: a step with tag changes ends with those."""
        sent = self._packed
        # In one process a step that says the same is made of the very same array.
        return sent is packed or (sent is not None and bool(sent[: len(packed)].tobytes() == packed.tobytes()))

    @property
    def memory(self) -> Any:
        """The device array that views lie in, until a delta needs a larger one."""
        return self._device

    def view(self, span: Span) -> Any:
        """The words [start, stop) on the device, as an array of their own."""
        view = self._views.get(span)
        if view is None:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            view = self._views[span] = self._device[span[0] : span[1]]
        return view
