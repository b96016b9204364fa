"""Faults of what a cached page is found by, inside a real SGLang: keys of its radix tree, its nodes, its lookups.

SGLang has no hashes: its tree compares tokens, page by page, below a root for each pair of extra key and salt. A key
that is made wrongly is one that leads elsewhere in the tree; see `faults/keys.py` for those of the embedded engine,
whose names these share. They go into the engine before its first request, as a slip in its code would be there from the
start, or wait for a request that they can lead astray.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, ClassVar

__all__ = ["NOT_IN_SGLANG_KEYS", "SGLANG_KEY_FAULTS", "SGLANG_KEY_PROOF_SETS", "SglangKeyFault"]

KEPT_BITS = 1
"""Of what stands for a page in a key that is cut: the tree compares only what stands behind the same prefix."""
SAME_TOKENS_MIN = 16
"""So many tokens make a page of other content likely to be taken for one's own; a single token is soon the same."""


@dataclass(frozen=True, kw_only=True)
class SglangKeyFault:
    """Base of the faults below.

    seed, engine  a SglangEngine
    untruncated   prompt that was cut to its last tokens -> what it was before
    at_start      whether it goes in before the first request
    """

    seed: int
    engine: Any
    untruncated: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    name: ClassVar[str]
    summary: ClassVar[str]
    at_start: ClassVar[bool] = True

    def install(self) -> str | None:
        """Asked before each batch until it answers with what was done; None: nothing suitable is there yet."""
        raise NotImplementedError

    def _rng(self) -> random.Random:
        return random.Random(f"{self.name}-{self.seed}")

    @property
    def _tree(self) -> Any:
        return self.engine.scheduler.tree_cache

    @property
    def _size(self) -> int:
        return int(self._tree.page_size)

    def _key(self, request: Any) -> Any:
        """What a lookup of the request asks for: all but the last token, whose logits are needed."""
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = array("q", [*request.origin_input_ids, *request.output_ids][:-1])
        return RadixKey(tokens, request.extra_key, cache_salt=request.cache_salt)

    def _path(self, key: Any) -> list[int]:
        """The pages that the tree has for a key, as it is: without splitting nodes or making them recent."""
        length, node, _ = self._tree.tree_core.match_full_device_prefix(key)
        return [int(slot) // self._size for slot in self._tree.path_device_indices(node)[: length : self._size]]


def _with_tokens(key: Any, tokens: Sequence[int]) -> Any:
    """A key of these tokens in the same name space."""
    return type(key)(array("q", tokens), key.extra_key, cache_salt=key.cache_salt)


@dataclass(frozen=True, kw_only=True)
class _OtherKeys(SglangKeyFault):
    """Base: what the tree is asked for, and what it is given records under, are other keys."""

    def _renamed(self, key: Any) -> Any:
        raise NotImplementedError

    def install(self) -> str | None:
        tree = self._tree
        match, insert = tree._match_tree, tree.insert
        tree._match_tree = lambda params: match(dataclasses.replace(params, key=self._renamed(params.key)))
        tree.insert = lambda params: insert(dataclasses.replace(params, key=self._renamed(params.key)))
        return self.summary


@dataclass(frozen=True, kw_only=True)
class PhantomHit(SglangKeyFault):
    """A node of the tree names a page that was filled with other content, and published for it."""

    name: ClassVar[str] = "phantom-hit"
    summary: ClassVar[str] = "node of the tree names a page that was refilled"
    at_start: ClassVar[bool] = False

    def install(self) -> str | None:
        tree, size = self._tree, self._size
        for request in self.engine.scheduler.waiting_queue:
            path = self._path(self._key(request))
            others = {int(slot) // size for slot in tree.all_values_flatten().tolist()} - set(path)
            if path and others:
                rng = self._rng()
                column, page = rng.randrange(len(path)), rng.choice(sorted(others))
                self._point(path[: column + 1], page)
                return f"column {column} of {request.rid}, page {path[column]} of the tree, is now page {page}"
        return None

    def _point(self, pages: list[int], other: int) -> None:
        """The last page of this path is another one, until the path leaves the tree."""
        import torch

        tree, size = self._tree, self._size
        paths, evict, reset = tree.path_device_indices, tree._evict, tree.reset
        end, there = len(pages) * size, [True]

        def path_device_indices(node: Any) -> Any:
            path = paths(node)
            if there and (path[:end:size] // size).tolist() == pages:
                path = path.clone()
                path[end - size : end] = torch.arange(other * size, (other + 1) * size)
            return path

        def evicted(*args: Any, **kwargs: Any) -> Any:
            result = evict(*args, **kwargs)
            if pages[-1] in tree.token_to_kv_pool_allocator.get_all_free_pages().tolist():
                there.clear()
            return result

        def emptied() -> None:
            there.clear()
            reset()

        tree.path_device_indices, tree._evict, tree.reset = path_device_indices, evicted, emptied
        tree.prefix_device_indices = lambda request: path_device_indices(request.last_node)[: request.prefix_len]


@dataclass(frozen=True, kw_only=True)
class TruncatedHash(_OtherKeys):
    """In place of a page's tokens a bit of a hash of them is compared, behind the same prefix."""

    name: ClassVar[str] = "truncated-hash"
    summary: ClassVar[str] = "a page's tokens are compared by a bit of their hash"

    def _renamed(self, key: Any) -> Any:
        tokens, size = list(key), self._size
        for first in range(0, len(tokens) - size + 1, size):
            # Of a tuple of integers it is the same in every process.
            cut = hash(tuple(tokens[first : first + size])) & ((1 << KEPT_BITS) - 1)
            tokens[first : first + size] = [cut] * size
        return _with_tokens(key, tokens)


@dataclass(frozen=True, kw_only=True)
class CollidingHash(_OtherKeys):
    """A request's page is taken for another content's that stands behind the same prefix: two inputs of one key."""

    name: ClassVar[str] = "colliding-hash"
    summary: ClassVar[str] = "two contents behind one prefix have one key"
    at_start: ClassVar[bool] = False
    taken_for: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Tokens up to the page's end -> those whose page it is taken for."""

    def install(self) -> str | None:
        scheduler, size = self.engine.scheduler, self._size
        running = [*scheduler.running_batch.reqs, *([scheduler.chunked_req] if scheduler.chunked_req else [])]
        for request in scheduler.waiting_queue:
            key = self._key(request)
            mine, hit = list(key), len(self._path(key)) * size
            owners = []
            for owner in running:
                theirs = self._key(owner)
                if (theirs.extra_key, theirs.cache_salt) != (key.extra_key, key.cache_salt):
                    continue
                cached = list(theirs)[: len(self._path(theirs)) * size]
                common = len(commonprefix([mine, cached])) // size * size
                if hit <= common and common + size <= min(len(mine), len(cached)):
                    owners.append((owner.rid, cached[: common + size]))
            if owners:
                name, tokens = self._rng().choice(owners)
                self.taken_for[tuple(mine[: len(tokens)])] = tokens
                super().install()
                return f"column {len(tokens) // size - 1} of {request.rid} has the key of {name}'s"
        return None

    def _renamed(self, key: Any) -> Any:
        tokens = list(key)
        for mine, theirs in self.taken_for.items():
            if tuple(tokens[: len(mine)]) == mine:
                tokens[: len(mine)] = theirs
        return _with_tokens(key, tokens)


@dataclass(frozen=True, kw_only=True)
class PrefixIgnored(SglangKeyFault):
    """A lookup that ends takes the path of another prefix where the tokens behind it are the same."""

    name: ClassVar[str] = "prefix-ignored"
    summary: ClassVar[str] = "same tokens under another prefix are one node"

    def install(self) -> str | None:
        tree, size, known = self._tree, self._size, []
        match, insert = tree._match_tree, tree.insert

        def inserted(params: Any) -> Any:
            known.append(params.key)
            return insert(params)

        def matched(params: Any) -> Any:
            result = match(params)
            mine, own = list(params.key), int(result.device_prefix_len)
            best = own
            for key in known:
                if (key.extra_key, key.cache_salt) != (params.key.extra_key, params.key.cache_salt):
                    continue
                # It goes on where the request's own path ends, behind other tokens.
                theirs = list(key)
                run = len(commonprefix([mine[own:], theirs[own:]])) // size * size
                if run < max(SAME_TOKENS_MIN, size) or theirs[:own] == mine[:own] or own + run <= best:
                    continue
                found = match(dataclasses.replace(params, key=_with_tokens(params.key, theirs[: own + run])))
                if found.device_prefix_len > best:
                    result, best = found, int(found.device_prefix_len)
            return result

        tree._match_tree, tree.insert = matched, inserted
        return self.summary


@dataclass(frozen=True, kw_only=True)
class WrongLora(_OtherKeys):
    """The adapter is not in the key. SGLang appends its id to the extra key."""

    name: ClassVar[str] = "wrong-lora"
    summary: ClassVar[str] = "keys of the tree leave out the LoRA adapter"

    def _renamed(self, key: Any) -> Any:
        tenant, _ = _fields(self.engine, key)
        return type(key)(key.raw_token_ids(), tenant or None, cache_salt=key.cache_salt)


@dataclass(frozen=True, kw_only=True)
class WrongSalt(_OtherKeys):
    """Neither extra key nor salt are in the key, only the adapter."""

    name: ClassVar[str] = "wrong-salt"
    summary: ClassVar[str] = "keys of the tree leave out extra key and salt"

    def _renamed(self, key: Any) -> Any:
        _, adapter = _fields(self.engine, key)
        return type(key)(key.raw_token_ids(), self.engine.lora_ids.get(adapter))


@dataclass(frozen=True, kw_only=True)
class FieldsConfused(_OtherKeys):
    """Extra key, salt and the adapter's name are joined: equal strings in different fields are the same."""

    name: ClassVar[str] = "fields-confused"
    summary: ClassVar[str] = "equal strings in different fields are one name space"

    def _renamed(self, key: Any) -> Any:
        joined = "".join((*_fields(self.engine, key), key.cache_salt or ""))
        return type(key)(key.raw_token_ids(), joined or None)


def _fields(engine: Any, key: Any) -> tuple[str, str]:
    """A key's extra key as the client sent it, and the name of its adapter."""
    given = key.extra_key or ""
    for name, lora_id in engine.lora_ids.items():
        if given.endswith(lora_id):
            return given.removesuffix(lora_id), name
    return given, ""


@dataclass(frozen=True, kw_only=True)
class BlockRangeShifted(SglangKeyFault):
    """A lookup answers with the pages from the second one on."""

    name: ClassVar[str] = "block-range-shifted"
    summary: ClassVar[str] = "off-by-one range of cached pages"

    def install(self) -> str | None:
        tree, size = self._tree, self._size
        match = tree._match_tree

        def shorter(params: Any) -> Any:
            result = match(params)
            return result._replace(device_prefix_len=max(int(result.device_prefix_len) - size, 0))

        def shifted(request: Any) -> Any:
            return tree.path_device_indices(request.last_node)[size : size + request.prefix_len]

        tree._match_tree, tree.prefix_device_indices = shorter, shifted
        return self.summary


@dataclass(frozen=True, kw_only=True)
class TokensTruncated(_OtherKeys):
    """A prompt is cut to its last tokens, and keeps the key of the whole."""

    name: ClassVar[str] = "tokens-truncated"
    summary: ClassVar[str] = "tokens are truncated, the key is kept"

    def _renamed(self, key: Any) -> Any:
        tokens = list(key)
        for kept, whole in self.untruncated.items():
            known = min(len(tokens), len(kept))
            if tuple(tokens[:known]) == tuple(kept[:known]) and known > 1:
                return _with_tokens(key, [*whole, *tokens[len(kept) :]][: len(tokens)])
        return key


@dataclass(frozen=True, kw_only=True)
class StaleAfterEviction(SglangKeyFault):
    """An eviction has freed pages and left their node in the tree, for the first who comes back to it."""

    name: ClassVar[str] = "stale-after-eviction"
    summary: ClassVar[str] = "node of the tree is left behind when its pages are evicted"
    at_start: ClassVar[bool] = False
    records: list[tuple[Any, Any]] = field(default_factory=list)
    """(key, slots) of what went into the tree, oldest first."""

    def install(self) -> str | None:
        if "insert" not in vars(self._tree):
            self._keep_records()
        for request in self.engine.scheduler.waiting_queue:
            key = self._key(request)
            mine, path = list(key), self._path(key)
            for known, slots in reversed(self.records):
                if (known.extra_key, known.cache_salt) != (key.extra_key, key.cache_salt):
                    continue
                common = len(commonprefix([mine, list(known)])) // self._size
                pages = (slots[:: self._size] // self._size).tolist()[:common]
                if common > len(path) and pages[: len(path)] == path:
                    self._leave(known, slots, common * self._size)
                    return (
                        f"{common - len(path)} evicted pages from {pages[len(path)]} on are what the tree has for "
                        f"{request.rid} from column {len(path)} on"
                    )
        return None

    def _keep_records(self) -> None:
        tree = self._tree
        insert = tree.insert

        def inserted(params: Any) -> Any:
            result = insert(params)
            # With what the tree has now: the record's own duplicates are gone.
            self.records.append((params.key, tree.path_device_indices(result.last_device_node).clone()))
            return result

        tree.insert = inserted

    def _leave(self, key: Any, slots: Any, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        # Nothing is given back as a duplicate, and no second eviction frees the pages once more.
        left = InsertParams(key=key[:tokens], value=slots[:tokens], prev_prefix_len=tokens)
        self._tree.inc_lock_ref(self._tree.insert(left).last_device_node)


SGLANG_KEY_FAULTS: dict[str, type[SglangKeyFault]] = {
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
    )
}
"""Every fault of this module by name, in the order of the report."""

SEEN_BY_TAGS = ("phantom-hit", "block-range-shifted", "stale-after-eviction")
"""Of a path of the tree whose pages do not add up: the chain of tags sees them, and content is compared at its end."""
SGLANG_KEY_PROOF_SETS: dict[str, tuple[str, ...]] = {
    name: ("all", "tag") if name in SEEN_BY_TAGS else ("all", "content_key") for name in SGLANG_KEY_FAULTS
}
"""With which proofs each is tried."""

NOT_IN_SGLANG_KEYS = {
    "cache-kept-over-update": "after new weights the guard's hooks take nothing from SGLang's cache and empty it when "
    "nobody runs: no hit is ever wrong, which tests/sglang/test_contents.py holds it to",
    "hit-not-loaded": "HiCache, LMCache and external linkers, which load what they report, are refused at attach",
}
"""Faults of cache keys in other engines -> why a campaign in SGLang has none of that name."""
