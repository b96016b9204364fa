"""What every page of a real SGLang really holds, and whose row names one that holds something else than its own.

It knows no guard and no content key: it keeps beside each page the request that wrote it, and compares the tokens
themselves, as `key_watch.py` does for the embedded engine.
"""

from __future__ import annotations

import dataclasses
from os.path import commonprefix
from typing import Any, NamedTuple

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.faults.pages import Injection
from kvguard.fault_injection.targets.sglang_engine import SglangEngine, generate_request
from kvguard.fault_injection.targets.sglang_keys import SglangKeyFault
from kvguard.fault_injection.targets.sglang_watch import WatchedRun
from kvguard.fault_injection.traffic import Arrival

SALTED = "green"
"""The tenant that is known by its salt; the others by their extra key."""


class Written(NamedTuple):
    """What was written into a page last: by whom, and as which column."""

    writer: Any
    column: int


class KeyWatchedRun(WatchedRun):
    """Puts the fault in, and notes each request that is about to read a page of other content."""

    def __init__(
        self,
        engine: SglangEngine,
        arrivals: list[Arrival],
        *,
        fault: type[SglangKeyFault] | None = None,
        fault_seed: int = 0,
        update: tuple[int, str] | None = None,
        taken: dict[str, list[int]] | None = None,
        client_aborts: dict[str, int] | None = None,
    ) -> None:
        """update: from which step on no request is sent until nobody runs, and the checkpoint that is loaded then.

        taken: request -> how many cached tokens it takes at most each time it is admitted, for a run that another one
        is compared with; None: as many as there are.
        """
        super().__init__(engine, arrivals, recites=False, client_aborts=client_aborts)
        self._may_break = fault is not None
        self._key_fault = None
        if fault is not None:
            cut = {a.request.prompt: a.request.untruncated for a in arrivals if a.request.untruncated}
            self._key_fault = fault(seed=fault_seed, engine=engine, untruncated=cut)
        self._requests = {arrival.request.id: arrival.request for arrival in arrivals}
        self._update = update
        self._holds: dict[int, Written] = {}
        self._done = ""
        self._led: dict[str, None] = {}
        self._wrong: set[int] = set()
        if self._key_fault is not None and self._key_fault.at_start:
            self._install()
        if taken is not None:
            self._limit(taken)

    def _limit(self, limits: dict[str, list[int]]) -> None:
        tree = self._scheduler.tree_cache
        match = tree.match_prefix

        def limited(params: Any) -> Any:
            if params.req is not None and not params.req.kv.holds_kv:
                mine, times = limits.get(params.req.rid, []), len(self.run.taken.get(params.req.rid, []))
                params = dataclasses.replace(params, key=params.key[: mine[times] if times < len(mine) else 0])
            return match(params)

        tree.match_prefix = limited

    # -- what clients send ----------------------------------------------------------------------------------------

    def _message(self, request: Request, *, ignore_eos: bool) -> Any:
        salted = request.tenant == SALTED
        return generate_request(
            request.id,
            request.prompt,
            request.max_new_tokens,
            ignore_eos=ignore_eos,
            tenant="" if salted else request.tenant,
            salt=request.tenant if salted else "",
            lora_id=self._engine.lora_ids.get(request.lora, ""),
        )

    def _receive(self) -> list[Any]:
        if self._update is None or self._step < self._update[0]:
            return super()._receive()
        if self._scheduler.is_fully_idle():
            (_, checkpoint), self._update = self._update, None
            self.run.counts.weight_updates += 1
            return [_new_weights(checkpoint), *super()._receive()]
        # The clients wait: the rest of the traffic comes a step later.
        sent, rest = self._arrivals[: self._position], self._arrivals[self._position :]
        self._arrivals = [*sent, *(_later(arrival) for arrival in rest)]
        return super()._receive()

    def _sent(self, output: Any) -> None:
        if not getattr(output, "success", True):
            raise RuntimeError(f"SGLang did not take the weights: {output.message}")
        super()._sent(output)

    # -- what happens before a batch ------------------------------------------------------------------------------

    def _inject(self) -> None:
        if self._key_fault is not None and not self._done and not self._key_fault.at_start:
            self._install()

    def _install(self) -> None:
        assert self._key_fault is not None
        self._done = self._key_fault.install() or ""
        if self._done:
            self.run.injected_step = self._step

    # -- looking on -----------------------------------------------------------------------------------------------

    def _adopt(self, request: Any, tokens: int) -> None:
        super()._adopt(request, tokens)
        self.run.taken.setdefault(request.rid, []).append(tokens)

    def _launch(self, batch: Any, chunked: Any) -> None:
        super()._launch(batch, chunked)
        size, slots, start = self._target.page_size, batch.out_cache_loc.tolist(), 0
        extends = batch.forward_mode.is_extend()
        firsts = batch.prefix_lens if extends else [length - 1 for length in batch.seq_lens_cpu.tolist()]
        lengths = batch.extend_lens if extends else [1] * len(batch.reqs)
        for request, first, length in zip(batch.reqs, firsts, lengths, strict=True):
            for place, slot in enumerate(slots[start : start + length]):
                column = (first + place) // size
                self._holds[slot // size] = Written(request, column)
            start += length
        if self._key_fault is None:
            return
        free = set(self._scheduler.token_to_kv_pool_allocator.get_all_free_pages().tolist())
        for request, first, length in zip(batch.reqs, firsts, lengths, strict=True):
            self._look(request, first + length, free)

    def _look(self, request: Any, tokens: int, free: set[int]) -> None:
        """Note a request that reads a page that does not hold what it is made of, or that nobody holds."""
        size, same = self._target.page_size, dict[str, int]()
        row = self._scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        pages = [slot // size for slot in row[:tokens:size].tolist()]
        wrong = [
            page
            for column, page in enumerate(pages)
            if not self._is_own(request, column, page, page in free, same)
        ]
        if wrong:
            self._wrong.update(wrong)
            self._led[request.rid] = None
            self.run.affected |= {request.rid}
            if self.run.live_step < 0:
                self.run.live_step = self._step

    def _is_own(self, request: Any, column: int, page: int, is_free: bool, same: dict[str, int]) -> bool:
        """Whether a page holds what a request is made of up to the column's end. same: writer -> tokens in common.

        A page in the free list is nobody's, and holds nothing for those who were led to it.
        """
        written = self._holds.get(page)
        if written is None or written.column != column:
            return False
        writer = written.writer
        if writer.rid == request.rid:
            return True
        if is_free:
            return False
        mine, theirs = self._requests[request.rid], self._requests[writer.rid]
        if (mine.tenant, mine.lora) != (theirs.tenant, theirs.lora):
            return False
        if writer.rid not in same:
            texts = [[*one.origin_input_ids, *one.output_ids] for one in (request, writer)]
            same[writer.rid] = len(commonprefix(texts))
        return (column + 1) * self._target.page_size <= same[writer.rid]

    def finish(self) -> None:
        """The run is over: what was done, if anybody was led astray by it."""
        if self._done and self._led:
            affected, led = self.run.affected, tuple(self._led)
            self.run.injection = Injection(
                victims=led,
                page=min(self._wrong),
                column=-1,
                live_when=lambda scheduled: True,
                affected=lambda: affected,
                description=f"{self._done}; led astray: {', '.join(led)}",
                pages=frozenset(self._wrong),
            )


def _later(arrival: Arrival) -> Arrival:
    leaves = None if arrival.abort_step is None else arrival.abort_step + 1
    return dataclasses.replace(arrival, step=arrival.step + 1, abort_step=leaves)


def _new_weights(checkpoint: str) -> Any:
    """What an operator's call for other weights comes to: the cache is emptied with it."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(model_path=checkpoint, load_format="auto", flush_cache=True)
