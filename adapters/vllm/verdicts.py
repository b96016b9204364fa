"""What follows from verdicts in vLLM: requests end with an error, clients are told, pages are kept apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvguard.guard import Guard, GuardHalt, UncheckedStep
from kvguard.judge import Judgement
from kvguard.kernels.verify_pages.layout import FLAGS
from kvguard.messages import StepDelta, Verdicts
from kvguard.pools import PoolSpec
from kvguard.telemetry import emit
from kvguard.write_verdicts import rows_flagged


class VerdictHandler:
    """Acts on verdicts before vLLM takes the tokens of the same step."""

    def __init__(self, guard: Guard, scheduler: Any, pools: tuple[PoolSpec, ...]) -> None:
        self._guard = guard
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        managers = self._manager.coordinator.single_type_managers
        self._blocks_of = {pool.name: single.req_to_blocks for pool, single in zip(pools, managers, strict=True)}

    def act(self, delta: StepDelta, model_output: Any) -> list[tuple[Any, str]]:
        """Judge a step and end whom it condemns; returns the vLLM requests that ended, with their messages."""
        trouble = getattr(model_output, "_kvguard_trouble", None)
        if trouble:
            raise UncheckedStep(f"the worker could not check step {delta.step}: {trouble}")
        verdicts = getattr(model_output, "_kvguard", None)
        judgement = self._guard.judge(verdicts or Verdicts(step=delta.step, records=None))
        if judgement.clean and not judgement.evict:
            return []
        if judgement.halt:
            raise GuardHalt(judgement.violations[0])
        messages = {abort.request: abort.violation.message for abort in judgement.aborts}
        self._leave_to_others(judgement)
        if judgement.evict:
            self._manager.block_pool.evict_blocks({page for _, page in judgement.evict})
        for name in judgement.withheld - messages.keys():
            # Preempted since: the request has given its pages back, but the token of this step is still unproven.
            messages[name] = self._why_withheld(name, judgement)
        return self._end(messages)

    def _leave_to_others(self, judgement: Judgement) -> None:
        """Take pages off the lists of aborted requests that vLLM would otherwise free under whoever holds them now.

        Those are the ones that more lists name than vLLM has counted. A page that was counted for the request, as one
        that it took from the cache, is given back like any other: else it would never be free again.
        """
        foreign = {page for abort in judgement.aborts for pages in abort.foreign_pages.values() for page in pages}
        if not foreign:
            return
        listed: Counter[int] = Counter()
        for lists in self._blocks_of.values():
            for blocks in lists.values():
                listed.update(block.block_id for block in blocks if block.block_id in foreign)
        null_block = self._manager.block_pool.null_block
        for abort in judgement.aborts:
            for pool, pages in abort.foreign_pages.items():
                blocks = self._blocks_of[pool].get(abort.request, [])
                for column, block in enumerate(blocks):
                    if block.block_id in pages and listed[block.block_id] > block.ref_cnt:
                        listed[block.block_id] -= 1
                        blocks[column] = null_block

    def _why_withheld(self, name: str, judgement: Judgement) -> str:
        for violation in (*judgement.violations, *reversed(self._guard.violations)):
            if violation.request == name:
                return violation.message
        return "kvguard: a step of this request was not proven"

    def flagged_without_books(self, delta: StepDelta, model_output: Any) -> list[tuple[Any, str]]:
        """The guard has failed with this step in flight: what the device flagged in it must not leave all the same."""
        verdicts = getattr(model_output, "_kvguard", None)
        if verdicts is None or not delta.enforce:
            return []
        flagged = np.zeros(len(delta.requests), bool)
        if verdicts.records is not None:
            flagged |= (verdicts.records[:, :, FLAGS] > 0).any(axis=0)
        if verdicts.writes is not None:
            flagged[rows_flagged(verdicts.writes)] = True
        messages = {}
        requests = self._scheduler.requests
        for row, name in enumerate(delta.requests):
            if flagged[row] and name in requests and not requests[name].is_finished():
                messages[name] = self._guard.found_too_late(name, delta.step, row).message
        return self._end(messages)

    def _end(self, messages: dict[str, str]) -> list[tuple[Any, str]]:
        """Finish these requests with an error; vLLM then drops their tokens of this step itself."""
        from vllm.v1.request import RequestStatus

        requests = self._scheduler.requests
        known = [requests[name] for name in messages if name in requests and not requests[name].is_finished()]
        if known:
            self._scheduler.finish_requests({request.request_id for request in known}, RequestStatus.FINISHED_ERROR)
        return [(request, messages[request.request_id]) for request in known]

    def tell_clients(self, result: Any, ended: list[tuple[Any, str]]) -> None:
        if not ended:
            return
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

        for request, message in ended:
            outputs = result.get(request.client_index)
            if outputs is None:
                outputs = result[request.client_index] = EngineCoreOutputs()
            outputs.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=message,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )
        emit("vllm_requests_aborted", severity="error", requests=sorted(request.request_id for request, _ in ended))
