"""The device half: a mirror of every pool's tags, and the check of a step. It lives next to the model runner.

Threads. One thread owns a Verifier: the one that launches the forward, on whose stream everything here is enqueued.
No call but those of PendingVerdicts reads anything back. (A CUDA upload from pageable memory is staged by the driver up
to 64 KiB, which is about 4,000 tag changes in one step; beyond that it may wait for the stream.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvguard.kernels.backend import check_backend
from kvguard.kernels.scatter_tags import scatter_tags
from kvguard.kernels.verify_pages import layout, verify_pages
from kvguard.messages import NO_EVIDENCE, Evidence, PoolSection, StepDelta, Verdicts
from kvguard.pools import GuardSetup, PoolSpec

EVIDENCE_ROWS = 4
"""Flagged rows of a step and pool whose block table is kept for the report; further ones are flagged without."""
EVIDENCE_COLUMNS = 4096
BLANKS_MAX = 64
BLANK_WORDS_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PoolInputs:
    """What one pool's attention is about to read and write in this step, in the engine's own tensors.

    table         int32 or int64 [table_rows, columns], any strides: kernel-page ids
    slot_mapping  int64 [tokens] or None: where this step writes
    query_start   int32 or int64 [batch rows + 1] or None: tokens of each batch row, needed with slot_mapping
    query_row     int64 [rows] or None: place in the batch of each row of the step, where that is not its own order
    place_is_row  the batch lists its requests as the block table does: a request's place is its table row
    """

    table: Any
    slot_mapping: Any = None
    query_start: Any = None
    query_row: Any = None
    place_is_row: bool = False


class PendingVerdicts(NamedTuple):
    """The verdicts of a step, still on the device.

    on_host  where `depart` has sent the record: the pinned copy and the event after which it is complete
    """

    step: int
    record: Any
    evidence: Mapping[str, tuple[Any, Any]] = NO_EVIDENCE
    on_host: tuple[Any, Any] | None = None

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
        if self.record is None:
            return []
        rows: list[int] = np.flatnonzero((self._records()[:, :, layout.FLAGS] > 0).any(axis=0)).tolist()
        return rows

    def resolve(self) -> Verdicts:
        """Bring them to the host. On a GPU this waits for the step: call it where the sampled tokens are read."""
        if self.record is None:
            return Verdicts(step=self.step, records=None)
        records = self._records()
        evidence: dict[str, tuple[Evidence, ...]] = {}
        if np.count_nonzero(records[:, :, layout.FLAGS]):
            for pool, (entries, rows) in self.evidence.items():
                host_rows, host_entries = _to_numpy(rows), _to_numpy(entries)
                evidence[pool] = tuple(
                    Evidence(row=int(row), entries=host_entries[place].copy())
                    for place, row in enumerate(host_rows)
                    if row >= 0
                )
        return Verdicts(step=self.step, records=records, evidence=evidence)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Uploaded:
    """A delta's arrays on the device. Nothing writes to them, so later steps that say the same use them again.

    packed_from, sections  the parts of the delta itself, if it had no tag changes
    sent        the bytes of the delta up to its tag changes, before table rows were filled in
    spans       per pool, where its arrays lie
    table_rows  what was filled in
    packed      int64 [words]: what lies on the device; views: its arrays, per pool in the order of `spans`
    """

    packed_from: Any
    sections: tuple[PoolSection, ...]
    sent: bytes
    spans: Sequence[tuple[tuple[int, int], ...]]
    table_rows: list[int] | None
    packed: Any
    views: list[tuple[Any, ...]]


class Verifier:
    """Checks every step on the device before attention reads the cache."""

    def __init__(self, setup: GuardSetup, *, backend: str = "torch", device: Any = "cpu") -> None:
        """`backend`: a name of `kvguard.kernels.backend.BACKENDS`; `device`: a torch device, ignored for numpy."""
        self._setup = setup
        self._arrays = _NumpyArrays() if check_backend(backend) == "numpy" else _TorchArrays(device)
        self._tags = {pool.name: self._arrays.zeros(pool.num_pages) for pool in setup.pools}
        self._step = 0
        self._uploaded: _Uploaded | None = None
        self._blanks: dict[str, tuple[tuple[int, ...], list[Any], int]] = {}
        self._accepted: dict[str, tuple[PoolInputs, int, PoolInputs]] = {}

    @property
    def step(self) -> int:
        """The last step that was applied."""
        return self._step

    def check(
        self, delta: StepDelta, inputs: Mapping[str, PoolInputs], *, table_rows: list[int] | None = None
    ) -> PendingVerdicts:
        """Apply the delta's tag changes, check its rows, neutralise what fails; all enqueued, nothing awaited.

        `inputs`: per pool name. `table_rows`: the block-table row of each request, where only the model runner knows
        it. Raises ValueError if a step is missing before this one or a pool has no inputs: a mirror that missed a
        change would judge every later step wrongly.
        """
        if delta.step != self._step + 1:
            raise ValueError(f"step {delta.step} does not follow step {self._step}: a delta was lost or repeated")
        rows = len(delta.requests)
        if self._setup.check and rows:
            missing = [section.pool for section in delta.sections if section.pool not in inputs]
            if missing:
                raise ValueError(f"no block table for pool {', '.join(missing)}: attention would read it unchecked")
        accepted = {name: self._accept(name, given, rows) for name, given in inputs.items()}
        uploaded = self._upload(delta, table_rows)
        self._step = delta.step
        for section in delta.sections:
            if section.tag_pages[0] != section.tag_pages[1]:
                pages, values = _slice(uploaded.packed, section.tag_pages), _slice(uploaded.packed, section.tag_values)
                scatter_tags(page_tag=self._tags[section.pool], pages=pages, tags=values)
        if not self._setup.check or rows == 0:
            return PendingVerdicts(step=delta.step, record=None)
        record = self._blank("record", (len(delta.sections), rows, layout.RECORD_WORDS))
        evidence: dict[str, tuple[Any, Any]] = {}
        for index, (pool, section) in enumerate(zip(self._setup.pools, delta.sections, strict=True)):
            given, views = accepted[pool.name], uploaded.views[index]
            evidence[pool.name] = self._check_pool(pool, section, delta.enforce, views, given, record[index])
        return PendingVerdicts(step=delta.step, record=record, evidence=evidence)

    def _blank(self, use: str, shape: tuple[int, ...]) -> Any:
        """A fresh array of -1 (not checked, no evidence). Made several at a time: each filling costs a launch.

        No array is handed out twice, so whoever still reads one of an earlier step finds what that step wrote. As many
        are made as were wanted of this shape before, up to BLANKS_MAX, so that shapes that come once cost one.
        """
        kept = self._blanks.get(use)
        if kept is None or kept[0] != shape:
            kept = self._blanks[use] = (shape, [], 1)
        _, blanks, count = kept
        if not blanks:
            most = max(1, min(BLANKS_MAX, BLANK_WORDS_MAX // max(1, math.prod(shape))))
            blanks = self._arrays.apart(self._arrays.full((min(count, most), *shape), layout.NOT_CHECKED))
            self._blanks[use] = (shape, blanks, 2 * min(count, most))
        return blanks.pop()

    def _accept(self, name: str, given: PoolInputs, rows: int) -> PoolInputs:
        """What a pool is given, in this backend's arrays; an object that is given again is not looked at again."""
        known = self._accepted.get(name)
        if known is None or known[0] is not given or known[1] != rows:
            _require_consistent(name, given, rows)
            known = self._accepted[name] = (given, rows, self._arrays.accept(given))
        return known[2]

    def _upload(self, delta: StepDelta, table_rows: list[int] | None) -> _Uploaded:
        """The delta's arrays on the device: those of an earlier step where it says the same, else in one copy."""
        sections, last = delta.sections, self._uploaded
        if (
            last is not None
            and last.packed_from is delta.packed
            and last.sections is sections
            and last.table_rows == table_rows
        ):
            # In one process a delta that says the same is made of the very same parts, without tag changes.
            return last
        spans = [(s.table_row, s.expected, s.extent_offset, s.extent_start, s.extent_stop) for s in sections]
        end = min(section.tag_pages[0] for section in sections)
        sent = delta.packed[:end].tobytes()
        if (
            last is not None
            and len(delta.packed) == end
            and last.sent == sent
            and last.spans == spans
            and last.table_rows == table_rows
        ):
            self._uploaded = replace(last, packed_from=delta.packed, sections=sections)
            return last
        host = delta.packed
        if table_rows is not None:
            host = host.copy()
            for of_pool in spans:
                host[slice(*of_pool[0])] = table_rows
        packed = self._arrays.upload(host)
        plain = len(delta.packed) == end
        uploaded = _Uploaded(
            packed_from=delta.packed if plain else None,
            sections=sections,
            sent=sent,
            spans=spans,
            table_rows=table_rows,
            packed=packed,
            views=[tuple(_slice(packed, span) for span in of_pool) for of_pool in spans],
        )
        if all(span[1] <= end for of_pool in spans for span in of_pool):
            self._uploaded = uploaded
        return uploaded

    def _check_pool(
        self,
        pool: PoolSpec,
        section: PoolSection,
        enforce: bool,
        views: tuple[Any, ...],
        given: PoolInputs,
        record: Any,
    ) -> tuple[Any, Any]:
        row_index, expected, extent_offset, extent_start, extent_stop = views
        width = min(int(given.table.shape[1]), max(1, section.columns) * pool.split, EVIDENCE_COLUMNS)
        evidence = self._blank(pool.name, (EVIDENCE_ROWS, width))
        evidence_row = self._blank("evidence_row", (EVIDENCE_ROWS,))
        null_page = -1 if pool.null_page is None else pool.null_page
        verify_pages(
            table=given.table,
            page_tag=self._tags[pool.name],
            row_index=row_index,
            expected=expected,
            extent_offset=extent_offset,
            extent_start=extent_start,
            extent_stop=extent_stop,
            columns=section.columns,
            key=self._setup.digest_key,
            split=pool.split,
            null_page=null_page,
            neutral_page=null_page if enforce else -1,
            record=record,
            evidence=evidence,
            evidence_row=evidence_row,
            slot_mapping=given.slot_mapping,
            query_start=given.query_start,
            query_row=row_index if given.place_is_row else given.query_row,
            skip_slot=pool.skip_slot,
        )
        return evidence, evidence_row

    def tags(self, pool: str) -> Any:
        """The device mirror int64 [num_pages] of a pool's tags; for tests."""
        return self._tags[pool]


def _require_consistent(pool: str, given: PoolInputs, rows: int) -> None:
    """Shapes alone, which are host knowledge. ValueError: a flagged row could not be neutralised as promised."""
    if given.slot_mapping is None:
        return
    if given.query_start is None:
        raise ValueError(f"pool {pool}: slot_mapping needs query_start, to know whose tokens are whose")
    places = int(given.query_start.shape[0]) - 1
    if given.query_row is None and not given.place_is_row and places < rows:
        raise ValueError(f"pool {pool}: query_start covers {places} batch rows, the step has {rows}")
    if given.query_row is not None and int(given.query_row.shape[0]) != rows:
        raise ValueError(f"pool {pool}: query_row has {int(given.query_row.shape[0])} entries, the step {rows} rows")


def _slice(packed: Any, span: tuple[int, int]) -> Any:
    return packed[span[0] : span[1]]


def _to_numpy(array: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(array, np.ndarray):
        return array
    host: np.ndarray[Any, np.dtype[np.int64]] = (array if array.device.type == "cpu" else array.cpu()).numpy()
    return host


class _NumpyArrays:
    """Array making for the numpy backend: the device is the host."""

    def zeros(self, length: int) -> Any:
        return np.zeros(length, np.int64)

    def apart(self, stacked: Any) -> list[Any]:
        return list(stacked)

    def full(self, shape: tuple[int, ...], value: int) -> Any:
        return np.full(shape, value, np.int64)

    def upload(self, array: Any) -> Any:
        return array

    def accept(self, given: PoolInputs) -> PoolInputs:
        """Tensors on the CPU are taken as NumPy views of the same memory."""

        def view(array: Any) -> Any:
            return array if array is None or isinstance(array, np.ndarray) else array.numpy()

        return PoolInputs(
            table=view(given.table),
            slot_mapping=view(given.slot_mapping),
            query_start=view(given.query_start),
            query_row=view(given.query_row),
            place_is_row=given.place_is_row,
        )


class _TorchArrays:
    """Array making on a torch device; uploads do not wait."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)

    def apart(self, stacked: Any) -> list[Any]:
        return list(stacked.unbind(0))

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

        return PoolInputs(
            table=view(given.table),
            slot_mapping=view(given.slot_mapping),
            query_start=view(given.query_start),
            query_row=view(given.query_row),
            place_is_row=given.place_is_row,
        )

    def upload(self, array: Any) -> Any:
        # From pageable memory CUDA stages the copy before the call returns, so the host array may be reused at once.
        # PyTorch warns of arrays that may not be written to, which packed deltas are.
        array = array if array.flags.writeable else array.copy()
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)
