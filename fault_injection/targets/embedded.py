"""The embedded engine as a target of faults."""

from __future__ import annotations

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.pool import NULL_PAGE, chain_keys
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.target import RunningRequest, WaitingRequest


class EmbeddedTarget:
    """Implements `PageTarget` on an Engine's own lists and tensors; see there for what each call means."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.page_size = engine.config.page_size
        self.num_pages = engine.config.num_pages
        self.null_page = NULL_PAGE
        self.recites = True

    def running(self) -> list[RunningRequest]:
        return [self._view(sequence) for sequence in self._engine.scheduler.running]

    def _view(self, sequence: Sequence) -> RunningRequest:
        count = min(len(sequence.tokens) - sequence.computed, self._engine.config.token_budget)
        return RunningRequest(
            id=sequence.id,
            pages=tuple(sequence.pages),
            computed_tokens=sequence.computed,
            prompt_tokens=len(sequence.request.prompt),
            generated_tokens=sequence.generated,
            total_tokens=len(sequence.request.prompt) + sequence.request.max_new_tokens,
            prefix_keys=tuple(chain_keys(sequence.tokens, self.page_size)),
            needs_page=sequence.computed + count > len(sequence.pages) * self.page_size,
        )

    def waiting(self) -> list[WaitingRequest]:
        scheduler = self._engine.scheduler
        return [
            WaitingRequest(
                id=sequence.id,
                prefix_keys=tuple(chain_keys(sequence.tokens[:-1], self.page_size)),
                fits=index == 0
                and bool(scheduler.free_rows)
                and self._engine.pool.available * self.page_size > len(sequence.tokens),
            )
            for index, sequence in enumerate(scheduler.waiting)
        ]

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(sequence.id for sequence in self._engine.scheduler.running if page in sequence.pages)

    def handed_out(self, page: int) -> tuple[int, str | None]:
        pool = self._engine.pool
        return pool.handed_out[page], pool.last_taker.get(page)

    def free_under_users(self, page: int) -> None:
        pool = self._engine.pool
        pool.references[page] = 0
        pool.give_back(page)

    def is_free(self, page: int) -> bool:
        return page in self._engine.pool.free

    def make_next(self, page: int) -> None:
        free = self._engine.pool.free
        free.remove(page)
        free.appendleft(page)

    def list_as_free(self, page: int) -> None:
        self._engine.pool.free.appendleft(page)

    def unlist(self, page: int) -> None:
        free = self._engine.pool.free
        if page in free:
            free.remove(page)

    def block_table_row(self, request: str) -> tuple[int, ...]:
        sequence = self._engine.sequences[request]
        entries: list[int] = self._engine.block_table[sequence.row, : len(sequence.pages)].tolist()
        return tuple(entries)

    def write_block_table(self, request: str, column: int, entry: int) -> None:
        self._engine.block_table[self._engine.sequences[request].row, column] = entry

    def cached_page(self, key: int) -> int | None:
        return self._engine.pool.cached.get(key)

    def cached_pages(self) -> dict[int, int]:
        return dict(self._engine.pool.key_of)

    def point_cache_entry(self, key: int, page: int | None) -> None:
        if page is None:
            self._engine.pool.cached.pop(key, None)
        else:
            self._engine.pool.cached[key] = page
