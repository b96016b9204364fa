"""One vLLM engine serves many runs: what a run changed is taken back, and the next one starts from a known state.

Two things are taken back. Functions that the guard and the harness had set on the engine's objects go, so that an
unguarded run is vLLM's own code. And the block pool is made anew: a run with a fault and no guard leaves reference
counts below zero, pages listed twice and cache entries that lie, which no single repair (`PageFault.undo`) would put
right. The free queue comes back in the order of a fresh engine, so that runs are comparable page by page.

Anything else that is not as in a fresh engine (a request that is left over, in the scheduler or the worker) is not
repaired: the engine is thrown away and built again.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

FLUSH_STEPS_MAX = 20
GUARD_MARK = "_kvguard_attached"


class OwnFunctions:
    """The functions that stand on an engine's own objects, and a way back to them."""

    def __init__(self, engine: Any) -> None:
        manager, runner = engine.scheduler.kv_cache_manager, engine.runner
        objects = [engine.scheduler, manager, manager.coordinator, *manager.coordinator.single_type_managers]
        objects += [engine.pool, engine.core, engine.core.model_executor, runner]
        objects += [getattr(runner, name) for name in ("input_batch", "block_tables") if hasattr(runner, name)]
        self._before = [(found, self._functions(found)) for found in objects]

    @staticmethod
    def _functions(found: Any) -> dict[str, Any]:
        kinds = (FunctionType, MethodType)
        return {name: value for name, value in vars(found).items() if isinstance(value, kinds) or name == GUARD_MARK}

    def restore(self) -> None:
        """Remove what was set on the objects since, and put back what it replaced."""
        for found, before in self._before:
            for name in self._functions(found).keys() - before.keys():
                delattr(found, name)
            for name, value in before.items():
                setattr(found, name, value)


def flush(engine: Any) -> None:
    """Let the worker hear of the last requests that ended: vLLM tells it with the next step, if there is one."""
    for _ in range(FLUSH_STEPS_MAX):
        if not engine.scheduler.has_requests() and not engine.core.batch_queue:
            return
        engine.llm_engine.step()


def leaked_pages(engine: Any) -> int:
    """Pages that are neither free nor in use by anybody, once no request is left."""
    return int(engine.pool.num_gpu_blocks) - 1 - int(engine.pool.get_num_free_blocks())


def clean_slate(engine: Any) -> str:
    """Make the pool and the KV cache as in a fresh engine. Returns what is wrong with the rest, "" if nothing is."""
    flush(engine)
    trouble = _leftovers(engine)
    if trouble:
        return trouble
    pool = engine.pool
    for block in pool.blocks:
        block.ref_cnt = 0
        block.reset_hash()
        block.prev_free_block = block.next_free_block = None
    pool.free_block_queue = type(pool.free_block_queue)(pool.blocks)
    if pool.free_block_queue.popleft() is not pool.null_block:
        return "the null block is not the first one"
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for cache in engine.runner.kv_caches:
        cache.zero_()
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if free != list(range(1, pool.num_gpu_blocks)) or pool.get_num_free_blocks() != len(free):
        return f"{len(free)} of {pool.num_gpu_blocks - 1} pages are free"
    return ""


def _leftovers(engine: Any) -> str:
    scheduler, runner = engine.scheduler, engine.runner
    coordinator = scheduler.kv_cache_manager.coordinator
    if runner is None:
        return "the model runner is in another process"
    worker = runner.req_states.req_id_to_index if hasattr(runner, "req_states") else runner.requests
    held = [single for single in coordinator.single_type_managers if any(single.req_to_blocks.values())]
    for what, left in (
        ("requests in the scheduler", scheduler.requests),
        ("requests in its queues", [*scheduler.running, *scheduler.waiting]),
        ("steps in flight", engine.core.batch_queue or ()),
        ("requests in the worker", worker),
        ("managers that hold pages", held),
        ("requests in the output processor", engine.llm_engine.output_processor.request_states),
        ("guards", [found for found in (scheduler, runner) if hasattr(found, GUARD_MARK)]),
    ):
        if len(left):
            return f"{len(left)} {what} left over"
    return ""
