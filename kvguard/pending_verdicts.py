"""The verdicts of a step while they are still on the device, and their way to the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvguard.kernels.verify_pages import layout
from kvguard.messages import NO_EVIDENCE, Evidence, Verdicts
from kvguard.pools import GuardSetup

# Half of what a call of the named tuple's class takes, and every step of decode makes a few.
_new = tuple.__new__


def record_rows(setup: GuardSetup, rows: int) -> tuple[int, int]:
    """Of the records that each pool has of a step: how many are of what rows read, and how many of what is written.

    Where no pool's inputs say what is written there are none of those.
    """
    return (rows if setup.check else 0), (rows + 1 if setup.check_writes else 0)


class PendingVerdicts(NamedTuple):
    """The verdicts of a step, still on the device.

    record   int64 [pools, records, 4], None where nothing was checked
    on_host  where `depart` has sent the record: the pinned copy and the event after which it is complete
    reads    how many records of each pool are of what rows read, see `record_rows`; the others are of what is written
    view     the record as a NumPy array of the same memory, where `clean` says what it holds
    clean    the check was made on the host, and no record has a flag. Whoever replaces the record drops both
    """

    step: int
    record: Any
    evidence: Mapping[str, tuple[Any, Any]] = NO_EVIDENCE
    on_host: tuple[Any, Any] | None = None
    reads: int | None = None
    view: Any = None
    clean: bool = False

    def depart(self) -> PendingVerdicts:
        """Start the record's way to the host behind the check, on the stream of the caller; does not wait.

        On a GPU only: an engine may read its results in another thread, whose stream is not ordered with the check.
        """
        if self.record is None or isinstance(self.record, np.ndarray) or self.record.device.type != "cuda":
            return self
        import torch

        copy = torch.empty(self.record.shape, dtype=self.record.dtype, pin_memory=True)
        copy.copy_(self.record, non_blocking=True)
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        return self._replace(on_host=(copy, event))

    def _records(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self.on_host is None:
            return _to_numpy(self.record)
        copy, event = self.on_host
        event.synchronize()
        return _to_numpy(copy)

    def flagged_rows(self) -> list[int]:
        """Rows of the step that any pool flagged, ascending. Waits for the device, as `resolve` does."""
        if self.record is None or self.clean:
            return []
        flags = self._records()[:, :, layout.FLAGS] > 0
        reads = flags.shape[1] if self.reads is None else self.reads
        # The last record of what is written is that of the padding.
        of_reads, of_writes = flags[:, :reads], flags[:, reads:][:, :-1]
        return sorted({int(row) for part in (of_reads, of_writes) for row in np.nonzero(part)[1]})

    def resolve(self) -> Verdicts:
        """Bring them to the host. On a GPU this waits for the step: call it where the sampled tokens are read."""
        if self.record is None:
            return Verdicts(step=self.step, records=None)
        found = self.view if self.clean else self._records()
        records: Any = found if self.reads is None else found[:, : self.reads] if self.reads else None
        writes = None if self.reads is None or self.reads == found.shape[1] else found[:, self.reads :]
        if self.clean or not np.count_nonzero(found[:, :, layout.FLAGS]):
            return _new(Verdicts, (self.step, records, NO_EVIDENCE, True, writes))
        evidence: dict[str, tuple[Evidence, ...]] = {}
        for pool, (entries, rows) in self.evidence.items():
            host_rows, host_entries = _to_numpy(rows), _to_numpy(entries)
            evidence[pool] = tuple(
                Evidence(row=int(row), entries=host_entries[place].copy())
                for place, row in enumerate(host_rows)
                if row >= 0
            )
        return Verdicts(step=self.step, records=records, evidence=evidence, writes=writes)


def _to_numpy(array: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(array, np.ndarray):
        return array
    host: np.ndarray[Any, np.dtype[np.int64]] = (array if array.device.type == "cpu" else array.cpu()).numpy()
    return host
