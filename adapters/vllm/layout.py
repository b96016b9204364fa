"""What kvguard must recognise in a vLLM before it attaches; anything else is refused by name."""

from __future__ import annotations

import inspect
from typing import Any

from kvguard.pools import PoolSpec

COVERED_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")


class Unsupported(RuntimeError):
    """kvguard cannot see enough of this vLLM to guard it; the message says what and names the version."""


def vllm_version() -> str:
    """The installed vLLM's version."""
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def _refuse(what: str) -> Unsupported:
    return Unsupported(f"kvguard cannot guard this vLLM {vllm_version()}: {what}")


def require(owner: Any, *names: str) -> None:
    """Every name is an attribute of `owner`. Raises Unsupported."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise _refuse(f"{type(owner).__name__} has no {', '.join(missing)}")


def require_parameters(function: Any, *names: str) -> None:
    """The function's first parameters carry these names, in this order. Raises Unsupported."""
    found = [name for name in inspect.signature(function).parameters if name != "self"][: len(names)]
    if found != list(names):
        raise _refuse(f"{getattr(function, '__qualname__', function)} takes {found}, expected {list(names)}")


def describe_scheduler(scheduler: Any) -> tuple[PoolSpec, ...]:
    """The pools of a Scheduler, one per KV cache group. Raises Unsupported for what is not covered."""
    require(scheduler, "kv_cache_manager", "requests", "schedule", "update_from_output", "finish_requests")
    manager = scheduler.kv_cache_manager
    require(manager, "block_pool", "coordinator", "free", "get_computed_blocks", "reset_prefix_cache")
    require(manager, "empty_kv_cache_blocks", "kv_cache_config")
    pool = manager.block_pool
    require(pool, "get_new_blocks", "free_blocks", "cache_full_blocks", "_maybe_evict_cached_block", "evict_blocks")
    require(pool, "blocks", "null_block", "free_block_queue", "num_gpu_blocks", "cached_block_hash_to_block")
    require_parameters(pool.get_new_blocks, "num_blocks")
    require_parameters(pool.free_blocks, "ordered_blocks")
    require_parameters(
        pool.cache_full_blocks,
        "request",
        "blocks",
        "num_cached_blocks",
        "num_full_blocks",
        "block_size",
        "kv_cache_group_id",
    )
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    kinds = ("tensor", "pipeline", "data", "decode_context", "prefill_context")
    for name in (f"{kind}_parallel_size" for kind in kinds):
        if getattr(parallel, name, 1) > 1:
            raise _refuse(f"{name} = {getattr(parallel, name)} is not covered")
    groups = manager.kv_cache_config.kv_cache_groups
    specs = []
    for index, group in enumerate(groups):
        spec = group.kv_cache_spec
        if type(spec).__name__ not in COVERED_SPECS:
            raise _refuse(f"KV cache group {index} is a {type(spec).__name__}; covered: {', '.join(COVERED_SPECS)}")
        specs.append(
            PoolSpec(
                name=f"group{index}",
                num_pages=pool.num_gpu_blocks,
                page_size=spec.block_size,
                null_page=pool.null_block.block_id,
            )
        )
    if not specs:
        raise _refuse("it has no KV cache groups")
    return tuple(specs)


def describe_tables_v1(runner: Any) -> list[Any]:
    """The block tables of model runner V1, one per group. Raises Unsupported if they do not look as expected."""
    require(runner, "input_batch", "_prepare_inputs", "sample_tokens", "execute_model")
    require(runner.input_batch, "block_table", "req_id_to_index", "num_reqs")
    tables = list(runner.input_batch.block_table.block_tables)
    for table in tables:
        require(table, "block_table", "slot_mapping", "block_size")
        require(table.block_table, "gpu")
        require(table.slot_mapping, "gpu")
        if table.block_table.gpu.dim() != 2:
            raise _refuse(f"a block table has {table.block_table.gpu.dim()} dimensions, expected 2")
    return tables
