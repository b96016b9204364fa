"""Somebody's own engine as a target of faults: what it must offer, and how the faults' view is made of that.

The engine is reached through one small object, a `CampaignEngine`. Whatever can be worked out from outside is: what a
request has computed from its tokens, who was handed which page from the guard's calls that the engine makes anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.plan import UNSUPPORTED
from kvguard.fault_injection.target import CacheKey, RunningRequest, WaitingRequest

__all__ = ["CampaignEngine", "HandedOut", "OwnTarget", "what_is_unfit", "why_unsupported"]


class CampaignEngine(Protocol):
    """A fresh engine for one run. Greedy decoding, one `step` per forward, its tokens there when `step` returns.

    page_size, num_pages  of its pool; vocab_size: prompts are token ids below it
    null_page   the page that padding points to, None if there is none

    Faults need more, and are listed as unsupported where it is missing:

    block_table, row(request)     what attention reads, [rows, columns] of page ids, NumPy or torch; a request's row
    free_pages                    the allocator's own list or deque; the next to be handed out first, or last where
                                  `takes_last` is True
    release(page)                 the allocator's own free path for one page, as if its last user had gone
    prefix_cache, prefix_keys(request)  the cache's own dict, key -> page, and the keys of the request's full pages

    And there may be

    exact             True: tokens do not depend on what else is in the batch (the default is False)
    max_prompt_tokens, max_new_tokens   bounds for the traffic (64 and 26)
    fits(request)     whether the next step could admit a waiting request
    text(tokens)      how token ids read, for the report
    unsupported       fault name -> why this engine cannot have it
    """

    page_size: int
    num_pages: int
    vocab_size: int
    null_page: int | None

    def submit(self, request: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        """A request enters."""

    def step(self) -> None:
        """Run one forward, or nothing if there is nothing to run."""

    def busy(self) -> bool:
        """Whether any request is unfinished."""

    def abort(self, request: str) -> None:
        """The client went away; no error if the request is over."""

    def tokens(self, request: str) -> Sequence[int]:
        """What the request's client has got so far, also after its end."""

    def error(self, request: str) -> str | None:
        """Why the request ended early: None if it did not."""

    def pages(self, request: str) -> Sequence[int]:
        """Its physical pages by column, as the engine has them in its own books; empty if it has none now."""


_NEEDS: dict[str, tuple[str, ...]] = {
    "use-after-free": ("free_pages", "release"),
    "freed-not-reused": ("free_pages", "release"),
    "double-allocation": ("free_pages",),
    "stale-row": ("block_table", "row"),
    "null-entry": ("block_table", "row", "null_page"),
    "out-of-range-entry": ("block_table", "row"),
    "stale-cache-entry": ("prefix_cache", "prefix_keys"),
}


def why_unsupported(engine: CampaignEngine, fault: str, proofs: str) -> str:
    """Why this fault proves nothing in this engine; "" if it can be injected."""
    if (fault, proofs) in UNSUPPORTED:
        return UNSUPPORTED[fault, proofs]
    declared: Mapping[str, str] = getattr(engine, "unsupported", {})
    if fault in declared:
        return declared[fault]
    missing = [name for name in _NEEDS[fault] if getattr(engine, name, None) is None]
    if missing:
        return f"{PAGE_FAULTS[fault].summary}: {type(engine).__name__} offers no {' and no '.join(missing)}"
    return ""


def what_is_unfit(engine: CampaignEngine, fault: str) -> str:
    """Which member that this fault writes is not of a kind that it can write, and what it must be; "" if all are."""
    for name in _NEEDS[fault]:
        member = getattr(engine, name, None)
        kind = f"{type(engine).__name__}.{name} is a {type(member).__name__}"
        if name == "block_table" and len(getattr(member, "shape", ())) != 2:
            return (
                f"{kind}: it must be the table that attention reads itself, a NumPy or torch array [rows, columns]; "
                'if there is none, name the fault in unsupported = {"fault": "why"}'
            )
        if name == "free_pages" and not all(hasattr(member, call) for call in ("append", "insert", "remove")):
            return f"{kind}: it must be the allocator's own list or deque"
        if name == "prefix_cache" and not all(hasattr(member, call) for call in ("get", "pop", "items", "__setitem__")):
            return f"{kind}: it must be the cache's own dict, key -> page"
    return ""


class HandedOut:
    """How often each page was given to a request, and to which one last: noted where the engine tells its guard."""

    def __init__(self) -> None:
        self.times: dict[int, int] = {}
        self.taker: dict[int, str] = {}

    def note(self, page: int, request: str) -> None:
        """The allocator gave the page to the request."""
        self.times[page] = self.times.get(page, 0) + 1
        self.taker[page] = request


class OwnTarget:
    """Implements `PageTarget` on a CampaignEngine; see there for what each call means."""

    recites = False

    def __init__(self, engine: CampaignEngine, submitted: Mapping[str, tuple[int, int]], handed_out: HandedOut) -> None:
        """`submitted`: request -> tokens of its prompt, tokens that it asks for; in order of arrival."""
        self._engine: Any = engine
        self._submitted, self._handed_out = submitted, handed_out
        self.page_size, self.num_pages = engine.page_size, engine.num_pages
        self.null_page = -1 if engine.null_page is None else engine.null_page

    def _over(self, request: str) -> bool:
        wanted = self._submitted[request][1]
        return self._engine.error(request) is not None or len(self._engine.tokens(request)) >= wanted

    def _keys(self, request: str) -> tuple[CacheKey, ...]:
        keys = getattr(self._engine, "prefix_keys", None)
        return () if keys is None else tuple(keys(request))

    def running(self) -> list[RunningRequest]:
        found = []
        for request, (prompt, wanted) in self._submitted.items():
            pages = tuple(int(page) for page in self._engine.pages(request))
            if not pages or self._over(request):
                continue
            generated = len(self._engine.tokens(request))
            # The last token that was sampled has no KV yet; before the first, nobody outside knows how far it got.
            computed = prompt + generated - 1 if generated else 0
            found.append(
                RunningRequest(
                    id=request,
                    pages=pages,
                    computed_tokens=computed,
                    prompt_tokens=prompt,
                    generated_tokens=generated,
                    total_tokens=prompt + wanted,
                    prefix_keys=self._keys(request),
                    needs_page=prompt + generated > len(pages) * self.page_size,
                )
            )
        return found

    def waiting(self) -> list[WaitingRequest]:
        found: list[WaitingRequest] = []
        for request in self._submitted:
            if not self._over(request) and not len(self._engine.pages(request)):
                fits = self._fits(request) if not found else False
                found.append(WaitingRequest(id=request, prefix_keys=self._keys(request), fits=fits))
        return found

    def _fits(self, request: str) -> bool:
        if hasattr(self._engine, "fits"):
            return bool(self._engine.fits(request))
        free = getattr(self._engine, "free_pages", None)
        tokens = self._submitted[request][0] + len(self._engine.tokens(request))
        return free is None or len(free) * self.page_size > tokens

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(request.id for request in self.running() if page in request.pages)

    def handed_out(self, page: int) -> tuple[int, str | None]:
        return self._handed_out.times.get(page, 0), self._handed_out.taker.get(page)

    def free_under_users(self, page: int) -> None:
        self._engine.release(page)

    def is_free(self, page: int) -> bool:
        return page in self._engine.free_pages

    def make_next(self, page: int) -> None:
        self._engine.free_pages.remove(page)
        self.list_as_free(page)

    def list_as_free(self, page: int) -> None:
        free = self._engine.free_pages
        if getattr(self._engine, "takes_last", False):
            free.append(page)
        else:
            free.insert(0, page)

    def unlist(self, page: int) -> None:
        if page in self._engine.free_pages:
            self._engine.free_pages.remove(page)

    def block_table_row(self, request: str) -> tuple[int, ...]:
        row = self._engine.block_table[self._engine.row(request)]
        return tuple(int(entry) for entry in row[: len(self._engine.pages(request))])

    def write_block_table(self, request: str, column: int, entry: int) -> None:
        self._engine.block_table[self._engine.row(request), column] = entry

    def cached_page(self, key: CacheKey) -> int | None:
        page: int | None = self._engine.prefix_cache.get(key)
        return page

    def cached_pages(self) -> dict[int, CacheKey]:
        return {page: key for key, page in self._engine.prefix_cache.items()}

    def point_cache_entry(self, key: CacheKey, page: int | None) -> None:
        if page is None:
            self._engine.prefix_cache.pop(key, None)
        else:
            self._engine.prefix_cache[key] = page
