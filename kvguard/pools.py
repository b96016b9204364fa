"""What a pool of pages looks like: the part of an engine's layout that both halves of the guard must agree on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """One set of pages with one page size. Hybrid models have several.

    name           how reports and calls name it
    num_pages      pages in the pool, the null page included; valid page ids are 0 .. num_pages - 1
    page_size      tokens in a page; None for pages that hold no token range (recurrent state)
    null_page      the page no request may own and that padding points to; None if the engine has none. Without it a
                   flagged row cannot be pointed anywhere harmless: it is flagged, but not neutralised.
    split          kernel pages per manager page: attention may be given smaller pages than the allocator hands out
    skip_slot      what the engine's cache-write kernel takes as "write nothing" in a slot mapping
    windowed       pages behind a window give way to the null page, so that a request's token may have nowhere to go
    """

    name: str = "main"
    num_pages: int
    page_size: int | None = 16
    null_page: int | None = 0
    split: int = 1
    skip_slot: int = -1
    windowed: bool = False

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise ValueError(f"pool {self.name!r}: num_pages must be at least 1, not {self.num_pages}")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"pool {self.name!r}: page_size must be at least 1 token, not {self.page_size}")
        if self.null_page is not None and not 0 <= self.null_page < self.num_pages:
            raise ValueError(
                f"pool {self.name!r}: null_page {self.null_page} is not one of its pages 0..{self.num_pages - 1}; "
                "give None if the engine has no null page"
            )
        if self.split < 1 or (self.page_size is not None and self.page_size % self.split):
            raise ValueError(
                f"pool {self.name!r}: {self.split} kernel pages cannot make up one manager page of "
                f"{self.page_size} tokens"
            )


@dataclass(frozen=True, kw_only=True)
class GuardSetup:
    """What the device half must know once, before the first step: picklable, sent over the engine's own channel.

    digest_key  secret 64-bit key of the row digests
    check       whether what rows read is checked on the device
    check_writes  whether what they write is
    """

    pools: tuple[PoolSpec, ...]
    digest_key: int
    check: bool = True
    check_writes: bool = True
