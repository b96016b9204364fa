"""Everything the host half holds: pools, requests, evidence and policy. Guard, steps and judge work on it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvguard.config import GuardConfig
from kvguard.content_key import ContentHasher, draw_content_secret
from kvguard.kernels.native import extension
from kvguard.ledger import Ledger
from kvguard.page_table import PageTable
from kvguard.policy import Breaker, Quarantine
from kvguard.pools import PoolSpec
from kvguard.recorder import FlightRecorder, PageEvent
from kvguard.report import write_report
from kvguard.requests import RequestState, RowArrays
from kvguard.tags import TagCounter, draw_digest_key
from kvguard.telemetry import Counters, emit
from kvguard.violation import Action, Kind, Proof, Violation

_STEPS: Any = extension("kvguard._steps")
keep_promises: Callable[[PageTable, list[tuple[int, Promise]]], int] | None = _STEPS and _STEPS.keep_promises

if TYPE_CHECKING:
    from kvguard.batch import Batch, PendingStep
    from kvguard.content_calls import ContentBinding
    from kvguard.page_table import Promise

RECENT_VIOLATIONS = 256


class GuardHalt(RuntimeError):
    """Raised where `on_violation` is `halt`: the engine must stop. `violation` says why."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.message)
        self.violation = violation


class UsageError(ValueError):
    """A call that makes no sense: a bug of the adapter, which leaves the books as they were."""


def page_ids(pages: Sequence[int]) -> Sequence[int]:
    """`pages` as Python integers. UsageError for anything that is not a list of integers.

    Tensors are refused rather than converted: reading one from a device would wait for the device.
    """
    for page in pages:
        if type(page) is not int:
            break
    else:
        return pages
    if isinstance(pages, np.ndarray) and np.issubdtype(pages.dtype, np.integer):
        listed: list[int] = pages.tolist()
        return listed
    if all(isinstance(page, (int, np.integer)) for page in pages):
        return [int(page) for page in pages]
    raise UsageError(f"page ids must be integers, not {type(pages[0]).__name__}; convert them where that is free")


class Books:
    """The host's state. One thread owns it; see `kvguard.guard.Guard`."""

    def __init__(self, pools: Sequence[PoolSpec], config: GuardConfig, proofs: frozenset[Proof]) -> None:
        if not pools:
            raise ValueError("a guard needs at least one pool")
        names = [spec.name for spec in pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ: {', '.join(names)}")
        self.config = config
        self.proofs = proofs
        self.checks_tags = Proof.TAG in proofs
        self.checks_writes = Proof.WRITE_SLOT in proofs
        self.checks_device = self.checks_tags or self.checks_writes
        self.checks_contents = Proof.CONTENT_KEY in proofs
        self.page_size_max = max((spec.page_size for spec in pools if spec.page_size), default=1)
        self.key = draw_digest_key(config.seed)
        shared = config.content_key_secret
        self.hasher = ContentHasher(
            draw_content_secret(None if shared is None else shared.get_secret_value(), config.seed)
        )
        self.all_is_told = False
        """Whatever fills a request's pages before its first step is told: cached pages, and loads that were vetted."""
        self.stored: dict[tuple[str, Hashable], ContentBinding] = {}
        """(pool, the engine's cache key) -> what an external store holds under it."""
        self.tags = TagCounter(config.seed)
        self.recorder = FlightRecorder(config.recorder_events_per_page)
        self.tables = tuple(PageTable(spec, self.tags, self.recorder) for spec in pools)
        self.pool_index = {name: index for index, name in enumerate(names)}
        self.rows = RowArrays([spec.page_size for spec in pools])
        self.requests: dict[str, RequestState] = {}
        self.pending: dict[int, PendingStep] = {}
        self.quarantine = Quarantine(config.quarantine_pages_max)
        self.breaker = Breaker(config.breaker_violations, config.breaker_window_s)
        self.counters = Counters()
        self.recent: deque[Violation] = deque(maxlen=RECENT_VIOLATIONS)
        self.incarnations = 0
        self.roster = 0
        """Grows whenever a request starts, ends or begins another incarnation: what is kept of a batch is then void."""
        self.batch: Batch | None = None
        """The rows of the last step, taken over by the next one if they are the same."""
        self.progress: PendingStep | None = None
        """The last verified step of a batch, if what its rows have computed was not yet written to their states."""
        self.marked: set[RequestState] = set()
        """Requests with promises, dependencies or a sentence: a step looks at each of them, and at no other."""
        self.step = 0
        self.content_of: Callable[[str], str] | None = None
        """Given only with `report_content`: what an adapter lets a report show of a request."""

    @property
    def enforcing(self) -> bool:
        """Violations have consequences; False while they are only observed."""
        if self.config.on_violation == "observe":
            return False
        return not (self.breaker.tripped and self.config.breaker_action == "observe")

    @property
    def preparing(self) -> int:
        """The step that is being put together: what happens between two steps belongs to the next one."""
        return self.step + 1

    def index(self, pool: str | None) -> int:
        """The index of a pool by name; None means the only or first one."""
        if pool is None:
            return 0
        try:
            return self.pool_index[pool]
        except KeyError:
            raise UsageError(f"no pool {pool!r}: this guard has {', '.join(self.pool_index)}") from None

    def state(self, request: str) -> RequestState:
        """The live request; UsageError if it was never started or has finished."""
        if self.progress is not None:
            self.write_progress()
        try:
            return self.requests[request]
        except KeyError:
            raise UsageError(f"request {request!r} was not started, or has finished") from None

    def new_state(self, request: str) -> RequestState:
        """A fresh request with empty ledgers."""
        self.write_progress()
        self.roster += 1
        self.incarnations += 1
        state = RequestState(
            id=request,
            slot=self.rows.take_slot(),
            incarnation=self.incarnations,
            ledgers=tuple(Ledger(self.key) for _ in self.tables),
        )
        self.rows.begin(state)
        self.requests[request] = state
        return state

    def write_progress(self) -> None:
        """Rows of a verified step have computed up to its end.

        In steady decode each step goes beyond the one before: what it says of 32 rows is written once somebody asks,
        which is whoever gets hold of a state.
        """
        pending, self.progress = self.progress, None
        if pending is None:
            return
        further = pending.further
        for state, incarnation, end in zip(pending.states, pending.incarnations, pending.base, strict=True):
            if end + further > state.computed and state.incarnation == incarnation and not state.stalled:
                state.computed = end + further

    def scheduled_tokens(self, state: RequestState) -> int:
        """Tokens of the request whose KV is written once the steps in flight have run."""
        tokens = state.computed
        for pending in self.pending.values():
            for row in pending.rows_of(state):
                if pending.incarnations[row] == state.incarnation:
                    tokens = max(tokens, pending.end(row))
        return tokens

    def writing_step(self, state: RequestState, tokens: int) -> tuple[PendingStep, int] | None:
        """The first step in flight that brings the request to so many tokens, and its row there; None if none does."""
        for pending in self.pending.values():
            for row in pending.rows_of(state):
                if pending.incarnations[row] == state.incarnation and pending.end(row) >= tokens:
                    return pending, row
        return None

    def open_promises(self, writer: RequestState) -> list[Promise]:
        """Promises of this writer that are neither kept nor broken, scheduled or not."""
        scheduled = [
            promise
            for pending in self.pending.values()
            for _, promise in pending.promises
            if promise.writer is writer and promise.kept is None
        ]
        return scheduled + writer.promises

    def settle(self, promise: Promise, *, kept: bool) -> None:
        """A promise is kept or broken, once; a broken one makes whoever reads the page on its strength unproven."""
        if promise.kept is None:
            promise.kept = kept
            self.tables[self.pool_index[promise.pool]].settle(promise)

    def settle_verified(self, promises: list[tuple[int, Promise]]) -> None:
        """Every row of the step that keeps these promises, (row, promise) each, was verified."""
        done = 0
        if keep_promises is not None and len(self.tables) == 1:
            done = keep_promises(self.tables[0], promises)
        for _, promise in promises[done:]:
            self.settle(promise, kept=not promise.writer.stalled)

    def release_all(self, state: RequestState) -> None:
        """Forget what the request holds in every pool; its pages stay as they are."""
        for table, ledger in zip(self.tables, state.ledgers, strict=True):
            table.release_each([page for _, page, _ in ledger.entries()], state.id)
            ledger.clear()
        for promise in state.promises:
            # No step was scheduled that writes this page: whoever adopted it will be stopped before reading it.
            self.settle(promise, kept=False)
        state.promises.clear()
        state.depends.clear()
        state.adopted.clear()
        self.rows.touch(state)

    def misused(self, problem: str) -> None:
        """A call of the adapter made no sense, or was left out; the books are as they were. Count it and say so."""
        self.counters.adapter_errors += 1
        emit("adapter_error", severity="error", error=problem)

    def control_violation(
        self,
        kind: Kind,
        pool: int,
        page: int,
        request: str | None,
        detail: str = "",
        *,
        proof: Proof = Proof.CONTROL_PLANE,
        column: int = -1,
    ) -> Violation:
        """Record a fault of an allocator or cache operation, and raise GuardHalt if so configured."""
        table = self.tables[pool]
        in_pool = 0 <= page < table.spec.num_pages
        record = table.record(page) if in_pool else None
        holders = sorted(record.holders) if record else []
        action = Action.HALTED if self.config.on_violation == "halt" else Action.REFUSED
        violation = self.violate(
            Violation(
                id="",
                proof=proof,
                kind=kind,
                action=action if self.enforcing else Action.OBSERVED,
                pool=table.spec.name,
                request=request,
                step=self.preparing,
                column=column,
                page=page,
                found_tag=record.tag if record else 0,
                owner=", ".join(holders) or (record.owner if record else None),
                page_size=table.spec.page_size,
                history=self.recorder.history(table.spec.name, page),
                detail=detail,
            )
        )
        if violation.action is Action.HALTED:
            raise GuardHalt(violation)
        return violation

    def violate(self, draft: Violation) -> Violation:
        """Number, count, log and write down a violation; `draft` is complete but for id and time."""
        counters = self.counters
        counters.violations += 1
        if draft.action is Action.REFUSED:
            counters.refused += 1
        elif draft.action is Action.OBSERVED:
            counters.observed += 1
        elif draft.action is Action.ABORTED:
            counters.aborted += 1
        fields = {name: getattr(draft, name) for name in Violation.__dataclass_fields__}
        fields.update(id=f"kvg-{os.getpid():x}-{counters.violations}", time_s=time.time())
        violation = Violation(**fields)
        self.recent.append(violation)
        if violation.page >= 0:
            self.recorder.record(
                violation.pool,
                violation.page,
                PageEvent(self.step, "violation", violation.found_tag, violation.request, str(violation.kind)),
            )
        emit(
            "violation",
            severity="error",
            id=violation.id,
            proof=str(violation.proof),
            kind=str(violation.kind),
            action=str(violation.action),
            pool=violation.pool,
            request=violation.request,
            step=violation.step,
            column=violation.column,
            page=violation.page,
            owner=violation.owner,
            message=violation.message,
        )
        if self.config.report_dir is not None:
            try:
                content = None
                if self.config.report_content and self.content_of and violation.request is not None:
                    content = self.content_of(violation.request)
                write_report(self.config.report_dir, violation, content=content)
            except Exception as error:
                # Losing a report file must not lose the abort, whatever the disk or an adapter's `content_of` raise.
                emit("report_not_written", severity="error", id=violation.id, error=str(error))
        if self.breaker.count():
            emit(
                "breaker_tripped",
                severity="critical",
                violations=self.config.breaker_violations,
                window_s=self.config.breaker_window_s,
                action=self.config.breaker_action,
            )
        return violation

    def quarantine_page(self, pool: int, page: int) -> bool:
        """Take a page out of circulation; False if the bound is reached (logged and counted)."""
        name = self.tables[pool].spec.name
        if (name, page) in self.quarantine:
            return True
        if not self.quarantine.mark(name, page):
            self.counters.quarantine_refused += 1
            emit(
                "quarantine_full",
                severity="warning",
                pool=name,
                page=page,
                bound=self.config.quarantine_pages_max,
            )
            return False
        self.counters.quarantined += 1
        self.recorder.record(name, page, PageEvent(self.step, "quarantined", self.tables[pool].tag(page), None))
        return True
