"""The forward that vLLM is about to run, as its model runner has prepared it: where each token is going to be written.

A hook on the runner's own call, set before the guard's: what is changed here is what the guard finds. Batches are
padded besides, as CUDA graphs do it on a GPU; vLLM on a CPU never pads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvguard.fault_injection.target import StepToken
from kvguard.fault_injection.targets.vllm import client_name

PAD_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """The first KV cache group's tensors of a step, and where they come from.

    requests     the clients' names in the order of the batch
    query_start  requests + 1 token indices; lengths: KV length of each request after the step
    slots        int64 [tokens and padding lanes], the runner's own
    last_slots   what `slots` held in the forward before
    last_layout  requests and query_start of that one
    """

    requests: tuple[str, ...]
    query_start: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: Any
    last_slots: tuple[int, ...] = ()
    last_layout: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())

    def tokens(self) -> list[StepToken]:
        """Every token in the order of the tensors, padding lanes last."""
        found: list[StepToken] = []
        slots = self.slots.tolist()
        for place, request in enumerate(self.requests):
            start, stop = self.query_start[place : place + 2]
            before = self.lengths[place] - stop
            for index in range(start, stop):
                found.append(StepToken(index=index, request=request, position=before + index, slot=slots[index]))
        for index in range(len(found), len(slots)):
            found.append(StepToken(index=index, request=None, position=-1, slot=slots[index]))
        return found

    def computed(self) -> dict[str, int]:
        """How many tokens each request of the step has computed before it."""
        starts, lengths = self.query_start, self.lengths
        return {name: lengths[place] - (starts[place + 1] - starts[place]) for place, name in enumerate(self.requests)}


class StepHook:
    """Pads every batch of an engine and shows each prepared step to `action`; set before a guard is attached."""

    def __init__(self, engine: Any) -> None:
        self.action: Callable[[PreparedStep], None] | None = None
        self._last: tuple[tuple[int, ...], tuple[tuple[str, ...], tuple[int, ...]]] = ((), ((), ()))
        self._runner = engine.runner
        if engine.options.runner == "v2":
            self._hook_v2(engine.runner)
        else:
            self._hook_v1(engine.runner)

    def _hook_v1(self, runner: Any) -> None:
        determine, get_slots = runner._determine_batch_execution_and_padding, runner._get_slot_mappings

        def padded(*args: Any, **kwargs: Any) -> Any:
            mode, descriptor, *rest = determine(*args, **kwargs)
            return (mode, self._pad(descriptor), *rest)

        def prepared(*args: Any, **kwargs: Any) -> Any:
            result = get_slots(*args, **kwargs)
            batch = runner.input_batch
            requests = batch.num_reqs
            self._show(
                batch.req_ids[:requests], runner.query_start_loc.np[: requests + 1], runner.seq_lens, result[0][0]
            )
            return result

        runner._determine_batch_execution_and_padding, runner._get_slot_mappings = padded, prepared

    def _hook_v2(self, runner: Any) -> None:
        prepare_inputs, prepare_attn = runner.prepare_inputs, runner.prepare_attn

        def padded(output: Any, state: Any, descriptor: Any, *args: Any, **kwargs: Any) -> Any:
            return prepare_inputs(output, state, self._pad(descriptor), *args, **kwargs)

        def prepared(batch: Any, *args: Any, **kwargs: Any) -> Any:
            tables, slots = prepare_attn(batch, *args, **kwargs)
            starts = batch.query_start_loc_np[: batch.num_reqs + 1]
            self._show(batch.req_ids[: batch.num_reqs], starts, batch.seq_lens, slots[0])
            return tables, slots

        runner.prepare_inputs, runner.prepare_attn = padded, prepared

    def _pad(self, descriptor: Any) -> Any:
        tokens = -(-descriptor.num_tokens // PAD_MULTIPLE) * PAD_MULTIPLE
        return replace(descriptor, num_tokens=min(tokens, self._runner.max_num_tokens))

    def _show(self, names: Any, starts: Any, lengths: Any, slots: Any) -> None:
        requests = tuple(map(client_name, names))
        layout = (requests, tuple(starts.tolist()))
        last_slots, last_layout = self._last
        self._last = (tuple(slots.tolist()), layout)
        if self.action is not None:
            self.action(
                PreparedStep(
                    requests=requests,
                    query_start=layout[1],
                    lengths=tuple(lengths[: len(requests)].tolist()),
                    slots=slots,
                    last_slots=last_slots,
                    last_layout=last_layout,
                )
            )
