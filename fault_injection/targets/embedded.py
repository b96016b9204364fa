"""The embedded engine as a target of faults."""

from __future__ import annotations

from collections.abc import Mapping

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.pool import NULL_PAGE, chain_keys
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.engine.step import MAIN_POOL
from kvguard.fault_injection.engine.window import WINDOW_POOL
from kvguard.fault_injection.target import RunningRequest, StepToken, WaitingRequest


class EmbeddedTarget:
    """Implements `WriteTarget` on an Engine's own lists and tensors; see there for what each call means.

    Of an engine with windowed layers it is one pool: `pool`, MAIN_POOL or WINDOW_POOL.
    """

    def __init__(self, engine: Engine, *, recites: bool = True, pool: str = MAIN_POOL) -> None:
        self._engine = engine
        self._name = pool
        self._window = engine.window if pool == WINDOW_POOL else None
        self._pool = engine.pool if self._window is None else self._window.pool
        self._table = engine.block_table if self._window is None else self._window.block_table
        self.page_size = engine.config.page_size
        self.num_pages = self._pool.num_pages
        self.null_page = NULL_PAGE
        self.recites = recites

    def running(self) -> list[RunningRequest]:
        return [self._view(sequence) for sequence in self._engine.scheduler.running]

    def _pages(self, sequence: Sequence) -> list[int]:
        return sequence.pages if self._window is None else sequence.window_pages

    def _keys(self, sequence: Sequence, tokens: list[int]) -> tuple[int, ...]:
        return tuple(chain_keys(tokens, self.page_size, sequence.request.tenant))

    def _view(self, sequence: Sequence) -> RunningRequest:
        count = min(len(sequence.tokens) - sequence.computed, self._engine.config.token_budget)
        if count == 1:
            # Guesses are made when the step is scheduled, and may be fewer.
            count += self._engine.config.draft_tokens
        return RunningRequest(
            id=sequence.id,
            pages=tuple(self._pages(sequence)),
            computed_tokens=sequence.computed,
            prompt_tokens=len(sequence.request.prompt),
            generated_tokens=sequence.generated,
            total_tokens=len(sequence.request.prompt) + sequence.request.max_new_tokens,
            prefix_keys=self._keys(sequence, sequence.tokens),
            needs_page=sequence.computed + count > len(self._pages(sequence)) * self.page_size,
        )

    def waiting(self) -> list[WaitingRequest]:
        scheduler = self._engine.scheduler
        return [
            WaitingRequest(
                id=sequence.id,
                prefix_keys=self._keys(sequence, sequence.tokens[:-1]),
                fits=index == 0
                and bool(scheduler.free_rows)
                and self._pool.available * self.page_size > len(sequence.tokens),
            )
            for index, sequence in enumerate(scheduler.waiting)
        ]

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(sequence.id for sequence in self._engine.scheduler.running if page in self._pages(sequence))

    def handed_out(self, page: int) -> tuple[int, str | None]:
        return self._pool.handed_out[page], self._pool.last_taker.get(page)

    def free_under_users(self, page: int) -> None:
        self._pool.references[page] = 0
        self._pool.give_back(page)

    def is_free(self, page: int) -> bool:
        return page in self._pool.free

    def make_next(self, page: int) -> None:
        free = self._pool.free
        free.remove(page)
        free.appendleft(page)

    def list_as_free(self, page: int) -> None:
        self._pool.free.appendleft(page)

    def unlist(self, page: int) -> None:
        free = self._pool.free
        if page in free:
            free.remove(page)

    def block_table_row(self, request: str) -> tuple[int, ...]:
        sequence = self._engine.sequences[request]
        entries: list[int] = self._table[sequence.row, : len(self._pages(sequence))].tolist()
        return tuple(entries)

    def write_block_table(self, request: str, column: int, entry: int) -> None:
        self._table[self._engine.sequences[request].row, column] = entry

    def cached_page(self, key: int) -> int | None:
        return self._pool.cached.get(key)

    def cached_pages(self) -> dict[int, int]:
        return dict(self._pool.key_of)

    def point_cache_entry(self, key: int, page: int | None) -> None:
        if page is None:
            self._pool.cached.pop(key, None)
        else:
            self._pool.cached[key] = page

    # -- the forward about to run ---------------------------------------------------------------------------------

    @property
    def window(self) -> int | None:
        return None if self._window is None else self._window.window

    def windowed(self) -> EmbeddedTarget | None:
        if self._engine.window is None:
            return None
        return EmbeddedTarget(self._engine, recites=self.recites, pool=WINDOW_POOL)

    def tokens(self) -> list[StepToken]:
        tensors = self._engine.tensors
        if tensors is None:
            return []
        slots, positions = tensors.slots[self._name].tolist(), tensors.positions.tolist()
        starts = tensors.query_start.tolist()
        found = []
        for place in range(len(starts) - 1):
            request = tensors.requests[place] if place < len(tensors.requests) else None
            drafts = 0 if request is None else len(self._engine.sequences[request].drafts)
            for index in range(starts[place], starts[place + 1]):
                found.append(
                    StepToken(
                        index=index,
                        request=request,
                        position=positions[index],
                        slot=slots[index],
                        is_draft=index >= starts[place + 1] - drafts,
                    )
                )
        return found

    def write_slots(self, slots: Mapping[int, int]) -> None:
        assert self._engine.tensors is not None
        for index, slot in slots.items():
            self._engine.tensors.slots[self._name][index] = slot

    def last_slots(self) -> tuple[int, ...]:
        last = self._engine.last_served
        return () if last is None else tuple(last.slots[self._name].tolist())
