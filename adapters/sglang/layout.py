"""What kvguard must recognise in an SGLang before it attaches; anything else is refused by name."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from kvguard.adapters.expectations import Expectations
from kvguard.adapters.expectations import Unsupported as Unsupported
from kvguard.config import GuardConfig

TESTED_RELEASES = ("0.5.23",)
"""Releases that kvguard's own tests run on."""

REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("speculative_algorithm", None, "speculative decoding: drafters allocate and read past the check"),
    ("disaggregation_mode", "null", "P/D disaggregation: pages are allocated outside the scheduler's allocation calls"),
    ("enable_hierarchical_cache", False, "HiCache: pages are loaded back from the host"),
    ("enable_lmcache", False, "LMCache: pages are loaded from an external store"),
    ("enable_flexkv", False, "FlexKV: pages are loaded from an external store"),
    ("enable_unified_cache_external_linker", False, "an external cache linker: pages are loaded from outside"),
    ("enable_unified_memory", False, "unified memory: its pools move pages by virtual ids"),
    ("enable_hisparse", False, "HiSparse: logical slots are bound to pages later"),
    ("enable_pdmux", False, "PD multiplexing: a prefill is split over several forwards"),
    ("enable_streaming_session", False, "streaming sessions: rows outlive their requests"),
    ("enable_session_radix_cache", False, "radix sessions: rows outlive their requests"),
    ("dllm_algorithm", None, "diffusion models: slots are written more than once"),
    ("pp_size", 1, "pipeline parallelism"),
    ("dp_size", 1, "data parallelism"),
    ("attn_dp_size", 1, "attention data parallelism"),
    ("dcp_size", 1, "decode context parallelism"),
    ("attn_cp_size", 1, "attention context parallelism"),
)
"""(server argument, the value that is covered, what else would be): anything but that value is refused."""

COVERED_ALLOCATORS = ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")
WINDOW_ALLOCATOR = "SWATokenToKVPoolAllocator"
"""One of these for full attention, one for sliding windows, and which slot of the one goes with which of the other."""

WEIGHT_CALLS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
)
"""What changes the weights under running requests and cached pages."""

STANDING_LIMITS = (
    "beam search is refused request by request (status 400)",
    "MiniCPM's sparse attention: the slots that it reserves beside req_to_token are not checked",
    "SGLang under Ray loads no plug-ins in its scheduler actors: nothing is guarded there",
    "embeddings in chunks with overlap: beside the error of an aborted request its embedding so far may be sent",
    "bytes that a copy, an offload tier or a bit flip changes in a page are not seen at levels tags and keys",
    "wrong tokens under a right cache key, LoRA adapters and tenants are not seen at level tags",
    "multimodal inputs are told apart by SGLang's own hash of them at level keys; no multimodal model has been run",
    "pages are not quarantined: SGLang's idle check wants every page accounted for; after a violation every cache hit "
    "and every free of the tree is checked on the host until the cache was flushed, which happens at the next idle",
    "wrong allocations and frees are reported after they took effect, as page ids are never read by the host",
)
"""What no configuration of this level covers."""


class WindowLayout(NamedTuple):
    """The pool of the sliding-window layers beside that of the others. num_pages counts the null page 0; size: how many
    positions before its own a query reads."""

    num_pages: int
    size: int


class PoolLayout(NamedTuple):
    """The pool of a scheduler, or that of its layers of full attention. num_pages counts the null page 0; rows are
    those of req_to_token."""

    num_pages: int
    page_size: int
    rows: int
    device: str
    window: WindowLayout | None = None


def sglang_version() -> str:
    """The installed SGLang's version."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


_EXPECTED = Expectations("SGLang", sglang_version)
refuse, require, require_parameters = _EXPECTED.refuse, _EXPECTED.require, _EXPECTED.require_parameters


def check_hook_points() -> None:
    """The functions that are hooked take what the hooks expect. Imports SGLang. Raises Unsupported."""
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.distributed import parallel_state
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.unified_cache import cache_action
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.plugins.hook_registry import HookRegistry

    require(parallel_state, "get_tp_group")
    require(HookRegistry, "register", "_patched")
    require(allocation, "alloc_for_extend", "alloc_for_decode", "_prefix_kv_indices")
    require(BeamCoordinator, "validate_and_init")
    require_parameters(BeamCoordinator.validate_and_init, "req", "recv_req")
    require_parameters(allocation.alloc_for_extend, "batch")
    require_parameters(allocation.alloc_for_decode, "batch", "token_per_req")
    require_parameters(allocation._prefix_kv_indices, "batch", "req")
    require(TokenToKVPoolAllocator, "alloc", "free", "clear", "free_group_begin", "free_group_end")
    require_parameters(TokenToKVPoolAllocator.free, "free_index")
    require(PagedTokenToKVPoolAllocator, "free", "clear", "free_page_ids", "_release_page_ids")
    require_parameters(PagedTokenToKVPoolAllocator._release_page_ids, "page_ids")
    require_parameters(SWATokenToKVPoolAllocator.alloc, "need_size")
    require(SWATokenToKVPoolAllocator, "alloc_extend", "clear_full_to_swa_mapping")
    require_parameters(SWATokenToKVPoolAllocator.alloc_decode, "seq_lens", "seq_lens_cpu", "last_loc")
    require_parameters(SWATokenToKVPoolAllocator.set_full_to_swa_mapping, "full_indices", "swa_indices")
    require_parameters(UnifiedRadixCache._apply_cache_actions, "actions")
    require(cache_action, "FreeDeviceKVFullOnly", "SWARebuild")
    require(UnifiedRadixCache, "checkpoint_into_tree", "match_prefix", "path_device_indices", "_apply_cache_action")
    require_parameters(UnifiedRadixCache.checkpoint_into_tree, "req", "up_to")
    require_parameters(UnifiedRadixCache.match_prefix, "params")
    require_parameters(BasePrefixCache.free_kv_row, "kv", "ranges")
    require_parameters(ModelRunner.forward, "forward_batch")
    require(Scheduler, "run_batch", "on_idle", "flush_cache", "is_fully_idle")
    require_parameters(Scheduler.run_batch, "batch")
    missing = {"extra_key", "cache_salt", "lora_id"} - set(inspect.signature(Req.__init__).parameters)
    if missing:
        raise refuse(f"Req takes no {', '.join(sorted(missing))}")
    require(SchedulerWeightUpdaterManager, *WEIGHT_CALLS)
    for name in ("process_batch_result_prefill", "process_batch_result_decode"):
        require_parameters(getattr(SchedulerBatchResultProcessor, name), "batch", "result")


def describe(scheduler: Any) -> PoolLayout:
    """The pool of a Scheduler. Raises Unsupported for what is not covered."""
    require(scheduler, "server_args", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "tp_worker")
    check_configuration(scheduler.server_args)
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    kind = type(allocator).__name__
    pool, window, wanted = allocator, None, ["full"]
    if kind == WINDOW_ALLOCATOR:
        window, wanted = describe_window(scheduler), ["full", "swa"]
        pool = allocator.full_attn_allocator
        kind = type(pool).__name__
    if kind not in COVERED_ALLOCATORS:
        raise refuse(
            f"KV allocator {kind} is not covered; covered: {', '.join((*COVERED_ALLOCATORS, WINDOW_ALLOCATOR))}"
        )
    if type(tree).__name__ != "UnifiedRadixCache":
        raise refuse(f"prefix cache {type(tree).__name__} is not covered; covered: UnifiedRadixCache")
    components = [str(getattr(part, "name", part)).lower() for part in tree.tree_components]
    if components != wanted:
        raise refuse(f"prefix cache components {', '.join(components)} are not covered; covered: {', '.join(wanted)}")
    if getattr(scheduler.model_config, "is_encoder_decoder", False):
        raise refuse("encoder-decoder models are not covered: their rows begin with the encoder's tokens")
    table = scheduler.req_to_token_pool.req_to_token
    if table.dim() != 2 or str(table.dtype) not in ("torch.int32", "torch.int64"):
        raise refuse(f"req_to_token is {table.dtype} with {table.dim()} dimensions, expected int32 with 2")
    require(scheduler.tp_worker, "model_runner")
    require(scheduler, "batch_result_processor")
    if allocator.page_size != tree.page_size:
        raise refuse(f"the allocator's page size is {allocator.page_size}, the prefix tree's {tree.page_size}")
    # Slot 0 is where padding is written to: with pages, all of page 0.
    pages = int(pool.size) // int(allocator.page_size) + 1
    return PoolLayout(pages, int(allocator.page_size), int(table.shape[0]), str(table.device), window)


def describe_window(scheduler: Any) -> WindowLayout:
    """The window pool of a Scheduler that has one. Raises Unsupported for kinds that are not covered."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    require(allocator, "full_attn_allocator", "swa_attn_allocator", "full_to_swa_index_mapping", "swa_req_ring")
    if allocator.swa_req_ring:
        raise refuse("sliding windows in a ring per request are not covered: their slots are not allocated")
    kind, pool = type(allocator.swa_attn_allocator).__name__, type(allocator.get_kvcache()).__name__
    if kind not in COVERED_ALLOCATORS:
        raise refuse(
            f"KV allocator {kind} is not covered for sliding windows; covered: {', '.join(COVERED_ALLOCATORS)}"
        )
    if pool != "SWAKVPool":
        raise refuse(f"KV pool {pool} is not covered for sliding windows; covered: SWAKVPool")
    parts = getattr(tree, "components", {}).values()
    if not all(getattr(part, "gates_prefix_match", True) for part in parts):
        raise refuse("a prefix cache that hits where windows are gone is not covered")
    size = scheduler.tp_worker.sliding_window_size
    if size is None or size < 0:
        raise refuse(f"a sliding window of {size} tokens is not covered")
    return WindowLayout(int(allocator.swa_attn_allocator.size) // int(allocator.page_size) + 1, int(size))


def check_configuration(arguments: Any) -> None:
    """Server arguments. Raises Unsupported for what is not covered."""
    for name, covered, what in REFUSED:
        found = getattr(arguments, name, covered)
        if found != covered and found:
            raise refuse(f"{name} = {found}: {what} is not covered")


def check_ranks(arguments: Any, config: GuardConfig) -> None:
    """Ranks must act alike. Raises Unsupported for a setting under which each would decide for itself."""
    if int(arguments.tp_size) > 1 and config.breaker_action == "observe":
        raise refuse("breaker_action = observe with tensor parallel: each rank counts violations for itself")


def limits_of(arguments: Any, level: str) -> list[str]:
    """What of this configuration is guarded only in part at this level; named when the guard attaches."""
    found = []
    if sglang_version() not in TESTED_RELEASES:
        found.append(f"SGLang {sglang_version()} is not a tested release ({', '.join(TESTED_RELEASES)})")
    if level != "keys" and (getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None)):
        found.append("LoRA: which adapter wrote a page is not verified")
    return found
