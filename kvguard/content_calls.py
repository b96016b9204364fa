"""What pages hold, and who may read it: the calls of a Guard about tokens and domains, at level `keys`.

A publication is bound to what its publisher is made of, and a hit is compared with what the adopter is made of, each by
what the engine said of that request and not by the engine's own cache key. At a lower level nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from kvguard.books import Books, UsageError
from kvguard.content_key import (
    ContentDomain,
    ContentError,
    ContentKey,
    MultimodalInput,
    RequestContent,
)
from kvguard.requests import RequestState
from kvguard.violation import Action, Kind, Proof

__all__ = ["ContentBinding", "ContentCalls"]


@dataclass(frozen=True, slots=True)
class ContentBinding:
    """What a page was published to hold: the key up to its end, and for reports the domain and who published it."""

    key: ContentKey
    domain: ContentDomain
    publisher: str


class ContentCalls:
    """The calls about contents, and the checks of hits and publications that the other calls make."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._contents = books.checks_contents

    @property
    def wants_contents(self) -> bool:
        """Whether contents are checked; else an adapter need not collect tokens for `identify` and `add_tokens`."""
        return self._contents

    def all_is_told(self) -> None:
        """Whatever fills a request's pages before its first step is told to this guard, from now on.

        That is cached pages, with `adopt`, and loads from an external store, with `vet_loaded`. A request whose first
        step starts behind them is ended then, if that is said in `step` (`tokens_start`): it would read what former
        owners left in pages that are rightly its own. Not for an engine that also fills pages by other ways.
        """
        self._books.all_is_told = self._contents

    def identify(
        self, request: str, domain: ContentDomain, tokens: Any, inputs: Sequence[MultimodalInput] = ()
    ) -> None:
        """What the request is made of: call it after `start`, before any of its pages is adopted or published.

        `tokens`: all that are known so far, a list or a NumPy array of integers; `inputs`: multimodal inputs by the
        position of their first placeholder token. Called again, it takes the place of the first: after new weights for
        a request that was preempted, say. UsageError while the request holds pages that it would mean something else
        by, or for what no key can be made of.
        """
        if not self._contents:
            return
        books = self._books
        state, before = books.state(request), books.state(request).content
        try:
            content = RequestContent(books.hasher, domain)
            content.extend(tokens, inputs)
        except ContentError as error:
            raise UsageError(f"request {request!r}: {error}") from None
        if before is not None and any(len(ledger) for ledger in state.ledgers):
            shared = min(before.tokens, content.tokens)
            if before.key(shared) != content.key(shared):
                raise UsageError(f"request {request!r} holds pages of what it was: preempt it before it is another one")
        state.content = content

    def add_tokens(self, request: str, tokens: Any, inputs: Sequence[MultimodalInput] = ()) -> None:
        """More tokens of an identified request, behind those that are known: what it generated, or its next turn."""
        if not self._contents:
            return
        state = self._books.state(request)
        if state.content is None:
            raise UsageError(f"request {request!r} was not identified: nothing can be added to its tokens")
        try:
            state.content.extend(tokens, inputs)
        except ContentError as error:
            raise UsageError(f"request {request!r}: {error}") from None

    def cut_tokens(self, request: str, tokens: int) -> None:
        """Only the first `tokens` tokens of an identified request are left, with the inputs that start among them.

        For what was sampled and then taken back: what comes instead goes to `add_tokens`. Pages that were published up
        to a later token keep what they were published for. No error where it has no more tokens than that.
        """
        if not self._contents:
            return
        content = self._books.state(request).content
        if tokens < 0 or content is None:
            raise UsageError(f"request {request!r} was not identified, or is cut to {tokens} tokens")
        content.cut(tokens)

    def vet_promised(
        self, request: str, column: int, page: int, publisher: str, published: int, *, pool: str | None = None
    ) -> bool:
        """Whether `request` may take a page that `publisher` is about to publish for its own column `published`.

        For engines whose publications reach the books after others have looked them up: the two requests themselves
        are compared. Both were identified, the publisher with the tokens up to the page's end; nothing is recorded.
        """
        if not self._contents:
            return True
        books = self._books
        index = books.index(pool)
        size = books.tables[index].spec.page_size
        state, writer = books.state(request), books.state(publisher)
        if state.content is None or writer.content is None:
            self._unidentified(writer if writer.content is None else state)
            return False
        key = None if size is None else writer.content.key((published + 1) * size)
        if key is None:
            wrong: tuple[Kind, str] | None = (Kind.CONTENT_UNBOUND, f"request {publisher} has no tokens for it")
        else:
            wrong = self._difference(
                state.content, ContentBinding(key, writer.content.domain, publisher), index, column
            )
        return wrong is None or not self._refuse_content(*wrong, index, page, state, column)

    def vet_range(self, request: str, tokens: int, columns: int, *, pool: str | None = None) -> bool:
        """Whether a lookup that says it has found `tokens` tokens must not be believed, for it gives only `columns`.

        The rest would stand on pages that the request gets afresh, with what their former owners left in them.
        """
        books = self._books
        index = books.index(pool)
        size = books.tables[index].spec.page_size
        if not self._contents or size is None or tokens <= columns * size:
            return False
        detail = f"{tokens} tokens were reported as cached, {columns} pages of {size} were given"
        return self._refuse_content(Kind.CONTENT_UNWRITTEN, detail, index, -1, books.state(request), columns)

    # -- the external store ---------------------------------------------------------------------------------------

    def stored(self, key: Hashable, page: int, *, pool: str | None = None) -> bool:
        """The page was copied to an external store under the engine's key: what it holds is kept with that key.

        False if the engine must take it out of the store: no such publication is known.
        """
        if not self._contents:
            return True
        books = self._books
        table = books.tables[books.index(pool)]
        binding = None if table.problem_with_adoption(page, key) else table.record(page).content
        if binding is None:
            return False
        books.stored[table.spec.name, key] = binding
        return True

    def unstored(self, keys: Sequence[Hashable], *, pool: str | None = None) -> None:
        """The external store no longer holds these keys."""
        if self._contents:
            name = self._books.tables[self._books.index(pool)].spec.name
            for key in keys:
                self._books.stored.pop((name, key), None)

    def vet_stored(self, request: str, keys: Sequence[Hashable], column: int, *, pool: str | None = None) -> int:
        """A connector reports hits for the request's columns from `column` on: how many leading ones may be loaded.

        A key that was stored by a process that this guard knows nothing of is not proven, and not a violation either.
        """
        if not self._contents:
            return len(keys)
        books = self._books
        index = books.index(pool)
        name, state = books.tables[index].spec.name, books.state(request)
        if state.content is None:
            return self._unidentified(state)
        for accepted, key in enumerate(keys):
            binding = books.stored.get((name, key))
            if binding is None:
                return accepted
            problem = self._difference(state.content, binding, index, column + accepted)
            if problem is not None and self._refuse_content(*problem, index, -1, state, column + accepted):
                return accepted
        return len(keys)

    def vet_loaded(self, request: str, keys: Sequence[Hashable], loaded: Sequence[Hashable], column: int) -> int:
        """Of the hits `keys` that a connector reported from `column` on: how many leading ones it also loaded.

        `loaded`: keys of the copies that were completed, from whatever made them, not from the connector's report.
        Pages behind the answer hold somebody else's bytes: the request computes them itself.
        """
        if not self._contents:
            return len(keys)
        done, state = set(loaded), self._books.state(request)
        accepted = len(keys)
        for place, key in enumerate(keys):
            if key in done:
                continue
            detail = f"{len(keys)} pages were reported as hits, {len(done)} copies were completed"
            if self._refuse_content(Kind.CONTENT_NOT_LOADED, detail, 0, -1, state, column + place):
                accepted = place
                break
        if accepted:
            state.loaded = (column + accepted) * (self._books.tables[0].spec.page_size or 0)
        return accepted

    # -- what hits and publications are checked for ---------------------------------------------------------------

    def _content_of_hits(self, state: RequestState, index: int, hits: int, column: int) -> list[tuple[int, int, int]]:
        """The request's own keys at the ends of `hits` columns from `column` on, as many as it has tokens for.

        Plain tuples, for there may be thousands in each lookup: they are equal to the `ContentKey` that they stand for.
        """
        size = self._books.tables[index].spec.page_size
        if size is None or state.content is None:
            return []
        lanes = state.content.lanes(size, column)[:hits]
        ends = range((column + 1) * size, (column + len(lanes)) * size + 1, size)
        return list(zip(ends, *lanes.T.tolist(), strict=True))

    def _problem_with_content(
        self, state: RequestState, index: int, column: int, page: int, own: tuple[int, int, int] | None
    ) -> tuple[Kind, str] | None:
        """What is wrong with a hit of an identified request, with both sides in words; None if it is its own.

        `own`: its key at the end of the column, if that is known already.
        """
        table = self._books.tables[index]
        if table.problem_with_page(page) is not None:
            return Kind.CONTENT_UNBOUND, "it is no page that anything could be published in"
        binding = table.record(page).content
        if binding is None:
            return Kind.CONTENT_UNBOUND, ""
        if binding.key == own:
            return None
        assert state.content is not None
        return self._difference(state.content, binding, index, column)

    def _difference(
        self, content: RequestContent, binding: ContentBinding, index: int, column: int
    ) -> tuple[Kind, str] | None:
        """How what a request is made of differs from what was published for one of its columns; None if it does not."""
        size, tokens = self._books.tables[index].spec.page_size, binding.key.tokens
        fingerprint = self._books.hasher.fingerprint
        published = f"published by request {binding.publisher}: {tokens} tokens, content {fingerprint(binding.key)}"
        if size is not None and not column * size < tokens <= (column + 1) * size:
            return Kind.CONTENT_RANGE, f"column {column} holds tokens up to {(column + 1) * size}; {published}"
        own = content.key(tokens)
        if own is None:
            return Kind.CONTENT_TOO_SHORT, f"the request has {content.tokens} tokens; {published}"
        if own == binding.key:
            return None
        both = f"the request's own {tokens} tokens have content {fingerprint(own)}; {published}"
        fields = content.domain.differing(binding.domain)
        if fields:
            return Kind.CONTENT_DOMAIN, f"differing in {', '.join(fields)}; {both}"
        return Kind.CONTENT_TOKENS, both

    def _content_to_publish(
        self, state: RequestState, index: int, column: int, page: int, tokens: int
    ) -> ContentBinding | bool | None:
        """What a page of the request holds that is published at `tokens` tokens; False: it must not be published.

        None: nobody can adopt it, though it is published: violations are only observed.
        """
        content = state.content
        if content is None:
            self._unidentified(state)
            return False
        key = content.key(tokens)
        if key is not None:
            return ContentBinding(key, content.domain, state.id)
        detail = f"the request has {content.tokens} tokens, the page ends at {tokens}"
        return False if self._refuse_content(Kind.PUBLISH_BEYOND, detail, index, page, state, column) else None

    def _unidentified(self, state: RequestState) -> int:
        """An adapter that does not say what a request is made of makes no violation: its pages are its own only."""
        self._books.misused(f"request {state.id!r} was not identified: it can share no pages at level keys")
        return 0

    def _refuse_content(self, kind: Kind, detail: str, index: int, page: int, state: RequestState, column: int) -> bool:
        """Record what is wrong with a page's content; whether the operation must not take effect."""
        violation = self._books.control_violation(
            kind, index, page, state.id, detail, proof=Proof.CONTENT_KEY, column=column
        )
        return violation.action is not Action.OBSERVED
