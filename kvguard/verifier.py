"""The device half: a mirror of every pool's tags, and the check of a step. It lives next to the model runner.

Threads. One thread owns a Verifier: the one that launches the forward, on whose stream everything here is enqueued.
No call but those of PendingVerdicts reads anything back, and uploads to a GPU go through pinned memory
(`kvguard/staging.py`), so that they do not wait either.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvguard.fused import FusedCheck, evidence_width
from kvguard.kernels.backend import DEVICE_BACKENDS, check_backend, default_backend
from kvguard.kernels.host_check import BoundCheck
from kvguard.kernels.native import extension
from kvguard.kernels.scatter_tags import scatter_tags
from kvguard.kernels.verify_pages import layout, verify_pages
from kvguard.kernels.verify_slots import verify_slots
from kvguard.messages import NO_EVIDENCE, PoolSection, StepDelta
from kvguard.pending_verdicts import PendingVerdicts, record_rows
from kvguard.pools import GuardSetup, PoolSpec
from kvguard.step_arrays import NumpyArrays, TorchArrays
from kvguard.step_buffer import StepBuffer
from kvguard.telemetry import emit

# Half of what a call of the named tuple's class takes, and every step of decode makes a few.
_new = tuple.__new__
_STEPS: Any = extension("kvguard._steps")
change_tags: Callable[..., None] | None = _STEPS and _STEPS.change_tags
renew: Callable[..., bool] | None = _STEPS and _STEPS.renew

__all__ = ["PendingVerdicts", "PoolInputs", "Verifier", "record_rows"]

EVIDENCE_ROWS = 4
"""Flagged rows of a step and pool whose block table is kept for the report; further ones are flagged without."""
EVIDENCE_COLUMNS = 4096
_WRITES_KNOWN = operator.attrgetter("writes_known")
AFTER_CHANGES = PoolSection._fields.index("table_row")
"""What a section says beside its tag changes begins here."""
BLANKS_MAX = 64
BLANK_WORDS_MAX = 1 << 16


@dataclass(frozen=True, kw_only=True)
class PoolInputs:
    """What one pool's attention is about to read and write in this step, in the engine's own tensors.

    table         int32 or int64 [table_rows, columns], any strides: kernel-page ids
    slot_mapping  int64 [tokens] or None: where this step writes, padding lanes included
    query_start   int32 or int64 [batch rows + 1] or None: tokens of each batch row, needed with slot_mapping
    lengths       int32 or int64 [batch rows] or None: KV length of each batch row after the step. Without it, or
                  without slot_mapping, what the step writes is not checked
    query_row     int64 [rows] or None: place in the batch of each row of the step, where that is not its own order
    place_is_row  the batch lists its requests as the block table does: a request's place is its table row

    An object that is given again is not looked at again: a tensor that was moved to other memory needs a new one.
    """

    table: Any
    slot_mapping: Any = None
    query_start: Any = None
    query_row: Any = None
    place_is_row: bool = False
    lengths: Any = None

    @property
    def writes_known(self) -> bool:
        """Whether what the step writes can be checked."""
        return self.slot_mapping is not None and self.lengths is not None


class Verifier:
    """Checks every step on the device before attention reads the cache."""

    def __init__(self, setup: GuardSetup, *, backend: str | None = None, device: Any = "cpu") -> None:
        """`backend`: a name of `kvguard.kernels.backend.BACKENDS`, None for the device's default.

        `device`: a torch device, ignored for numpy. ValueError where the backend cannot run there.
        """
        self._setup = setup
        backend = default_backend(device) if backend is None else backend
        on_device = None if check_backend(backend) == "numpy" else TorchArrays(device)
        self._arrays = on_device or NumpyArrays()
        self._tags = {pool.name: self._arrays.zeros(pool.num_pages) for pool in setup.pools}
        self._writers = {pool.name: self._arrays.zeros(pool.num_pages) for pool in setup.pools}
        self._cells = {
            pool.name: (self._arrays.cells(self._tags[pool.name]), self._arrays.cells(self._writers[pool.name]))
            for pool in setup.pools
        }
        self._step = 0
        self._buffer = StepBuffer(self._arrays)
        self._blanks: dict[str, tuple[Any, list[Any], int]] = {}
        self._unseen: set[str] = set()
        self._page_sizes = {pool.name: pool.page_size for pool in setup.pools}
        self._accepted: dict[str, tuple[PoolInputs, int, PoolInputs]] = {}
        self._checked = False
        """Whether the last step was checked as a whole, so that one that says the same can be checked like it."""
        self._launches: tuple[list[Any], tuple[Any, ...], list[_Launch]] | None = None
        """The launches that were made last, behind what they were made for."""
        self._ground: tuple[Any, Any, Any, Any, int] | None = None
        """For `check_further`: see `_common_ground`."""
        self._sections: Any = None
        """The sections that it last found to lie where those of `_launches` do."""
        self._fused: FusedCheck | None = None
        if on_device is not None and backend in DEVICE_BACKENDS:
            self._fused = FusedCheck(
                setup,
                self._tags,
                self._writers,
                backend=backend,
                device=device,
                upload=on_device.upload,
                zeros=on_device.zeros,
                blank=lambda words: self._blank("step", ((words,),))[0],
                evidence_rows=EVIDENCE_ROWS,
                evidence_columns=EVIDENCE_COLUMNS,
            )

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
        rows, setup = len(delta.requests), self._setup
        if table_rows is not None and len(table_rows) != rows:
            raise ValueError(f"{len(table_rows)} table rows for {rows} requests: one each")
        reads, writes = record_rows(setup, rows)
        # A batch without requests may write, too.
        checks = (rows > 0 and bool(reads + writes)) or (bool(inputs) and bool(writes))
        accepted = self._accept(delta, inputs, rows) if checks else []
        if writes and not any(map(_WRITES_KNOWN, accepted)):
            writes, checks = 0, rows > 0 and bool(reads)
        self._checked = False
        if self._fused is not None:
            record, evidence, reads = self._fused.check(delta, accepted if checks else [], table_rows)
            self._step, self._checked = delta.step, checks
            return PendingVerdicts(step=delta.step, record=record, evidence=evidence, reads=reads)
        buffer = self._buffer
        buffer.load(delta, table_rows)
        self._step = delta.step
        self._change_tags(delta)
        if not checks:
            return PendingVerdicts(step=delta.step, record=None)
        arrays = [buffer.memory, *accepted]
        spans = (reads, writes, delta.enforce, *[section[AFTER_CHANGES:] for section in delta.sections])
        kept = self._launches
        if kept is None or kept[1] != spans or not all(map(operator.is_, kept[0], arrays)):
            kept = self._launches = arrays, spans, self._launches_for(delta, accepted, reads, writes)
        self._ground, self._sections, self._checked = self._common_ground(), None, True
        return self._launch(delta.step, kept[2])

    def _launches_for(self, delta: StepDelta, accepted: list[PoolInputs], reads: int, writes: int) -> list[_Launch]:
        launches = [
            _Launch(
                pool.name,
                ((len(delta.sections), reads + writes, layout.RECORD_WORDS),),
                reads,
                self._writes_of(pool, section, delta.enforce, given) if writes and given.writes_known else None,
                self._reads_of(pool, section, delta.enforce, given) if reads else None,
                self._evidence_of(pool, section, given),
            )
            for pool, section, given in zip(self._setup.pools, delta.sections, accepted, strict=True)
        ]
        # All of them or none: a step is clean where all its records say so.
        bound = []
        for launch in launches:
            whole = launch.of_writes is not None or not writes
            check = self._arrays.bind(launch.of_reads, launch.of_writes) if whole else None
            if check is None:
                return launches
            bound.append(launch._replace(bound=check))
        return bound

    def check_again(self, delta: StepDelta) -> PendingVerdicts | None:
        """`check` of a delta that says what the last one said, given the inputs and table rows that this one was given.

        The caller has seen to the inputs: the very memory and shapes that the last step was given. None, and nothing
        was done, where it is not such a delta, or the last step was not checked: call `check`.
        """
        if not delta.again or delta.step != self._step + 1 or not self._checked:
            return None
        self._step = delta.step
        if self._fused is not None:
            record, evidence, reads = self._fused.check_again()
            return PendingVerdicts(delta.step, record, evidence, None, reads)
        assert self._launches is not None
        return self._launch(delta.step, self._launches[2])

    def check_further(self, delta: StepDelta) -> PendingVerdicts | None:
        """`check` of a delta whose rows are those of the last one, given the inputs and table rows that it was given.

        Its rows may have other digests, extents and floors, and tags may have changed. The caller has seen to the
        inputs and the requests. A short way for one pool in host memory; None, and nothing was done, anywhere else and
        where it needs a closer look: call `check`.
        """
        ground, kept, sections = self._ground, self._launches, delta.sections
        if ground is None or kept is None or not self._checked or delta.step != self._step + 1:
            return None
        if sections is not self._sections or delta.enforce is not kept[1][2]:
            if (delta.enforce, *[section[AFTER_CHANGES:] for section in sections]) != kept[1][2:]:
                return None
            self._sections = sections
        (_, (pages, end), (values, _), (words, _), *_), = sections
        # Never the last step's verdicts once more, should this one fail half way.
        self._checked = False
        assert renew is not None
        done = renew(*ground, delta.packed, pages, values, words, end - pages)
        self._checked = True
        if not done:
            return None
        self._buffer.was_overwritten(delta.packed)
        self._step = delta.step
        return self._launch(delta.step, kept[2])

    def _common_ground(self) -> tuple[Any, Any, Any, Any, int] | None:
        """What `renew` needs of the step that was just checked; None where the next one cannot be checked like it."""
        (pool, *others), found = self._setup.pools, self._buffer.ground
        if renew is None or others or found is None or not self._arrays.on_host(self._buffer.memory):
            return None
        tags, writers = self._cells[pool.name]
        return found[0], tags, writers if self._setup.check_writes else None, found[1], found[2]

    def _change_tags(self, delta: StepDelta) -> None:
        """What changes of the mirrors before the step is checked; the step's arrays are loaded."""
        view, writes = self._buffer.view, self._setup.check_writes
        for section in delta.sections:
            changes = section.tag_pages[1] - section.tag_pages[0]
            if not changes:
                continue
            pool = section.pool
            tags = self._tags[pool]
            if change_tags is not None and self._arrays.on_host(tags):
                cells, cells_of_writers = self._cells[pool]
                starts = section.tag_pages[0], section.tag_values[0], section.tag_writers[0]
                change_tags(cells, cells_of_writers if writes else None, delta.packed, *starts, changes)
                continue
            pages = view(section.tag_pages)
            scatter_tags(page_tag=tags, pages=pages, tags=view(section.tag_values))
            if writes:
                scatter_tags(page_tag=self._writers[pool], pages=pages, tags=view(section.tag_writers))

    def _launch(self, step: int, launches: list[_Launch]) -> PendingVerdicts:
        first = launches[0]
        reads = first.reads
        if first.bound is None:
            record, *parts = self._blank("record", first.records, reads)
        else:
            record, view = self._blank("record", first.records, views=True)
            for pool, launch in enumerate(launches):
                if not launch.bound(view, pool):  # type: ignore[misc]  # all are bound, or none is
                    break
            else:
                return _new(PendingVerdicts, (step, record, NO_EVIDENCE, None, reads, view, True))
            parts = [part for of_pool in record for part in (of_pool[:reads], of_pool[reads:])]
        evidence = {}
        place = 0
        for name, _, _, of_writes, of_reads, evidence_shapes, _ in launches:
            # First what is written: the slots of a row that the other check flags are gone.
            if of_writes is not None:
                verify_slots(record=parts[place + 1], **of_writes)
            if of_reads is not None:
                entries, rows = evidence[name] = self._blank(name, evidence_shapes)
                verify_pages(record=parts[place], evidence=entries, evidence_row=rows, **of_reads)
            place += 2
        return PendingVerdicts(step, record, evidence, None, reads)

    def _blank(
        self, use: str, shapes: tuple[tuple[int, ...], ...], cut: int | None = None, *, views: bool = False
    ) -> Any:
        """Fresh arrays of -1 (not checked, no evidence), one of each shape.

        `cut`: behind each array also its parts along the first axis, each cut in two there, as views of it. `views`:
        behind each tensor also a NumPy array of the same memory.

        Made several at a time: each filling, and each view, costs a launch's worth of time. No array is handed out
        twice, so whoever still reads one of an earlier step finds what that step wrote. As many are made as were
        wanted of these shapes before, up to BLANKS_MAX, so that shapes that come once cost one.
        """
        kept, wanted = self._blanks.get(use), (shapes, cut, views)
        if kept is None or kept[0] != wanted:
            kept = self._blanks[use] = (wanted, [], 1)
        _, blanks, count = kept
        if not blanks:
            words = sum(map(math.prod, shapes))
            count = min(count, max(1, min(BLANKS_MAX, BLANK_WORDS_MAX // max(1, words))))
            columns = []
            for shape in shapes:
                stacked = self._arrays.full((count, *shape), layout.NOT_CHECKED)
                columns.append(self._arrays.apart(stacked))
                if views:
                    columns.append(list(stacked.numpy()))
                if cut is not None:
                    for part in range(shape[0]):
                        columns += map(self._arrays.apart, (stacked[:, part, :cut], stacked[:, part, cut:]))
            blanks = list(zip(*columns, strict=True))
            self._blanks[use] = (wanted, blanks, 2 * count)
        return blanks.pop()

    def _accept(self, delta: StepDelta, inputs: Mapping[str, PoolInputs], rows: int) -> list[PoolInputs]:
        """What each pool is given, in this backend's arrays; an object that is given again is not looked at again."""
        accepted = []
        for section in delta.sections:
            name = section.pool
            given, known = inputs.get(name), self._accepted.get(name)
            if known is None or known[0] is not given or known[1] != rows:
                if given is None:
                    raise ValueError(f"no block table for pool {name}: attention would read it unchecked")
                _require_consistent(name, given, rows)
                array = self._arrays.accept(given)
                if self._page_sizes[name] is None:
                    # Its pages hold no token range: no token has a place in one.
                    array = replace(array, lengths=None)
                elif self._setup.check_writes and not given.writes_known and name not in self._unseen:
                    self._unseen.add(name)
                    emit("writes_not_checked", severity="warning", pool=name)
                known = self._accepted[name] = (given, rows, array)
            accepted.append(known[2])
        return accepted

    @staticmethod
    def _evidence_of(pool: PoolSpec, section: PoolSection, given: PoolInputs) -> tuple[tuple[int, ...], ...]:
        width = evidence_width(pool, section, int(given.table.shape[1]), EVIDENCE_COLUMNS)
        return (EVIDENCE_ROWS, width), (EVIDENCE_ROWS,)

    def _reads_of(self, pool: PoolSpec, section: PoolSection, enforce: bool, given: PoolInputs) -> dict[str, Any]:
        """What verify_pages is given, but for the arrays of a step's findings."""
        view = self._buffer.view
        row_index = view(section.table_row)
        null_page = -1 if pool.null_page is None else pool.null_page
        return dict(
            table=given.table,
            page_tag=self._tags[pool.name],
            row_index=row_index,
            expected=view(section.expected),
            extent_offset=view(section.extent_offset),
            extent_start=view(section.extent_start),
            extent_stop=view(section.extent_stop),
            columns=section.columns,
            key=self._setup.digest_key,
            split=pool.split,
            null_page=null_page,
            neutral_page=null_page if enforce else -1,
            slot_mapping=given.slot_mapping,
            query_start=given.query_start,
            query_row=row_index if given.place_is_row else given.query_row,
            skip_slot=pool.skip_slot,
        )

    def _writes_of(self, pool: PoolSpec, section: PoolSection, enforce: bool, given: PoolInputs) -> dict[str, Any]:
        """The same for verify_slots."""
        view = self._buffer.view
        return dict(
            slot_mapping=given.slot_mapping,
            query_start=given.query_start,
            query_row=view(section.table_row) if given.place_is_row else given.query_row,
            lengths=given.lengths,
            writer=view(section.writer),
            floor=view(section.floor),
            page_writer=self._writers[pool.name],
            page_size=pool.page_size or 1,
            skip_slot=pool.skip_slot,
            skip_allowed=pool.windowed,
            enforce=enforce,
            null_page=-1 if pool.null_page is None else pool.null_page,
        )

    def tags(self, pool: str) -> Any:
        """The device mirror int64 [num_pages] of a pool's tags; for tests."""
        return self._tags[pool]


class _Launch(NamedTuple):
    """How one pool of a step is checked: what `_blank` is asked for, what the kernels are given, and the short way."""

    pool: str
    records: tuple[tuple[int, ...], ...]
    reads: int
    of_writes: dict[str, Any] | None
    of_reads: dict[str, Any] | None
    evidence: tuple[tuple[int, ...], ...]
    bound: BoundCheck | None = None


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
