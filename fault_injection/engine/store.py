"""An external tier for KV pages: evicted ones go there, and come back to who asks for them under the same cache key.

It stands for a connector to host memory, disk or a remote cache. It lives in the process of its engine, and knows no
tokens: a page goes by the key that the engine's prefix cache had for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvguard.fault_injection.engine.kv_cache import PagedKV

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard


class ExternalStore:
    """Copies of pages by cache key, the oldest dropped first.

    completed  keys of the copies that were made by the last `load`
    hits       pages that came back, in all
    """

    def __init__(self, kv: PagedKV, guard: PagedGuard | None, *, capacity: int) -> None:
        """`capacity`: in pages."""
        self._kv, self._guard, self._capacity = kv, guard, capacity
        self._pages: OrderedDict[int, list[Tensor]] = OrderedDict()
        self.completed: list[int] = []
        self.hits = 0

    def save(self, key: int, page: int) -> None:
        """Keep a copy of a complete page, unless the guard knows no such publication of it."""
        if self._guard is not None and not self._guard.stored(key, page):
            return
        self._pages[key] = [rows[page].clone() for rows in (*self._kv.keys, *self._kv.values)]
        self._pages.move_to_end(key)
        if len(self._pages) > self._capacity:
            self.drop([next(iter(self._pages))])

    def drop(self, keys: Sequence[int]) -> None:
        """Forget these pages."""
        for key in keys:
            self._pages.pop(key, None)
        if self._guard is not None:
            self._guard.unstored(keys)

    def clear(self) -> None:
        """Forget everything: after a weight update, say."""
        self.drop(list(self._pages))

    def lookup(self, keys: Sequence[int]) -> list[int]:
        """The leading keys that it has pages for."""
        found: list[int] = []
        for key in keys:
            if key not in self._pages:
                break
            found.append(key)
        return found

    def load(self, keys: Sequence[int], pages: Sequence[int]) -> int:
        """Copy the pages of these keys to the pages beside them; returns how many it reports as loaded."""
        self.completed = []
        for key, page in zip(keys, pages, strict=True):
            for rows, kept in zip((*self._kv.keys, *self._kv.values), self._pages[key], strict=True):
                rows[page] = kept
            self.completed.append(key)
        self.hits += len(self.completed)
        return len(keys)
