"""A violation: one broken promise, with everything a report needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvguard.recorder import PageHistory


class Proof(enum.StrEnum):
    """Which check found it."""

    TAG = "tag"
    """The device's comparison of page tags with the row's ledger, or a dependency on a row that it flagged."""
    CONTROL_PLANE = "control_plane"
    """The host's check of an allocator or cache operation, before it took effect."""


class Kind(enum.StrEnum):
    """What was found. The first group comes from the device, the second from the host's books."""

    STALE_PAGE = "stale-page"
    VACANT_PAGE = "vacant-page"
    FOREIGN_ROW = "foreign-row"
    NULL_ENTRY = "null-entry"
    OUT_OF_RANGE_ENTRY = "out-of-range-entry"
    SPLIT_ENTRY = "split-entry"
    UNRECORDED_PAGE = "unrecorded-page"
    WRITER_FLAGGED = "writer-flagged"
    WRITER_NEVER_RAN = "writer-never-ran"

    DOUBLE_ALLOCATION = "double-allocation"
    DOUBLE_FREE = "double-free"
    FREE_UNOWNED = "free-of-unowned-page"
    FREE_WHILE_HELD = "free-while-held"
    ADOPT_VACANT = "adoption-of-vacant-page"
    ADOPT_STALE = "adoption-of-stale-publication"
    PUBLISH_UNOWNED = "publication-of-unowned-page"
    PAGE_OUT_OF_RANGE = "page-out-of-range"
    NULL_PAGE_USED = "null-page-used"


MEANING: dict[Kind, str] = {
    Kind.STALE_PAGE: "was about to read a page that has been handed to someone else",
    Kind.VACANT_PAGE: "was about to read a page that has been freed",
    Kind.FOREIGN_ROW: "was about to read through a block-table row that is not its own",
    Kind.NULL_ENTRY: "was about to read the null page inside its live extent",
    Kind.OUT_OF_RANGE_ENTRY: "was about to read through a block-table entry outside the pool",
    Kind.SPLIT_ENTRY: "was about to read the wrong piece of a manager page",
    Kind.UNRECORDED_PAGE: "was about to read past the pages that its ledger holds",
    Kind.WRITER_FLAGGED: "depends on pages that a flagged request had promised to write",
    Kind.WRITER_NEVER_RAN: "depends on promised pages that nobody will write",
    Kind.DOUBLE_ALLOCATION: "was given a page that is still in use",
    Kind.DOUBLE_FREE: "freed a page that is free already",
    Kind.FREE_UNOWNED: "freed a page that it does not hold",
    Kind.FREE_WHILE_HELD: "had a page freed under it while it was running",
    Kind.ADOPT_VACANT: "took a cache hit on a page that has been freed",
    Kind.ADOPT_STALE: "took a cache hit on a page that now belongs to other content",
    Kind.PUBLISH_UNOWNED: "published a page that it no longer holds",
    Kind.PAGE_OUT_OF_RANGE: "named a page outside the pool",
    Kind.NULL_PAGE_USED: "named the null page, which belongs to nobody",
}

ADVICE: dict[Kind, str] = {
    Kind.STALE_PAGE: "look for the free of this page between the two allocations below: it ran while a reader was live",
    Kind.VACANT_PAGE: "look for the free below: it ran while a reader was live",
    Kind.FOREIGN_ROW: "look at who writes this block-table row: row reuse, batch compaction, an asynchronous copy",
    Kind.NULL_ENTRY: "look for code that clears block-table rows of finished or padded requests too early",
    Kind.OUT_OF_RANGE_ENTRY: "look for uninitialised or mis-scaled page ids on the way into the block table",
    Kind.SPLIT_ENTRY: "look at the expansion of manager pages into kernel pages",
    Kind.UNRECORDED_PAGE: "an allocation path is not covered by the adapter: report it with the engine's version",
    Kind.WRITER_FLAGGED: "see the violation of the writer; this request only shared its fate",
    Kind.WRITER_NEVER_RAN: "look at the prefix cache: it keeps entries of pages whose writer was preempted or aborted",
    Kind.DOUBLE_ALLOCATION: "look at the free list: it held a page that was never given back",
    Kind.DOUBLE_FREE: "look at the free paths below: two of them released the same page",
    Kind.FREE_UNOWNED: "look at who kept this page id after giving the page back",
    Kind.FREE_WHILE_HELD: "look at the reference count of this page",
    Kind.ADOPT_VACANT: "look at eviction: a cache entry outlived its page",
    Kind.ADOPT_STALE: "look at eviction: a cache entry outlived its page, and the page was filled with other content",
    Kind.PUBLISH_UNOWNED: "look at the order of free and publish for this request",
    Kind.PAGE_OUT_OF_RANGE: "look at the arithmetic that produced this page id",
    Kind.NULL_PAGE_USED: "look at the free list's initialisation and at padding",
}


class Action(enum.StrEnum):
    """What the guard did about it."""

    ABORTED = "aborted"
    REFUSED = "refused"
    OBSERVED = "observed"
    HALTED = "halted"


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One broken promise.

    id            unique in the process, in the client's error message and in the report
    request       whose promise; None for an allocator operation outside any request
    step          the step it was found in; row: its row in that step (-1: not from the device)
    column, page  where (-1: not located); in manager pages
    expected_tag, found_tag  the tag promised, the tag the books hold for the page now (0: vacant)
    owner         who holds the page now, if anyone
    row_entries   the block-table row as the device found it (empty: not captured), promised_pages: as it should be
    cause         id of the violation this one follows from (dependents)
    time_s        seconds since the epoch
    """

    id: str
    proof: Proof
    kind: Kind
    action: Action
    pool: str
    request: str | None
    step: int
    row: int = -1
    column: int = -1
    page: int = -1
    expected_tag: int = 0
    found_tag: int = 0
    owner: str | None = None
    page_size: int | None = None
    row_entries: tuple[int, ...] = ()
    promised_pages: tuple[int, ...] = ()
    history: PageHistory | None = None
    cause: str | None = None
    quarantined: bool = False
    detail: str = ""
    time_s: float = 0.0

    @property
    def message(self) -> str:
        """One line for a client or a log: names kvguard and the violation id, and holds no content of any request."""
        who = f"request {self.request}" if self.request is not None else "the allocator"
        return f"kvguard {self.id}: {who} {MEANING[self.kind]} (pool {self.pool}, step {self.step}); {self.action}"
