"""What every cached page of a real vLLM really holds, and who is led to one that is not what it asked for.

It knows no guard and no content key: it keeps the tokens themselves beside each page, as `key_watch.py` does for the
embedded engine.
"""

from __future__ import annotations

from typing import Any

from kvguard.fault_injection.faults.pages import Injection
from kvguard.fault_injection.targets.vllm import client_name
from kvguard.fault_injection.targets.vllm_keys import VllmKeyFault
from kvguard.fault_injection.targets.vllm_watch import WatchedRun
from kvguard.fault_injection.traffic import Arrival

Truth = tuple[tuple[int, ...], str, int]
"""Tokens up to the page's end, salt, how often the weights had changed."""


class KeyWatchedRun(WatchedRun):
    """Puts the fault in, and notes each wrong hit that a lookup offers and each that a request is scheduled with."""

    def __init__(
        self,
        engine: Any,
        arrivals: list[Arrival],
        *,
        fault: type[VllmKeyFault] | None = None,
        fault_seed: int = 0,
        update: tuple[int, str] | None = None,
        taken: dict[str, list[int]] | None = None,
        client_aborts: dict[str, int] | None = None,
        guard: Any = None,
    ) -> None:
        """update: the step before which the weights change, and the checkpoint that is loaded then.

        taken: request -> how many cached tokens it takes at most each time it is admitted, for a run that another one
        is compared with; None: as many as there are.
        """
        super().__init__(engine, arrivals, recites=False, client_aborts=client_aborts, guard=guard)
        untruncated = {a.request.id: a.request.untruncated for a in arrivals if a.request.untruncated}
        self._key_fault = None
        if fault is not None:
            self._key_fault = fault(seed=fault_seed, engine=engine, untruncated=untruncated)
        self._update, self._limits = update, taken
        self.taken: dict[str, list[int]] = {}
        """Request -> how many cached tokens it took each time it was admitted."""
        self._epoch = 0
        self._done = ""
        self._holds: dict[int, Truth] = {}
        self._led: list[str] = []
        self._wrong: set[int] = set()
        self._looking: Any = None
        self._hook()
        if self._key_fault is not None and self._key_fault.at_start:
            self._install()

    # -- looking on -----------------------------------------------------------------------------------------------

    def _hook(self) -> None:
        manager, pool = self._scheduler.kv_cache_manager, self._engine.pool
        look_up, publish, take = manager.get_computed_blocks, pool.cache_full_blocks, pool.get_new_blocks

        def looked_up(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._looking = request
            try:
                return look_up(request, *args, **kwargs)
            finally:
                self._looking = None

        def published(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
        ) -> Any:
            result = publish(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            for column in range(num_cached_blocks, num_full_blocks):
                self._holds[blocks[column].block_id] = self._truth(request, column)
            return result

        def taken(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            for block in blocks:
                self._holds.pop(block.block_id, None)
            return blocks

        manager.get_computed_blocks, pool.cache_full_blocks, pool.get_new_blocks = looked_up, published, taken
        self._see_offers()

    def _see_offers(self) -> None:
        """What vLLM's own search of its cache answers, whatever becomes of it; asked last, so that a fault is seen."""
        coordinator = self._scheduler.kv_cache_manager.coordinator
        find = coordinator.find_longest_cache_hit

        def found(block_hashes: Any, longest: int, *args: Any, **kwargs: Any) -> Any:
            request = self._looking
            if self._limits is not None:
                limits = self._limits.get(client_name(request.request_id), [])
                times = len(self.taken.get(client_name(request.request_id), []))
                longest = min(longest, limits[times] if times < len(limits) else 0)
            result = find(block_hashes, longest, *args, **kwargs)
            wrong = self._wrong_of(request, result[0][0])
            if wrong:
                self._wrong.update(wrong)
                self._led.append(client_name(request.request_id))
            return result

        coordinator.find_longest_cache_hit = found

    def _truth(self, request: Any, column: int) -> Truth:
        end = (column + 1) * self._target.page_size
        return tuple(request.all_token_ids[:end]), request.cache_salt or "", self._epoch

    def _wrong_of(self, request: Any, blocks: Any) -> list[int]:
        """Pages among a request's first ones that do not hold what it is made of."""
        pages = [block.block_id for block in blocks]
        return [page for column, page in enumerate(pages) if self._holds.get(page) != self._truth(request, column)]

    # -- what happens before a step -------------------------------------------------------------------------------

    def _inject(self) -> None:
        if self._update is not None and self._step == self._update[0]:
            self.change_weights(self._update[1])
            self.run.counts.weight_updates += 1
            self._epoch += 1
        if self._key_fault is not None and not self._done and not self._key_fault.at_start:
            self._install()

    def _install(self) -> None:
        assert self._key_fault is not None
        self._done = self._key_fault.install() or ""
        if self._done:
            self.run.injected_step = self._step
            self._see_offers()

    def change_weights(self, checkpoint: str) -> None:
        """As an operator does it: load others, and start over with an empty cache."""
        self._engine.core.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
        self._engine.core.reset_prefix_cache(reset_running_requests=True)

    def _launch(self, output: Any) -> None:
        super()._launch(output)
        for request_id, tokens in self._admitted(output).items():
            name = client_name(request_id)
            self.taken.setdefault(name, []).append(tokens)
            blocks = self._manager.req_to_blocks[request_id][: tokens // self._target.page_size]
            if self._wrong_of(self._scheduler.requests[request_id], blocks):
                self.run.affected |= {name}
                if self.run.live_step < 0:
                    self.run.live_step = self._step

    def finish(self) -> None:
        """The run is over: what was done, if anybody was led astray by it."""
        if self._done and self._led:
            affected, led = self.run.affected, tuple(dict.fromkeys(self._led))
            self.run.injection = Injection(
                victims=led,
                page=min(self._wrong),
                column=-1,
                live_when=lambda scheduled: True,
                affected=lambda: affected,
                description=f"{self._done}; led astray: {', '.join(led)}",
                pages=frozenset(self._wrong),
            )
