"""One run of the traffic through a live vLLM engine, looked at through the engine's own calls.

A step is one call of `Scheduler.schedule`; its number rides on the SchedulerOutput, so that a token is known by the
forward that computed it, also with asynchronous scheduling, where it leaves one step later. Faults are injected right
before `schedule`: with asynchronous scheduling the forward launched before is then still in flight, and not affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.faults.pages import PageFault
from kvguard.fault_injection.mixed_traffic import returning
from kvguard.fault_injection.runs import MAX_STEPS, Run, first_step
from kvguard.fault_injection.targets.vllm import VllmTarget, client_name
from kvguard.fault_injection.targets.vllm_step import PreparedStep, StepHook
from kvguard.fault_injection.targets.vllm_writes import VllmWriteFault
from kvguard.fault_injection.traffic import Arrival

LEFT = "aborted by the client"


class WatchedRun:
    """Drives the engine and fills a Run. Its functions stand outside of the guard's: they see what the guard let by."""

    def __init__(
        self,
        engine: Any,
        arrivals: list[Arrival],
        *,
        recites: bool,
        fault: type[PageFault] | None = None,
        fault_seed: int = 0,
        client_aborts: dict[str, int] | None = None,
        guard: Any = None,
        hook: StepHook | None = None,
    ) -> None:
        """`hook`: set on the engine before the guard; needed for a fault of what a step writes."""
        self.run = Run()
        self.handed_out: dict[int, int] = {}
        self.last_taker: dict[int, str] = {}
        self._engine, self._scheduler = engine, engine.scheduler
        self._manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self._arrivals = sorted(arrivals, key=lambda arrival: (arrival.step, arrival.request.id))
        self._tenants = {arrival.request.id for arrival in arrivals if arrival.request.tenant}
        self._returning = returning(arrivals)
        self._fault, self._seed, self._guard = fault, fault_seed, guard
        self._first = first_step(fault, fault_seed) if fault is not None else 0
        self._client_aborts = client_aborts or {}
        self._target = VllmTarget(engine, self, recites=recites)
        self._step = self._judged = 0
        self._taker = ""
        self._taking = False
        self._publications: dict[int, tuple[int, str]] = {}
        self._left: dict[str, list[tuple[int, int]]] = {}
        if hook is not None and fault is not None and issubclass(fault, VllmWriteFault):
            hook.action = self._mislead
        self._wrap()

    # -- looking on -----------------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        scheduler, pool, single = self._scheduler, self._engine.pool, self._manager
        schedule, update, preempt = scheduler.schedule, scheduler.update_from_output, scheduler._preempt_request
        get_new_blocks, evict, publish = pool.get_new_blocks, pool._maybe_evict_cached_block, pool.cache_full_blocks
        allocate = single.allocate_new_blocks
        counts = self.run.counts

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            self._inject()
            output = schedule(*args, **kwargs)
            output._campaign_step = self._step
            if output.num_scheduled_tokens:
                counts.steps += 1
                self._launch(output)
            self._note_detection(self._step)
            return output

        def watched_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            step = output._campaign_step
            leaving = [name for name, at in self._client_aborts.items() if at == step]
            if leaving:
                self._leave(leaving)
            result = update(output, *args, **kwargs)
            self._judged = step
            self._note_detection(step)
            for outputs in result.values():
                for core_output in outputs.outputs:
                    name = client_name(core_output.request_id)
                    self._left.setdefault(name, []).extend((step, token) for token in core_output.new_token_ids)
                    if core_output.finish_reason is not None:
                        self.run.ended_step[name] = step
            return result

        def watched_preempt(*args: Any, **kwargs: Any) -> Any:
            counts.preemptions += 1
            return preempt(*args, **kwargs)

        def watched_get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            self._taking = True
            blocks = get_new_blocks(*args, **kwargs)
            self._taking = False
            for block in blocks:
                self.handed_out[block.block_id] = self.handed_out.get(block.block_id, 0) + 1
                self.last_taker[block.block_id] = self._taker
            return blocks

        def watched_evict(*args: Any, **kwargs: Any) -> Any:
            evicted = evict(*args, **kwargs)
            counts.evictions += bool(evicted and self._taking)
            return evicted

        def watched_publish(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
        ) -> Any:
            result = publish(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            for block in blocks[num_cached_blocks:num_full_blocks]:
                if block.block_hash is not None:
                    self._publications[block.block_id] = (self._step, client_name(request.request_id))
            return result

        def watched_allocate(request_id: str, *args: Any, **kwargs: Any) -> Any:
            self._taker = client_name(request_id)
            return allocate(request_id, *args, **kwargs)

        scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update
        scheduler._preempt_request = watched_preempt
        pool.get_new_blocks, pool._maybe_evict_cached_block = watched_get_new_blocks, watched_evict
        pool.cache_full_blocks, single.allocate_new_blocks = watched_publish, watched_allocate
        _wrap_round(self._engine)

    def _inject(self) -> None:
        run = self.run
        if self._fault is None or run.injection is not None:
            return
        if issubclass(self._fault, VllmWriteFault):
            self._fault.prepare(self._target)
            return
        if self._step < self._first:
            return
        run.injection = self._fault(seed=self._seed, target=self._target).inject()
        if run.injection is not None:
            run.injected_step = self._step
            self._note_detection(self._step)

    def _mislead(self, step: PreparedStep) -> None:
        """The forward of this step comes next, its slots are computed, and no guard has looked at them yet."""
        run, fault = self.run, self._fault
        if fault is None or not issubclass(fault, VllmWriteFault) or run.injection or self._step < self._first:
            return
        run.injection = fault(seed=self._seed, target=self._target, step=step).inject()
        if run.injection is not None:
            run.injected_step = run.live_step = self._step
            run.affected = run.injection.affected()

    def _launch(self, output: Any) -> None:
        """The step's forward comes next: note whether the fault is live for it, and who took promised pages."""
        run, cached = self.run, output.scheduled_cached_reqs
        for request_id, tokens in self._admitted(output).items():
            run.counts.prefix_hits += tokens > 0
            run.counts.tenant_hits += tokens > 0 and client_name(request_id) in self._tenants
            resumes = request_id in cached.resumed_req_ids
            run.counts.returns += tokens == 0 and not resumes and client_name(request_id) in self._returning
            for block in self._manager.req_to_blocks[request_id][: tokens // self._target.page_size]:
                step, writer = self._publications.get(block.block_id, (0, ""))
                if step > self._judged and writer != client_name(request_id):
                    run.promised_adoptions.append((step, client_name(request_id), writer))
                    run.counts.promised_hits += 1
        if run.injection is None:
            return
        if run.live_step < 0:
            scheduled = frozenset(client_name(name) for name in output.num_scheduled_tokens)
            if run.injection.live_when(scheduled):
                run.live_step = self._step
                run.affected = run.injection.affected()
        elif run.live_step > self._judged and run.injection.cache_key is not None:
            # Until the verdict on the live step is back, others may follow the same stale entry. A page that was handed
            # out anew is another matter: who takes it from the cache then takes what its new owner wrote.
            run.affected |= run.injection.affected()

    def _admitted(self, output: Any) -> dict[str, int]:
        """Requests that start or resume with this step, and how many tokens they found cached."""
        admitted = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        resumed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        return admitted | {name: tokens for name, tokens in resumed if name in cached.resumed_req_ids}

    def _prompt(self, request: Request) -> dict[str, Any]:
        """What the client sends."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt)}
        return prompt | {"cache_salt": request.tenant} if request.tenant else prompt

    def _note_detection(self, step: int) -> None:
        if self._guard is not None and self.run.detected_step < 0 and self._guard.violations:
            self.run.detected_step = step

    # -- driving --------------------------------------------------------------------------------------------------

    def drive(self) -> Run:
        """Serve all arrivals. What the engine raises is passed on."""
        from vllm import SamplingParams

        run, llm, position = self.run, self._engine.llm_engine, 0
        answers: dict[str, tuple[int, ...]] = {}
        errors: dict[str, str | None] = {}
        while position < len(self._arrivals) or self._scheduler.has_requests() or self._engine.core.batch_queue:
            while position < len(self._arrivals) and self._arrivals[position].step <= self._step:
                request = self._arrivals[position].request
                parameters = SamplingParams(
                    max_tokens=request.max_new_tokens, temperature=0, ignore_eos=True, detokenize=False
                )
                llm.add_request(request.id, self._prompt(request), parameters)
                answers[request.id], errors[request.id] = (), None
                position += 1
            leaving = [a.request.id for a in self._arrivals if a.abort_step == self._step]
            self._leave([name for name in leaving if name in answers])
            if self._step >= MAX_STEPS:
                run.crash = f"not done after {MAX_STEPS} steps"
                return run
            self._step += 1
            for output in llm.step():
                answer = output.outputs[0]
                answers[output.request_id] = tuple(answer.token_ids)
                if answer.finish_reason not in (None, "length"):
                    errors[output.request_id] = f"{answer.stop_reason or answer.finish_reason}"
        for name, tokens in answers.items():
            left = self._left.get(name, [])
            error = LEFT if self.run.ended_step.get(name) is None else errors[name]
            run.outputs[name] = (tokens if error != LEFT else tuple(token for _, token in left), error)
            run.emitted[name] = tuple(step for step, _ in left)
            if run.outputs[name][0] != tuple(token for _, token in left):
                raise RuntimeError(f"{name}: the client got {tokens}, the engine core gave {left}")
        return run

    def _leave(self, names: list[str]) -> None:
        """Clients go away."""
        here = [name for name in names if any(client_name(left) == name for left in self._scheduler.requests)]
        self.run.counts.client_aborts += len(here)
        if here:
            self._engine.llm_engine.abort_request(here)


def _wrap_round(engine: Any) -> None:
    """Entries outside of the pool land in somebody's memory, as with a GPU's unchecked pointer arithmetic.

    On a CPU they might as well hit an unmapped address and end the campaign. It happens after the guard has seen the
    entries as they are, and is the same in every run.
    """
    pages = int(engine.pool.num_gpu_blocks)
    size = int(engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].block_size)

    def wrap(table: Any, slots: Any) -> None:
        outside = (table < 0) | (table >= pages)
        if outside.any():
            table[outside] = table[outside] % pages
        # -1 stands for "do not write".
        outside = (slots < -1) | (slots >= pages * size)
        if outside.any():
            slots[outside] = slots[outside] % (pages * size)

    runner = engine.runner
    prepare: Callable[..., Any]
    if engine.options.runner == "v2":
        prepare = runner.prepare_attn

        def prepared(*args: Any, **kwargs: Any) -> Any:
            tables, slots = result = prepare(*args, **kwargs)
            wrap(tables[0], slots[0])
            return result

        runner.prepare_attn = prepared
        return
    # The guard looks after this call.
    prepare = runner._get_slot_mappings

    def prepared_v1(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        table = runner.input_batch.block_table.block_tables[0]
        wrap(table.block_table.gpu, table.slot_mapping.gpu)
        return result

    runner._get_slot_mappings = prepared_v1
