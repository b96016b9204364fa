"""A violation: one broken promise, with everything a report needs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvguard.recorder import PageHistory


class Proof(enum.StrEnum):
    """Which check found it."""

    TAG = "tag"
    """The device's comparison of page tags with the row's ledger, or a dependency on a row that it flagged."""
    WRITE_SLOT = "write_slot"
    """The device's comparison of where a step writes with who may write there."""
    CONTROL_PLANE = "control_plane"
    """The host's check of an allocator or cache operation, before it took effect."""
    CONTENT_KEY = "content_key"
    """The host's comparison of what an adopter wants to read with what was published, before it takes the page."""
    TRANSFER = "transfer"
    """The checks on both sides of a KV transfer between two engines, against the books of each and a manifest."""


class Kind(enum.StrEnum):
    """What was found: a group each from the device, from the host's books, and from KV transfers."""

    STALE_PAGE = "stale-page"
    VACANT_PAGE = "vacant-page"
    FOREIGN_ROW = "foreign-row"
    NULL_ENTRY = "null-entry"
    OUT_OF_RANGE_ENTRY = "out-of-range-entry"
    SPLIT_ENTRY = "split-entry"
    UNRECORDED_PAGE = "unrecorded-page"
    WRITER_FLAGGED = "writer-flagged"
    WRITER_NEVER_RAN = "writer-never-ran"

    WRITE_FOREIGN = "write-into-foreign-page"
    WRITE_SHIFTED = "write-at-wrong-offset"
    WRITE_COMPLETE = "write-into-complete-page"
    WRITE_OUT_OF_RANGE = "write-out-of-range"
    WRITE_LOST = "write-to-nowhere"
    WRITE_OF_PADDING = "write-of-padding"

    DOUBLE_ALLOCATION = "double-allocation"
    DOUBLE_FREE = "double-free"
    FREE_UNOWNED = "free-of-unowned-page"
    FREE_WHILE_HELD = "free-while-held"
    ADOPT_VACANT = "adoption-of-vacant-page"
    ADOPT_STALE = "adoption-of-stale-publication"
    PUBLISH_UNOWNED = "publication-of-unowned-page"
    PAGE_OUT_OF_RANGE = "page-out-of-range"
    NULL_PAGE_USED = "null-page-used"

    CONTENT_TOKENS = "other-tokens-in-cached-page"
    CONTENT_DOMAIN = "other-domain-in-cached-page"
    CONTENT_RANGE = "other-place-in-cached-page"
    CONTENT_TOO_SHORT = "cached-page-beyond-request"
    CONTENT_UNBOUND = "cached-page-without-content"
    CONTENT_NOT_LOADED = "cached-page-not-loaded"
    CONTENT_UNWRITTEN = "unwritten-tokens"
    PUBLISH_CONTENT = "publication-under-taken-key"
    PUBLISH_BEYOND = "publication-beyond-request"

    TRANSFER_UNVERIFIED = "transfer-of-unverified-pages"
    TRANSFER_FOREIGN_PAGE = "transfer-of-foreign-page"
    TRANSFER_STALE_PAGE = "transfer-of-stale-page"
    TRANSFER_INCOMPLETE = "incomplete-transfer"
    TRANSFER_REPEATED = "repeated-transfer"
    TRANSFER_MANIFEST = "transfer-manifest-mismatch"
    TRANSFER_LAYOUT = "transfer-layout-mismatch"
    TRANSFER_TARGET_PAGE = "transfer-into-foreign-page"


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
    Kind.WRITE_FOREIGN: "was about to write into a page whose designated writer it is not",
    Kind.WRITE_SHIFTED: "was about to write at another place of its page than the token's",
    Kind.WRITE_COMPLETE: "was about to write into a page that is complete",
    Kind.WRITE_OUT_OF_RANGE: "was about to write outside the pool",
    Kind.WRITE_LOST: "was about to write a token's KV nowhere",
    Kind.WRITE_OF_PADDING: "was about to write into the pool",
    Kind.DOUBLE_ALLOCATION: "was given a page that is still in use",
    Kind.DOUBLE_FREE: "freed a page that is free already",
    Kind.FREE_UNOWNED: "freed a page that it does not hold",
    Kind.FREE_WHILE_HELD: "had a page freed under it while it was running",
    Kind.ADOPT_VACANT: "took a cache hit on a page that has been freed",
    Kind.ADOPT_STALE: "took a cache hit on a page that now belongs to other content",
    Kind.PUBLISH_UNOWNED: "published a page that it no longer holds",
    Kind.PAGE_OUT_OF_RANGE: "named a page outside the pool",
    Kind.NULL_PAGE_USED: "named the null page, which belongs to nobody",
    Kind.CONTENT_TOKENS: "took a cache hit on a page that holds other tokens than its own",
    Kind.CONTENT_DOMAIN: "took a cache hit on a page that was computed in another domain than its own",
    Kind.CONTENT_RANGE: "took a cache hit on a page that holds another range of positions",
    Kind.CONTENT_TOO_SHORT: "took a cache hit on a page that ends behind its own tokens",
    Kind.CONTENT_UNBOUND: "took a cache hit on a page that nothing is published in",
    Kind.CONTENT_NOT_LOADED: "took a hit of an external store that was not loaded",
    Kind.CONTENT_UNWRITTEN: "was about to count tokens as cached that no page of the cache holds for it",
    Kind.PUBLISH_CONTENT: "published a page under a key that it carries for other content",
    Kind.PUBLISH_BEYOND: "published a page that ends behind its own tokens",
    Kind.TRANSFER_UNVERIFIED: "was about to be handed over with pages that no verified step has written",
    Kind.TRANSFER_FOREIGN_PAGE: "was about to be handed over with a page that is not its own",
    Kind.TRANSFER_STALE_PAGE: "was about to be handed over with a page that changed hands",
    Kind.TRANSFER_INCOMPLETE: "was handed over without some of its pages",
    Kind.TRANSFER_REPEATED: "was handed over once more, or without having been expected",
    Kind.TRANSFER_MANIFEST: "was handed over with a manifest that is not the source's word about this transfer",
    Kind.TRANSFER_LAYOUT: "was handed over in a layout that the receiver would misread",
    Kind.TRANSFER_TARGET_PAGE: "was about to receive KV in a page that is not its own",
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
    Kind.WRITE_FOREIGN: "look at how the slot mapping is made: stale entries, swapped rows, a replayed buffer",
    Kind.WRITE_SHIFTED: "look at where positions and slots come from: they are of different steps or page sizes",
    Kind.WRITE_COMPLETE: "look for code that runs tokens again after their page was filled: positions that went back",
    Kind.WRITE_OUT_OF_RANGE: "look for uninitialised or mis-scaled slots",
    Kind.WRITE_LOST: "look for slots that stayed at the padding value: the token's KV would be missing for ever",
    Kind.WRITE_OF_PADDING: "look for stale slots behind the batch: padding and dummy runs must write to the skip slot",
    Kind.DOUBLE_ALLOCATION: "look at the free list: it held a page that was never given back",
    Kind.DOUBLE_FREE: "look at the free paths below: two of them released the same page",
    Kind.FREE_UNOWNED: "look at who kept this page id after giving the page back",
    Kind.FREE_WHILE_HELD: "look at the reference count of this page",
    Kind.ADOPT_VACANT: "look at eviction: a cache entry outlived its page",
    Kind.ADOPT_STALE: "look at eviction: a cache entry outlived its page, and the page was filled with other content",
    Kind.PUBLISH_UNOWNED: "look at the order of free and publish for this request",
    Kind.PAGE_OUT_OF_RANGE: "look at the arithmetic that produced this page id",
    Kind.NULL_PAGE_USED: "look at the free list's initialisation and at padding",
    Kind.CONTENT_TOKENS: "look at what the engine's cache key is made of, and at entries that outlived their page",
    Kind.CONTENT_DOMAIN: "look at what the engine's cache key leaves out: the fields named above",
    Kind.CONTENT_RANGE: "look at the arithmetic from hits to block-table columns",
    Kind.CONTENT_TOO_SHORT: "look for tokens that were cut off after their cache keys were computed",
    Kind.CONTENT_UNBOUND: "look at eviction: a cache entry outlived its page",
    Kind.CONTENT_NOT_LOADED: "look at what the connector answers when a load fails or is partial",
    Kind.CONTENT_UNWRITTEN: "look at how tokens are counted as cached: on admission, and when a request comes back",
    Kind.PUBLISH_CONTENT: "look at what the engine's cache key is made of: two contents have one key",
    Kind.PUBLISH_BEYOND: "look for tokens that were cut off after their cache keys were computed",
    Kind.TRANSFER_UNVERIFIED: "look at when the connector starts the copy: the step's verdict must be in",
    Kind.TRANSFER_FOREIGN_PAGE: "look at the connector's page list: whose pages are in it, and since when",
    Kind.TRANSFER_STALE_PAGE: "look at when the source frees the pages: the copy must have read them before",
    Kind.TRANSFER_INCOMPLETE: "look at lost messages, and at pages that the connector left out",
    Kind.TRANSFER_REPEATED: "look at the retries of connector and router, and at request ids used twice",
    Kind.TRANSFER_MANIFEST: "look at messages that were mixed up, and at the keys of both sides",
    Kind.TRANSFER_LAYOUT: "compare model, KV dtype, page size and scales in the configurations of both engines",
    Kind.TRANSFER_TARGET_PAGE: "look at the receiver's frees, and at the page ids that it gave to the connector",
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
        anonymous = "a padding lane" if self.kind is Kind.WRITE_OF_PADDING else "the allocator"
        who = f"request {self.request}" if self.request is not None else anonymous
        return f"kvguard {self.id}: {who} {MEANING[self.kind]} (pool {self.pool}, step {self.step}); {self.action}"
