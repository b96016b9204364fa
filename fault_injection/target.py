"""What a fault may touch: an engine's own state, seen through one narrow protocol that every engine can offer.

Nothing here knows of a guard. Injectors change the allocator's lists, the prefix cache and the block table in device
memory, as a slip in the engine would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CacheKey = Any
"""Whatever an engine's prefix cache looks pages up by; hashable."""


@dataclass(frozen=True, kw_only=True)
class RunningRequest:
    """A request with pages.

    pages       logical page -> physical page; computed_tokens: how many tokens have their KV written
    prompt_tokens, total_tokens  length of the prompt, and of the request once it is complete
    prefix_keys the engine's cache keys of its full pages, first page first
    needs_page whether the step about to be scheduled gives it a new page
    """

    id: str
    pages: tuple[int, ...]
    computed_tokens: int
    prompt_tokens: int
    generated_tokens: int
    total_tokens: int
    prefix_keys: tuple[CacheKey, ...]
    needs_page: bool


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """A request without pages; prefix_keys: the engine's cache keys of its full pages, first page first.

    fits: whether the step about to be scheduled could admit it.
    """

    id: str
    prefix_keys: tuple[CacheKey, ...]
    fits: bool


@dataclass(frozen=True, kw_only=True)
class StepToken:
    """One token of the forward about to run.

    index     its place in the step's tensors; request: whose it is, None in padding and in a dummy batch
    position  its place in its request, from 0; is_draft: a guess, which the forward verifies
    slot      where it is going to be written: page * page_size + offset, or negative
    """

    index: int
    request: str | None
    position: int
    slot: int
    is_draft: bool = False


class PageTarget(Protocol):
    """An engine whose page bookkeeping can be broken on purpose, between two steps.

    recites  the model copies its prompt from the start, so that it is known which pages it has still to read closely;
             False: any computed page is worth breaking
    """

    page_size: int
    num_pages: int
    null_page: int
    recites: bool

    def running(self) -> Sequence[RunningRequest]:
        """Requests with pages, oldest first."""

    def waiting(self) -> Sequence[WaitingRequest]:
        """Requests that wait for pages, first in line first."""

    def users(self, page: int) -> tuple[str, ...]:
        """Requests whose pages include this one."""

    def handed_out(self, page: int) -> tuple[int, str | None]:
        """How often the allocator gave the page to a request, and to which one last."""

    def free_under_users(self, page: int) -> None:
        """The engine's own free path runs for a page in use, as if its reference count had been dropped too often."""

    def is_free(self, page: int) -> bool:
        """Whether the free list holds the page."""

    def make_next(self, page: int) -> None:
        """A page of the free list becomes the next to be handed out."""

    def list_as_free(self, page: int) -> None:
        """The page id appears in the free list, next to be handed out, without anyone having freed it."""

    def unlist(self, page: int) -> None:
        """The page id no longer stands in the free list."""

    def block_table_row(self, request: str) -> tuple[int, ...]:
        """The request's row in device memory, as far as it has pages."""

    def write_block_table(self, request: str, column: int, entry: int) -> None:
        """Overwrite one entry of the request's row in device memory."""

    def cached_page(self, key: CacheKey) -> int | None:
        """The page that the prefix cache holds under a key."""

    def cached_pages(self) -> dict[int, CacheKey]:
        """page -> key of every page that the prefix cache holds."""

    def point_cache_entry(self, key: CacheKey, page: int | None) -> None:
        """The prefix cache maps the key to the page (None: to nothing), and nothing else changes."""


class WriteTarget(PageTarget, Protocol):
    """An engine whose writes can be misled right before a forward, when its tensors are final.

    The calls of `PageTarget` speak of the same pool of pages as those below.
    """

    def tokens(self) -> Sequence[StepToken]:
        """The tokens of the forward about to run, padding included, in the order of its tensors."""

    def write_slots(self, slots: Mapping[int, int]) -> None:
        """Overwrite where tokens are written: index -> slot."""

    def last_slots(self) -> tuple[int, ...]:
        """The slots of the last forward that served requests, padding included; () before it."""

    def windowed(self) -> WriteTarget | None:
        """The same for the pool of windowed layers; None if there are none. Pages outside the window are the null page.

        How many tokens a window holds is in `window`.
        """

    @property
    def window(self) -> int | None:
        """Tokens that attention over this pool sees; None: all."""
