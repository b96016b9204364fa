"""What kvguard must recognise in a vLLM before it attaches; anything else is refused by name."""

from __future__ import annotations

from typing import Any

from kvguard.adapters.expectations import Expectations
from kvguard.adapters.expectations import Unsupported as Unsupported
from kvguard.pools import PoolSpec

COVERED_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec")
"""KV cache groups whose blocks hold consecutive tokens, column by column."""
WINDOWED_SPECS = ("SlidingWindowSpec",)
"""Those of them whose blocks give way to the null block once they are behind the window."""

COVERED_BACKENDS = {
    "CPU_ATTN": "run",
    "FLASH_ATTN": "read",
    "TRITON_ATTN": "read",
    "FLASHINFER": "read",
    "FLASHMLA": "read",
    "CUTLASS_MLA": "read",
    "TRITON_MLA": "read",
    "FLASH_ATTN_MLA": "read",
    "FLASHINFER_MLA": "read",
}
"""Attention backends that read the block table which is checked, or an index made from it after the check; and how we
know: `run` on this backend, or only `read` its source (vLLM 0.32.0)."""

COVERED_SPECULATION = ("ngram", "suffix")
"""Speculative methods without a drafter: nothing but the model itself touches the cache."""

PARALLEL_KINDS = ("pipeline", "data", "decode_context", "prefill_context")
"""Kinds of parallelism that are not covered. Tensor parallel is."""


TESTED_RELEASES = ("0.28.0", "0.30.0", "0.32.0")
"""Releases that kvguard's own tests run on."""

STANDING_LIMITS = (
    "bytes that a KV connector, an offload tier or a bit flip changes in a page are not seen at level tags",
    "writes of vLLM's dummy forwards, which it sends to no slot at all, are not checked",
    "a page that a connector writes after its request ended is not ordered with the forward, and not seen",
    "wrong tokens under a right cache key, LoRA adapters and tenants are not seen at level tags",
)
"""What no configuration covers, or not below level `keys`."""


def vllm_version() -> str:
    """The installed vLLM's version."""
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


_EXPECTED = Expectations("vLLM", vllm_version)
_refuse, require, require_parameters = _EXPECTED.refuse, _EXPECTED.require, _EXPECTED.require_parameters


def check_scheduler_shape(scheduler: Any, manager: Any, pool: Any, single: Any) -> None:
    """The functions that the scheduler side wraps or calls; objects or their classes. Raises Unsupported."""
    require(scheduler, "schedule", "update_from_output", "finish_requests")
    require(manager, "free", "get_computed_blocks", "reset_prefix_cache", "pop_blocks_for_free")
    require(pool, "get_new_blocks", "free_blocks", "cache_full_blocks", "_maybe_evict_cached_block", "evict_blocks")
    require_parameters(manager.free, "request")
    require_parameters(manager.pop_blocks_for_free, "request")
    require_parameters(manager.get_computed_blocks, "request")
    require_parameters(pool.get_new_blocks, "num_blocks")
    require_parameters(pool.free_blocks, "ordered_blocks")
    require_parameters(pool._maybe_evict_cached_block, "block")
    require_parameters(
        pool.cache_full_blocks,
        "request",
        "blocks",
        "num_cached_blocks",
        "num_full_blocks",
        "block_size",
        "kv_cache_group_id",
    )
    require_parameters(scheduler.update_from_output, "scheduler_output", "model_runner_output")
    require_parameters(scheduler.finish_requests, "request_ids", "finished_status")
    if hasattr(single, "_remove_blocks_in_range"):
        require_parameters(single._remove_blocks_in_range, "request_id")


def describe_scheduler(scheduler: Any) -> tuple[PoolSpec, ...]:
    """The pools of a Scheduler, one per KV cache group. Raises Unsupported for what is not covered."""
    require(scheduler, "kv_cache_manager", "requests")
    manager = scheduler.kv_cache_manager
    require(manager, "block_pool", "coordinator", "empty_kv_cache_blocks", "kv_cache_config")
    require(manager.coordinator, "single_type_managers", "find_longest_cache_hit")
    pool = manager.block_pool
    require(pool, "blocks", "null_block", "free_block_queue", "num_gpu_blocks", "cached_block_hash_to_block")
    for single in manager.coordinator.single_type_managers:
        require(single, "req_to_blocks", "block_size")
        check_scheduler_shape(scheduler, manager, pool, single)
    check_configuration(getattr(scheduler, "vllm_config", None))
    if getattr(manager.coordinator, "enable_partial_hash_hits", False):
        raise _refuse("prefix hits on parts of blocks are not covered")
    if getattr(scheduler, "prefix_replay_tokens", 0):
        raise _refuse("prefix hits whose tail is computed again are not covered: shared blocks would be written again")
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
                windowed=type(spec).__name__ in WINDOWED_SPECS,
            )
        )
    if not specs:
        raise _refuse("it has no KV cache groups")
    return tuple(specs)


def check_configuration(config: Any) -> None:
    """Parallelism and speculation of a VllmConfig. Raises Unsupported for what is not covered."""
    parallel = getattr(config, "parallel_config", None)
    for name in (f"{kind}_parallel_size" for kind in PARALLEL_KINDS):
        if getattr(parallel, name, 1) > 1:
            raise _refuse(f"{name} = {getattr(parallel, name)} is not covered")
    if getattr(getattr(config, "model_config", None), "disable_cascade_attn", True) is False:
        raise _refuse("cascade attention is not covered: all rows read their common prefix through one row's table")
    speculation = getattr(config, "speculative_config", None)
    method = getattr(speculation, "method", None)
    if speculation is not None and method not in COVERED_SPECULATION:
        raise _refuse(
            f"speculative decoding with {method} is not covered: a drafter computes slots and reads the cache after "
            f"the check; covered: {', '.join(COVERED_SPECULATION)}"
        )


def limits_of(config: Any, level: str) -> list[str]:
    """What of this VllmConfig is guarded only in part at this level; named when the guard attaches."""
    found = []
    if vllm_version().partition("+")[0] not in TESTED_RELEASES:
        found.append(f"vLLM {vllm_version()} is not a tested release ({', '.join(TESTED_RELEASES)})")
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is not None:
        connector = getattr(transfer, "kv_connector", None)
        found.append(f"KV connector {connector}: the bytes that it moves are not verified")
    if getattr(config, "lora_config", None) is not None and level != "keys":
        found.append("LoRA: which adapter wrote a page is not verified")
    return found


def check_backends(runner: Any) -> None:
    """The attention backends of a model runner are known to read the block table. Raises Unsupported."""
    require(runner, "attn_groups")
    for groups in runner.attn_groups:
        for group in groups:
            name = str(group.backend.get_name())
            if name not in COVERED_BACKENDS:
                raise _refuse(f"attention backend {name} is not covered; covered: {', '.join(COVERED_BACKENDS)}")


def describe_tables_v1(runner: Any) -> list[int]:
    """Tokens per block-table entry of model runner V1, one per group. Raises Unsupported for an unexpected layout."""
    require(runner, "input_batch", "query_start_loc", "seq_lens", "device")
    require(runner.query_start_loc, "gpu")
    _require_lengths(runner.seq_lens)
    require(runner.input_batch, "block_table", "req_id_to_index", "num_reqs")
    tables = list(runner.input_batch.block_table.block_tables)
    for table in tables:
        require(table, "block_table", "slot_mapping", "block_size")
        require(table.block_table, "gpu")
        require(table.slot_mapping, "gpu")
        _require_table(table.block_table.gpu)
    return [int(table.block_size) for table in tables]


def describe_tables_v2(runner: Any) -> list[int]:
    """Tokens per block-table entry of model runner V2, one per group. Raises Unsupported for an unexpected layout."""
    require(runner, "block_tables", "input_buffers", "device")
    require(runner.input_buffers, "seq_lens")
    _require_lengths(runner.input_buffers.seq_lens)
    require(runner.block_tables, "input_block_tables", "slot_mappings", "block_sizes")
    if getattr(runner, "pcp_manager", None) is not None:
        raise _refuse("prefill context parallel is not covered")
    for table in runner.block_tables.input_block_tables:
        _require_table(table)
    return [int(size) for size in runner.block_tables.block_sizes]


def _require_table(table: Any) -> None:
    if table.dim() != 2 or str(table.dtype) not in ("torch.int32", "torch.int64"):
        raise _refuse(f"a block table is {table.dtype} with {table.dim()} dimensions, expected int32 with 2")


def _require_lengths(lengths: Any) -> None:
    if lengths.dim() != 1 or str(lengths.dtype) not in ("torch.int32", "torch.int64"):
        raise _refuse(f"sequence lengths are {lengths.dtype} with {lengths.dim()} dimensions, expected int32 with 1")
