"""The check, next to vLLM's model runner, in the worker process.

The runner hands over the very tensors that attention is about to read, after they were brought up to date and before
the forward is launched. Nothing here waits for the device; verdicts are read where vLLM reads the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvguard.adapters.vllm.layout import describe_tables_v1
from kvguard.adapters.vllm.scheduler_side import StepPayload
from kvguard.pools import GuardSetup
from kvguard.telemetry import emit
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier


class WorkerSideV1:
    """One model runner's verifier (vLLM's runner V1, `vllm.v1.worker.gpu_model_runner`)."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._verifier: Verifier | None = None
        self._payload: StepPayload | None = None
        self._pending: PendingVerdicts | None = None
        self._failed = False
        runner.execute_model = self._executing(runner.execute_model)
        runner._prepare_inputs = self._preparing(runner._prepare_inputs)
        runner.sample_tokens = self._sampling(runner.sample_tokens)

    def _executing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._payload = getattr(scheduler_output, "_kvguard", None)
            self._pending = None
            return original(scheduler_output, *args, **kwargs)

        return guarded

    def _preparing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            payload, self._payload = self._payload, None
            if payload is not None and not self._failed:
                try:
                    self._pending = self._check(payload)
                except Exception as error:
                    # No verdict goes back: the scheduler side then knows that the step is unproven.
                    self._failed = True
                    emit("guard_fault", severity="critical", where="worker", error=f"{type(error).__name__}: {error}")
            return result

        return guarded

    def _check(self, payload: StepPayload) -> PendingVerdicts:
        runner = self._runner
        batch = runner.input_batch
        tables = describe_tables_v1(runner) if self._verifier is None else batch.block_table.block_tables
        if self._verifier is None:
            self._verifier = Verifier(self._with_split(payload.setup, tables), device=runner.device)
            self._names = [pool.name for pool in payload.setup.pools]
        index = batch.req_id_to_index
        rows = np.array([index[request] for request in payload.delta.requests], np.int64)
        inputs = {}
        query_start = runner.query_start_loc.gpu[: batch.num_reqs + 1]
        query_row = self._verifier.upload(rows)
        for name, table in zip(self._names, tables, strict=True):
            inputs[name] = PoolInputs(
                table=table.block_table.gpu,
                slot_mapping=table.slot_mapping.gpu,
                query_start=query_start,
                query_row=query_row,
            )
        return self._verifier.check(payload.delta.placed(rows), inputs)

    @staticmethod
    def _with_split(setup: GuardSetup, tables: list[Any]) -> GuardSetup:
        """Attention may be given smaller blocks than the scheduler allocates: the worker knows by how much."""
        pools = []
        for pool, table in zip(setup.pools, tables, strict=True):
            size = pool.page_size or table.block_size
            if size % table.block_size:
                raise ValueError(f"{pool.name}: kernel blocks of {table.block_size} do not divide blocks of {size}")
            pools.append(replace(pool, split=size // table.block_size))
        return replace(setup, pools=tuple(pools))

    def _sampling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            pending, self._pending = self._pending, None
            output = original(*args, **kwargs)
            if pending is None or output is None:
                return output
            if hasattr(output, "get_output"):
                # Asynchronous scheduling: the verdicts are read where the sampled tokens are, not before.
                get_output = output.get_output

                def guarded_get_output() -> Any:
                    result = get_output()
                    result._kvguard = pending.resolve()
                    return result

                output.get_output = guarded_get_output
            else:
                output._kvguard = pending.resolve()
            return output

        return guarded
