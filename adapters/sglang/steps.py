"""Hooks around a step: check before the forward, act on the verdict before any token leaves, tidy up when idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvguard.adapters.sglang.plugin import ATTACHED


def around_run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of this batch is checked, and what comes of it travels with its result."""
    guard = getattr(scheduler, ATTACHED, None)
    if guard is None:
        return original(scheduler, batch, *args, **kwargs)
    guard.begin(batch)
    try:
        result = original(scheduler, batch, *args, **kwargs)
    finally:
        pending = guard.end()
    if pending is not None:
        result._kvguard_step = pending
    return result


def before_forward(runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """Block-table rows, lengths and slots are final here, and neither attention nor a graph has read them."""
    guard = getattr(runner, ATTACHED, None)
    if guard is not None and guard.batch is not None:
        guard.check(forward_batch)


def before_result(processor: Any, batch: Any, result: Any) -> None:
    """The tokens of a step are about to be taken over: first its verdict."""
    # The processor takes no further attributes.
    guard = getattr(processor.tree_cache, ATTACHED, None)
    if guard is not None:
        pending = getattr(result, "_kvguard_step", None)
        if pending is not None:
            guard.judge(batch, pending)


def around_beam(original: Callable[..., Any], coordinator: Any, req: Any, recv_req: Any) -> Any:
    """Beam search is refused, request by request, with SGLang's own status 400: its member rows share the leader's
    pages and are repointed between steps, outside of every function that the books know."""
    if getattr(coordinator.tree_cache, ATTACHED, None) is not None:
        return "Beam search is not covered by kvguard, which guards this server: it is refused rather than unguarded."
    return original(coordinator, req, recv_req)


def before_idle(scheduler: Any) -> None:
    """Nobody runs: a cache in which something was wrong, or that is of other weights, is emptied, before SGLang counts
    its pages."""
    guard = getattr(scheduler, ATTACHED, None)
    if guard is None or not (guard.ran or guard.audits or guard.outdated) or not (guard.armed or guard.ranks > 1):
        return
    if not scheduler.is_fully_idle():
        return
    with guard.contained():
        guard.check_free_list()
    if guard.audits or guard.outdated:
        scheduler.flush_cache(empty_cache=False)
