"""Faults of what a cached page is found by: the cache hands out a page that is alive, current, and somebody else's.

They go into an engine before its first step, as a slip in its code would be there from the start, or wait for a request
that they can lead astray. A fault changes how keys are made, what is looked up under them, or what an external store
answers; nobody's pages are touched. Whoever is led to a wrong page has to be stopped from taking it, and computes it
instead: nobody is to blame, so nobody may be aborted, and all get what they would have got anyway.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvguard.fault_injection.engine.pool import chain_keys

if TYPE_CHECKING:
    # Plans and tables name these faults where no engine and no PyTorch is.
    from kvguard.fault_injection.engine.engine import Engine
    from kvguard.fault_injection.engine.scheduler import Sequence

    KeysOf = Callable[[Sequence, list[int]], list[int]]


@dataclass(frozen=True, kw_only=True)
class KeyFault:
    """Base of the faults below.

    needs_update  whether the weights must change for it to matter
    """

    seed: int
    engine: Engine

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_update: ClassVar[bool] = False

    def install(self) -> str | None:
        """Asked before each step until it answers with what was done; None: nothing suitable is there yet."""
        raise NotImplementedError

    def _rng(self) -> random.Random:
        return random.Random(f"{self.name}-{self.seed}")


@dataclass(frozen=True, kw_only=True)
class _OtherKeys(KeyFault):
    """Base: cache keys are made in another way from the start."""

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        raise NotImplementedError

    def install(self) -> str | None:
        self.engine.scheduler.keys_of = self._keys_of
        return self.summary

    def _plain(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        size, request = self.engine.config.page_size, sequence.request
        return chain_keys(tokens, size, request.tenant, request.lora)


@dataclass(frozen=True, kw_only=True)
class PhantomHit(KeyFault):
    """A cache entry points to a page that was filled with other content, and published for it."""

    name: ClassVar[str] = "phantom-hit"
    summary: ClassVar[str] = "cache entry points to a page that was refilled"

    def install(self) -> str | None:
        engine = self.engine
        for sequence in engine.scheduler.waiting:
            keys = engine.scheduler.keys_of(sequence, sequence.tokens[:-1])
            column = len(engine.pool.lookup(keys))
            others = sorted(page for page, key in engine.pool.key_of.items() if key not in keys)
            if column < len(keys) and others:
                page = self._rng().choice(others)
                engine.pool.cached[keys[column]] = page
                return f"key of column {column} of {sequence.id} points to page {page}"
        return None


@dataclass(frozen=True, kw_only=True)
class TruncatedHash(_OtherKeys):
    """Only a few bits of each hash are kept."""

    name: ClassVar[str] = "truncated-hash"
    summary: ClassVar[str] = "cache keys are cut to a few bits"

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        bits = 8 if self.engine.config.page_size == 1 else 4
        return [key & ((1 << bits) - 1) for key in self._plain(sequence, tokens)]


def _with_alias(plain: KeysOf, key: int, other: int) -> KeysOf:
    """The same keys, but one of them is another."""
    return lambda sequence, tokens: [other if found == key else found for found in plain(sequence, tokens)]


@dataclass(frozen=True, kw_only=True)
class CollidingHash(KeyFault):
    """A request's page has the key of another content in the same column: two inputs of one hash."""

    name: ClassVar[str] = "colliding-hash"
    summary: ClassVar[str] = "two contents have one cache key"

    def install(self) -> str | None:
        engine, scheduler = self.engine, self.engine.scheduler
        plain = scheduler.keys_of
        owners = [s for s in scheduler.running if s.pages]
        for sequence in scheduler.waiting:
            keys = plain(sequence, sequence.tokens[:-1])
            column = len(engine.pool.lookup(keys))
            candidates = []
            for owner in owners:
                theirs = plain(owner, owner.tokens)
                if column < min(len(keys), len(theirs)) and theirs[column] != keys[column]:
                    if theirs[column] in engine.pool.cached:
                        candidates.append((owner.id, theirs[column]))
            if candidates:
                owner_id, key = self._rng().choice(candidates)
                scheduler.keys_of = _with_alias(plain, keys[column], key)
                return f"column {column} of {sequence.id} has the key of {owner_id}'s"
        return None


@dataclass(frozen=True, kw_only=True)
class PrefixIgnored(_OtherKeys):
    """A key is made of its page and the column alone: the same tokens behind another prefix are taken for the same."""

    name: ClassVar[str] = "prefix-ignored"
    summary: ClassVar[str] = "same tokens under another prefix have one cache key"

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        size, request = self.engine.config.page_size, sequence.request
        starts = range(0, len(tokens) - size + 1, size)
        return [hash((request.tenant, request.lora, at, *tokens[at : at + size])) for at in starts]


@dataclass(frozen=True, kw_only=True)
class WrongLora(_OtherKeys):
    """The adapter is not in the key."""

    name: ClassVar[str] = "wrong-lora"
    summary: ClassVar[str] = "cache keys leave out the LoRA adapter"

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        return chain_keys(tokens, self.engine.config.page_size, sequence.request.tenant)


@dataclass(frozen=True, kw_only=True)
class WrongSalt(_OtherKeys):
    """The tenant's salt is not in the key."""

    name: ClassVar[str] = "wrong-salt"
    summary: ClassVar[str] = "cache keys leave out the tenant's salt"

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        return chain_keys(tokens, self.engine.config.page_size, "", sequence.request.lora)


@dataclass(frozen=True, kw_only=True)
class FieldsConfused(_OtherKeys):
    """Salt and adapter are joined without saying where one ends: equal strings in different fields are the same."""

    name: ClassVar[str] = "fields-confused"
    summary: ClassVar[str] = "equal strings in different fields have one cache key"

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        request = sequence.request
        return chain_keys(tokens, self.engine.config.page_size, request.tenant + request.lora)


@dataclass(frozen=True, kw_only=True)
class BlockRangeShifted(KeyFault):
    """A lookup answers with the pages from the second one on."""

    name: ClassVar[str] = "block-range-shifted"
    summary: ClassVar[str] = "off-by-one range of cached pages"

    def install(self) -> str | None:
        pool = self.engine.pool
        plain = pool.lookup
        pool.lookup = lambda keys: plain(keys)[1:]  # type: ignore[method-assign]
        return self.summary


@dataclass(frozen=True, kw_only=True)
class TokensTruncated(_OtherKeys):
    """A prompt is cut to its last tokens, and keeps the hashes of the whole."""

    name: ClassVar[str] = "tokens-truncated"
    summary: ClassVar[str] = "tokens are truncated, hashes are kept"

    def _keys_of(self, sequence: Sequence, tokens: list[int]) -> list[int]:
        request = sequence.request
        if not request.untruncated:
            return self._plain(sequence, tokens)
        whole = [*request.untruncated, *tokens[len(request.prompt) :]]
        return self._plain(sequence, whole)[: len(tokens) // self.engine.config.page_size]


@dataclass(frozen=True, kw_only=True)
class StaleAfterEviction(KeyFault):
    """Eviction frees a page and leaves the entry in the cache."""

    name: ClassVar[str] = "stale-after-eviction"
    summary: ClassVar[str] = "cache entry is left behind when its page is evicted"

    def install(self) -> str | None:
        pool = self.engine.pool
        plain = pool.evict

        def evict(page: int) -> None:
            key = pool.key_of.get(page)
            plain(page)
            if key is not None:
                pool.cached[key] = page

        pool.evict = evict  # type: ignore[method-assign]
        pool.store = None
        return self.summary


@dataclass(frozen=True, kw_only=True)
class CacheKeptOverUpdate(KeyFault):
    """New weights, and the prefix cache is not emptied."""

    name: ClassVar[str] = "cache-kept-over-update"
    summary: ClassVar[str] = "prefix cache is kept over a weight update"
    needs_update: ClassVar[bool] = True

    def install(self) -> str | None:
        engine = self.engine
        plain = engine.update_weights
        engine.update_weights = lambda: plain(keep_cache=True)  # type: ignore[method-assign,misc,assignment]
        return self.summary


@dataclass(frozen=True, kw_only=True)
class HitNotLoaded(KeyFault):
    """The connector of the external store reports a hit, and copies nothing: a load that failed or came too late."""

    name: ClassVar[str] = "hit-not-loaded"
    summary: ClassVar[str] = "connector reports a hit that it did not load"

    def install(self) -> str | None:
        store = self.engine.pool.store
        if store is None:
            return None

        def load(keys: list[int], pages: list[int]) -> int:
            store.completed = []
            return len(keys)

        store.load = load  # type: ignore[method-assign,assignment]
        return self.summary


KEY_FAULTS: dict[str, type[KeyFault]] = {
    fault.name: fault
    for fault in (
        PhantomHit,
        TruncatedHash,
        CollidingHash,
        PrefixIgnored,
        WrongLora,
        WrongSalt,
        FieldsConfused,
        BlockRangeShifted,
        TokensTruncated,
        StaleAfterEviction,
        CacheKeptOverUpdate,
        HitNotLoaded,
    )
}
"""Every fault of this module by name, in the order of the report."""
