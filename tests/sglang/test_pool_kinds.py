"""KV pools of other kinds under SGLang's allocators: the guard looks at pages, so none of them is anything special."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sglang.apart import Child

ROWS, CONTEXT, SIZE = 4, 96, 320
HEADS = {"head_num": 2, "head_dim": 64}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}
KINDS: dict[str, tuple[str, torch.dtype, dict[str, int]]] = {
    "plain": ("MHATokenToKVPool", torch.bfloat16, HEADS),
    "fp8": ("MHATokenToKVPool", torch.float8_e4m3fn, HEADS),
    "fp8, e5m2": ("MHATokenToKVPool", torch.float8_e5m2, HEADS),
    "mxfp8": ("MHATokenToKVPoolMXFP8", torch.float8_e4m3fn, HEADS),
    "fp4": ("MHATokenToKVPoolFP4", torch.bfloat16, HEADS),
    "latent": ("MLATokenToKVPool", torch.bfloat16, LATENT),
    "latent, fp8": ("MLATokenToKVPool", torch.float8_e4m3fn, LATENT),
    "latent, fp4": ("MLATokenToKVPoolFP4", torch.bfloat16, LATENT),
}
"""Class, dtype, shape; those of fp4 are packed two to a byte."""


class World:
    """SGLang's allocator and a guard, and rows that grow and end; no model, no tree."""

    def __init__(self, kind: str, page_size: int) -> None:
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.plugins import load_plugins

        from kvguard.adapters.sglang.layout import PoolLayout
        from kvguard.adapters.sglang.plugin import ATTACHED
        from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard
        from kvguard.config import GuardConfig

        load_plugins()
        name, dtype, shape = KINDS[kind]
        self.pool = getattr(memory_pool, name)(
            size=SIZE, page_size=page_size, dtype=dtype, layer_num=2, device="cpu", enable_memory_saver=False, **shape
        )
        sorts = {"need_sort": page_size > 1}
        if page_size == 1:
            self.allocator: Any = TokenToKVPoolAllocator(SIZE, dtype, "cpu", self.pool, **sorts)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(SIZE, page_size, dtype, "cpu", self.pool, **sorts)
        rows = ReqToTokenPool(size=ROWS, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
        self.table, self.size = rows.req_to_token, page_size
        scheduler: Any = SimpleNamespace(
            server_args=SimpleNamespace(tp_size=1), req_to_token_pool=rows, token_to_kv_pool_allocator=self.allocator
        )
        layout = PoolLayout(SIZE // page_size + 1, page_size, self.table.shape[0], "cpu")
        self.guard = SchedulerGuard(scheduler, layout, GuardConfig.load())
        setattr(self.allocator, ATTACHED, self.guard)
        self.lengths = [0] * ROWS

    def extend(self, row: int, tokens: int) -> None:
        """New tokens of a row, as `alloc_for_extend` gives them."""
        before, after = self.lengths[row], self.lengths[row] + tokens
        last = self.table[row, before - 1 : before].long() if before else torch.tensor([-1])
        bounds = torch.tensor([before]), torch.tensor([after])
        if self.size == 1:
            slots = self.allocator.alloc(tokens)
        else:
            slots = self.allocator.alloc_extend(bounds[0], bounds[0], bounds[1], bounds[1], last, tokens)
        assert slots is not None and slots.max() < self.pool.get_key_buffer(0).shape[0], "a slot that the pool has not"
        self.table[row, before:after] = slots.to(torch.int32)
        adopted = torch.tensor([-1 if before else 0])
        offset = torch.tensor([0, tokens])
        self.guard.books.stamp(slots, torch.tensor([row]), bounds[0], offset=offset, adopted=adopted)
        self.lengths[row] = after

    def end(self, row: int) -> None:
        """The row gives back what it has."""
        if self.lengths[row]:
            self.guard.freeing = row + 1
            self.allocator.free_segment(self.table[row, : self.lengths[row]].long(), start_pos=0)
            self.guard.freeing = 0
            self.lengths[row] = 0

    def flagged(self) -> list[int]:
        """Rows that a step would not be let read; no allocation and no free may have been wrong."""
        _, events = self.guard.books.settle()
        assert not events.any() or self.stolen, events
        rows = torch.tensor([row for row in range(ROWS) if self.lengths[row]], dtype=torch.int64)
        record = torch.full((len(rows), 4), -1, dtype=torch.int64)
        self.guard.books.verify(
            table=self.table, rows=rows, lengths=torch.tensor([self.lengths[row] for row in rows.tolist()]),
            enforce=False, record=record, slot_mapping=None, query_start=None,
        )  # fmt: skip
        return [row for row, flags in zip(rows.tolist(), record[:, 0].tolist(), strict=True) if flags]

    stolen = False

    def steal(self, row: int) -> None:
        """A page of the row goes to the front of the free list."""
        self.stolen = True
        page = self.table[row, :1].long() // self.size
        self.allocator.merge_and_sort_free()
        self.allocator.free_pages = torch.cat([page, self.allocator.free_pages])


def _history(kept: dict[str, Any], kind: str, page_size: int) -> None:
    try:
        world = World(kind, page_size)
    except (ImportError, NotImplementedError, RuntimeError, AssertionError) as error:
        kept["cannot"] = f"{type(error).__name__}: {error}"
        return
    rng = random.Random(1)
    for _ in range(60):
        row = rng.randrange(ROWS)
        if world.lengths[row] > CONTEXT - 24 or rng.random() < 0.2:
            world.end(row)
        else:
            world.extend(row, rng.choice((1, 1, 5, 17)))
        assert world.flagged() == []
    for row in range(ROWS):
        world.end(row)
    assert world.flagged() == []
    assert sorted(world.allocator.get_all_free_pages().tolist()) == list(range(1, SIZE // page_size + 1))
    for row in range(3):
        world.extend(row, 20)
    assert world.flagged() == []
    world.steal(1)
    world.extend(3, 1)
    assert world.flagged() == [1], "and the thief holds what it was promised"


@pytest.fixture(scope="module")
def child() -> Any:
    made = Child({"KVGUARD_LEVEL": "tags"})
    yield made
    made.stop()


def _cannot(kept: dict[str, Any]) -> Any:
    return kept.pop("cannot", None)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_history_is_clean_and_a_stolen_page_is_flagged(child: Child, kind: str, page_size: int) -> None:
    """Rows that grow and end, then a page that two of them have."""
    child.call(_history, kind, page_size)
    cannot = child.call(_cannot)
    if cannot:
        pytest.skip(f"{KINDS[kind][0]} cannot be made here: {cannot}")
