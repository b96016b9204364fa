"""One SGLang scheduler's guard: its books, the check of a step, the verdict, and who is aborted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvguard.adapters.sglang.books import EVENT_KINDS, POOL, Operation, TokenBooks
from kvguard.adapters.sglang.contents import RequestContents
from kvguard.adapters.sglang.layout import PoolLayout
from kvguard.adapters.sglang.reports import Reports
from kvguard.adapters.sglang.step_words import PendingStep, WordStore
from kvguard.config import GuardConfig
from kvguard.guard import Guard, GuardHalt
from kvguard.kernels.events import CONTENT
from kvguard.kernels.verify_pages import layout
from kvguard.pools import PoolSpec
from kvguard.telemetry import Health, emit
from kvguard.violation import Action, Kind, Proof, Violation

STATUS = HTTPStatus.SERVICE_UNAVAILABLE
"""A retry is right: nothing is wrong with the request itself."""
ERROR_TYPE = "KVIntegrityError"

class GuardFault(RuntimeError):
    """A fault inside kvguard while `on_guard_error` is `abort`: the engine stops rather than serve unguarded."""


class _Closed:
    """Rows of a list that takes no more: what a withheld token adds to it is never sent."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def append(self, *_: Any) -> None:
        """Not any more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class _Contained:
    """`with guard.contained():` a fault of the guard does not surface in SGLang; it disarms."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception) and not isinstance(error, GuardHalt):
            self._guard.fault(error)
            return True
        return False


class SchedulerGuard(Reports):
    """See the module. The scheduler's thread makes all calls."""

    def __init__(self, scheduler: Any, pool: PoolLayout, config: GuardConfig) -> None:
        self.guard = Guard(self._pools(pool), config)
        self._host_books = self.guard._books
        super().__init__(scheduler, self._new_books(scheduler, pool))
        books = self.books
        self._words = WordStore(books.device)
        self._contained = _Contained(self.guard)
        self._checks = Proof.TAG in self._host_books.proofs
        self._checks_writes = Proof.WRITE_SLOT in self._host_books.proofs
        self._reports_events = Proof.CONTROL_PLANE in self._host_books.proofs
        # Nothing is compared where nothing is shared: then nobody's tokens are hashed.
        if Proof.CONTENT_KEY in self._host_books.proofs and not scheduler.tree_cache.disable:
            self.contents = RequestContents(self._host_books.hasher, scheduler)
        self._step = 0
        self._in_flight = 0
        self._pending: PendingStep | None = None
        self.batch: Any = None
        self.prefixes: list[Tensor] | None = None
        self._said_unchecked = False
        self._late = False

    def _pools(self, pool: PoolLayout) -> list[PoolSpec]:
        return [PoolSpec(name=POOL, num_pages=pool.num_pages, page_size=pool.page_size, null_page=0)]

    def _new_books(self, scheduler: Any, pool: PoolLayout) -> TokenBooks:
        host = self._host_books
        return TokenBooks(
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            rows=pool.rows,
            device=pool.device,
            tags=host.tags,
            key=host.key,
            contents=Proof.CONTENT_KEY in host.proofs,
        )

    # -- what an operator asks ------------------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether the guard checks."""
        return self.guard.armed

    @property
    def enforcing(self) -> bool:
        """Violations have consequences; False while they are only observed."""
        return self._host_books.enforcing

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent violations, oldest first."""
        return self.guard.violations

    def health(self) -> Health:
        """Whether the guard is armed, fit and alive, and its counters."""
        alive = self._in_flight <= self.guard.config.steps_in_flight_max
        return replace(self.guard.health(), in_flight=self._in_flight, alive=alive)

    def contained(self) -> _Contained:
        """Around everything that the guard does inside SGLang's functions."""
        return self._contained

    def check_only(self, proofs: frozenset[Proof]) -> None:
        """Switch every other proof off: what fault campaigns do, to show what each finds alone."""
        self._checks, self._checks_writes = Proof.TAG in proofs, Proof.WRITE_SLOT in proofs
        self._reports_events = Proof.CONTROL_PLANE in proofs
        if Proof.CONTENT_KEY not in proofs:
            self.contents = None

    def weights_change(self) -> None:
        """New weights: nothing that is cached is taken, until SGLang empties its cache.

        It does so in the same call where it is told to and nobody runs; else at the next idle moment. Requests that
        hold pages of the old weights have ended by then, and what they published is gone with the rest. Where nobody
        holds a page and none is cached, there is nothing to wait for: reinforcement learning empties the cache first,
        while everybody waits, and may not come to rest for a long time afterwards.
        """
        if self.contents is not None:
            self.contents.epoch += 1
            self.outdated = self.outdated or any(
                allocator.available_size() < allocator.size // allocator.page_size * allocator.page_size
                for allocator, _ in self.free_lists()
            )

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self, batch: Any) -> None:
        """SGLang is about to run this batch."""
        self._require_armed()
        if self._takes_part:
            self.batch = batch

    def end(self) -> PendingStep | None:
        """Its forward is enqueued: what was checked of it."""
        batch, self.batch = self.batch, None
        pending, self._pending = self._pending, None
        if pending is None and batch is not None and self.guard.armed and not batch.forward_mode.is_idle():
            self._unchecked(batch)
        return pending

    def _unchecked(self, batch: Any) -> None:
        """A forward that did not pass where the check stands: counted, and said once."""
        self._host_books.counters.steps_seen += 1
        if not self._said_unchecked:
            self._said_unchecked = True
            emit("unchecked_forward", severity="critical", mode=str(batch.forward_mode), requests=len(batch.reqs))
        if self.guard.config.on_guard_error == "abort":
            raise GuardFault("a forward did not pass the check and on_guard_error is abort: nothing unproven may leave")

    @property
    def _takes_part(self) -> bool:
        """Other ranks wait for this one's word, also when its guard has failed."""
        return self.guard.armed or self.ranks > 1

    def check(self, forward_batch: Any) -> None:
        """Run the queue and check what attention is about to read, on the current stream; nothing is awaited."""
        if not self._takes_part or forward_batch.forward_mode.is_idle():
            return
        if self.guard.armed:
            with self._contained:
                self._pending = self._launch(forward_batch)
            self._require_armed()
        if self.ranks > 1:
            if self._pending is None or not self.guard.armed:
                self._pending = self._failed_step(forward_batch)
            with self._contained:
                self.combine(self._pending.words.words, self._pending.words.verdicts)
        if self._pending is not None:
            with self._contained:
                self._pending.words.depart()

    def _failed_step(self, forward: Any) -> PendingStep:
        """What a rank whose guard has failed says: every rank reads it in the same step, and disarms."""
        count = forward.req_pool_indices.shape[0]
        words = self._words.take(count, 0)
        words.words.zero_()
        words.words[-1] = layout.NOT_CHECKED
        self._in_flight += 1
        self.ran = True
        return PendingStep(self._step, words, count, [], False)

    def _launch(self, forward: Any) -> PendingStep:
        books, host = self.books, self._host_books
        rows = forward.req_pool_indices
        count, operations = rows.shape[0], books.take()
        words = self._words.take(count, len(operations))
        books.run(operations, words.events)
        enforce = host.enforcing
        reads = self._checks or self.contents is not None
        if reads or self._checks_writes:
            query_start = None
            if not forward.forward_mode.is_decode():
                query_start = torch.nn.functional.pad(torch.cumsum(forward.extend_seq_lens, 0), (1, 0))
            books.verify(
                table=self.table,
                rows=rows,
                lengths=forward.seq_lens,
                enforce=enforce,
                record=words.record,
                slot_mapping=forward.out_cache_loc,
                query_start=query_start,
                writes=words.writes if self._checks_writes else None,
                reads=reads,
            )
        step = self._step = host.step = self._step + 1
        self._in_flight += 1
        self.ran = True
        if self._in_flight > self.guard.config.steps_in_flight_max and not self._late:
            self._late = True
            emit("heartbeat_lost", severity="critical", in_flight=self._in_flight, step=step)
        host.counters.steps_seen += 1
        host.counters.rows_seen += count
        return PendingStep(step, words, count, operations, enforce)

    def _require_armed(self) -> None:
        if not self.guard.armed and self.guard.config.on_guard_error == "abort":
            raise GuardFault("kvguard has failed and on_guard_error is abort: nothing unproven may leave")

    # -- its verdict ----------------------------------------------------------------------------------------------

    def judge(self, batch: Any, pending: PendingStep) -> None:
        """Act on a step's verdict: requests whose proof failed end, with none of this step's tokens."""
        self._in_flight -= 1
        self._late = self._late and self._in_flight > self.guard.config.steps_in_flight_max
        with self._contained:
            self._judge(batch, pending)
        if not self.guard.armed:
            self._require_armed()

    def _judge(self, batch: Any, pending: PendingStep) -> None:
        words, rows = pending.words, pending.rows
        words.arrive()
        if rows < len(batch.reqs):
            raise RuntimeError(f"step {pending.step}: {rows} rows were checked of {len(batch.reqs)} requests")
        verified = not words.found.any() or self._judge_closely(batch, pending)
        self._words.give_back(words)
        if not verified:
            return
        counters = self._host_books.counters
        counters.steps_verified += 1
        counters.rows_verified += rows

    def _judge_closely(self, batch: Any, pending: PendingStep) -> bool:
        """Something was found, or not looked for; whether the step was verified at all."""
        found, rows = pending.words.found, pending.rows
        if found[-1] < 0:
            if self.guard.armed:
                raise RuntimeError(f"step {pending.step}: the guard of another rank has failed")
            return False
        if self._checks and (found[:rows] == layout.NOT_CHECKED).any():
            raise RuntimeError(f"step {pending.step}: no verdict for some rows; the verification did not run")
        try:
            self._act(batch, pending, pending.words.host)
        except Exception as error:
            if self._checks and pending.enforce and not isinstance(error, GuardHalt):
                self._end_unexplained(batch, np.flatnonzero(found[:rows] > 0))
            raise
        return True

    def _end_unexplained(self, batch: Any, flagged: Any) -> None:
        """The guard failed while it looked for what is wrong with these rows: their tokens must not leave for that."""
        for _, req in self._of_rows(batch, flagged):
            self._abort(batch, req, f"kvguard: a KV page of request {req.rid} failed its proof; aborted")

    def _of_rows(self, batch: Any, rows: Any) -> Iterator[tuple[int, Any]]:
        """Rows of a step with their requests, without those that ended or were retracted since: they take no tokens."""
        for row in rows:
            req = batch.reqs[row] if row < len(batch.reqs) else None
            if req is not None and not (req.finished() or req.is_retracted or id(req) in self.condemned):
                yield row, req

    def _act(self, batch: Any, pending: PendingStep, words: Any) -> None:
        rows = pending.rows
        halted = self.report(pending.operations, words[pending.words.verdicts :], pending.enforce)
        if words[-1, 0] and pending.enforce:
            self.start_audits()
        writes = words[rows : pending.words.verdicts]
        if writes[-1, 0] > 0:
            violation = self._padding_violation(pending, writes[-1])
            halted = violation if violation.action is Action.HALTED else halted
        flagged = np.flatnonzero((words[:rows, 0] > 0) | (writes[:-1, 0] > 0))
        for row, req in self._of_rows(batch, flagged):
            violation = self._violation_of(pending, req, words[row], writes[row])
            if pending.enforce:
                self.start_audits()
                self._abort(batch, req, violation.message)
                if violation.action is Action.HALTED:
                    halted = violation
        if halted is not None:
            raise GuardHalt(halted)

    def report(self, operations: list[Operation], events: Any, enforce: bool) -> Violation | None:
        """Allocations and frees that were wrong; they have taken effect by now. Returns one that halts the engine."""
        halted = None
        for operation, event in zip(operations, events, strict=False):
            code, page, at = (int(word) for word in event[:3])
            if not code:
                continue
            if enforce:
                self.start_audits()
            if code == CONTENT:
                found = self._content_event(operation, page, at, enforce)
                halted = found if found is not None and found.action is Action.HALTED else halted
                continue
            if not self._reports_events:
                continue
            violation = self._control_violation(
                EVENT_KINDS[code],
                page,
                f"{operation.what}: found on the device after it had taken effect; the rows that read the page are "
                "checked",
                enforce,
                pool=operation.pool,
                request=operation.names(at) if operation.names is not None else None,
            )
            if violation.action is Action.HALTED:
                halted = violation
        return halted

    def free_list_wrong(self, kind: Kind, page: int, detail: str) -> None:
        """Found when nobody runs; the cache is emptied next, which puts it right."""
        if not self._reports_events:
            return
        violation = self._control_violation(kind, page, detail, self.enforcing)
        if violation.action is Action.HALTED:
            raise GuardHalt(violation)

    def _abort(self, batch: Any, req: Any, message: str) -> None:
        """End the request: its tokens up to the last proven step stand, this step's is dropped."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        reason = FINISH_ABORT(message, STATUS, ERROR_TYPE)
        self.condemn(req)
        req.skip_radix_cache_insert = True
        if batch.forward_mode.is_decode():
            # SGLang still appends the token; what lies past `finished_len` is never sent.
            req.to_finish, req.finished_len = reason, len(req.output_ids)
            # Nor may what the token was sampled from, or what other requests' slots in its row stand for.
            req.return_hidden_states = req.return_routed_experts = req.return_indexer_topk = False
            if getattr(req, "sampling_mask_rows", None) is not None:
                req.sampling_mask_rows = _Closed(req.sampling_mask_rows)
            return
        req.discard_output_reason = reason
        # Only while it is the one: of any other SGLang would end all whose ids begin with this one's.
        if self.scheduler.chunked_req is req:
            self.scheduler._pending_chunked_abort_req = req
