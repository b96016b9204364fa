"""The guard for an engine whose page numbers exist only on the device, as tensors that its allocator slices.

The books are there too: a tag for each page, and for each row of the block table the digest of the pages it was
promised. Every call enqueues a few small operations behind what the engine has enqueued, and reads nothing: how many
pages there are is known from shapes. What went wrong comes back with the verdicts of the step, where the engine reads
its sampled tokens. So a wrong allocation or free is not refused; it is reported, and the row that would read a page
that is not its own any more is flagged and neutralised in the same step, before attention.

What the host does not know it cannot say: a report names the request, its row as it was found, and the page only where
the device could tell. One pool; a row's live pages are its first columns, without gaps. Publications are tied to their
page, not to their writer's step: publish a page once the step that filled it was judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvguard.adapters.activation import refuse_contents
from kvguard.adapters.device_books import EVENT_KINDS, DeviceBooks, DeviceRow, Event
from kvguard.adapters.generic import GuardFault, GuardHalt
from kvguard.config import GuardConfig
from kvguard.guard import Guard, UsageError
from kvguard.judge import Abort, Judgement
from kvguard.kernels.verify_pages import layout, verify_pages
from kvguard.messages import Verdicts
from kvguard.pools import PoolSpec
from kvguard.telemetry import Health
from kvguard.verifier import EVIDENCE_COLUMNS, EVIDENCE_ROWS, PendingVerdicts, PoolInputs
from kvguard.violation import Action, Kind, Proof, Violation

__all__ = ["DevicePagedGuard", "DevicePending", "GuardFault", "GuardHalt"]

T = TypeVar("T")

FLAG_KINDS = (
    (layout.FLAG_RANGE, Kind.OUT_OF_RANGE_ENTRY),
    (layout.FLAG_NULL, Kind.NULL_ENTRY),
    (layout.FLAG_SPLIT, Kind.SPLIT_ENTRY),
    (layout.FLAG_VACANT, Kind.VACANT_PAGE),
)


class DevicePending(NamedTuple):
    """A step on its way: `verdicts` is still on the device; the rest is what the host knows of it."""

    step: int
    verdicts: PendingVerdicts
    states: tuple[DeviceRow, ...]
    events: tuple[Event, ...]
    enforce: bool
    unproven: frozenset[str] = frozenset()

    def depart(self) -> DevicePending:
        """Start the verdicts' way to the host behind the check; does not wait."""
        return self._replace(verdicts=self.verdicts.depart())


class DevicePagedGuard:
    """Page tags and row digests on the device, for one engine in one process.

    All calls belong to the thread that launches the forward, on its stream. A page tensor is int32 or int64 [pages] on
    the guard's device; its values are never read by the host. A call that makes no sense (an unknown request, a count
    that does not fit) is logged, counted as an adapter error and changes nothing.
    """

    def __init__(
        self, pool: PoolSpec, *, table_rows: int, device: Any = "cpu", config: GuardConfig | None = None
    ) -> None:
        """`table_rows`: rows of the engine's block table. ValueError for a pool without page size or with `split`."""
        settings = GuardConfig.load() if config is None else config
        refuse_contents(settings, "books on the device")
        if pool.page_size is None or pool.split != 1:
            raise ValueError(f"pool {pool.name!r}: device books need a page size, and kernel pages as the allocator's")
        self.pool, self._page_size = pool, pool.page_size
        self._guard = None if settings.is_off else Guard([pool], settings)
        self._step = 0
        self._in_flight: dict[int, DevicePending] = {}
        if self._guard is None:
            return
        self._books = self._guard._books
        self._device_books = DeviceBooks(pool, self._books.tags, self._books.key, table_rows=table_rows, device=device)
        self._reallocated: deque[int] = deque(maxlen=1024)

    # -- what an operator asks ------------------------------------------------------------------------------------

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent violations, oldest first."""
        return () if self._guard is None else self._guard.violations

    def health(self) -> Health:
        """Whether the guard is armed, fit and alive, and its counters; at level `off` it is not armed."""
        if self._guard is None:
            return Health(armed=False, fit=True, alive=True, in_flight=0, quarantined_pages=0, counters={})
        waiting = len(self._in_flight)
        alive = waiting <= self._guard.config.steps_in_flight_max
        return replace(self._guard.health(), in_flight=waiting, alive=alive)

    def _kept(self, unguarded: T, call: Callable[[DeviceBooks], T]) -> T:
        guard = self._guard
        if guard is None or not guard.armed:
            return unguarded
        try:
            return call(self._device_books)
        except UsageError as error:
            guard.adapter_error(error)
        except Exception as error:
            guard.fault(error)
        return unguarded

    # -- requests and pages ---------------------------------------------------------------------------------------

    def start(self, request: str, row: int) -> None:
        """A request enters, or comes back after a preemption, with row `row` of the block table and no pages."""
        self._kept(None, lambda books: books.start(request, row))

    def finish(self, request: str) -> None:
        """A request ends or is preempted; its pages stay as they are until `free`. No error if it is not live."""
        self._kept(None, lambda books: books.finish(request))

    def allocate(self, requests: Sequence[str], counts: Sequence[int], pages: Tensor) -> None:
        """The allocator gave `pages` [sum(counts)]: counts[i] of them to requests[i], for its next columns."""
        self._kept(None, lambda books: books.allocate(requests, counts, pages))

    def publish(self, pages: Tensor) -> Tensor:
        """What `pages` hold now, int64 [pages] on the device: keep it beside the cache entry, for whoever adopts it."""
        published = self._kept(None, lambda books: books.published(pages))
        if published is not None:
            return published
        if isinstance(pages, Tensor):
            return torch.zeros_like(pages, dtype=torch.int64)
        return torch.zeros(len(pages) if hasattr(pages, "__len__") else 0, dtype=torch.int64)

    def adopt(self, request: str, pages: Tensor, published: Tensor) -> None:
        """The request takes cached pages for its next columns; `published`: what `publish` answered for them then."""
        self._kept(None, lambda books: books.adopt(request, pages, published))

    def truncate(self, request: str, pages: Tensor) -> None:
        """The request gives up its last columns, which hold `pages` in column order; free them afterwards."""
        self._kept(None, lambda books: books.truncate(request, pages))

    def free(self, pages: Tensor) -> None:
        """The allocator takes `pages` [pages] back. A row that still reads one of them is flagged from now on."""
        self._kept(None, lambda books: books.free(pages))

    def reset(self) -> None:
        """The engine emptied its cache and nobody runs: every page is vacant, whoever had it."""
        self._kept(None, lambda books: books.reset())

    # -- steps ----------------------------------------------------------------------------------------------------

    def before_forward(
        self, requests: Sequence[str], tokens_end: Sequence[int], inputs: PoolInputs
    ) -> DevicePending | None:
        """Check what this step's attention will read; None once the guard is disarmed. Nothing is awaited.

        `tokens_end`: each request's KV length after the step. Call it after the block table is final, on the stream of
        the forward, once per forward. A flagged row is neutralised in place. A request that is not live is an adapter
        error, and its row is not checked; its tokens are withheld if `on_guard_error` is `abort`. GuardFault if the
        guard has failed and `on_guard_error` is `abort`.
        """

        def call(guard: Guard) -> DevicePending:
            device, places = self._device_books, range(len(requests))
            ends, query_row = list(tokens_end), inputs.query_row
            known = [place for place in places if requests[place] in device.rows]
            if len(known) < len(requests):
                # Left out: what nobody promised anything cannot be proven. The others keep their places in the batch.
                for place in sorted(set(places).difference(known)):
                    guard.adapter_error(UsageError(f"request {requests[place]!r} of a step is not live"))
                ends = [ends[place] for place in known]
                at = device.upload(np.array(known, np.int64))
                query_row = at if query_row is None else query_row.index_select(0, at)
            states = tuple(device.rows[requests[place]] for place in known)
            rows, enforce = len(states), self._books.enforcing
            withhold = enforce and rows < len(requests) and guard.config.on_guard_error == "abort"
            # What a row reads past the pages that it was promised is checked as well, and does not add up.
            stops = [max(state.columns, -(-end // self._page_size)) for state, end in zip(states, ends, strict=True)]
            packed = np.zeros(4 * rows + 1, np.int64)
            packed[:rows] = [state.row for state in states]
            packed[rows : 2 * rows + 1] = np.arange(rows + 1)
            packed[3 * rows + 1 :] = stops
            uploaded = device.upload(packed)
            row_index, offset = uploaded[:rows], uploaded[rows : 2 * rows + 1]
            events = device.take_events()
            shape = (1, rows + len(events), layout.RECORD_WORDS)
            record = torch.full(shape, layout.NOT_CHECKED, dtype=torch.int64, device=device.device)
            width = min(int(inputs.table.shape[1]), max([1, *stops]), EVIDENCE_COLUMNS)
            evidence = torch.full((EVIDENCE_ROWS, width), -1, dtype=torch.int64, device=device.device)
            evidence_row = torch.full((EVIDENCE_ROWS,), -1, dtype=torch.int64, device=device.device)
            null_page = -1 if self.pool.null_page is None else self.pool.null_page
            if rows and guard.setup.check:
                verify_pages(
                    table=inputs.table,
                    page_tag=device.page_tag,
                    row_index=row_index,
                    expected=device.digest.index_select(0, row_index),
                    extent_offset=offset,
                    extent_start=uploaded[2 * rows + 1 : 3 * rows + 1],
                    extent_stop=uploaded[3 * rows + 1 :],
                    columns=max(stops),
                    key=self._books.key,
                    null_page=null_page,
                    neutral_page=null_page if enforce else -1,
                    record=record[0, :rows],
                    evidence=evidence,
                    evidence_row=evidence_row,
                    slot_mapping=inputs.slot_mapping,
                    query_start=inputs.query_start,
                    query_row=query_row,
                    skip_slot=self.pool.skip_slot,
                )
            if events:
                record[0, rows:] = torch.stack([event.record for event in events])
            self._step += 1
            pending = DevicePending(
                step=self._step,
                verdicts=PendingVerdicts(self._step, record, {self.pool.name: (evidence, evidence_row)}),
                states=states,
                events=tuple(events),
                enforce=enforce,
                unproven=frozenset(requests).difference(state.id for state in states) if withhold else frozenset(),
            )
            self._in_flight[self._step] = pending
            self._books.counters.steps_seen += 1
            self._books.counters.rows_seen += rows
            return pending

        checked = self._contained(call)
        self._require_armed(requests)
        return checked

    def after_forward(self, pending: DevicePending | None) -> Judgement:
        """The verdicts of that step, acted on. Waits for the step: call it where the sampled tokens are read.

        Raises GuardHalt if there is a violation and `on_violation` is `halt`.
        """
        if pending is None or self._guard is None:
            return Judgement(step=0)
        self._in_flight.pop(pending.step, None)
        judgement = self._contained(lambda guard: self._judge(guard, pending))
        self._require_armed([state.id for state in pending.states])
        if judgement is None:
            # The guard failed with this step in flight: nothing of it was proven.
            names = frozenset(state.id for state in pending.states) if pending.enforce else frozenset[str]()
            return Judgement(step=pending.step, withheld=names)
        if judgement.halt:
            raise GuardHalt(judgement.violations[0])
        return judgement

    def _contained(self, call: Callable[[Guard], T]) -> T | None:
        guard = self._guard
        if guard is None or not guard.armed:
            return None
        try:
            return call(guard)
        except Exception as error:
            guard.fault(error)
            return None

    def _require_armed(self, requests: Sequence[str]) -> None:
        guard = self._guard
        if guard is not None and not guard.armed and guard.config.on_guard_error == "abort":
            raise GuardFault("kvguard has failed: this step is unproven", tuple(requests))

    def _judge(self, guard: Guard, pending: DevicePending) -> Judgement:
        verdicts, rows = pending.verdicts.resolve(), len(pending.states)
        assert verdicts.records is not None
        records = verdicts.records[0]
        if guard.setup.check and (records[:rows, layout.FLAGS] == layout.NOT_CHECKED).any():
            raise RuntimeError(f"step {pending.step}: no verdict for some rows; the verification did not run")
        violations = [
            self._event_violation(pending, event, *(int(word) for word in record[:3]))
            for event, record in zip(pending.events, records[rows:], strict=True)
            if record[0]
        ]
        aborts: list[Abort] = []
        for row, state in enumerate(pending.states):
            if records[row, layout.FLAGS] <= 0 or state.condemned:
                continue
            violation = self._row_violation(pending, row, verdicts)
            violations.append(violation)
            if pending.enforce:
                state.condemned = True
                if self._device_books.rows.get(state.id) is state:
                    aborts.append(Abort(request=state.id, violation=violation))
        self._books.counters.steps_verified += 1
        self._books.counters.rows_verified += rows
        return Judgement(
            step=pending.step,
            violations=tuple(violations),
            withheld=frozenset(state.id for state in pending.states if state.condemned) | pending.unproven,
            aborts=tuple(aborts),
            halt=bool(violations) and pending.enforce and guard.config.on_violation == "halt",
        )

    def _action(self, pending: DevicePending, wanted: Action) -> Action:
        if not pending.enforce:
            return Action.OBSERVED
        return Action.HALTED if self._books.config.on_violation == "halt" else wanted

    def _event_violation(self, pending: DevicePending, event: Event, code: int, page: int, place: int) -> Violation:
        """An allocation, a free or a cache hit that was wrong; it has taken effect by now."""
        kind = EVENT_KINDS[code - 1]
        if kind is Kind.DOUBLE_ALLOCATION:
            self._reallocated.append(page)
        request = None
        for name, count in zip(event.requests, event.counts, strict=True):
            if 0 <= place < count:
                request = name
            place -= count
        return self._books.violate(
            Violation(
                id="",
                proof=Proof.CONTROL_PLANE,
                kind=kind,
                action=self._action(pending, Action.OBSERVED),
                pool=self.pool.name,
                request=request,
                step=pending.step,
                page=page,
                page_size=self.pool.page_size,
                detail="found on the device after it had taken effect; the rows that read the page are checked",
            )
        )

    def _row_violation(self, pending: DevicePending, row: int, verdicts: Verdicts) -> Violation:
        assert verdicts.records is not None
        flags, _, column, page = (int(word) for word in verdicts.records[0, row])
        state = pending.states[row]
        entries: tuple[int, ...] = ()
        for found in verdicts.evidence.get(self.pool.name, ()):
            if found.row == row:
                entries = tuple(int(entry) for entry in found.entries[: state.columns])
        kind = next((kind for flag, kind in FLAG_KINDS if flags & flag), Kind.FOREIGN_ROW)
        if kind is Kind.FOREIGN_ROW:
            for place, entry in enumerate(entries):
                if entry in self._reallocated:
                    kind, column, page = Kind.STALE_PAGE, place, entry
                    break
        return self._books.violate(
            Violation(
                id="",
                proof=Proof.TAG,
                kind=kind,
                action=self._action(pending, Action.ABORTED),
                pool=self.pool.name,
                request=state.id,
                step=pending.step,
                row=state.row,
                column=column,
                page=page,
                page_size=self.pool.page_size,
                row_entries=entries,
            )
        )
