"""Hooks where pages of sliding-window layers change hands, and what the hooks of an allocator find on theirs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.kernels.events import UNSAID

# -- allocation -------------------------------------------------------------------------------------------------------


def around_alloc(original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
    """New tokens get slots in both pools: what the mapping is set to meanwhile are fresh pages."""
    guard = getattr(allocator, ATTACHED, None)
    if guard is None or not guard.armed:
        return original(allocator, *args, **kwargs)
    guard.pairs_are_fresh = True
    try:
        return original(allocator, *args, **kwargs)
    finally:
        guard.pairs_are_fresh = False


def around_alloc_decode(original: Callable[..., Any], allocator: Any, *args: Any, **kwargs: Any) -> Any:
    """The same for one token of every row; SGLang writes the mapping by itself there."""
    guard = getattr(allocator, ATTACHED, None)
    full = original(allocator, *args, **kwargs)
    if guard is not None and guard.armed and full is not None:
        with guard.contained():
            guard.books.pair(full, allocator.full_to_swa_index_mapping[full], fresh=True)
    return full


def after_set_mapping(_: Any, allocator: Any, full_indices: Tensor, swa_indices: Tensor) -> None:
    """Outside of an allocation window pages that are in use go over to other full pages.

    Both tensors are new ones or values of the tree, which are replaced and not written into.
    """
    guard = getattr(allocator, ATTACHED, None)
    if guard is not None and guard.armed and full_indices.shape[0]:
        with guard.contained():
            guard.books.pair(full_indices, swa_indices, fresh=guard.pairs_are_fresh)


# -- prefix tree ------------------------------------------------------------------------------------------------------


def before_cache_actions(tree: Any, actions: list[Any]) -> None:
    """What an insertion is about to do: a node that had lost its windows may get the request's own pages.

    Then it frees the node's old ones, full attention only, and right after makes the node's windows from the new ones.
    Neither action says what they are to each other, and duplicates of the request are freed by the first kind as well:
    whether the one was the tree's and the other the request's own is seen on the device.
    """
    guard = getattr(tree, ATTACHED, None)
    if guard is None or not guard.armed or not guard.inserting or not hasattr(guard, "replaced"):
        return
    for free, rebuild in pairwise(actions):
        if type(free).__name__ == "FreeDeviceKVFullOnly" and type(rebuild).__name__ == "SWARebuild":
            (old, *more), new = free.indices, rebuild.source_value
            if not more and old.shape == new.shape:
                guard.replaced.append((old, new))


# -- free list --------------------------------------------------------------------------------------------------------


class WindowPages:
    """What the hooks of an allocator's frees find on the allocator of window pages: a guard in small."""

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self.group: list[tuple[int, int]] = []
        self.plain_free = self.plain_collected = False

    @property
    def books(self) -> WindowPages:
        """For `retire`."""
        return self

    @property
    def armed(self) -> bool:
        """Whether the guard checks."""
        return bool(self._guard.armed)

    @property
    def audits(self) -> bool:
        """Whether frees are checked on the host."""
        return bool(self._guard.audits)

    @property
    def freeing(self) -> int:
        """Whose pages are given back right now."""
        return UNSAID

    def contained(self) -> Any:
        """Around what the guard does inside SGLang's functions."""
        return self._guard.contained()

    def retire(self, pages: Tensor, holders: Any) -> None:
        """Window pages went back to the free list."""
        self._guard.books.retire_windows(pages)

    def own_pages(self, pages: Tensor) -> Tensor:
        """Those that whoever frees them holds."""
        kept: Tensor = self._guard.own_window_pages(pages)
        return kept

    def cleared(self) -> None:
        """Nothing: the pool of full attention is emptied with it, and the books of both with that."""
