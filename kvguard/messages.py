"""The two messages between the halves: StepDelta (host to device) and Verdicts (device to host).

Both are immutable once handed over and picklable, so they can ride on an engine's own messages across processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

NO_EVIDENCE: Final[Mapping[str, Any]] = {}
"""What a clean step shows; nobody writes to it."""


NO_WRITER: Final = -1 << 62
"""A writer word that no column makes equal to a page's: the row may write nowhere."""


class PoolSection(NamedTuple):
    """Where one pool's arrays lie in `StepDelta.packed`: half-open ranges of int64 words.

    tag_pages, tag_values, tag_writers  [changes]: what changes before this step's check: pages, their tags, and their
                           designated writers
    table_row, expected    [rows]: the block-table row and the expected digest of each request of the step
    extent_offset          [rows + 1]; extent_start, extent_stop [extents]: live extents, in manager-page columns
    columns                the largest extent_stop
    writer, floor          [rows]: each request's writer word at column 0, and the first position that it may write; the
                           same words for every pool
    """

    pool: str
    tag_pages: tuple[int, int]
    tag_values: tuple[int, int]
    tag_writers: tuple[int, int]
    table_row: tuple[int, int]
    expected: tuple[int, int]
    extent_offset: tuple[int, int]
    extent_start: tuple[int, int]
    extent_stop: tuple[int, int]
    columns: int
    writer: tuple[int, int]
    floor: tuple[int, int]


class StepDelta(NamedTuple):
    """What changed since the last step and what this step will read.

    step      1, 2, 3, ... without gaps: the device half refuses to skip one
    requests  request ids in row order: row r of every section is requests[r]
    enforce   flagged rows are neutralised on the device and withheld on the host; False: they are only observed
    packed    int64 [words]: every array of every section, for one host-to-device copy
    sections  one per pool, in the order of the setup
    again     it says what the step before said, whose tag changes are left out: those are made
    """

    step: int
    requests: tuple[str, ...]
    enforce: bool
    packed: Int64
    sections: tuple[PoolSection, ...]
    again: bool = False

    def array(self, span: tuple[int, int]) -> Int64:
        """The host view of one range of `packed`."""
        return self.packed[span[0] : span[1]]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A flagged row's block table as the device found it, before it was neutralised.

    row      row of the step; entries int64 [columns]: kernel-page ids, possibly cut to the evidence width
    """

    row: int
    entries: Int64


class Verdicts(NamedTuple):
    """What the device found in one step.

    records   int64 [pools, rows, 4] per `kvguard.kernels.verify_pages.layout`; None if the device check is off
    writes    int64 [pools, rows + 1, 4] per `kvguard.kernels.verify_slots.layout`, the last of a pool that of its
              padding lanes; None where nothing that is written was checked
    evidence  per pool name, rows captured before they were neutralised (a few, not all)
    clean     whoever made this has looked at every flag of both and found none set; False says nothing
    """

    step: int
    records: Int64 | None
    evidence: Mapping[str, tuple[Evidence, ...]] = NO_EVIDENCE
    clean: bool = False
    writes: Int64 | None = None
