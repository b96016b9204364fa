"""The page table: what the host knows about every page of one pool.

The life of a page: vacant -> allocated (a fresh tag) -> promised (published before its KV is computed) -> complete ->
retired (tag back to vacant) -> vacant. States are derived from the record, never stored beside it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvguard.pools import PoolSpec
from kvguard.recorder import FlightRecorder
from kvguard.tags import VACANT, TagCounter
from kvguard.violation import Kind

if TYPE_CHECKING:
    from kvguard.content_calls import ContentBinding
    from kvguard.requests import RequestState


class PageState(enum.StrEnum):
    """Where a page is in its life."""

    VACANT = "vacant"
    ALLOCATED = "allocated"
    PROMISED = "promised"
    COMPLETE = "complete"


@dataclass(slots=True, eq=False)
class Promise:
    """A publication whose KV is not computed yet.

    need_tokens  the writer's verified length at which the page is complete
    step         the step that writes up to there, once one is scheduled; None until then
    dependents   requests (and their incarnation) that adopted the page on the strength of the promise
    kept         None while open; True once the step was verified; False if it was flagged or will never run
    """

    pool: str
    page: int
    tag: int
    writer: RequestState
    need_tokens: int
    step: int | None = None
    dependents: list[tuple[RequestState, int]] = field(default_factory=list)
    kept: bool | None = None


@dataclass(slots=True, eq=False)
class PageRecord:
    """One page: its tag (0: vacant), who holds it, under which cache key it is published, and how far it is written.

    holders      requests whose ledger holds the page; a cached page that nobody uses has none
    owner        the request it was last allocated to
    publication  the engine's cache key of the current publication, None if not published
    promise      the open promise of the current publication
    content      what the current publication holds, where contents are checked
    former       key and tag of the last publication before the page was retired or handed on
    reset_free   a reset made it vacant; the engine may still give it back, once, for it has its own list of such pages
    was_used     whether it was ever allocated: tells a double free from a free of a page that was never owned
    """

    tag: int = VACANT
    holders: set[str] = field(default_factory=set)
    owner: str | None = None
    publication: Hashable | None = None
    promise: Promise | None = None
    content: ContentBinding | None = None
    former: tuple[Hashable, int] | None = None
    reset_free: bool = False
    was_used: bool = False

    @property
    def state(self) -> PageState:
        if self.tag == VACANT:
            return PageState.VACANT
        if self.promise is not None:
            return PageState.PROMISED
        return PageState.COMPLETE if self.publication is not None else PageState.ALLOCATED


class PageTable:
    """Records of one pool's pages, the tag changes that the device has not seen yet, and the control-plane checks.

    Checks only answer; they change nothing. What to do about an answer is the Guard's business.
    """

    def __init__(self, spec: PoolSpec, tags: TagCounter, recorder: FlightRecorder) -> None:
        self.spec = spec
        self._tags = tags
        self._recorder = recorder
        self._events = recorder.events_of(spec.name)
        self._records: dict[int, PageRecord] = {}
        self.changes: dict[int, int] = {}
        """page -> tag since the last step; the last change of a page wins."""
        self.writers: dict[int, int] = {}
        """page -> the writer word that goes with the tag of its last allocation since then."""

    @property
    def step(self) -> int:
        """The step under which events are recorded, the same for all tables of one recorder."""
        return self._recorder.step

    @step.setter
    def step(self, step: int) -> None:
        self._recorder.step = step

    def record(self, page: int) -> PageRecord:
        """The record of a page inside the pool, made on first use."""
        record = self._records.get(page)
        if record is None:
            record = self._records[page] = PageRecord()
        return record

    def tag(self, page: int) -> int:
        """The page's tag now; 0 if vacant or never used."""
        record = self._records.get(page)
        return VACANT if record is None else record.tag

    def record_under(self, page: int, tag: int) -> PageRecord | None:
        """The record of a page that still carries this tag; None if it does not, or cannot be a request's page."""
        record = self._records.get(page)
        if record is None or record.tag != tag or tag == VACANT or self.problem_with_page(page) is not None:
            return None
        return record

    def held_pages(self) -> list[int]:
        """Pages that some ledger holds, ascending."""
        return sorted(page for page, record in self._records.items() if record.holders)

    def live_pages(self) -> list[int]:
        """Pages that are not vacant, ascending."""
        return sorted(page for page, record in self._records.items() if record.tag != VACANT)

    # -- checks ---------------------------------------------------------------------------------------------------

    def may_be_handed_out(self, pages: Sequence[int]) -> bool:
        """Whether nothing at all stands against allocating these pages: a quick answer to the usual question."""
        records, null_page, num_pages = self._records, self.spec.null_page, self.spec.num_pages
        for page in pages:
            record = records.get(page)
            if page == null_page or not 0 <= page < num_pages or (record is not None and record.holders):
                return False
        return True

    def unclaimed(self, pages: Sequence[int], *, unpublished: bool = False) -> bool:
        """`may_be_handed_out`, and nobody has promised to write them either; `unpublished`: nor can they be found."""
        records, null_page, num_pages = self._records, self.spec.null_page, self.spec.num_pages
        for page in pages:
            record = records.get(page)
            if page == null_page or not 0 <= page < num_pages:
                return False
            if record is not None and (record.holders or record.promise is not None):
                return False
            if unpublished and record is not None and record.publication is not None:
                return False
        return True

    def problem_with_page(self, page: int) -> Kind | None:
        """Whether the id can be a request's page at all."""
        if not 0 <= page < self.spec.num_pages:
            return Kind.PAGE_OUT_OF_RANGE
        return Kind.NULL_PAGE_USED if page == self.spec.null_page else None

    def problem_with_allocation(self, page: int) -> Kind | None:
        """An allocation is wrong while anyone holds the page. A cached page that nobody uses may be taken over."""
        return self.problem_with_page(page) or (Kind.DOUBLE_ALLOCATION if self.record(page).holders else None)

    def problem_with_retire(self, page: int, by: str | None) -> Kind | None:
        """A page may be given back once, and not while a ledger other than the giver's holds it."""
        problem = self.problem_with_page(page)
        if problem is not None:
            return problem
        record = self.record(page)
        if record.tag == VACANT and record.reset_free:
            return None
        if record.tag == VACANT:
            return Kind.DOUBLE_FREE if record.was_used else Kind.FREE_UNOWNED
        if by is not None and record.holders and by not in record.holders:
            return Kind.FREE_UNOWNED
        return Kind.FREE_WHILE_HELD if record.holders - {by} else None

    def problem_with_adoption(self, page: int, key: Hashable) -> Kind | None:
        """A cache hit is right only on a page whose current publication carries the very same key."""
        problem = self.problem_with_page(page)
        if problem is not None:
            return problem
        record = self.record(page)
        if record.tag == VACANT:
            return Kind.ADOPT_VACANT
        return None if record.publication == key and key is not None else Kind.ADOPT_STALE

    # -- changes --------------------------------------------------------------------------------------------------

    def allocate(self, page: int, request: str) -> int:
        """Hand the page to a request under a fresh tag; earlier holders keep their now outdated ledgers."""
        self.record(page)
        return self.allocate_each((page,), (request,), whatever=True)[0]

    def allocate_each(self, pages: Sequence[int], requests: Sequence[str], *, whatever: bool = False) -> list[int]:
        """Hand each page to the request beside it under a fresh tag; returns the tags.

        It stops before the first page that needs a closer look, because it may not be a request's page, somebody holds
        it, or its last publication is still a promise. `whatever`: it is the caller's will all the same.
        """
        records, changes, all_events = self._records, self.changes, self._events
        null_page, num_pages = self.spec.null_page, self.spec.num_pages
        step, depth, take = self._recorder.step, self._recorder.depth, self._tags.take
        tags: list[int] = []
        for page, request in zip(pages, requests, strict=True):
            if not 0 <= page < num_pages:
                break
            record = records.get(page)
            if record is None:
                record = records[page] = PageRecord()
            if record.holders or record.promise is not None or page == null_page:
                if not whatever:
                    break
                record.holders.clear()
            if record.publication is not None:
                self._end_publication(record)
            tag = record.tag = changes[page] = take()
            record.owner = request
            record.holders.add(request)
            record.was_used = True
            record.reset_free = False
            tags.append(tag)
            # What `_note` does, without the call: this is the loop that a step's page crossings go through.
            if depth:
                events = all_events.get(page)
                if events is None:
                    events = all_events[page] = []
                events.append((step, "allocated", tag, request))
                if len(events) > depth:
                    del events[0]
        return tags

    def retire(self, page: int, by: str | None) -> Promise | None:
        """The page goes back to the allocator; returns its open promise, which is thereby broken."""
        record = self.record(page)
        promise = record.promise
        self._note(page, "retired", record.tag, by)
        self._end_publication(record)
        record.tag = self.changes[page] = VACANT
        record.owner = None
        record.holders.clear()
        record.reset_free = False
        return promise

    def retire_idle(self, pages: Sequence[int], by: str | None) -> int:
        """Retire pages that nobody but the giver holds; returns how many leading ones.

        It stops before the first page that needs a closer look: one that is vacant already, held by others, or whose
        publication is still a promise.
        """
        records = self._records
        for place, page in enumerate(pages):
            record = records.get(page)
            if record is None or record.tag == VACANT or record.promise is not None or page == self.spec.null_page:
                return place
            if record.holders and (by not in record.holders or len(record.holders) > 1):
                return place
            self.retire(page, by)
        return len(pages)

    def revoke(self, page: int) -> Promise | None:
        """The page's content is invalid, its holders still hold it: a fresh tag that no ledger expects."""
        record = self.record(page)
        promise = record.promise
        self._end_publication(record)
        record.tag = self.changes[page] = self._tags.take()
        self.writers.pop(page, None)
        self._note(page, "revoked", record.tag, None)
        return promise

    def take_writer(self, page: int) -> None:
        """Nobody may write the page any more; its tag stays what it is."""
        self.changes[page] = self.record(page).tag
        self.writers.pop(page, None)

    @staticmethod
    def _end_publication(record: PageRecord) -> None:
        if record.publication is not None:
            record.former = (record.publication, record.tag)
        record.publication = record.promise = record.content = None

    def promised_tag(self, page: int, key: Hashable) -> int:
        """What an adopter of this cache entry is promised: the page's tag at the time it was published under the key.

        A page published for other content since then carries another tag. Where the books know no such publication,
        nothing was promised, and the answer is a tag that no page carries or ever will.
        """
        record = self._records.get(page)
        if record is not None and key is not None:
            if record.publication == key:
                return record.tag
            if record.former is not None and record.former[0] == key:
                return record.former[1]
        return self.invent_tag()

    def publish(
        self,
        page: int,
        key: Hashable,
        promise: Promise | None,
        request: str,
        content: ContentBinding | None = None,
    ) -> None:
        """The page can be found in the cache under `key`; `promise` says that it is not computed yet."""
        record = self.record(page)
        record.publication, record.promise, record.content = key, promise, content
        self._note(page, "promised" if promise is not None else "published", record.tag, request)

    def unpublish(self, page: int) -> Promise | None:
        """The page can no longer be found in the cache; returns its open promise, if it had one."""
        record = self._records.get(page)
        if record is None:
            return None
        promise = record.promise
        record.publication = record.promise = record.content = None
        return promise

    def adopt(self, page: int, request: str) -> None:
        """One more ledger holds the page."""
        record = self.record(page)
        record.holders.add(request)
        self._note(page, "adopted", record.tag, request)

    def settle(self, promise: Promise) -> None:
        """A promise was kept or broken: clear it, and the publication with it if broken, unless the page moved on."""
        record = self.record(promise.page)
        if record.promise is not promise:
            return
        record.promise = None
        if promise.kept:
            self._note(promise.page, "complete", record.tag, promise.writer.id)
        else:
            record.publication = record.content = None
            self._note(promise.page, "revoked", record.tag, promise.writer.id)

    def release(self, page: int, request: str) -> None:
        """The request's ledger no longer holds the page."""
        self.release_each((page,), request)

    def release_each(self, pages: Sequence[int], request: str) -> None:
        """The request's ledger no longer holds these pages; what is no page of this pool is passed over."""
        records = self._records
        for page in pages:
            record = records.get(page)
            if record is not None:
                record.holders.discard(request)

    def invent_tag(self) -> int:
        """A tag that no page carries or ever will: what a ledger expects that must not be satisfied."""
        return self._tags.take()

    def _note(self, page: int, what: str, tag: int, request: str | None) -> None:
        depth = self._recorder.depth
        if depth:
            events = self._events.get(page)
            if events is None:
                events = self._events[page] = []
            events.append((self._recorder.step, what, tag, request))
            if len(events) > depth:
                del events[0]
