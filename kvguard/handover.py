"""Pages between an engine's allocator and its requests: handed out, vetted, given back, forgotten by the cache.

Every call takes the short way through pages that nothing stands against, and a closer look at the first one that it
cannot pass: both ways must answer the same, and `tests/core/test_short_ways.py` holds them to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvguard.books import Books, UsageError, page_ids
from kvguard.content_calls import ContentCalls
from kvguard.page_table import PageState, Promise
from kvguard.requests import RequestState
from kvguard.telemetry import emit
from kvguard.violation import Action, Kind, Proof


@dataclass(frozen=True, kw_only=True)
class Retired:
    """What became of pages that an allocator wanted back.

    reusable     may go to the free list
    refused      must stay where they are: freeing them is a violation (double free, still held by a running request)
    quarantined  are given up by their owner and must not go to the free list either, until `reset`
    """

    reusable: list[int]
    refused: list[int]
    quarantined: list[int]


class PageHandover(ContentCalls):
    """The calls of a Guard that an allocator and a prefix cache make."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._control = Proof.CONTROL_PLANE in books.proofs

    def allocate(
        self, request: str, pages: Sequence[int], *, pool: str | None = None, refusable: bool = True
    ) -> list[int]:
        """The allocator gave `pages` to the request, for its next columns in this order; returns those accepted.

        A page that is not accepted must not be used: it is still someone's (double allocation), in quarantine, the null
        page, or outside the pool. The caller draws others and calls again; a refused page leaves the free list for good
        and comes back when its holder frees it. Only pages accepted are in the ledger.
        `refusable`: False where the engine has acted already: every page is accepted, and whoever held one of them
        before is flagged by the device.
        """
        pages = page_ids(pages)
        state = self._books.state(request)
        refused = self._hand_out([state] * len(pages), [request] * len(pages), pages, pool, refusable)
        if not refused:
            return list(pages)
        return [page for place, page in enumerate(pages) if place not in refused]

    def allocate_each(self, requests: Sequence[str], pages: Sequence[int], *, pool: str | None = None) -> list[int]:
        """`allocate` of one page each for many requests of a step; returns the places of pages that are not accepted.

        `requests[i]` gets `pages[i]`; a request that is listed more than once gets its pages in this order.
        """
        pages = page_ids(pages)
        if len(requests) != len(pages):
            raise UsageError(f"{len(requests)} requests and {len(pages)} pages: one each")
        return self._hand_out([self._books.state(request) for request in requests], requests, pages, pool)

    def _hand_out(
        self,
        states: list[RequestState],
        requests: Sequence[str],
        pages: Sequence[int],
        pool: str | None,
        refusable: bool = True,
    ) -> list[int]:
        """`requests[i]` is the id of `states[i]`; returns the places of pages that are not accepted."""
        books = self._books
        index = books.index(pool)
        table = books.tables[index]
        books.rows.touched.update(states)
        refused: list[int] = []
        done = 0
        while done < len(pages):
            if not (books.quarantine and books.enforcing):
                tags = table.allocate_each(pages[done:], requests[done:])
                writers = table.writers
                for state, page, tag in zip(states[done:], pages[done:], tags, strict=False):
                    writers[page] = state.writer + state.ledgers[index].append(page, tag)
                done += len(tags)
                if done == len(pages):
                    break
            if not self._allocate_one(states[done], index, pages[done], refusable):
                refused.append(done)
            done += 1
        return refused

    def _allocate_one(self, state: RequestState, index: int, page: int, refusable: bool) -> bool:
        """Whether a page that needs a closer look is accepted."""
        books = self._books
        table, ledger = books.tables[index], state.ledgers[index]
        if refusable and (table.spec.name, page) in books.quarantine and books.enforcing:
            return False
        if refusable and self._control:
            problem = table.problem_with_allocation(page)
            if problem is not None and self._refuse(problem, index, page, state.id):
                return False
        if 0 <= page < table.spec.num_pages:
            self._revoke(table.record(page).promise)
            column = ledger.append(page, table.allocate(page, state.id))
            table.writers[page] = state.writer + column
        else:
            # Let through for lack of a control plane: the device has no tag for it and will flag the row.
            ledger.append(page, table.invent_tag())
        return True

    def may_take_over(self, pages: Sequence[int], *, pool: str | None = None) -> bool:
        """Whether these pages may be handed out as they are: `vet` would refuse none, and none is published.

        Pages that were cached until now, and left the cache (`unpublish`), need not be retired first. One that did not
        leave it is retired: until its new request is told, a lookup would find it.
        """
        books = self._books
        table = books.tables[0 if pool is None else books.index(pool)]
        return not books.quarantine.pages and table.unclaimed(pages, unpublished=True)

    def vet(self, pages: Sequence[int], *, pool: str | None = None) -> list[int]:
        """Which of these pages may not be handed out: still held, in quarantine, the null page, outside the pool.

        For engines whose allocator does not say for whom it allocates: vet when the pages leave the free list, call
        `allocate` when their request is known. Without the control plane only quarantined pages are answered.
        """
        books = self._books
        index = books.index(pool)
        table = books.tables[index]
        refused: list[int] = []
        if not books.quarantine and table.may_be_handed_out(pages):
            return refused
        for page in pages:
            if (table.spec.name, page) in books.quarantine and books.enforcing:
                refused.append(page)
            elif self._control:
                problem = table.problem_with_allocation(page)
                if problem is not None and self._refuse(problem, index, page, None):
                    refused.append(page)
        return refused

    def vet_hits(
        self,
        request: str,
        hits: Sequence[tuple[Hashable, int]],
        *,
        pool: str | None = None,
        columns: Sequence[int] | None = None,
    ) -> int:
        """How many leading hits of a cache lookup may be taken; nothing is recorded in any ledger yet.

        `columns`: where the hits go, ascending, if not to the columns that follow those of the ledger one by one.
        """
        books = self._books
        index = books.index(pool)
        table = books.tables[index]
        state, own, first = None, [], 0
        if self._contents and hits:
            state = books.state(request)
            if state.content is None:
                return self._unidentified(state)
            first = len(state.ledgers[index])
            columns = range(first, first + len(hits)) if columns is None else columns
            first = columns[0]
            own = self._content_of_hits(state, index, columns[-1] + 1 - first, first)
        for accepted, (key, page) in enumerate(hits):
            if (table.spec.name, page) in books.quarantine and books.enforcing:
                return accepted
            problem = table.problem_with_adoption(page, key)
            if problem is not None and self._control and self._refuse(problem, index, page, request):
                return accepted
            if state is not None and columns is not None:
                column = columns[accepted]
                expected = own[column - first] if column - first < len(own) else None
                wrong = self._problem_with_content(state, index, column, page, expected)
                if wrong is not None and self._refuse_content(*wrong, index, page, state, column):
                    return accepted
        return len(hits)

    def quarantined(self, page: int, *, pool: str | None = None) -> bool:
        """Whether the page is kept out of circulation."""
        name = self._books.tables[self._books.index(pool)].spec.name
        return (name, page) in self._books.quarantine

    def retire(self, pages: Sequence[int], *, by: str | None = None, pool: str | None = None) -> Retired:
        """The allocator wants `pages` back, free to be handed out again. Only `reusable` ones may go to its free list.

        `by`: the request that gives them back, if it is known and has not finished; its ledger keeps expecting the tag
        the page had, so that a read after its own free is flagged.
        """
        pages = page_ids(pages)
        books = self._books
        index = books.index(pool)
        table = books.tables[index]
        done = 0 if books.quarantine else table.retire_idle(pages, by)
        result = Retired(reusable=list(pages[:done]), refused=[], quarantined=[])
        for page in pages[done:]:
            if self._control:
                problem = table.problem_with_retire(page, by)
                if problem is not None and self._refuse(problem, index, page, by):
                    result.refused.append(page)
                    continue
            if table.problem_with_page(page) is None:
                if table.tag(page) != 0:
                    self._revoke(table.retire(page, by))
                else:
                    table.record(page).reset_free = False
            if (table.spec.name, page) in books.quarantine and books.enforcing:
                result.quarantined.append(page)
            else:
                result.reusable.append(page)
        return result

    def unpublish(self, pages: Sequence[int], *, pool: str | None = None) -> None:
        """The pages can no longer be found in the cache; who holds them keeps them."""
        books = self._books
        table = books.tables[0 if pool is None else books.index(pool)]
        for page in pages:
            if 0 <= page < table.spec.num_pages:
                promise = table.unpublish(page)
                if promise is not None and not promise.dependents:
                    self._books.settle(promise, kept=False)

    def reset(self, *, pool: str | None = None, revoke_held: bool = False) -> list[int]:
        """The engine emptied its prefix cache, slept, woke up or changed its weights.

        Every publication is gone, pages that no request holds are vacant, quarantined pages are released. Returns the
        released pages that nobody holds, ascending: the caller zeroes them and puts those on its free list that are
        not there already.
        `revoke_held`: KV of running requests is invalid too (new weights); a request that reads it again is flagged.
        Preempt them: they hold their pages until then, and give them back as ever.
        """
        books = self._books
        index = books.index(pool)
        table = books.tables[index]
        released = books.quarantine.release(table.spec.name)
        for page in table.live_pages():
            if not table.record(page).holders:
                self._revoke(table.retire(page, None))
                table.record(page).reset_free = True
            elif revoke_held:
                self._revoke(table.revoke(page))
            else:
                # Its writer still computes it; only the cache forgets it.
                table.unpublish(page)
        books.breaker.reset()
        emit("reset", pool=table.spec.name, released_pages=len(released))
        return [page for page in released if not table.record(page).holders]

    def page_state(self, page: int, *, pool: str | None = None) -> PageState:
        """Where a page is in its life; for tests and for `doctor`-like tools."""
        return self._books.tables[self._books.index(pool)].record(page).state

    # -- what the books say, for adapters that see an allocator from outside ---------------------------------------

    def columns(self, request: str, *, pool: str | None = None) -> int:
        """Columns in the request's ledger, empty ones included; -1 if it is not live."""
        state = self._books.requests.get(request)
        return -1 if state is None else len(state.ledgers[self._books.index(pool)])

    def pages(self, request: str, *, pool: str | None = None) -> list[int]:
        """The pages in the request's ledger, in column order; none if it is not live."""
        state = self._books.requests.get(request)
        if state is None:
            return []
        return [page for _, page, _ in state.ledgers[self._books.index(pool)].entries()]

    def foreign_pages(self, request: str, *, pool: str | None = None) -> list[int]:
        """Pages in the request's ledger that are vacant or somebody else's by now: it must not free them."""
        books = self._books
        state, table = books.requests.get(request), books.tables[books.index(pool)]
        found: list[int] = []
        for _, page, tag in () if state is None else state.ledgers[books.index(pool)].entries():
            if table.problem_with_page(page) is not None:
                found.append(page)
            elif table.tag(page) != tag and (table.tag(page) == 0 or table.record(page).holders - {request}):
                found.append(page)
        return found

    def unused(self, pages: Sequence[int], *, pool: str | None = None) -> list[int]:
        """Those of the pages that are handed out, that no ledger holds, and that are not published."""
        table = self._books.tables[self._books.index(pool)]
        found: list[int] = []
        for page in pages:
            record = None if table.problem_with_page(page) else table.record(page)
            if record is not None and record.tag and not record.holders and record.publication is None:
                found.append(page)
        return found

    def _refuse(self, problem: Kind, index: int, page: int, request: str | None) -> bool:
        """Record the fault of an operation; whether it must not take effect. What the report says is what happens."""
        return self._books.control_violation(problem, index, page, request).action is not Action.OBSERVED

    def _revoke(self, promise: Promise | None) -> None:
        """The page moved on: nobody will be scheduled to write it. A step in flight still keeps its promise."""
        if promise is not None and promise.step is None:
            self._books.settle(promise, kept=False)
