"""Faults of what a cached page is found by, inside a real vLLM: in its hashes, its cache's entries, and its lookups.

They go into the engine before its first request, as a slip in its code would be there from the start, or wait for a
request that they can lead astray; see `faults/keys.py` for those of the embedded engine, whose names they share.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvguard.fault_injection.targets.vllm import client_name

__all__ = ["NOT_IN_VLLM_KEYS", "VLLM_KEY_FAULTS", "VllmKeyFault"]

KEPT_BITS = 4
"""Of each hash that is cut."""


@dataclass(frozen=True, kw_only=True)
class VllmKeyFault:
    """Base of the faults below.

    seed, engine  a VllmEngine
    untruncated   client's name -> the tokens of a prompt before it was cut to its last ones
    at_start      whether it goes in before the first request
    needs_update  whether the weights must change for it to matter
    """

    seed: int
    engine: Any
    untruncated: Mapping[str, Sequence[int]] = field(default_factory=dict)

    name: ClassVar[str]
    summary: ClassVar[str]
    at_start: ClassVar[bool] = True
    needs_update: ClassVar[bool] = False

    def install(self) -> str | None:
        """Asked before each step until it answers with what was done; None: nothing suitable is there yet."""
        raise NotImplementedError

    def _rng(self) -> random.Random:
        return random.Random(f"{self.name}-{self.seed}")

    @property
    def _size(self) -> int:
        return int(self.engine.pool.hash_block_size)

    def _entries(self) -> Any:
        """vLLM's cache: key -> block, or several blocks by their numbers."""
        return self.engine.pool.cached_block_hash_to_block

    def _keys(self, request: Any) -> list[Any]:
        """What the pages of the request may be found by that a lookup asks for."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        hashes = request.block_hashes[: (request.num_tokens - 1) // self._size]
        return [make_block_hash_with_group_id(found, 0) for found in hashes]

    def _cached(self, keys: list[Any]) -> int:
        """How many leading ones the cache has."""
        column = 0
        while column < len(keys) and self._entries().get_one_block(keys[column]) is not None:
            column += 1
        return column


@dataclass(frozen=True, kw_only=True)
class _OtherHashes(VllmKeyFault):
    """Base: the hashes of all requests are made in another way from the start."""

    def install(self) -> str | None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

        size = self._size
        function = get_hash_fn_by_name(self.engine.llm_engine.vllm_config.cache_config.prefix_caching_hash_algo)

        def hashes(request: Any) -> list[Any]:
            tokens = self._tokens(request)
            found: list[Any] = []
            parent = None
            for start in range(0, len(tokens) - size + 1, size):
                extra, _ = generate_block_hash_extra_keys(request, start, start + size, 0)
                extra = self._extra(request, extra, start)
                parent = hash_block_tokens(function, self._parent(parent), tokens[start : start + size], extra)
                found.append(self._kept(parent))
            return found[len(request.block_hashes) : request.num_tokens // size]

        self.engine.core.request_block_hasher = hashes
        return self.summary

    def _tokens(self, request: Any) -> list[int]:
        return list(request.all_token_ids)

    def _parent(self, parent: Any) -> Any:
        return parent

    def _extra(self, request: Any, extra: Any, start: int) -> Any:
        del request, start
        return extra

    def _kept(self, found: Any) -> Any:
        return found


@dataclass(frozen=True, kw_only=True)
class PhantomHit(VllmKeyFault):
    """A cache entry points to a page that was filled with other content, and published for it."""

    name: ClassVar[str] = "phantom-hit"
    summary: ClassVar[str] = "cache entry points to a page that was refilled"
    at_start: ClassVar[bool] = False

    def install(self) -> str | None:
        blocks = self.engine.pool.blocks
        for request in self.engine.scheduler.waiting:
            keys = self._keys(request)
            column = self._cached(keys)
            others = [block for block in blocks if block.block_hash is not None and block.block_hash not in keys]
            if column < len(keys) and others:
                block = self._rng().choice(others)
                self._entries().insert(keys[column], block)
                name = client_name(request.request_id)
                return f"key of column {column} of {name} points to page {block.block_id}"
        return None


@dataclass(frozen=True, kw_only=True)
class TruncatedHash(_OtherHashes):
    """Only a few bits of each hash are kept."""

    name: ClassVar[str] = "truncated-hash"
    summary: ClassVar[str] = f"block hashes are cut to {KEPT_BITS} bits"

    def _kept(self, found: Any) -> Any:
        return bytes([found[0] & ((1 << KEPT_BITS) - 1)]) * len(found)


@dataclass(frozen=True, kw_only=True)
class CollidingHash(VllmKeyFault):
    """A request's page has the hash of another content in the same column: two inputs of one hash."""

    name: ClassVar[str] = "colliding-hash"
    summary: ClassVar[str] = "two contents have one block hash"
    at_start: ClassVar[bool] = False

    def install(self) -> str | None:
        scheduler = self.engine.scheduler
        for request in scheduler.waiting:
            keys = self._keys(request)
            column = self._cached(keys)
            owners = []
            for owner in scheduler.running:
                theirs = self._keys(owner)
                if column < min(len(keys), len(theirs)) and theirs[column] != keys[column]:
                    if self._entries().get_one_block(theirs[column]) is not None:
                        owners.append(owner)
            if owners:
                owner = self._rng().choice(owners)
                request.block_hashes[column] = owner.block_hashes[column]
                names = client_name(request.request_id), client_name(owner.request_id)
                return f"column {column} of {names[0]} has the hash of {names[1]}'s"
        return None


@dataclass(frozen=True, kw_only=True)
class PrefixIgnored(_OtherHashes):
    """A hash is made of its page and the column alone: the same tokens behind another prefix are taken for the same."""

    name: ClassVar[str] = "prefix-ignored"
    summary: ClassVar[str] = "same tokens under another prefix have one block hash"

    def _parent(self, parent: Any) -> Any:
        return None

    def _extra(self, request: Any, extra: Any, start: int) -> Any:
        # vLLM has the salt in the first block's hash alone, and the others from their parents.
        return (*(extra or ()), request.cache_salt, start)


@dataclass(frozen=True, kw_only=True)
class WrongSalt(_OtherHashes):
    """The tenant's salt is not in the hash."""

    name: ClassVar[str] = "wrong-salt"
    summary: ClassVar[str] = "block hashes leave out the cache salt"

    def _extra(self, request: Any, extra: Any, start: int) -> Any:
        # The campaign's requests have nothing else there.
        return None


@dataclass(frozen=True, kw_only=True)
class BlockRangeShifted(VllmKeyFault):
    """A lookup answers with the pages from the second one on."""

    name: ClassVar[str] = "block-range-shifted"
    summary: ClassVar[str] = "off-by-one range of cached pages"

    def install(self) -> str | None:
        coordinator = self.engine.scheduler.kv_cache_manager.coordinator
        plain, size = coordinator.find_longest_cache_hit, self._size

        def shifted(*args: Any, **kwargs: Any) -> Any:
            groups, tokens, *rest = plain(*args, **kwargs)
            return (tuple(list(blocks)[1:] for blocks in groups), max(tokens - size, 0), *rest)

        coordinator.find_longest_cache_hit = shifted
        return self.summary


@dataclass(frozen=True, kw_only=True)
class TokensTruncated(_OtherHashes):
    """A prompt is cut to its last tokens, and keeps the hashes of the whole."""

    name: ClassVar[str] = "tokens-truncated"
    summary: ClassVar[str] = "tokens are truncated, hashes are kept"

    def _tokens(self, request: Any) -> list[int]:
        whole = self.untruncated.get(client_name(request.request_id))
        tokens = list(request.all_token_ids)
        return tokens if whole is None else [*whole, *tokens[request.num_prompt_tokens :]]


@dataclass(frozen=True, kw_only=True)
class StaleAfterEviction(VllmKeyFault):
    """Eviction frees a page and leaves the entry in the cache."""

    name: ClassVar[str] = "stale-after-eviction"
    summary: ClassVar[str] = "cache entry is left behind when its page is evicted"

    def install(self) -> str | None:
        pool = self.engine.pool
        plain = pool._maybe_evict_cached_block

        def evict(block: Any, *args: Any, **kwargs: Any) -> Any:
            key = block.block_hash
            evicted = plain(block, *args, **kwargs)
            if evicted and key is not None:
                self._entries().insert(key, block)
            return evicted

        pool._maybe_evict_cached_block = evict
        return self.summary


@dataclass(frozen=True, kw_only=True)
class CacheKeptOverUpdate(VllmKeyFault):
    """New weights, and the prefix cache is not emptied, though vLLM reports it."""

    name: ClassVar[str] = "cache-kept-over-update"
    summary: ClassVar[str] = "prefix cache is kept over a weight update"
    needs_update: ClassVar[bool] = True

    def install(self) -> str | None:
        self.engine.scheduler.kv_cache_manager.reset_prefix_cache = lambda: True
        return self.summary


VLLM_KEY_FAULTS: dict[str, type[VllmKeyFault]] = {
    fault.name: fault
    for fault in (
        PhantomHit,
        TruncatedHash,
        CollidingHash,
        PrefixIgnored,
        WrongSalt,
        BlockRangeShifted,
        TokensTruncated,
        StaleAfterEviction,
        CacheKeptOverUpdate,
    )
}
"""Every fault of this module by name, in the order of the report."""

NOT_IN_VLLM_KEYS = {
    "wrong-lora": "the campaign's models have no LoRA adapters; tests/vllm/test_content_identity.py compares requests "
    "of two",
    "fields-confused": "vLLM's hash takes its fields one by one, and the campaign's requests fill one of them, the "
    "salt: there is no second one to confuse it with",
    "hit-not-loaded": "what a connector of vLLM has copied is said by that connector alone: docs/vllm.md",
}
"""Faults of cache keys in other engines -> why a campaign in vLLM has none of that name."""
