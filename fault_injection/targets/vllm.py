"""vLLM as a target of faults: its scheduler's requests, its block pool, its prefix cache, its worker's block table.

Everything here is the engine's own state, read and changed between two calls of `Scheduler.schedule`. A fault is one of
vLLM's first KV cache group; the campaign's models have no other.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvguard.fault_injection.target import CacheKey, RunningRequest, WaitingRequest


def client_name(request_id: str) -> str:
    """The id that the client gave: vLLM appends a random part to it."""
    return request_id.rsplit("-", 1)[0]


class Takings(Protocol):
    """How often each page was handed out, and to whom last: vLLM's pool does not keep it, so the harness looks on."""

    handed_out: dict[int, int]
    last_taker: dict[int, str]


class BlockRows(Protocol):
    """The block table in device memory, as the worker's next step will read it."""

    def read(self, request_id: str, columns: int) -> tuple[int, ...]:
        """The first entries of the request's row; () if it has none yet."""

    def write(self, request_id: str, column: int, entry: int) -> None:
        """Overwrite one entry."""


class RowsV1:
    """Runner V1: one table, written on the host and copied to the device as a whole before each step."""

    def __init__(self, runner: Any) -> None:
        self._batch = runner.input_batch

    def _table(self) -> Any:
        return self._batch.block_table.block_tables[0].block_table

    def read(self, request_id: str, columns: int) -> tuple[int, ...]:
        row = self._batch.req_id_to_index.get(request_id)
        return () if row is None else tuple(self._table().np[row, :columns].tolist())

    def write(self, request_id: str, column: int, entry: int) -> None:
        row, table = self._batch.req_id_to_index[request_id], self._table()
        table.np[row, column] = entry
        # The same memory on a CPU; on a GPU the host's copy goes over it before the next step.
        table.gpu[row, column] = entry


class RowsV2:
    """Runner V2: a row per request stays on the device; each step gathers those of its batch."""

    def __init__(self, runner: Any) -> None:
        self._rows, self._tables = runner.req_states.req_id_to_index, runner.block_tables.block_tables

    def read(self, request_id: str, columns: int) -> tuple[int, ...]:
        row = self._rows.get(request_id)
        return () if row is None else tuple(self._tables[0].gpu[row, :columns].tolist())

    def write(self, request_id: str, column: int, entry: int) -> None:
        self._tables[0].gpu[self._rows[request_id], column] = entry


class VllmTarget:
    """Implements `PageTarget`; see there for what each call means. Requests go by their clients' names."""

    def __init__(self, engine: Any, takings: Takings, *, recites: bool) -> None:
        self._scheduler, self._pool, self._takings = engine.scheduler, engine.pool, takings
        self._manager = self._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self._rows: BlockRows = RowsV2(engine.runner) if engine.options.runner == "v2" else RowsV1(engine.runner)
        self.page_size = int(self._manager.block_size)
        self.num_pages = int(self._pool.num_gpu_blocks)
        self.null_page = int(self._pool.null_block.block_id)
        self.recites = recites

    def _pages(self, request_id: str) -> tuple[int, ...]:
        return tuple(block.block_id for block in self._manager.req_to_blocks.get(request_id, ()))

    def _keys(self, request: Any, tokens: int) -> tuple[CacheKey, ...]:
        """The prefix cache's keys of the first full pages of the request, as far as `tokens` go."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        return tuple(make_block_hash_with_group_id(key, 0) for key in request.block_hashes[: tokens // self.page_size])

    def running(self) -> list[RunningRequest]:
        return [self._view(request) for request in self._scheduler.running]

    def _view(self, request: Any) -> RunningRequest:
        pages = self._pages(request.request_id)
        # With asynchronous scheduling a token is on its way, whose value the scheduler does not know yet.
        known = request.num_tokens_with_spec + request.num_output_placeholders
        return RunningRequest(
            id=client_name(request.request_id),
            pages=pages,
            computed_tokens=request.num_computed_tokens,
            prompt_tokens=request.num_prompt_tokens,
            generated_tokens=request.num_output_tokens + request.num_output_placeholders,
            total_tokens=request.num_prompt_tokens + request.max_tokens,
            prefix_keys=self._keys(request, request.num_tokens),
            needs_page=known > len(pages) * self.page_size,
        )

    def waiting(self) -> list[WaitingRequest]:
        scheduler = self._scheduler
        room = len(scheduler.running) < scheduler.max_num_running_reqs
        free_tokens = self._pool.get_num_free_blocks() * self.page_size
        return [
            WaitingRequest(
                id=client_name(request.request_id),
                # The last token is always computed: its logits are needed.
                prefix_keys=self._keys(request, request.num_tokens - 1),
                fits=index == 0 and room and free_tokens > request.num_tokens,
            )
            for index, request in enumerate(scheduler.waiting)
        ]

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(request.id for request in self.running() if page in request.pages)

    def handed_out(self, page: int) -> tuple[int, str | None]:
        return self._takings.handed_out.get(page, 0), self._takings.last_taker.get(page)

    def free_under_users(self, page: int) -> None:
        block = self._pool.blocks[page]
        # A cached page without references would stay readable until it is evicted: let that happen at once.
        self._pool._maybe_evict_cached_block(block)
        block.ref_cnt = 1
        self._pool.free_blocks([block])

    def _free(self) -> list[Any]:
        return list(self._pool.free_block_queue.get_all_free_blocks())

    def is_free(self, page: int) -> bool:
        return any(block.block_id == page for block in self._free())

    def make_next(self, page: int) -> None:
        block = self._pool.blocks[page]
        self._pool.free_block_queue.remove(block)
        self._pool.free_block_queue.prepend_n([block])

    def list_as_free(self, page: int) -> None:
        block = self._pool.blocks[page]
        # vLLM asserts that what leaves the queue has no references; such a page got there by losing them. Still cached,
        # it could leave the queue as a prefix hit, and nobody would get it a second time.
        self._pool._maybe_evict_cached_block(block)
        block.ref_cnt = 0
        self._pool.free_block_queue.prepend_n([block])

    def unlist(self, page: int) -> None:
        if self.is_free(page):
            self._pool.free_block_queue.remove(self._pool.blocks[page])

    def _request_id(self, name: str) -> str:
        ids: list[str] = [request.request_id for request in self._scheduler.running]
        return next(request_id for request_id in ids if client_name(request_id) == name)

    def block_table_row(self, request: str) -> tuple[int, ...]:
        request_id = self._request_id(request)
        return self._rows.read(request_id, len(self._pages(request_id)))

    def write_block_table(self, request: str, column: int, entry: int) -> None:
        self._rows.write(self._request_id(request), column, entry)

    def cached_page(self, key: CacheKey) -> int | None:
        block = self._pool.cached_block_hash_to_block.get_one_block(key)
        return None if block is None else int(block.block_id)

    def cached_pages(self) -> dict[int, CacheKey]:
        return {block.block_id: block.block_hash for block in self._pool.blocks if block.block_hash is not None}

    def point_cache_entry(self, key: CacheKey, page: int | None) -> None:
        entries = self._pool.cached_block_hash_to_block._cache
        if page is None:
            entries.pop(key, None)
        else:
            entries[key] = self._pool.blocks[page]
