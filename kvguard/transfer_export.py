"""The source's half of a KV transfer: only pages that a verified step wrote, and that stay the request's, may leave.

A copy out of a page is work that is not ordered after the forward's stream: the page may be freed, handed out and
overwritten by a later forward while a copy engine or a network card still reads it. So the promised tags are compared
when the transfer begins, at every part of the copy, and once more after the last byte was read. The host's books are
what is compared with: a page is handed out there before any forward that could overwrite it is launched.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from kvguard.books import UsageError, page_ids
from kvguard.guard import Guard
from kvguard.requests import RequestState
from kvguard.transfer_manifest import (
    OBSERVED,
    UNCHECKED,
    UNEXAMINED,
    VERIFIED,
    KVLayout,
    PageLabel,
    PagesByPool,
    Refusal,
    TransferLink,
    TransferManifest,
    by_pool,
    columns_of,
    report_refusal,
)
from kvguard.violation import Kind, Proof


@dataclass(eq=False)
class _Export:
    """A transfer under way: whose, to whom, what its ledger promised when it began, and what was copied so far.

    parts, layers  per part: the entries that it carried, and which layers of them
    carried        entry -> layers of it that some part carried
    """

    state: RequestState
    incarnation: int
    ticket: str
    receiver: str
    tokens: int
    layout: KVLayout
    entries: tuple[PageLabel, ...]
    unverified: str
    parts: list[tuple[int, ...]] = field(default_factory=list)
    layers: list[tuple[int, ...]] = field(default_factory=list)
    carried: dict[int, set[int]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Its request has ended, or has given its pages up since."""
        return not self.state.alive or self.state.incarnation != self.incarnation


class KVExporter:
    """Belongs to the guard's thread. Call `begin`, `take` before each part is copied, `finish` after all."""

    def __init__(self, guard: Guard, link: TransferLink) -> None:
        self._books = guard._books
        self._checks = Proof.TRANSFER in self._books.proofs
        # Without the look on the device a row may have read anything: its verdict is worth nothing to the receiver.
        self._word = UNEXAMINED if not self._checks else VERIFIED if self._books.checks_tags else UNCHECKED
        self._link = link
        self._exports: dict[str, _Export] = {}

    def begin(
        self, request: str, *, ticket: str, receiver: str, tokens: int, pages: PagesByPool, layout: KVLayout
    ) -> Refusal | None:
        """The request's prompt is computed; its first `tokens` tokens are about to be copied out of `pages`.

        `pages`: what the copy will really read, all live columns of every pool in order. `ticket`: the receiver's. The
        request must stay live, and keep its pages, until `finish`. UsageError if it is not live, or for an argument of
        another type.
        """
        books = self._books
        state = books.state(request)
        tokens = _plain(ticket, receiver, tokens, layout)
        # Whoever ended or gave its pages up without `cancel` copies nothing any more.
        self._exports = {name: one for name, one in self._exports.items() if not one.is_over}
        if request in self._exports:
            detail = f"{self._link.name} was still copying it to {self._exports[request].receiver}"
            return self._refuse(Kind.TRANSFER_REPEATED, state, detail, ends_request=False)
        given = by_pool(books, pages)
        for pool in range(len(books.tables)):
            layout.layers_in(pool)
        export = _Export(state, state.incarnation, ticket, receiver, tokens, layout, (), self._word)
        self._exports[request] = export
        if self._checks:
            waits = [promise for promise in state.depends if not promise.kept]
            if state.condemned is not None or state.stalled or state.computed < tokens or waits:
                detail = (
                    f"{tokens} tokens were to leave {self._link.name}, verified steps have written "
                    f"{0 if state.stalled else state.computed}"
                )
                refused = self._end(export, Kind.TRANSFER_UNVERIFIED, detail)
                if refused is not None:
                    return refused
        entries: list[PageLabel] = []
        for pool, table in enumerate(books.tables):
            listed = given.get(pool, [])
            promised = columns_of(state.ledgers[pool], tokens, table.spec.page_size)
            if self._checks and (promised is None or len(promised) != len(listed)):
                detail = f"{self._link.name} lists {len(listed)} pages of pool {table.spec.name} for {tokens} tokens; "
                detail += "its ledger says otherwise"
                refused = self._end(export, Kind.TRANSFER_INCOMPLETE, detail)
                if refused is not None:
                    return refused
            name = table.spec.name
            labels = [PageLabel(name, *entry) for entry in promised or ()]
            refused = self._compare(export, labels, listed, "before it was copied")
            if refused is not None:
                return refused
            entries += labels
        export.entries = tuple(entries)
        return None

    def take(
        self,
        request: str,
        pages: PagesByPool,
        columns: Sequence[int] | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> list[PageLabel] | Refusal:
        """A part of the copy is about to read `pages`; returns the labels that must travel with its bytes.

        `columns`: the columns that the pages stand for, the same in every pool; None: all of the transfer's.
        `layers`: which layers of these pages the part holds, counted within their pool; None: the next one, as in a
        copy that goes layer by layer. All parts together must hold every layer of every column once.
        """
        export, books = self._export(request), self._books
        if columns is not None:
            columns = page_ids(columns)
        places = {(label.pool, label.column): place for place, label in enumerate(export.entries)}
        labels: list[PageLabel] = []
        part: list[int] = []
        for pool, listed in by_pool(books, pages).items():
            table = books.tables[pool]
            name = table.spec.name
            named = columns if columns is not None else [entry.column for entry in export.entries if entry.pool == name]
            if len(named) != len(listed):
                raise UsageError(f"{len(listed)} pages for {len(named)} columns of pool {name}: one each")
            for column in named:
                if (name, column) not in places:
                    raise UsageError(f"column {column} of pool {name} is not part of this transfer of {request!r}")
            here = [places[name, column] for column in named]
            refused = self._compare(export, [export.entries[place] for place in here], listed, "while it was copied")
            if refused is not None:
                return refused
            labels += (PageLabel(name, *both, table.tag(both[1])) for both in zip(named, listed, strict=True))
            part += here
        export.layers.append(self._carry(export, part, layers))
        export.parts.append(tuple(part))
        return labels

    def _carry(self, export: _Export, part: list[int], layers: Sequence[int] | None) -> tuple[int, ...]:
        """The layers of a part, noted for each of its entries. UsageError if they cannot be, or came before."""
        if not self._checks:
            return () if layers is None else tuple(page_ids(layers))
        if layers is None:
            following = {len(export.carried.get(place, ())) for place in part}
            if len(following) > 1:
                raise UsageError("the columns of this part are at different layers: say which `layers` it holds")
            layers = tuple(following)
        layers = tuple(page_ids(layers))
        for place in part:
            known = export.layout.layers_in(self._books.index(export.entries[place].pool))
            before = export.carried.get(place, set())
            if len(set(layers)) != len(layers) or before & set(layers) or not all(0 <= n < known for n in layers):
                raise UsageError(
                    f"a part of layers {layers}: a pool of this layout has {known} layers, and of column "
                    f"{export.entries[place].column} {sorted(before)} were copied; give each once (`KVLayout.layers`)"
                )
        for place in part:
            export.carried.setdefault(place, set()).update(layers)
        return layers

    def finish(self, request: str, *, first_token: int = -1) -> TransferManifest | Refusal:
        """The last byte was read: the manifest, unless a page changed hands meanwhile. Then the pages may be freed.

        `first_token`: what was sampled after the prompt, to be signed with the rest.
        """
        export, books = self._export(request), self._books
        if not isinstance(first_token, int):
            first_token = page_ids([first_token])[0]
        if self._checks:
            if export.is_over:
                refused = self._end(export, Kind.TRANSFER_STALE_PAGE, "the request gave its pages up during the copy")
                if refused is not None:
                    return refused
            pages = [label.page for label in export.entries]
            refused = self._compare(export, export.entries, pages, "while it was copied")
            if refused is not None:
                return refused
            for place, entry in enumerate(export.entries):
                copied, known = len(export.carried.get(place, ())), export.layout.layers_in(books.index(entry.pool))
                if copied == known:
                    continue
                detail = f"{self._link.name} copied {copied} of {known} layers of column {entry.column}"
                refused = self._end(export, Kind.TRANSFER_INCOMPLETE, detail)
                if refused is not None:
                    return refused
                break
        self._exports.pop(request, None)
        return TransferManifest(
            source=self._link.name,
            receiver=export.receiver,
            request=request,
            ticket=export.ticket,
            tokens=export.tokens,
            layout=export.layout,
            entries=export.entries,
            parts=tuple(export.parts),
            layers=tuple(export.layers),
            first_token=first_token,
            unverified=export.unverified,
        ).signed(self._link.key)

    def cancel(self, request: str) -> None:
        """The transfer will not be finished. No error if there is none."""
        self._exports.pop(request, None)

    def stop(self, request: str, why: object) -> Refusal | None:
        """A call about this transfer made no sense, so that nobody vouches for it: it is over, and so is its request.

        None where violations are only observed, or transfers are not checked: `finish` then has nothing to sign.
        """
        export = self._exports.pop(request, None)
        state = self._books.requests.get(request) if export is None else export.state
        if state is not None and not state.alive:
            state = None
        return self._refuse(Kind.TRANSFER_UNVERIFIED, state, f"{self._link.name}: {why}", request=request)

    def _export(self, request: str) -> _Export:
        try:
            return self._exports[request]
        except KeyError:
            raise UsageError(f"no transfer of request {request!r} has begun") from None

    def _compare(
        self, export: _Export, promised: Sequence[PageLabel], read: Sequence[int], when: str
    ) -> Refusal | None:
        """Whether the copy reads the promised pages, and they still carry the promised tags."""
        if not self._checks:
            return None
        tables, name = self._books.tables, f"{self._link.name} to {export.receiver}"
        # No two pages ever share a tag: another page has another one, too.
        wrong = [
            (label, page)
            for label, page in zip(promised, read, strict=False)
            if tables[self._books.index(label.pool)].tag(page) != label.tag
        ]
        if not wrong:
            return None
        label, page = wrong[0]
        if page != label.page:
            kind = Kind.TRANSFER_FOREIGN_PAGE
            detail = f"column {label.column}: the copy from {name} reads page {page} instead of {label.page}"
        else:
            kind = Kind.TRANSFER_STALE_PAGE
            detail = f"column {label.column}: page {page} changed hands {when} from {name}"
        return self._end(export, kind, detail, label, page=page, foreign=[page for _, page in wrong])

    def _end(
        self,
        export: _Export,
        kind: Kind,
        detail: str,
        label: PageLabel | None = None,
        *,
        foreign: Sequence[int] = (),
        page: int = -1,
    ) -> Refusal | None:
        """The transfer is over, unless violations are only observed: then it goes on as one that nobody vouches for."""
        pool, column = (0, -1) if label is None else (self._books.index(label.pool), label.column)
        # The tag that a foreign page carries is its owner's: only the promised page can have lost the promised tag.
        expected = label.tag if label is not None and page == label.page else 0
        refused = self._refuse(
            kind, export.state, detail, pool=pool, column=column, page=page, expected=expected, foreign=foreign
        )
        if refused is None:
            export.unverified = OBSERVED
        else:
            self._exports.pop(export.state.id, None)
        return refused

    def _refuse(
        self,
        kind: Kind,
        state: RequestState | None,
        detail: str,
        *,
        request: str = "",
        ends_request: bool = True,
        pool: int = 0,
        column: int = -1,
        page: int = -1,
        expected: int = 0,
        foreign: Sequence[int] = (),
    ) -> Refusal | None:
        if not self._checks:
            return None
        return report_refusal(
            self._books, kind, state, request if state is None else state.id, detail,
            ends_request=ends_request, pool=pool, column=column, page=page, expected=expected, foreign=foreign,
        )  # fmt: skip


def _plain(ticket: str, receiver: str, tokens: int, layout: KVLayout) -> int:
    """The number of tokens as a Python integer. UsageError if anything here could not be signed."""
    try:
        json.dumps((str.__str__(ticket), str.__str__(receiver), asdict(layout)))
        return operator.index(tokens)
    except (TypeError, ValueError) as error:
        raise UsageError(f"ticket, receiver, tokens and layout must be plain data: {error}") from None


__all__ = ["KVExporter"]
