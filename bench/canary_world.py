"""A small SGLang without a model: its own pools, allocator, prefix tree, requests and allocation calls, on the CPU.

What a scheduler does between forwards is SGLang's own code: `Req.init_next_round_input`, `alloc_for_extend`,
`alloc_for_decode`, `checkpoint`, `release_kv_cache`. Only the model is made up: its forward writes rows of K and V
that depend on token, position and layer. A watch (see bench/canary_watch.py) is told before and after each forward,
at the places where SGLang's kv_canary and kvguard stand in a real server.
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

PAGE = 4
LAYERS = 3
HEADS, WIDTH = 2, 16
ROWS, CONTEXT = 8, 64
VOCABULARY = 1000


class Watch(Protocol):
    """Who looks at the world's forwards."""

    def attach(self, world: World) -> None:
        """The world is built; nothing has been allocated."""

    def before(self, batch: Any, forward: Any) -> None:
        """Right before a forward: block table, lengths and slots are final."""

    def after(self, batch: Any, forward: Any) -> None:
        """Right after it, on the same stream."""


class Batch(SimpleNamespace):
    """What SGLang's allocation functions read of a ScheduleBatch."""

    def maybe_evict_swa(self) -> None:
        """There is no sliding window here."""

    def is_dllm(self) -> bool:
        """Never a diffusion model."""
        return False


def prompt(seed: int, length: int) -> list[int]:
    """Tokens of a prompt; other seeds give other tokens."""
    return [(seed * 131 + place * 17) % VOCABULARY + 1 for place in range(length)]


class World:
    """See the module. `pages` without the null page; `step` counts forwards from 1."""

    def __init__(self, watch: Watch, *, pages: int = 40) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        size = pages * PAGE
        self.pool = MHATokenToKVPool(
            size=size,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=WIDTH,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(size, PAGE, torch.bfloat16, "cpu", self.pool, False)
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.table: Tensor = self.rows.req_to_token
        self.pages, self.step = pages, 0
        self.live_step = 0
        """The forward that is the first to read what a fault has left; 0: none has."""
        self.victims: tuple[str, ...] = ()
        self.counts = dict.fromkeys(("prefix hits", "evicted tokens", "chunks", "retractions", "duplicates"), 0)
        # What a fault changes in the next forward of the model.
        self.unwritten: set[int] = set()
        self.stray: Callable[[], None] | None = None
        self.misdirected: dict[int, int] = {}
        self.scale = 1.0
        self.watch = watch
        watch.attach(self)

    def live(self, *victims: Any) -> None:
        """The next forward reads what is wrong, for these requests."""
        self.live_step, self.victims = self.step + 1, tuple(req.rid for req in victims)

    def peer(self) -> World:
        """Another server of the same kind, with a watch of its own."""
        return World(type(self.watch)(*self.watch.arguments))  # type: ignore[attr-defined]

    # -- requests -------------------------------------------------------------------------------------------------

    def request(self, name: str, tokens: list[int], *, tenant: str | None = None) -> Any:
        """A request as it comes in."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        return Req(
            rid=name,
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=CONTEXT),
            extra_key=tenant,
        )

    def row(self, req: Any) -> int:
        """Its row of the block table."""
        return int(req.kv.req_pool_idx)

    def slots(self, req: Any, column: int) -> Tensor:
        """The slots that its row holds for one page, int64."""
        return self.table[self.row(req), column * PAGE : (column + 1) * PAGE].to(torch.int64)

    def allocate(self, *reqs: Any, upto: int | None = None) -> Batch:
        """Match, lock and allocate a prefill of whole prompts, or of their first `upto` tokens; it has not run."""
        from sglang.srt.mem_cache import allocation

        for req in reqs:
            if not req.kv.holds_kv:
                self.match(req)
                req.lock = self.tree.lock(req.last_node)
                self.counts["prefix hits"] += req.prefix_len > 0
        ends = [min(len(req.full_untruncated_fill_ids), upto or CONTEXT) for req in reqs]
        starts = [req.kv.kv_committed_len if req.kv.holds_kv else req.prefix_len for req in reqs]
        for req, start in zip(reqs, starts, strict=True):
            req.prefix_len = start
        lengths = torch.tensor(ends, dtype=torch.int64)
        batch = self._batch(reqs, lengths)
        batch.prefix_lens, batch.extend_lens = starts, [end - start for start, end in zip(starts, ends, strict=True)]
        batch.extend_num_tokens = sum(batch.extend_lens)
        before = self.allocator.available_size()
        slots, rows, _ = allocation.alloc_for_extend(batch)
        self.counts["evicted tokens"] += (
            max(0, self.allocator.available_size() + slots.shape[0] - before) // PAGE * PAGE
        )
        batch.req_pool_indices, batch.out_cache_loc = rows, slots
        return batch

    def match(self, req: Any) -> None:
        """Look the prompt up in the tree; faults take the place of this."""
        req.init_next_round_input(self.tree)

    def _batch(self, reqs: Any, lengths: Tensor) -> Batch:
        return Batch(
            reqs=list(reqs),
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            device="cpu",
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            hisparse_coordinator=None,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )

    def run_prefill(self, batch: Batch) -> None:
        """The forward of an allocated prefill; requests whose prompt is done get a token and go into the tree."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        starts, counts = batch.prefix_lens, batch.extend_lens
        positions: list[int] = []
        tokens: list[int] = []
        for req, start, count in zip(batch.reqs, starts, counts, strict=True):
            positions += range(start, start + count)
            tokens += req.full_untruncated_fill_ids[start : start + count]
        extra = {"extend_prefix_lens": torch.tensor(starts), "extend_seq_lens": torch.tensor(counts)}
        self._forward(ForwardMode.EXTEND, batch, tokens, positions, extra)
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            held = req.kv.cache_protected_len
            old = self.table[self.row(req), held:length].clone()
            self.tree.checkpoint(req, up_to=length)
            self.counts["duplicates"] += not torch.equal(old, self.table[self.row(req), held:length])
            if length == len(req.full_untruncated_fill_ids):
                self._sample(req, length)
            else:
                self.counts["chunks"] += 1

    def prefill(self, *reqs: Any, upto: int | None = None) -> None:
        """Allocate and run."""
        self.run_prefill(self.allocate(*reqs, upto=upto))

    def start(self, name: str, tokens: list[int], *, outputs: int = 0, tenant: str | None = None) -> Any:
        """A request with its prompt in the pool, and so many decode steps."""
        req = self.request(name, tokens, tenant=tenant)
        self.prefill(req)
        for _ in range(outputs):
            self.decode(req)
        return req

    def decode(self, *reqs: Any) -> None:
        """One token for each."""
        from sglang.srt.mem_cache import allocation
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lengths = torch.tensor([req.kv.kv_committed_len for req in reqs], dtype=torch.int64)
        batch = self._batch(reqs, lengths)
        batch.req_pool_indices = torch.tensor([self.row(req) for req in reqs], dtype=torch.int64)
        batch.req_pool_indices_cpu = batch.req_pool_indices.clone()
        batch.out_cache_loc = allocation.alloc_for_decode(batch, 1)
        batch.seq_lens = batch.seq_lens + 1
        if self.misdirected:
            wrong = [self.misdirected.pop(slot, slot) for slot in batch.out_cache_loc.tolist()]
            batch.out_cache_loc = torch.tensor(wrong)
            if self.misdirected:
                raise RuntimeError("the slot to be misdirected was not in this batch")
        positions = lengths.tolist()
        self._forward(ForwardMode.DECODE, batch, [req.output_ids[-1] for req in reqs], positions, {})
        for req, position in zip(reqs, positions, strict=True):
            self._sample(req, position + 1)

    def _sample(self, req: Any, position: int) -> None:
        req.output_ids.append((sum(map(ord, req.rid)) * 37 + position * 11) % VOCABULARY + 1)

    def finish(self, req: Any) -> None:
        """It ends; the tree keeps its pages."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.tree, checkpoint=True)

    def retract(self, req: Any) -> None:
        """It gives its pages back, and would start over."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.tree, checkpoint=False)
        self.counts["retractions"] += 1

    def evict_all(self) -> None:
        """The tree gives up every page that nobody reads."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        before = self.allocator.available_size()
        self.tree.evict(EvictParams(num_tokens=self.pages * PAGE))
        self.counts["evicted tokens"] += self.allocator.available_size() - before

    # -- the model ------------------------------------------------------------------------------------------------

    def _forward(self, mode: Any, batch: Batch, tokens: list[int], positions: list[int], extra: Any) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        reqs = batch.reqs
        forward = ForwardBatch(
            forward_mode=mode,
            batch_size=len(reqs),
            input_ids=torch.tensor(tokens, dtype=torch.int64),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            seq_lens_sum=int(batch.seq_lens.sum()),
        )
        forward.positions = torch.tensor(positions, dtype=torch.int64)
        for name, value in extra.items():
            setattr(forward, name, value)
        # As ForwardBatch.init_new snapshots them for kv_canary's token assert, but for the pinned memory.
        known = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
        forward.req_all_ids_flat = torch.tensor(sum(known, []), dtype=torch.int64)
        forward.req_all_ids_lens = torch.tensor([len(ids) for ids in known], dtype=torch.int64)
        self.step += 1
        self.watch.before(batch, forward)
        self._model(forward.input_ids, forward.positions, forward.out_cache_loc)
        self.watch.after(batch, forward)

    def _model(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
        kept = torch.tensor([int(slot) not in self.unwritten for slot in slots], dtype=torch.bool)
        if int((~kept).sum()) != len(self.unwritten):
            raise RuntimeError("the write to be lost was not in this forward")
        tokens, positions, slots = tokens[kept], positions[kept], slots[kept]
        place = torch.arange(HEADS * WIDTH).view(1, HEADS, WIDTH)
        for layer in range(LAYERS):
            value = torch.sin((tokens * 3 + positions * 7 + layer).view(-1, 1, 1) * 0.37 + place) * self.scale
            self.pool.k_buffer[layer][slots] = value.to(torch.bfloat16)
            self.pool.v_buffer[layer][slots] = (-value).to(torch.bfloat16)
        stray, self.stray = self.stray, None
        self.unwritten, self.scale = set(), 1.0
        if stray is not None:
            stray()

    def fingerprint(self) -> str:
        """Digest of the block table, the free list and all K and V: the same for every watch of one history."""
        digest = hashlib.sha256(self.table.numpy().tobytes())
        digest.update(self.allocator.get_all_free_pages().numpy().tobytes())
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            digest.update(buffer.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]


def transfer(source: World, target: World, pairs: list[tuple[int, int]]) -> None:
    """Copy pages between servers as P/D transfer does: by the pointers that SGLang's pools register for it.

    A pool that kv_canary is attached to registers its sidecar buffers as well, so they travel with the pages.
    """
    here, there = source.pool.get_contiguous_buf_infos(), target.pool.get_contiguous_buf_infos()
    for origin, goal, size in zip(here[0], there[0], here[2], strict=True):
        for page, other in pairs:
            ctypes.memmove(goal + other * size, origin + page * size, size)
