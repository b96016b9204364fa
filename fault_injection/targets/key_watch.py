"""What every cached page of the embedded engine really holds, and who is led to one that is not what it asked for.

It knows no guard and no content key: it keeps the tokens themselves, beside each page and each entry of the store.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.faults.keys import KeyFault
from kvguard.fault_injection.faults.pages import Injection
from kvguard.fault_injection.runs import Run

Truth = tuple[tuple[int, ...], str, str, int]
"""Tokens up to the page's end, tenant, adapter, epoch of the weights."""
IN_STORE = -1
"""In place of a page, where what was wrong was in the external store."""


class KeyWatch:
    """Puts the fault in, and notes each wrong hit that is offered (`pages`) and each that is taken (`Run.affected`)."""

    def __init__(self, engine: Engine, fault: type[KeyFault] | None, seed: int, run: Run, first_step: int) -> None:
        self._engine, self._run, self._first_step = engine, run, first_step
        self._fault = None if fault is None else fault(seed=seed, engine=engine)
        self._done = ""
        self._holds: dict[int, Truth] = {}
        self._stored: dict[int, Truth] = {}
        self.pages: set[int] = set()
        self.led: list[str] = []
        self._hook(engine)

    def _hook(self, engine: Engine) -> None:
        pool, scheduler, store = engine.pool, engine.scheduler, engine.pool.store
        publish, share, load_of = pool.publish, pool.share, scheduler._load
        take, give_back = pool.take, pool.give_back

        def take_noted(request: str) -> int | None:
            page = take(request)
            if page is not None:
                self._holds.pop(page, None)
            return page

        def give_back_noted(page: int) -> None:
            give_back(page)
            self._holds.pop(page, None)

        def publish_noted(request: str, column: int, page: int, key: int) -> None:
            known = pool.key_of.get(page)
            publish(request, column, page, key)
            if known is None and pool.key_of.get(page) == key:
                self._holds[page] = self._truth(engine.sequences[request], column)

        def share_noted(request: str, hits: Listed[tuple[int, int]]) -> list[int]:
            sequence = engine.sequences[request]
            wrong = [
                column
                for column, (_, page) in enumerate(hits)
                if page in pool.free or self._holds.get(page) != self._truth(sequence, column)
            ]
            self._offered(request, [hits[column][1] for column in wrong])
            taken = share(request, hits)
            if wrong and len(taken) > wrong[0]:
                self._taken(request)
            return taken

        def load_noted(sequence: Sequence, count: int) -> int:
            first = sequence.computed // engine.config.page_size
            offered = scheduler.keys_of(sequence, sequence.tokens[:-1])[first : len(sequence.pages)]
            offered = [] if pool.store is None else pool.store.lookup(offered)
            if pool.store is not None:
                pool.store.completed = []
            saved = load_of(sequence, count)
            copied = set() if pool.store is None else set(pool.store.completed)
            right = [self._stored.get(key) == self._truth(sequence, first + place) for place, key in enumerate(offered)]
            loaded = saved // engine.config.page_size
            if not all(right) or (self._fault is not None and self._fault.name == "hit-not-loaded" and offered):
                self._offered(sequence.id, [IN_STORE])
            if not all(right[:loaded]) or any(key not in copied for key in offered[:loaded]):
                self._taken(sequence.id)
            return saved

        pool.publish, pool.share = publish_noted, share_noted  # type: ignore[method-assign]
        pool.take, pool.give_back = take_noted, give_back_noted  # type: ignore[method-assign]
        scheduler._load = load_noted  # type: ignore[method-assign]
        if store is not None:
            save = store.save

            def save_noted(key: int, page: int) -> None:
                save(key, page)
                if page in self._holds and store.lookup([key]):
                    self._stored[key] = self._holds[page]

            store.save = save_noted  # type: ignore[method-assign]

    def _truth(self, sequence: Sequence, column: int) -> Truth:
        request, end = sequence.request, (column + 1) * self._engine.config.page_size
        return tuple(sequence.tokens[:end]), request.tenant, request.lora, self._engine.weights_epoch

    def _offered(self, request: str, pages: list[int]) -> None:
        if pages:
            self.pages.update(pages)
            self.led.append(request)

    def _taken(self, request: str) -> None:
        run = self._run
        run.affected |= {request}
        if run.live_step < 0:
            run.live_step = self._engine.step_index

    def at_schedule(self, engine: Engine) -> None:
        if self._fault is not None and not self._done and engine.step_index >= self._first_step:
            self._done = self._fault.install() or ""
            if self._done:
                self._run.injected_step = engine.step_index

    def finish(self) -> None:
        """The run is over: what was done, if anybody was led astray by it."""
        if self._done and self.led:
            affected = self._run.affected
            self._run.injection = Injection(
                victims=tuple(dict.fromkeys(self.led)),
                page=min(self.pages),
                column=-1,
                live_when=lambda scheduled: True,
                affected=lambda: affected,
                description=f"{self._done}; led astray: {', '.join(dict.fromkeys(self.led))}",
                pages=frozenset(self.pages),
            )
