"""The check, next to vLLM's model runner, in the worker process.

The runner hands over the very tensors that attention is about to read, after they were brought up to date and before
the forward is launched. Nothing here waits for the device; verdicts are read where vLLM reads the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_not
from typing import Any

from kvguard.adapters.vllm.block_books import StepPayload
from kvguard.adapters.vllm.layout import Unsupported, check_backends, describe_tables_v1, describe_tables_v2
from kvguard.adapters.vllm.ranks import RankVerdicts
from kvguard.pools import GuardSetup
from kvguard.telemetry import emit
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier


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
        self._payload: StepPayload | None = None
        self._pending: PendingVerdicts | None = None
        self._trouble = ""
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

    def _verify(
        self, place_of: Mapping[str, int], tables: Sequence[Any], slots: Sequence[Any], query_start: Any
    ) -> None:
        """Check the step that the runner is preparing. A fault of the guard does not surface in vLLM.

        place_of: request -> its row in the tables and in the batch; tables int32 [rows, columns] and slots
        int64 [tokens], one per KV group; query_start int32 [batch rows + 1].
        """
        payload, self._payload = self._payload, None
        if payload is None:
            return
        if payload.setup is not None and payload.setup is not self._setup:
            self._setup, self._verifier, self._trouble = payload.setup, None, ""
        pending = None
        if not self._trouble:
            try:
                pending = self._check(payload, place_of, tables, slots, query_start)
            except Exception as error:
                self._fail(error)
        if self._setup is not None and self._setup.check:
            try:
                # Launched on every rank in every step: one whose guard failed must not leave the others waiting.
                pending = self._combined(pending, payload)
            except Exception as error:
                pending = None
                self._fail(error)
        self._pending = pending

    def _fail(self, error: Exception) -> None:
        self._trouble = str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
        emit("guard_fault", severity="critical", where="worker", error=self._trouble)

    def _combined(self, pending: PendingVerdicts | None, payload: StepPayload) -> PendingVerdicts | None:
        if self._ranks is None:
            self._ranks = RankVerdicts(self._runner.device)
        combined = self._ranks.combine(pending, payload.delta)
        return None if combined is None else combined.depart()

    def _check(
        self,
        payload: StepPayload,
        place_of: Mapping[str, int],
        tables: Sequence[Any],
        slots: Sequence[Any],
        query_start: Any,
    ) -> PendingVerdicts:
        if self._verifier is None:
            self._verifier = self._make_verifier()
        rows = list(map(place_of.__getitem__, payload.delta.requests))
        given = [*tables, *slots, query_start]
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            self._given = given
            self._inputs = {
                name: PoolInputs(table=table, slot_mapping=slot, query_start=query_start, place_is_row=True)
                for name, table, slot in zip(self._names, tables, slots, strict=True)
            }
        return self._verifier.check(payload.delta, self._inputs, table_rows=rows)

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
    """For vLLM's runner V1 (`vllm.v1.worker.gpu_model_runner`)."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._starts: dict[int, tuple[Any, Any]] = {}
        prepare = runner._prepare_inputs

        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            self.verify_prepared()
            return result

        runner._prepare_inputs = guarded

    def verify_prepared(self) -> None:
        """Check the step for which the runner has just prepared its inputs."""
        batch = self._runner.input_batch
        tables = batch.block_table.block_tables
        self._verify(
            batch.req_id_to_index,
            [table.block_table.gpu for table in tables],
            [table.slot_mapping.gpu for table in tables],
            self._first_of(self._runner.query_start_loc.gpu, batch.num_reqs + 1),
        )

    def _first_of(self, buffer: Any, count: int) -> Any:
        """The same view of the runner's own buffer for the same number of requests."""
        kept = self._starts.get(count)
        if kept is None or kept[0] is not buffer:
            kept = self._starts[count] = (buffer, buffer[:count])
        return kept[1]

    def _block_sizes(self) -> list[int]:
        return describe_tables_v1(self._runner)


class WorkerSideV2(WorkerSide):
    """For vLLM's runner V2 (`vllm.v1.worker.gpu.model_runner`), which gathers a table of the step's rows."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        prepare = runner.prepare_attn

        def guarded(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            result = prepare(input_batch, *args, **kwargs)
            tables, slot_mappings = result
            place_of = {name: place for place, name in enumerate(input_batch.req_ids)}
            self._verify(place_of, tables, list(slot_mappings), input_batch.query_start_loc[: input_batch.num_reqs + 1])
            return result

        runner.prepare_attn = guarded

    def _block_sizes(self) -> list[int]:
        return describe_tables_v2(self._runner)
