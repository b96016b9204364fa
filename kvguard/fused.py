"""The check of a step on a GPU: one packed copy and at most three launches, whatever the number of pools.

What a launch must know of the engine's tensors (`kvguard.kernels.verify_pages.descriptor`) rarely changes, so it is
made when something changed and rides at the end of a step's packed copy; the words that say which pools' tags change
ride there too. What a step writes, its verdicts and evidence, lies in one array of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.backend import require_backend
from kvguard.kernels.scatter_tags import scatter_step
from kvguard.kernels.scatter_tags.descriptor import ScatterWord, describe_scatter
from kvguard.kernels.verify_pages import layout, verify_step
from kvguard.kernels.verify_pages.descriptor import Launch, PoolStep, describe
from kvguard.kernels.verify_slots import descriptor as slots
from kvguard.kernels.verify_slots import verify_slots_step
from kvguard.messages import PoolSection, StepDelta
from kvguard.pending_verdicts import record_rows
from kvguard.pools import GuardSetup, PoolSpec
from kvguard.step_buffer import spoil_shared_rows

Int64 = npt.NDArray[np.int64]


def evidence_width(pool: PoolSpec, section: PoolSection, table_columns: int, most: int) -> int:
    """Columns kept of a flagged row: its live ones, rounded up so that a growing context seldom changes it."""
    live = max(1, section.columns) * pool.split
    return min(table_columns, most, 1 << (live - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """How the rows of a step are checked, and what it was made for.

    words     int64 [words]: the descriptors for reads, then those for writes; launch, slot_launch: their launches
    read_words  how many of the words are of reads
    out_words int64 words that the step writes: records [pools, reads + writes, 4], then evidence of each pool
    evidence  per pool its (first word of the entries, width, first word of the rows) in what the step writes
    """

    sections: tuple[PoolSection, ...]
    enforce: bool
    inputs: tuple[Any, ...]
    words: Int64
    read_words: int
    launch: Launch
    slot_launch: slots.Launch
    reads: int
    writes: int
    out_words: int
    evidence: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sent:
    """A delta's words on the device, up to its tag changes; nothing writes to them.

    source      the array of the delta itself; table_rows: what was filled in
    prefix      the words as they were sent
    packed      int64 [words] on the device; more words may follow
    """

    source: Int64
    table_rows: list[int] | None
    prefix: Int64
    packed: Any


class FusedCheck:
    """What a Verifier does with the backends `triton` and `cupy`; it belongs to the Verifier's thread."""

    def __init__(
        self,
        setup: GuardSetup,
        tags: Mapping[str, Any],
        writers: Mapping[str, Any],
        *,
        backend: str,
        device: Any,
        upload: Callable[[Int64], Any],
        zeros: Callable[[int], Any],
        blank: Callable[[int], Any],
        evidence_rows: int,
        evidence_columns: int,
    ) -> None:
        """`tags`, `writers`: the mirrors, int64 [num_pages] per pool name.

        `upload`, `zeros`, `blank`  make device arrays int64 [words]: a copy of a host array, zeros, and -1 in an array
        that was never handed out before. Raises ValueError where the backend cannot run on the device.
        """
        require_backend(backend, device)
        self._setup, self._tags, self._writers, self._backend = setup, tags, writers, backend
        self._upload, self._zeros, self._blank = upload, zeros, blank
        self._evidence_rows, self._evidence_columns = evidence_rows, evidence_columns
        self._plan: _Plan | None = None
        self._sent: _Sent | None = None
        self._descriptors: tuple[Int64, Any, Any] | None = None
        self._workspace: Any = None

    def check(
        self, delta: StepDelta, inputs: Sequence[Any], table_rows: list[int] | None
    ) -> tuple[Any, dict[str, tuple[Any, Any]], int]:
        """The step's record int64 [pools, reads + writes, 4], evidence per pool, and reads; nothing is awaited.

        `inputs`: the `PoolInputs` of each pool, none where nothing is checked. The record is then None.
        """
        plan = self._plan_for(delta, inputs) if inputs else None
        changed = [section for section in delta.sections if section.tag_pages[0] != section.tag_pages[1]]
        packed = self._send(delta, table_rows, changed, plan)
        if plan is None:
            return None, {}, 0
        return self._launch(plan, packed)

    def _launch(self, plan: _Plan, packed: Any) -> tuple[Any, dict[str, tuple[Any, Any]], int]:
        assert self._descriptors is not None
        _, of_reads, of_writes = self._descriptors
        out = self._blank(plan.out_words)
        workspace = max(plan.launch.workspace_words, plan.slot_launch.workspace_words)
        if self._workspace is None or self._workspace.shape[0] < workspace:
            self._workspace = self._zeros(2 * workspace)
        shared = {"backend": self._backend, "packed": packed, "out": out, "workspace": self._workspace}
        # First what is written: the slots of a row that the other check flags are gone.
        if plan.writes:
            verify_slots_step(launch=plan.slot_launch, descriptors=of_writes, **shared)
        if plan.reads:
            verify_step(launch=plan.launch, descriptors=of_reads, **shared)
        pools, places, records = len(plan.sections), self._evidence_rows, plan.reads + plan.writes
        record = out[: pools * records * layout.RECORD_WORDS].reshape(pools, records, layout.RECORD_WORDS)
        evidence = {
            pool.name: (out[first : first + places * width].reshape(places, width), out[of_row : of_row + places])
            for pool, (first, width, of_row) in zip(self._setup.pools, plan.evidence, strict=False)
        }
        return record, evidence, plan.reads

    def check_again(self) -> tuple[Any, dict[str, tuple[Any, Any]], int]:
        """The check of a step that says what the last one said, which was checked."""
        assert self._plan is not None and self._sent is not None
        return self._launch(self._plan, self._sent.packed)

    def _send(
        self, delta: StepDelta, table_rows: list[int] | None, changed: Sequence[PoolSection], plan: _Plan | None
    ) -> Any:
        """Bring to the device what is not there yet, in one copy, and make the tag changes; the packed array."""
        known = self._descriptors
        fresh = plan is not None and (known is None or not np.array_equal(known[0], plan.words))
        last = self._sent
        if not changed and last is not None and last.source is delta.packed and last.table_rows == table_rows:
            prefix, packed = last.prefix, last.packed
        else:
            end = min(section.tag_pages[0] for section in delta.sections)
            prefix = delta.packed[:end].copy()
            if table_rows is not None:
                for section in delta.sections:
                    prefix[slice(*section.table_row)] = table_rows
            spoil_shared_rows(prefix, delta, table_rows)
            same = last is not None and np.array_equal(last.prefix, prefix)
            packed = last.packed if same and not changed and last is not None else None
        if packed is None:
            scatters = [words for section in changed for words in self._scatter_words(section)]
            scatter = np.array(scatters, np.int64).reshape(-1)
            described = plan.words if fresh and plan is not None else scatter[:0]
            host = np.concatenate((prefix, delta.packed[len(prefix) :], scatter, described))
            packed = self._upload(host)
            if changed:
                scatter_step(
                    backend=self._backend,
                    pools=len(scatters),
                    changes=max(section.tag_pages[1] - section.tag_pages[0] for section in changed),
                    descriptors=packed[len(delta.packed) : len(delta.packed) + len(scatter)],
                    packed=packed,
                )
            if fresh and plan is not None:
                self._keep(plan, packed[len(host) - len(described) :])
        elif fresh and plan is not None:
            self._keep(plan, self._upload(plan.words))
        # A copy: the caller may change its own list in place.
        kept_rows = None if table_rows is None else list(table_rows)
        self._sent = _Sent(source=delta.packed, table_rows=kept_rows, prefix=prefix, packed=packed)
        return packed

    def _keep(self, plan: _Plan, descriptors: Any) -> None:
        self._descriptors = plan.words, descriptors[: plan.read_words], descriptors[plan.read_words :]

    def _scatter_words(self, section: PoolSection) -> list[tuple[int, ...]]:
        """A pool's tags change, and with them its writers, if anybody looks at those."""
        mirrors = [(self._tags, section.tag_values)]
        if self._setup.check_writes:
            mirrors.append((self._writers, section.tag_writers))
        described = [
            describe_scatter(
                page_tag=mirror[section.pool],
                pages=section.tag_pages[0],
                tags=values[0],
                changes=section.tag_pages[1] - section.tag_pages[0],
            )
            for mirror, values in mirrors
        ]
        assert all(len(words) == len(ScatterWord) for words in described)
        return described

    def _plan_for(self, delta: StepDelta, inputs: Sequence[Any]) -> _Plan:
        """The last step's plan where nothing changed that it was made for."""
        given = tuple(inputs)
        last = self._plan
        if (
            last is not None
            and last.sections == delta.sections
            and last.enforce == delta.enforce
            and len(last.inputs) == len(given)
            and all(kept is now for kept, now in zip(last.inputs, given, strict=True))
        ):
            return last
        rows = len(delta.requests)
        reads, writes = record_rows(self._setup, rows)
        if not any(arrays.writes_known for arrays in given):
            writes = 0
        records = (reads + writes) * layout.RECORD_WORDS
        out_words = len(delta.sections) * records
        pools, written, evidence = [], [], []
        for index, (pool, section, arrays) in enumerate(zip(self._setup.pools, delta.sections, given, strict=True)):
            if reads:
                width = evidence_width(pool, section, int(arrays.table.shape[1]), self._evidence_columns)
                first, of_row = out_words, out_words + self._evidence_rows * width
                out_words = of_row + self._evidence_rows
                evidence.append((first, width, of_row))
                pools.append(self._read_step(delta, pool, section, arrays, index * records, evidence[-1]))
            if writes and arrays.writes_known:
                at = index * records + reads * layout.RECORD_WORDS
                written.append(self._write_step(delta, pool, section, arrays, at))
        words, launch = describe(pools)
        slot_words, slot_launch = slots.describe_slots(written)
        self._plan = _Plan(
            sections=delta.sections,
            enforce=delta.enforce,
            inputs=given,
            words=np.concatenate((words.reshape(-1), slot_words.reshape(-1))),
            read_words=words.size,
            launch=launch,
            slot_launch=slot_launch,
            reads=reads,
            writes=writes,
            out_words=out_words,
            evidence=tuple(evidence),
        )
        return self._plan

    def _read_step(
        self, delta: StepDelta, pool: PoolSpec, section: PoolSection, arrays: Any, record: int,
        evidence: tuple[int, int, int],
    ) -> PoolStep:  # fmt: skip
        null_page = -1 if pool.null_page is None else pool.null_page
        return PoolStep(
            table=arrays.table,
            page_tag=self._tags[pool.name],
            rows=len(delta.requests),
            columns=section.columns,
            key=self._setup.digest_key,
            split=pool.split,
            null_page=null_page,
            neutral_page=null_page if delta.enforce else -1,
            skip_slot=pool.skip_slot,
            row_index=section.table_row[0],
            expected=section.expected[0],
            extent_offset=section.extent_offset[0],
            extent_start=section.extent_start[0],
            extent_stop=section.extent_stop[0],
            record=record,
            evidence=evidence[0],
            evidence_row=evidence[2],
            evidence_places=self._evidence_rows,
            evidence_width=evidence[1],
            slot_mapping=arrays.slot_mapping,
            query_start=arrays.query_start,
            query_row=arrays.query_row,
            place_is_row=arrays.place_is_row,
        )

    def _write_step(
        self, delta: StepDelta, pool: PoolSpec, section: PoolSection, arrays: Any, record: int
    ) -> slots.SlotStep:
        return slots.SlotStep(
            slot_mapping=arrays.slot_mapping,
            lengths=arrays.lengths,
            page_writer=self._writers[pool.name],
            rows=len(delta.requests),
            writer=section.writer[0],
            floor=section.floor[0],
            page_size=pool.page_size or 1,
            skip_slot=pool.skip_slot,
            skip_allowed=pool.windowed,
            enforce=delta.enforce,
            record=record,
            null_page=-1 if pool.null_page is None else pool.null_page,
            query_start=arrays.query_start,
            query_row=arrays.query_row,
            place_is_row=arrays.place_is_row,
            row_index=section.table_row[0],
        )
