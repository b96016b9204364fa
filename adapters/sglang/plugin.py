"""SGLang's entry point (`sglang.srt.plugins`): decides whether to guard, and registers hooks where a scheduler runs.

Without any kvguard configuration, or at level `off`, it returns at once: nothing is imported, nothing is hooked. SGLang
calls it in every process, and only logs what it raises: a server would run unguarded and nobody would know. So the
guard says that it is armed when a scheduler is built, `on_guard_error = abort` makes the scheduler refuse to run
without it, and `kvguard doctor --engine sglang` looks beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvguard.adapters.activation import asked_for

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
ATTACHED = "_kvguard"
_MEM = "sglang.srt.mem_cache."
_PAGED = f"{_MEM}allocator.paged.PagedTokenToKVPoolAllocator."
_WINDOWS = f"{_MEM}allocator.swa.SWATokenToKVPoolAllocator."
_REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor."


def register() -> None:
    """Guard every scheduler that this process builds from now on."""
    if not asked_for():
        return
    if SCHEDULER_MODULE not in sys.modules:
        # In a process without a scheduler the hooks would only import one.
        return
    from kvguard.config import GuardConfig
    from kvguard.telemetry import emit

    try:
        config = GuardConfig.load()
    except Exception as error:
        # Somebody asked for a guard, and it is not known what should follow without one: nothing starts unguarded.
        emit("not_attached", severity="critical", reason=str(error))
        _refuse_to_start(error)
        return
    if config.is_off:
        return
    from kvguard.adapters.sglang.layout import check_hook_points

    try:
        check_hook_points()
    except Exception as error:
        emit("not_attached", severity="critical", reason=str(error), on_guard_error=config.on_guard_error)
        if config.on_guard_error == "abort":
            _refuse_to_start(error)
        return
    for target, hook, kind in hooks():
        _hook(target, hook, kind)


def hooks() -> list[tuple[str, Callable[..., Any], str]]:
    """(target, function, kind of hook) of everything that is hooked."""
    from kvguard.adapters.sglang import contents, layout, pages, steps, windows

    return [
        (f"{SCHEDULER_MODULE}.Scheduler.__init__", attach, "after"),
        (f"{_MEM}allocation.alloc_for_extend", pages.around_alloc_for_extend, "around"),
        (f"{_MEM}allocation._prefix_kv_indices", pages.after_prefix_kv_indices, "after"),
        (f"{_MEM}allocation.alloc_for_decode", pages.around_alloc_for_decode, "around"),
        (f"{_MEM}allocator.token.TokenToKVPoolAllocator.free", pages.around_token_free, "around"),
        (f"{_MEM}allocator.token.TokenToKVPoolAllocator.clear", pages.after_clear, "after"),
        (f"{_PAGED}free", pages.around_paged_free, "around"),
        (f"{_PAGED}free_page_ids", pages.around_free_page_ids, "around"),
        (f"{_PAGED}_release_page_ids", pages.around_release_page_ids, "around"),
        (f"{_PAGED}clear", pages.after_clear, "after"),
        (f"{_WINDOWS}alloc", windows.around_alloc, "around"),
        (f"{_WINDOWS}alloc_extend", windows.around_alloc, "around"),
        (f"{_WINDOWS}alloc_decode", windows.around_alloc_decode, "around"),
        (f"{_WINDOWS}set_full_to_swa_mapping", windows.after_set_mapping, "after"),
        (f"{_MEM}unified_radix_cache.UnifiedRadixCache._apply_cache_actions", windows.before_cache_actions, "before"),
        (f"{_MEM}unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree", pages.around_checkpoint, "around"),
        (f"{_MEM}unified_radix_cache.UnifiedRadixCache._apply_cache_action", pages.around_tree_free, "around"),
        (f"{_MEM}unified_radix_cache.UnifiedRadixCache.match_prefix", pages.around_match_prefix, "around"),
        (f"{_MEM}base_prefix_cache.BasePrefixCache.free_kv_row", pages.around_free_kv_row, "around"),
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", steps.before_forward, "before"),
        ("sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init", steps.around_beam, "around"),
        (f"{SCHEDULER_MODULE}.Scheduler.run_batch", steps.around_run_batch, "around"),
        (f"{SCHEDULER_MODULE}.Scheduler.on_idle", steps.before_idle, "before"),
        (f"{_PROCESSOR}process_batch_result_prefill", steps.before_result, "before"),
        (f"{_PROCESSOR}process_batch_result_decode", steps.before_result, "before"),
        (_REQUEST, contents.after_request, "after"),
        *((f"{_UPDATER}{name}", contents.before_weights, "before") for name in layout.WEIGHT_CALLS),
    ]


def _hook(target: str, function: Callable[..., Any], kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType(kind))


def _refuse_to_start(error: Exception) -> None:
    """No scheduler starts. What is raised here SGLang would only log; what its scheduler raises it does not."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    _hook(f"{SCHEDULER_MODULE}.Scheduler.__init__", refuse, "before")


def attach(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Called once a Scheduler is built: give it a guard, or say why not."""
    from kvguard.adapters.sglang.layout import check_ranks, describe, limits_of, refuse, sglang_version
    from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard
    from kvguard.adapters.sglang.window_guard import WindowGuard
    from kvguard.config import GuardConfig
    from kvguard.telemetry import emit

    config = GuardConfig.load()
    try:
        if missing := unhooked():
            raise refuse(f"its registry did not hook {', '.join(missing)}")
        pool = describe(scheduler)
        check_ranks(scheduler.server_args, config)
        guard = (SchedulerGuard if pool.window is None else WindowGuard)(scheduler, pool, config)
    except Exception as error:
        emit("not_attached", severity="critical", reason=str(error), on_guard_error=config.on_guard_error)
        if config.on_guard_error == "abort":
            raise
        return
    # Where the hooks find it: on the objects whose functions they are called for.
    for owner in (
        scheduler,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.tp_worker.model_runner,
    ):
        setattr(owner, ATTACHED, guard)
    limits = limits_of(scheduler.server_args, config.level)
    emit("sglang_attached", severity="warning" if limits else "info", version=sglang_version(), not_covered=limits)


def unhooked() -> list[str]:
    """What is not hooked after all: where its registry cannot hook a function, SGLang only logs it and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target, _, _ in hooks() if target not in HookRegistry._patched]


def guard_of(owner: Any) -> Any:
    """The SchedulerGuard of a scheduler, or of one of its parts; None where there is none."""
    return getattr(owner, ATTACHED, None)
