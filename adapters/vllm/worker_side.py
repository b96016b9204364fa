"""The check, next to vLLM's model runner, in the worker process.

The runner hands over the very tensors that attention is about to read and write through, after they were brought up to
date, padding lanes included, and before the forward is launched. Nothing here waits for the device; verdicts are read
where vLLM reads the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_not
from typing import Any, NamedTuple

from kvguard.adapters.vllm.block_books import StepPayload
from kvguard.adapters.vllm.layout import Unsupported, check_backends, describe_tables_v1, describe_tables_v2
from kvguard.adapters.vllm.ranks import RankVerdicts
from kvguard.pools import GuardSetup
from kvguard.telemetry import emit
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier

VIEWS_MAX = 1024


class BatchTensors(NamedTuple):
    """A step as the runner has prepared it, in the runner's own tensors, one of `tables` and `slots` per KV group.

    tables       int32 [table rows, columns]
    slots        int64 [tokens]: those of the step, then its padding lanes
    query_start  int32 [batch rows + 1]; lengths int32 [batch rows]: KV length after the step
    """

    tables: Sequence[Any]
    slots: Sequence[Any]
    query_start: Any
    lengths: Any


class WorkerSide:
    """One model runner's verifier. Subclasses know where their runner keeps what attention reads."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._verifier: Verifier | None = None
        self._ranks: RankVerdicts | None = None
        self._setup: GuardSetup | None = None
        self._names: list[str] = []
        self._given: list[Any] = []
        self._inputs: dict[str, PoolInputs] = {}
        self._requests: tuple[str, ...] = ()
        self._rows: list[int] = []
        """The place of each request of the last step, in tables and batch."""
        self._payload: StepPayload | None = None
        self._pending: PendingVerdicts | None = None
        self._trouble = ""
        self._views: dict[tuple[Any, int], tuple[Any, Any]] = {}
        self._last: Any = None
        """How the last step stood when it was checked: see `_looks_as`."""
        runner.execute_model = self._executing(runner.execute_model)
        for name in ("sample_tokens", "pool"):
            if hasattr(runner, name):
                setattr(runner, name, self._answering(getattr(runner, name)))

    def _executing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._payload = getattr(scheduler_output, "_kvguard", None)
            self._pending = None
            result = original(scheduler_output, *args, **kwargs)
            # Pooling models of runner V1 answer here; generating ones answer None and sample later.
            if self._pending is not None and (hasattr(result, "req_ids") or hasattr(result, "get_output")):
                return self._deliver(result)
            return result

        return guarded

    def _answering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # Taken before the call: with asynchronous scheduling the next step starts before this one is read.
            pending, self._pending = self._pending, None
            output = original(*args, **kwargs)
            self._pending = pending
            return self._deliver(output)

        return guarded

    def _verify(self, *prepared: Any) -> None:
        """Check the step that the runner has prepared. A fault of the guard does not surface in vLLM."""
        payload, self._payload = self._payload, None
        if payload is None:
            return
        if payload.setup is not None and payload.setup is not self._setup:
            self._setup, self._verifier, self._trouble = payload.setup, None, ""
        pending = None
        if not self._trouble:
            try:
                pending = self._checked(payload, *prepared)
            except Exception as error:
                self._fail(error)
        if self._setup is not None and (self._setup.check or self._setup.check_writes):
            try:
                # Launched on every rank in every step: one whose guard failed must not leave the others waiting.
                pending = self._combined(pending, payload)
            except Exception as error:
                pending = None
                self._fail(error)
        self._pending = pending

    def _checked(self, payload: StepPayload, *prepared: Any) -> PendingVerdicts:
        last, self._last = self._last, None
        delta, verifier = payload.delta, self._verifier
        if last is None or verifier is None or not self._looks_as(last, *prepared):
            pending = self._check(payload, *self._look_at(*prepared))
            self._last = self._look(*prepared)
            return pending
        found: PendingVerdicts | None = None
        if delta.again:
            found = verifier.check_again(delta)
        elif delta.requests == self._requests:
            found = verifier.check_further(delta)
        if found is None:
            if delta.requests == self._requests:
                found = verifier.check(delta, self._inputs, table_rows=self._rows)
            else:
                found = self._check(payload, *self._look_at(*prepared))
        self._last = last
        return found

    def _fail(self, error: Exception) -> None:
        self._trouble = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
        emit("guard_fault", severity="critical", where="worker", error=self._trouble)

    def _combined(self, pending: PendingVerdicts | None, payload: StepPayload) -> PendingVerdicts | None:
        if self._ranks is None:
            assert self._setup is not None
            self._ranks = RankVerdicts(self._runner.device, self._setup)
        if self._ranks.here_already:
            return pending
        combined = self._ranks.combine(pending, payload.delta)
        return None if combined is None else combined.depart()

    def _look_at(self, *prepared: Any) -> tuple[Mapping[str, int], BatchTensors]:
        """Each request's row, the same in tables and batch, and the tensors of the step that `_verify` was told of."""
        raise NotImplementedError

    def _look(self, *prepared: Any) -> Any:
        """What `_looks_as` compares a later step with."""
        raise NotImplementedError

    def _looks_as(self, last: Any, *prepared: Any) -> bool:
        """Whether `_look_at` would answer what it did then: the same places, tensors of the same memory and shapes."""
        raise NotImplementedError

    def _check(self, payload: StepPayload, place_of: Mapping[str, int], batch: BatchTensors) -> PendingVerdicts:
        if self._verifier is None:
            self._verifier = self._make_verifier()
        self._requests = payload.delta.requests
        rows = self._rows = list(map(place_of.__getitem__, self._requests))
        tables, slots, query_start, lengths = batch
        given = [*tables, *slots, query_start, lengths]
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            self._given = given
            self._inputs = {
                name: PoolInputs(
                    table=table, slot_mapping=slot, query_start=query_start, lengths=lengths, place_is_row=True
                )
                for name, table, slot in zip(self._names, tables, slots, strict=True)
            }
        return self._verifier.check(payload.delta, self._inputs, table_rows=rows)

    def _first_of(self, buffer: Any, count: int, use: Any) -> Any:
        """The same view of one of the runner's own buffers for the same number of its first elements."""
        kept = self._views.get((use, count))
        if kept is None or kept[0] is not buffer:
            if len(self._views) >= VIEWS_MAX:
                self._views.clear()
            kept = self._views[use, count] = (buffer, buffer[:count])
        return kept[1]

    def _make_verifier(self) -> Verifier:
        if self._setup is None:
            raise Unsupported("the first step that this worker saw carried no set-up")
        check_backends(self._runner)
        sizes = self._block_sizes()
        if len(sizes) != len(self._setup.pools):
            raise Unsupported(
                f"{len(sizes)} block tables in the worker, {len(self._setup.pools)} groups in the scheduler"
            )
        pools = []
        for pool, size in zip(self._setup.pools, sizes, strict=True):
            # Attention may be given smaller blocks than the scheduler allocates: the worker knows by how much.
            whole = pool.page_size or size
            if whole % size:
                raise Unsupported(f"{pool.name}: kernel blocks of {size} tokens do not divide blocks of {whole}")
            pools.append(replace(pool, split=whole // size))
        self._names = [pool.name for pool in pools]
        return Verifier(replace(self._setup, pools=tuple(pools)), device=self._runner.device)

    def _block_sizes(self) -> list[int]:
        """Tokens per table entry, one per KV group. Raises Unsupported if the tables do not look as expected."""
        raise NotImplementedError

    def _deliver(self, output: Any) -> Any:
        """Let the step's verdicts ride on vLLM's own answer."""
        pending, self._pending = self._pending, None
        trouble = self._trouble
        if output is None or (pending is None and not trouble):
            return output
        if self._ranks is not None and not self._ranks.answers:
            return output

        def attach(result: Any) -> Any:
            if trouble:
                result._kvguard_trouble = trouble
            if pending is not None:
                result._kvguard = pending.resolve()
            return result

        if not hasattr(output, "get_output"):
            return attach(output)
        # The verdicts are read where the sampled tokens are, not before.
        get_output = output.get_output
        output.get_output = lambda: attach(get_output())
        return output


class WorkerSideV1(WorkerSide):
    """For vLLM's runner V1 (`vllm.v1.worker.gpu_model_runner`).

    The check follows `_get_slot_mappings`: what lies behind a step's tokens is stale until that has filled it.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        get_slot_mappings = runner._get_slot_mappings

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = get_slot_mappings(*args, **kwargs)
            if self._payload is not None:
                self._verify(result[0])
            return result

        runner._get_slot_mappings = guarded

    def _look_at(self, *prepared: Any) -> tuple[Mapping[str, int], BatchTensors]:
        """`prepared`: the slot mapping of each KV group, by its index, cut to the step's tokens and padding lanes."""
        runner, (slots,) = self._runner, prepared
        batch = runner.input_batch
        tables, requests = batch.block_table.block_tables, batch.num_reqs
        tensors = BatchTensors(
            [table.block_table.gpu for table in tables],
            [
                self._first_of(table.slot_mapping.gpu, slots[group].shape[0], group)
                for group, table in enumerate(tables)
            ],
            self._first_of(runner.query_start_loc.gpu, requests + 1, "start"),
            self._first_of(runner.seq_lens, requests, "lengths"),
        )
        return batch.req_id_to_index, tensors

    def _look(self, *prepared: Any) -> Any:
        runner, (slots,) = self._runner, prepared
        batch = runner.input_batch
        buffers = batch.block_table, runner.query_start_loc, runner.seq_lens
        return batch, *buffers, list(batch.req_ids), [slots[group].shape[0] for group in slots]

    def _looks_as(self, last: Any, *prepared: Any) -> bool:
        runner, (slots,) = self._runner, prepared
        batch, tables, starts, lengths, names, tokens = last
        # The runner's own buffers, which it makes once.
        return bool(
            runner.input_batch is batch
            and batch.block_table is tables
            and runner.query_start_loc is starts
            and runner.seq_lens is lengths
            and batch.req_ids == names
            and [slots[group].shape[0] for group in slots] == tokens
        )

    def _block_sizes(self) -> list[int]:
        return describe_tables_v1(self._runner)


class WorkerSideV2(WorkerSide):
    """For vLLM's runner V2 (`vllm.v1.worker.gpu.model_runner`), which gathers a table of the step's rows."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        prepare = runner.prepare_attn

        def guarded(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = prepare(input_batch, *args, **kwargs)
            if self._payload is not None:
                self._verify(input_batch, *result)
            return result

        runner.prepare_attn = guarded

    def _look_at(self, *prepared: Any) -> tuple[Mapping[str, int], BatchTensors]:
        """`prepared`: the batch; tables, one per KV group; slots int64 [groups, tokens and padding lanes]."""
        batch, tables, slots = prepared
        place_of = {name: place for place, name in enumerate(batch.req_ids)}
        requests = batch.num_reqs
        return place_of, BatchTensors(
            tables, list(slots), batch.query_start_loc[: requests + 1], batch.seq_lens[:requests]
        )

    def _look(self, *prepared: Any) -> Any:
        batch, tables, slots = prepared
        tensors = [*tables, slots, batch.query_start_loc, batch.seq_lens]
        # They are kept, so that no other tensor can be made where they lie.
        return list(batch.req_ids), tensors, [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    def _looks_as(self, last: Any, *prepared: Any) -> bool:
        batch, tables, slots = prepared
        names, _, places = last
        if batch.req_ids != names or batch.num_reqs != len(names):
            return False
        # Views of the runner's own buffers, made anew for each step.
        tensors = *tables, slots, batch.query_start_loc, batch.seq_lens
        return bool([(tensor.data_ptr(), tensor.shape) for tensor in tensors] == places)

    def _block_sizes(self) -> list[int]:
        return describe_tables_v2(self._runner)
