"""One run of the traffic through a live SGLang scheduler, looked at through the scheduler's own calls.

A step is one iteration of the scheduler's loop; a token is known by the step of the forward that computed it, also in
the overlap loop, where it leaves one step later. Faults are injected right before `get_next_batch_to_run`: in the
overlap loop the forward launched before is then still to be judged, but has read what it reads.
"""

from __future__ import annotations

from typing import Any

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.faults.pages import FreedUnderUsers, Injection, PageFault, RowFault
from kvguard.fault_injection.faults.write_fault import PATIENCE_STEPS, WriteFault
from kvguard.fault_injection.mixed_traffic import returning
from kvguard.fault_injection.runs import MAX_STEPS, Run, first_step
from kvguard.fault_injection.targets.sglang import SglangTarget
from kvguard.fault_injection.targets.sglang_engine import Done, SglangEngine, abort_request, generate_request
from kvguard.fault_injection.traffic import Arrival

LEFT = "aborted by the client"
UNANSWERED = "never answered"
IDLE_STEPS = 3
"""Iterations with nothing to do at the end of a run: SGLang then checks its accounting."""


class WatchedRun:
    """Drives the scheduler and fills a Run. Its functions stand outside of the guard's: they see what it let by."""

    def __init__(
        self,
        engine: SglangEngine,
        arrivals: list[Arrival],
        *,
        recites: bool,
        fault: type[PageFault] | None = None,
        fault_seed: int = 0,
        client_aborts: dict[str, int] | None = None,
    ) -> None:
        self.run = Run()
        self.handed_out: dict[int, int] = {}
        self.last_taker: dict[int, str] = {}
        self._engine, self._scheduler, self._guard = engine, engine.scheduler, engine.guard
        self._arrivals = sorted(arrivals, key=lambda arrival: (arrival.step, arrival.request.id))
        self._fault, self._seed = fault, fault_seed
        self._tenants = {arrival.request.id for arrival in arrivals if arrival.request.tenant}
        self._returning = returning(arrivals)
        self._broken_by: type[PageFault] = fault or PageFault
        self._first = first_step(fault, fault_seed) if fault is not None else 0
        self._may_break = fault is not None
        self._client_aborts = client_aborts or {}
        self._target = SglangTarget(engine.scheduler, self, recites=recites)
        self._step = self._judged = self._processed = self._idle = self._position = self._handed_out_before = 0
        self._step_of: dict[int, int] = {}
        self._writers: dict[int, tuple[int, str]] = {}
        self._stale: set[tuple[int, Any]] = set()
        self._left: dict[str, list[tuple[int, int]]] = {}
        self._errors: dict[str, str | None] = {}
        self._gone: set[str] = set()
        self._wrap()

    # -- looking on -----------------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        scheduler, counts = self._scheduler, self.run.counts
        plan_next, process = scheduler.get_next_batch_to_run, scheduler.process_batch_result
        enqueue, note_eviction = scheduler._add_request_to_queue, scheduler.tree_cache.update_eviction_metrics

        def watched_plan(*args: Any, **kwargs: Any) -> Any:
            self._inject()
            chunked = scheduler.chunked_req
            plan = plan_next(*args, **kwargs)
            batch = plan.batch_to_run
            if batch is not None:
                counts.steps += 1
                self._step_of[scheduler.forward_ct + 1] = self._step
                self._launch(batch, chunked)
            self._note_detection(self._step)
            return plan

        def watched_process(batch: Any, result: Any) -> Any:
            self._processed = step = self._step_of[batch.forward_iter]
            for request in batch.reqs:
                if self._client_aborts.get(request.rid) == step and not request.finished():
                    self._end(request)
            value = process(batch, result)
            self._judged = step
            self._note_detection(step)
            return value

        def watched_enqueue(request: Any, is_retracted: bool = False, **kwargs: Any) -> Any:
            counts.preemptions += is_retracted
            return enqueue(request, is_retracted=is_retracted, **kwargs)

        def watched_eviction(tokens: int, *args: Any, **kwargs: Any) -> Any:
            counts.evictions += tokens > 0
            return note_eviction(tokens, *args, **kwargs)

        scheduler.get_next_batch_to_run, scheduler.process_batch_result = watched_plan, watched_process
        scheduler._add_request_to_queue = watched_enqueue
        scheduler.tree_cache.update_eviction_metrics = watched_eviction
        self._wrap_forward()
        _wrap_round(self._engine)

    def _wrap_forward(self) -> None:
        """Slots are misled where SGLang has made them, before the guard's hook on the same call sees them."""
        runner, target = self._scheduler.tp_worker.model_runner, self._target
        forward = runner.forward

        def watched_forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if batch.forward_mode.is_idle():
                return forward(batch, *args, **kwargs)
            target.forward = batch
            slots = tuple(batch.out_cache_loc.tolist())
            self._mislead()
            target.last = slots
            return forward(batch, *args, **kwargs)

        runner.forward = watched_forward

    def _made(self, fault: type[PageFault]) -> PageFault:
        if issubclass(fault, WriteFault):
            patient = self._step < self._first + PATIENCE_STEPS
            return fault(seed=self._seed, target=self._target, patient=patient)
        return fault(seed=self._seed, target=self._target)

    def _mislead(self) -> None:
        run, fault = self.run, self._fault
        if fault is None or not issubclass(fault, WriteFault) or self._step < self._first:
            return
        if run.injection is None:
            # Each of SGLANG_WRITE_FAULTS goes in here, right before a forward.
            run.injection = self._made(fault).inject()
            if run.injection is not None:
                run.injected_step = run.live_step = self._step
                run.affected = run.injection.affected()

    def _end(self, request: Any) -> None:
        """Where the guard would end it: with this step's result, and without leaving anything in the tree."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        request.to_finish = FINISH_ABORT()
        request.skip_radix_cache_insert = True
        self._gone.add(request.rid)

    def _inject(self) -> None:
        run = self.run
        if self._fault is None or run.injection is not None or self._step < self._first:
            return
        made = self._made(self._fault)
        if isinstance(made, WriteFault):
            made.prepare()
            return
        run.injection = made.inject()
        if run.injection is not None:
            run.injected_step = self._step
            self._handed_out_before = self.handed_out.get(run.injection.page, 0)
            self._note_stale_keys(run.injection)
            self._note_detection(self._step)

    def _launch(self, batch: Any, chunked: Any) -> None:
        """The step's forward comes next: note who got which page, who took what, whether the fault is live for it."""
        run, size = self.run, self._target.page_size
        extends = batch.forward_mode.is_extend()
        lengths = batch.extend_lens if extends else [1] * len(batch.reqs)
        slots, start = batch.out_cache_loc.tolist(), 0
        for index, (request, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            if extends and request is not chunked:
                self._adopt(request, batch.prefix_lens[index])
            for slot in slots[start : start + length]:
                page = slot // size
                if slot % size == 0:
                    self.handed_out[page] = self.handed_out.get(page, 0) + 1
                    self.last_taker[page] = request.rid
                # A wild write promises nothing to those who take the page from the tree for what its owner wrote.
                if self.last_taker.get(page) == request.rid:
                    self._writers[page] = (self._step, request.rid)
            start += length
        self._target.planned = batch
        if run.injection is None:
            return
        if run.live_step < 0:
            if self._is_live(run.injection, frozenset(request.rid for request in batch.reqs)):
                run.live_step = self._step
                run.affected = self._readers(run.injection)
        else:
            # The tree may lead others to the page for as long as it names it.
            run.affected |= self._readers(run.injection)
        self._target.planned = None

    def _is_live(self, injection: Injection, scheduled: frozenset[str]) -> bool:
        """Also where the first reader is no victim of the injection: the tree goes on leading others to the page."""
        if injection.live_when(scheduled):
            return True
        taken = self.handed_out.get(injection.page, 0) > self._handed_out_before
        broken = taken or (issubclass(self._broken_by, FreedUnderUsers) and self._target.is_free(injection.page))
        return broken and not issubclass(self._broken_by, RowFault) and bool(scheduled & self._readers(injection))

    def _adopt(self, request: Any, tokens: int) -> None:
        counts = self.run.counts
        counts.prefix_hits += tokens > 0
        counts.tenant_hits += tokens > 0 and request.rid in self._tenants
        counts.returns += tokens == 0 and not request.output_ids and request.rid in self._returning
        row = self._scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        for slot in row[: tokens : self._target.page_size].tolist():
            step, writer = self._writers.get(slot // self._target.page_size, (0, ""))
            if step > self._judged and writer != request.rid:
                self.run.promised_adoptions.append((step, request.rid, writer))
                self.run.counts.promised_hits += 1
            injection = self.run.injection
            if injection is not None and slot // self._target.page_size == injection.page:
                self.run.involved |= {request.rid}

    def _note_stale_keys(self, injection: Injection) -> None:
        """What the tree names the bad page for, now and from now on."""
        if injection.cache_key is not None:
            self._stale.add((injection.column, injection.cache_key))
        for request in self._target.running():
            if request.id in injection.victims and injection.page in request.pages:
                column = request.pages.index(injection.page)
                self._stale |= {(column, key) for key in request.prefix_keys[column : column + 1]}

    def _readers(self, injection: Injection) -> frozenset[str]:
        """Who reads the bad page for what it held. Who was given it may hold it, and share it for what it wrote."""
        page, listing = injection.page, injection.affected()
        return frozenset(
            request.id
            for request in self._target.running()
            if request.id in listing
            and (
                request.id in injection.victims
                or any(
                    request.pages[c : c + 1] == (page,) and request.prefix_keys[c : c + 1] == (k,)
                    for c, k in self._stale
                )
            )
        )

    def _note_detection(self, step: int) -> None:
        if self._guard is not None and self.run.detected_step < 0 and self._guard.violations:
            self.run.detected_step = step

    # -- driving --------------------------------------------------------------------------------------------------

    def drive(self) -> Run:
        """Serve all arrivals. What the engine raises is passed on."""
        try:
            self._engine.serve(self._receive, self._sent)
        finally:
            self._note_outputs()
        return self.run

    def finish(self) -> None:
        """The run is over, whatever ended it."""

    def _note_outputs(self) -> None:
        """What clients have; also of an engine that fell over, whose other clients never get an answer."""
        run = self.run
        for arrival in self._arrivals:
            name = arrival.request.id
            left = self._left.get(name, [])
            error = self._errors.get(name) if name in run.ended_step else UNANSWERED
            run.outputs[name] = (tuple(token for _, token in left), LEFT if name in self._gone else error)
            run.emitted[name] = tuple(step for step, _ in left)

    def _receive(self) -> list[Any]:
        self._count_idle()
        if self._step >= MAX_STEPS:
            self.run.crash = f"not done after {MAX_STEPS} steps"
            raise Done
        arrived: list[Any] = []
        while self._position < len(self._arrivals) and self._arrivals[self._position].step <= self._step:
            request = self._arrivals[self._position].request
            arrived.append(self._message(request, ignore_eos=self._engine.options.conservativeness >= 1))
            self._errors[request.id] = None
            self._position += 1
        for arrival in self._arrivals:
            name = arrival.request.id
            if arrival.abort_step == self._step and name in self._errors and name not in self.run.ended_step:
                self.run.counts.client_aborts += 1
                self._gone.add(name)
                arrived.append(abort_request(name))
        self._step += 1
        return arrived

    def _message(self, request: Request, *, ignore_eos: bool) -> Any:
        """What the tokenizer's process would send for this request."""
        return generate_request(
            request.id, request.prompt, request.max_new_tokens, ignore_eos=ignore_eos, tenant=request.tenant
        )

    def _count_idle(self) -> None:
        """Raise Done once everybody has an answer, and SGLang has looked at its accounting.

        Not after a fault without a guard: that SGLang would then stop itself is known, and says nothing of outputs.
        """
        if self._position < len(self._arrivals) or len(self.run.ended_step) < len(self._errors):
            return
        unguarded_fault = self._may_break and self._guard is None
        if unguarded_fault or self._idle >= IDLE_STEPS:
            raise Done
        self._idle += self._scheduler.is_fully_idle()

    def _sent(self, output: Any) -> None:
        """What would go to the detokenizer's or the tokenizer's process."""
        if not hasattr(output, "rids"):
            if hasattr(output, "finished_reason"):
                self._over(output.rid, output.finished_reason or {"type": "abort"})
            return
        for name, tokens, finished in zip(output.rids, output.output_ids or (), output.finished_reasons, strict=False):
            self._left.setdefault(name, []).extend((self._processed, int(token)) for token in tokens)
            if finished is not None:
                self._over(name, finished)

    def _over(self, name: str, finished: dict[str, Any]) -> None:
        self.run.ended_step[name] = self._processed
        if finished["type"] not in ("length", "stop"):
            self._errors[name] = str(finished.get("message") or finished["type"])


def _wrap_round(engine: SglangEngine) -> None:
    """Entries outside of the pool land in somebody's memory, as with a GPU's unchecked pointer arithmetic.

    On a CPU PyTorch would refuse them. It happens right around the model, after the guard has seen the entries as they
    are, and the rows are put back afterwards; it is the same in every run.
    """
    runner = engine.scheduler.tp_worker.model_runner
    forward, rows, slots = runner.model.forward, engine.scheduler.req_to_token_pool.req_to_token, engine.pool_slots

    def wrapped(input_ids: Any, positions: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        written = batch.out_cache_loc
        written[written != written % slots] %= slots
        before = rows[batch.req_pool_indices].clone()
        rows[batch.req_pool_indices] = before % slots
        try:
            return forward(input_ids, positions, batch, *args, **kwargs)
        finally:
            rows[batch.req_pool_indices] = before

    runner.model.forward = wrapped
