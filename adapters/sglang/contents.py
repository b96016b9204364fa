"""What SGLang's requests are made of, for content keys (level `keys`), and what the books on the device are told of it.

Tokens, tenant and adapter are read off the request, never off the keys of the prefix tree: they are what is checked.
A request is hashed when it gets a row of its own, and on when a part of it goes into the tree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.content_key import (
    LANES,
    ContentDomain,
    ContentHasher,
    ContentKey,
    MultimodalInput,
    RequestContent,
)
from kvguard.violation import Kind

Lanes = npt.NDArray[np.int64]

CONTENT = "_kvguard_content"
"""Of a request: its RequestContent since it got its row, under the weights of then."""
SAID = "_kvguard_said"
"""Of a request: extra key and cache salt as they came from the client."""
DOMAINS_MAX = 4096
"""Domains that are kept to name what differs; one more, and only the oldest cannot be named any longer."""
MASK64 = (1 << 64) - 1


# -- hooks ------------------------------------------------------------------------------------------------------------


def after_request(_: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """A request arrived. SGLang joins the extra key with others of its own; what the client said is kept apart."""
    if "extra_key" in kwargs or "cache_salt" in kwargs:
        setattr(req, SAID, (kwargs.get("extra_key"), kwargs.get("cache_salt")))


def before_weights(updater: Any, *args: Any, **kwargs: Any) -> None:
    """The weights change: what is in the cache was computed with others, until SGLang empties it."""
    guard = getattr(updater.tp_worker.model_runner, ATTACHED, None)
    if guard is not None and guard.armed and guard.contents is not None:
        with guard.contained():
            guard.weights_change()


# -- contents ---------------------------------------------------------------------------------------------------------


class RequestContents:
    """The contents of a scheduler's requests. epoch: counts changes of the weights."""

    def __init__(self, hasher: ContentHasher, scheduler: Any) -> None:
        self._hasher = hasher
        self._domain = base_domain(scheduler)
        self._domains: dict[ContentDomain, None] = {}
        self.epoch = 0

    def domain_of(self, req: Any) -> ContentDomain:
        """In which the request's KV is computed."""
        said = getattr(req, SAID, None) or (_without(req.extra_key, req.lora_id), req.cache_salt)
        # To SGLang an empty key or salt is none.
        tenant = tuple(value or None for value in said)
        domain = replace(
            self._domain,
            weights_epoch=self.epoch,
            # SGLang draws an id for each load of an adapter, so that it is a revision as well.
            lora=req.lora_id,
            tenant=repr(tenant) if any(tenant) else None,
        )
        if domain not in self._domains:
            if len(self._domains) >= DOMAINS_MAX:
                del self._domains[next(iter(self._domains))]
            self._domains[domain] = None
        return domain

    def identify(self, req: Any) -> RequestContent:
        """Learn anew what the request is: it got a row, or is looked up, and holds no pages."""
        content = RequestContent(self._hasher, self.domain_of(req))
        content.extend(req.origin_input_ids, inputs_of(req))
        content.extend(req.output_ids)
        setattr(req, CONTENT, content)
        return content

    def at(self, content: RequestContent, tokens: int) -> list[int]:
        """The lanes of the key of the first `tokens` tokens, as int64; two zeros if there are not so many."""
        key = content.key(tokens)
        return [0, 0] if key is None else [_signed(key.first_lane), _signed(key.second_lane)]

    def of_columns(self, req: Any, start: int, stop: int, page_size: int) -> Lanes:
        """int64 [stop - start, 2]: the lanes at the ends of the columns of a request that holds a row.

        Zeros, which satisfy nobody, where the request is not known to have so many tokens.
        """
        found = np.zeros((stop - start, LANES), np.int64)
        content: RequestContent | None = getattr(req, CONTENT, None)
        if content is not None:
            known, prompt = content.tokens, len(req.origin_input_ids)
            if known < stop * page_size:
                # What it generated since; the prompt was known from the start.
                content.extend(req.output_ids[max(known - prompt, 0) : stop * page_size - prompt])
            lanes = content.lanes(page_size, start)[: stop - start]
            found[: len(lanes)] = lanes.view(np.int64)
        return found

    def difference(self, content: RequestContent | None, tokens: int, held: list[int]) -> tuple[Kind, str]:
        """How what a request is differs from `held`, the lanes of a page that should end at `tokens` tokens of it."""
        if not any(held):
            return Kind.CONTENT_UNBOUND, f"nothing was published in it; the column ends at {tokens} tokens"
        there = ContentKey(tokens, *(lane & MASK64 for lane in held))
        shown = f"the page holds content {self._hasher.fingerprint(there)}"
        key = None if content is None else content.key(tokens)
        if content is None or key is None:
            known = 0 if content is None else content.tokens
            return Kind.CONTENT_TOO_SHORT, f"the request has {known} tokens, the column ends at {tokens}; {shown}"
        both = f"the request's own {tokens} tokens have content {self._hasher.fingerprint(key)}; {shown}"
        # Keys are sums that start with the domain: with the same tokens only the domains' shares differ.
        own = self._hasher.domain_words(content.domain)
        rest = [lane - share & MASK64 for lane, share in zip(key[1:], own, strict=True)]
        for domain in self._domains:
            words = self._hasher.domain_words(domain)
            if list(there[1:]) == [lane + share & MASK64 for lane, share in zip(rest, words, strict=True)]:
                return Kind.CONTENT_DOMAIN, f"differing in {', '.join(content.domain.differing(domain))}; {both}"
        return Kind.CONTENT_TOKENS, both


def _signed(lane: int) -> int:
    return lane - (1 << 64) if lane >> 63 else lane


def _without(extra_key: str | None, lora: str | None) -> str | None:
    """An extra key without the adapter's id, which SGLang appends to it."""
    return extra_key[: -len(lora)] if extra_key and lora and extra_key.endswith(lora) else extra_key


def base_domain(scheduler: Any) -> ContentDomain:
    """What all requests of a scheduler have in common."""
    server = scheduler.server_args
    said = [getattr(server, name, None) for name in ("model_path", "revision", "quantization", "dtype")]
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    layout = [type(pool).__name__, f"page_size={scheduler.token_to_kv_pool_allocator.page_size}"]
    layout += [
        f"{name}={getattr(pool, name)}"
        for name in ("layer_num", "head_num", "head_dim", "kv_lora_rank", "qk_rope_head_dim")
        if isinstance(getattr(pool, name, None), int)
    ]
    return ContentDomain(
        model=repr(tuple(None if value is None else str(value) for value in said)),
        kv_layout=",".join(layout),
        kv_dtype=f"{getattr(server, 'kv_cache_dtype', '')} {getattr(pool, 'dtype', '')}",
    )


def inputs_of(req: Any) -> list[MultimodalInput]:
    """What placeholder tokens of the request stand for, by SGLang's own hashes; embeddings belong to the request alone.

    SGLang also puts values made of the hash in the placeholders' place, so that they are among the tokens too.
    """
    found = []
    for item in getattr(req.multimodal_inputs, "mm_items", None) or ():
        if item.hash is not None:
            found += [
                MultimodalInput(position=first, tokens=last - first + 1, identity=item.hash)
                for first, last in item.offsets or ()
            ]
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        # The token ids say nothing then, and SGLang shares nothing.
        identity = f"embeddings of request {req.rid}"
        found.append(MultimodalInput(position=0, tokens=len(req.origin_input_ids), identity=identity))
    return sorted(found, key=lambda given: given.position)
