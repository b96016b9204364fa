"""Requests and pages: the half of the Guard's calls that an engine's scheduler and allocator make."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvguard.books import UsageError, page_ids
from kvguard.handover import PageHandover, Retired
from kvguard.page_table import Promise
from kvguard.requests import RequestState
from kvguard.violation import Kind

__all__ = ["BookKeeping", "Retired"]


class BookKeeping(PageHandover):
    """The book-keeping calls of a Guard. Pages are the allocator's; a pool is named by its spec, None: the first."""

    # -- requests -------------------------------------------------------------------------------------------------

    def start(self, request: str) -> None:
        """A request enters. UsageError if its id is no string, or is live already."""
        if not isinstance(request, str):
            raise UsageError(f"request ids are strings; {request!r} is a {type(request).__name__}")
        if request in self._books.requests:
            raise UsageError(f"request {request!r} is live already: finish it first, or give the new one another id")
        self._books.new_state(request)

    def finish(self, request: str) -> None:
        """The request ends, for whatever reason; its ledgers are forgotten, its pages stay as they are.

        Call this before `retire` of its pages. Its steps in flight are still judged. No error if it is not live.
        """
        books = self._books
        books.write_progress()
        state = books.requests.pop(request, None)
        if state is None:
            return
        books.roster += 1
        books.release_all(state)
        state.alive = False
        books.rows.give_slot(state.slot)

    def preempt(self, request: str) -> None:
        """The request loses all its pages and waits; steps of it that are in flight no longer count as progress."""
        state = self._books.state(request)
        self._books.release_all(state)
        self._restart(state)
        state.preempted = True

    def resume(self, request: str) -> None:
        """A preempted request is about to get pages again. UsageError if it was not preempted."""
        state = self._books.state(request)
        if not state.preempted:
            raise UsageError(f"request {request!r} was not preempted")
        state.preempted = False
        self._restart(state)

    def _restart(self, state: RequestState) -> None:
        books = self._books
        books.roster += 1
        books.incarnations += 1
        state.incarnation = books.incarnations
        state.stalled = False
        books.rows.begin(state)

    def scheduled_tokens(self, request: str) -> int:
        """Tokens of the request whose KV is written once the steps in flight have run; 0 before its first step."""
        return self._books.scheduled_tokens(self._books.state(request))

    def rewind(self, request: str, tokens: int) -> None:
        """Only the first `tokens` tokens are confirmed: speculation was rejected. Pages stay in the ledger.

        Call it after the step whose tokens were rejected was judged. Steps of this request that are in flight were
        scheduled behind the rejected tokens: they write that much earlier. Promises and publications of this request
        past `tokens` are revoked.
        """
        books = self._books
        state = books.state(request)
        self._move_back(state, tokens)
        if tokens < state.floor:
            # What the engine takes back itself is computed again in place, also where others have taken the pages.
            state.floor = tokens - tokens % books.page_size_max
            books.rows.touch(state)
            if books.batch is not None:
                books.batch.floors = None
        for promise in books.open_promises(state):
            if promise.need_tokens > tokens:
                self._books.settle(promise, kept=False)
        state.promises = [promise for promise in state.promises if promise.kept is None]
        for table, ledger in zip(books.tables, state.ledgers, strict=True):
            size = table.spec.page_size
            if size is None:
                continue
            for column in range(tokens // size, len(ledger)):
                page = ledger.page(column)
                if table.tag(page) == ledger.tag(column) and table.record(page).holders == {request}:
                    table.unpublish(page)

    def _move_back(self, state: RequestState, tokens: int, *, cut: bool = False) -> None:
        """The verified length becomes `tokens` at most; steps in flight move by what that takes away.

        `cut`: the pages past `tokens` are given up, so that nothing in flight counts past it.
        """
        if self._books.batch is not None:
            self._books.batch.again = None
        rejected = max(0, state.computed - tokens)
        state.computed = min(state.computed, tokens)
        for pending in self._books.pending.values():
            for row in pending.rows_of(state):
                if pending.incarnations[row] != state.incarnation:
                    continue
                end = pending.ends[row] - rejected
                pending.ends[row] = max(0, min(end, tokens) if cut or not rejected else end)

    # -- pages ----------------------------------------------------------------------------------------------------

    def skip(self, request: str, columns: int, *, pool: str | None = None) -> None:
        """The request's next `columns` columns stay empty: pages that a sliding window does not need."""
        index = self._books.index(pool)
        state = self._books.state(request)
        state.ledgers[index].skip(columns)
        self._books.rows.touch(state)

    def publish(
        self, request: str, column: int, key: Hashable, *, pool: str | None = None, tokens: int | None = None
    ) -> bool:
        """The page in the request's `column` can now be found in the cache under the engine's own key.

        Fine before its KV is computed: it is then a promise, kept by the step that writes its last token. False if the
        publication is refused: the page is no longer the request's own, or the request is being ended; the engine must
        drop the entry. `tokens`: the request's length at which the page holds what the key says, needed in a pool
        without a page size; by default the page's end; 0 for a page that was filled by a load, and not by its steps.
        """
        books = self._books
        index = books.index(pool)
        table, state = books.tables[index], books.state(request)
        ledger = state.ledgers[index]
        page, tag = ledger.entry(column)
        record = table.record_under(page, tag)
        if record is None:
            if self._control:
                problem = table.problem_with_page(page) or Kind.PUBLISH_UNOWNED
                return not self._refuse(problem, index, page, request)
            return True
        if state.condemned is not None and not state.observed:
            return False
        again = record.publication == key
        if again and not self._contents:
            # Published already, by whoever wrote it: an engine that publishes a whole prefix again changes nothing.
            return True
        size = table.spec.page_size
        if tokens is None and size is None:
            raise UsageError(f"pool {table.spec.name} has no page size: say at how many tokens the page is complete")
        need = tokens if tokens is not None else (column + 1) * int(size or 0)
        # Tokens before the page are a statement that it is complete already, and it holds what stands up to its end.
        holds = need if size is None or need > column * size else (column + 1) * size
        content = self._content_to_publish(state, index, column, page, holds) if self._contents else None
        if isinstance(content, bool):
            return False
        if again:
            if content is None or record.content is None or record.content.key == content.key:
                return True
            detail = f"the page is published by request {record.content.publisher} for other content"
            return not self._refuse_content(Kind.PUBLISH_CONTENT, detail, index, page, state, column)
        promise = None
        if state.stalled or need > state.computed:
            promise = Promise(table.spec.name, page, tag, state, need)
            self._attach(promise, state)
        if record.promise is not None:
            self._revoke(record.promise)
        table.publish(page, key, promise, request, content)
        return True

    def _attach(self, promise: Promise, state: RequestState) -> None:
        """An open promise waits with the step in flight that writes it, or with the writer until one is scheduled."""
        books = self._books
        found = books.writing_step(state, promise.need_tokens)
        if found is None:
            state.promises.append(promise)
            books.marked.add(state)
            return
        pending, row = found
        promise.step = pending.step
        pending.promises.append((row, promise))

    def adopt(
        self,
        request: str,
        hits: Sequence[tuple[Hashable, int]],
        *,
        pool: str | None = None,
        refusable: bool = True,
    ) -> int:
        """The request takes cached pages for its next columns; returns how many leading hits are accepted.

        `hits`: (the engine's cache key, page) in column order. A hit counts only if that page's current publication
        carries that very key. After a refused hit the engine treats the rest as not cached and computes it.
        `refusable`: False where the engine has acted on the hits already (they were vetted before, see `vet_hits`): a
        wrong one then gets an expectation that no page meets, and the device flags the row.
        """
        books = self._books
        index = books.index(pool)
        table, state = books.tables[index], books.state(request)
        ledger = state.ledgers[index]
        accepted = 0
        own: list[tuple[int, int, int]] = []
        books.rows.touch(state)
        pages = page_ids([page for _, page in hits])
        if self._contents and hits:
            if state.content is None:
                self._unidentified(state)
                if refusable:
                    return 0
            own = self._content_of_hits(state, index, len(hits), len(ledger))
        for place, ((key, _), page) in enumerate(zip(hits, pages, strict=True)):
            problem = table.problem_with_adoption(page, key)
            if problem is None and (table.spec.name, page) in books.quarantine and books.enforcing:
                break
            if problem is not None and refusable and self._control and self._refuse(problem, index, page, request):
                break
            wrong = None
            if self._contents and state.content is not None:
                expected = own[place] if place < len(own) else None
                wrong = self._problem_with_content(state, index, len(ledger), page, expected)
                if wrong is not None and refusable and self._refuse_content(*wrong, index, page, state, len(ledger)):
                    break
            if problem is not None or (wrong is not None and not refusable and books.enforcing):
                # The publication it goes by is gone; the ledger holds what was promised then, which the page no longer
                # carries. Or it is somebody's sound page, but not what this request is made of: no page will do.
                tag = table.promised_tag(page, key) if problem is not None else table.invent_tag()
                ledger.append(page, tag)
                state.adopted.add(tag)
                accepted += 1
                continue
            promise = table.record(page).promise
            if promise is not None and promise.writer is not state:
                promise.dependents.append((state, state.incarnation))
                state.depends.append(promise)
                books.marked.add(state)
            table.adopt(page, request)
            tag = table.tag(page)
            ledger.append(page, tag)
            state.adopted.add(tag)
            accepted += 1
        return accepted

    def drop(self, request: str, start: int, stop: int, *, pool: str | None = None) -> list[int]:
        """Columns [start, stop) of the request are no longer live (a sliding window moved on); returns their pages."""
        books = self._books
        index, state = books.index(pool), books.state(request)
        return self._give_up(state, index, state.ledgers[index].drop(start, stop))

    def truncate(self, request: str, columns: int, *, pool: str | None = None) -> list[int]:
        """The request keeps only its first `columns` columns; returns the pages it gave up, for the caller to free.

        What it had computed past them is gone: pages that it gets for those columns again are not computed.
        """
        books = self._books
        index, state = books.index(pool), books.state(request)
        cut = state.ledgers[index].truncate(columns)
        size = books.tables[index].spec.page_size
        if size is not None and books.scheduled_tokens(state) > columns * size:
            self._move_back(state, columns * size, cut=True)
        return self._give_up(state, index, cut)

    def _give_up(self, state: RequestState, index: int, cut: list[tuple[int, int]]) -> list[int]:
        """Pages left a ledger: the writer of a promise will not write them, an adopter no longer depends on them."""
        books = self._books
        table = books.tables[index]
        gone = set(cut)
        table.release_each([page for page, _ in cut], state.id)
        for page, tag in cut:
            # Where others hold it on, it must not pass for the page that the request gets for this column next.
            if tag not in state.adopted and table.record_under(page, tag) is not None:
                table.take_writer(page)
        if gone:
            for promise in state.promises:
                if promise.pool == table.spec.name and (promise.page, promise.tag) in gone:
                    self._books.settle(promise, kept=False)
            state.promises = [promise for promise in state.promises if promise.kept is None]
            self._stop_depending(state, table.spec.name, gone)
        books.rows.touch(state)
        return [page for page, _ in cut]

    def _stop_depending(self, state: RequestState, pool: str, gone: set[tuple[int, int]]) -> None:
        """Drop dependencies on pages that were given up, unless a step in flight reads them."""
        read = {
            promise
            for pending in self._books.pending.values()
            for row, promise in pending.waiting
            if pending.states[row] is state
        }
        kept = []
        for promise in state.depends:
            if promise.pool == pool and (promise.page, promise.tag) in gone and promise not in read:
                promise.dependents = [entry for entry in promise.dependents if entry[0] is not state]
            else:
                kept.append(promise)
        state.depends = kept
