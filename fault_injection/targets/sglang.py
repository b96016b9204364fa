"""SGLang as a target of faults: its scheduler's requests, its allocator's free list, its radix tree, `req_to_token`.

Everything here is the engine's own state, read and changed between two calls of `get_next_batch_to_run`. SGLang keeps a
request's pages in one place alone, the row of `req_to_token` in device memory: a row that a fault has changed is what
the request has from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from kvguard.fault_injection.sglang_plan import NO_ENTRIES
from kvguard.fault_injection.target import CacheKey, RunningRequest, StepToken, WaitingRequest


class Takings(Protocol):
    """How often each page was handed out, and to whom last: SGLang does not keep it, so the harness looks on."""

    handed_out: dict[int, int]
    last_taker: dict[int, str]


class SglangTarget:
    """Implements `WriteTarget`; see there for what each call means.

    planned  the batch about to run, if any; forward: its tensors, right before the model; last: the slots before those
    """

    window: int | None = None

    def __init__(self, scheduler: Any, takings: Takings, *, recites: bool) -> None:
        self._scheduler, self._takings = scheduler, takings
        self._allocator: Any = scheduler.token_to_kv_pool_allocator
        self._rows: Any = scheduler.req_to_token_pool.req_to_token
        self.page_size = int(self._allocator.page_size)
        # Page 0 takes the writes of padding; the pool's pages count from 1.
        self.num_pages = int(self._allocator.size) // self.page_size + 1
        self.null_page = 0
        self.recites = recites
        self.planned: Any = None
        self.forward: Any = None
        self.last: tuple[int, ...] = ()

    def _live(self) -> Iterator[Any]:
        """Requests with a row, oldest first: those that decode, those whose prompt just ran, the one in chunks."""
        scheduler, seen = self._scheduler, set[str]()
        batches = (scheduler.running_batch, scheduler.last_batch, self.planned)
        requests = [request for batch in batches if batch is not None for request in batch.reqs]
        for request in (*requests, scheduler.chunked_req):
            if request is None or request.rid in seen or request.finished() or not request.kv.holds_kv:
                continue
            seen.add(request.rid)
            yield request

    def _keys(self, request: Any, tokens: int) -> tuple[CacheKey, ...]:
        """The tree's keys of the first full pages, as far as `tokens` go: all tokens up to the page's end."""
        ids = (*request.origin_input_ids, *request.output_ids)
        ends = range(self.page_size, min(tokens, len(ids)) + 1, self.page_size)
        return tuple(ids[:end] for end in ends)

    def _pages(self, request: Any) -> tuple[int, ...]:
        row = self._rows[request.kv.req_pool_idx, : request.kv.kv_allocated_len : self.page_size]
        return tuple(slot // self.page_size for slot in row.tolist())

    def running(self) -> list[RunningRequest]:
        return [self._view(request) for request in self._live()]

    def _view(self, request: Any) -> RunningRequest:
        prompt, computed = len(request.origin_input_ids), request.kv.kv_committed_len
        return RunningRequest(
            id=request.rid,
            pages=self._pages(request),
            computed_tokens=computed,
            prompt_tokens=prompt,
            # The last token's KV comes with the next step. In the overlap loop its value may not be known yet.
            generated_tokens=max(0, computed - prompt + 1),
            total_tokens=prompt + request.sampling_params.max_new_tokens,
            prefix_keys=self._keys(request, computed),
            needs_page=computed >= prompt and computed % self.page_size == 0,
        )

    def waiting(self) -> list[WaitingRequest]:
        scheduler = self._scheduler
        room = scheduler.chunked_req is None and len(self.running()) < scheduler.max_running_requests
        free_tokens = self._allocator.available_size()
        return [
            WaitingRequest(
                id=request.rid,
                # The last token is always computed: its logits are needed.
                prefix_keys=self._keys(request, request.seqlen - 1),
                fits=index == 0 and room and free_tokens > request.seqlen + self.page_size,
            )
            for index, request in enumerate(scheduler.waiting_queue)
        ]

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(request.id for request in self.running() if page in request.pages)

    def handed_out(self, page: int) -> tuple[int, str | None]:
        return self._takings.handed_out.get(page, 0), self._takings.last_taker.get(page)

    def _slots(self, page: int) -> Any:
        import torch

        return torch.arange(page * self.page_size, (page + 1) * self.page_size, dtype=torch.int64)

    def free_under_users(self, page: int) -> None:
        import torch

        self._allocator.free(self._slots(page))
        if self.is_free(page):
            # SGLang hands out a freed page of several tokens next. A fault that wants that asks for it.
            free = self._allocator.free_pages
            self._allocator.free_pages = torch.cat((free[free != page], free.new_tensor([page])))

    def is_free(self, page: int) -> bool:
        return page in self._allocator.get_all_free_pages().tolist()

    def make_next(self, page: int) -> None:
        self.unlist(page)
        self.list_as_free(page)

    def list_as_free(self, page: int) -> None:
        import torch

        free = self._allocator.free_pages
        self._allocator.free_pages = torch.cat((free.new_tensor([page]), free))

    def unlist(self, page: int) -> None:
        free = self._allocator.free_pages
        self._allocator.free_pages = free[free != page]

    def _request(self, name: str) -> Any:
        return next(request for request in self._live() if request.rid == name)

    def block_table_row(self, request: str) -> tuple[int, ...]:
        return self._pages(self._request(request))

    def write_block_table(self, request: str, column: int, entry: int) -> None:
        found, size = self._request(request), self.page_size
        end = min((column + 1) * size, found.kv.kv_allocated_len)
        slots = self._slots(entry)[: end - column * size]
        self._rows[found.kv.req_pool_idx, column * size : end] = slots.to(self._rows.dtype)

    def cached_page(self, key: CacheKey) -> int | None:
        from array import array

        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree = self._scheduler.tree_cache
        # Read only: a look-up by match_prefix would split nodes and make them recent.
        length, node, _ = tree.tree_core.match_full_device_prefix(RadixKey(array("q", key), None))
        return None if length < len(key) else int(tree.path_device_indices(node)[len(key) - 1]) // self.page_size

    def cached_pages(self) -> dict[int, CacheKey]:
        raise NotImplementedError(NO_ENTRIES)

    def point_cache_entry(self, key: CacheKey, page: int | None) -> None:
        raise NotImplementedError(NO_ENTRIES)

    # -- the forward about to run ---------------------------------------------------------------------------------

    def windowed(self) -> None:
        return None

    def tokens(self) -> list[StepToken]:
        forward, found = self.forward, list[StepToken]()
        slots, positions = forward.out_cache_loc.tolist(), forward.positions.tolist()
        decodes = forward.forward_mode.is_decode()
        lengths = [1] * len(self.planned.reqs) if decodes else forward.extend_seq_lens.tolist()
        for request, length in zip(self.planned.reqs, lengths, strict=True):
            for index in range(len(found), len(found) + length):
                found.append(
                    StepToken(index=index, request=request.rid, position=positions[index], slot=slots[index])
                )
        return found

    def write_slots(self, slots: Mapping[int, int]) -> None:
        for index, slot in slots.items():
            self.forward.out_cache_loc[index] = slot

    def last_slots(self) -> tuple[int, ...]:
        return self.last
