"""KV transfers of an engine that is guarded through `kvguard.adapters.generic`: both halves behind its error policy.

See `kvguard.transfer_export` and `kvguard.transfer_import` for what each call means. What an engine without a guard
would do is the answer when the guard is off, or has failed and `on_guard_error` is `disarm`: then a manifest still goes
out, and says that nobody vouches for the pages.

A call that makes no sense (see `PagedGuard.kept`) is logged and counted, and ends its transfer: the pages were not
compared. While violations are only observed the engine goes on, with a manifest that says so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvguard.adapters.generic import PagedGuard
from kvguard.guard import Guard, UsageError
from kvguard.transfer_export import KVExporter
from kvguard.transfer_import import KVImporter
from kvguard.transfer_manifest import (
    DISARMED,
    MISUSED,
    KVLayout,
    PageLabel,
    PagesByPool,
    Refusal,
    TransferLink,
    TransferManifest,
    Wait,
)

__all__ = ["TransferSource", "TransferTarget"]

T = TypeVar("T")


@dataclass(eq=False)
class _Begun:
    """What a manifest says for which no books exist. `misused`: a call about it made no sense while they did."""

    ticket: str = ""
    receiver: str = ""
    tokens: int = -1
    layout: KVLayout = KVLayout(model="", dtype="", page_size=0, shape=())
    misused: bool = False


class TransferSource:
    """The prefill side. All calls belong to the thread of the guard."""

    def __init__(self, guard: PagedGuard, link: TransferLink) -> None:
        self._guard, self._link = guard, link
        self._exporter = guard.kept(None, lambda inner: KVExporter(inner, link))
        self._begun: dict[str, _Begun] = {}

    def begin(
        self, request: str, *, ticket: str, receiver: str, tokens: int, pages: PagesByPool, layout: KVLayout
    ) -> Refusal | None:
        """The copy of the request's pages is about to begin; a Refusal: it must not."""
        begun = _Begun(ticket, receiver, _whole(tokens), layout)

        def begin(exporter: KVExporter) -> Refusal | None:
            return exporter.begin(request, ticket=ticket, receiver=receiver, tokens=tokens, pages=pages, layout=layout)

        refused = self._ask(request, begun, None, begin)
        if refused is None:
            # A refused one leaves another transfer of the request as it is.
            self._begun[request] = begun
        return refused

    def take(
        self,
        request: str,
        pages: PagesByPool,
        columns: Sequence[int] | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> list[PageLabel] | Refusal:
        """A part is about to be copied out of these pages; returns the labels that travel with it."""
        unguarded: list[PageLabel] | Refusal = []
        begun = self._begun.get(request, _Begun())
        taken = self._ask(
            request, begun, unguarded, lambda exporter: exporter.take(request, pages, columns, layers=layers)
        )
        if isinstance(taken, Refusal):
            self._begun.pop(request, None)
        return taken

    def finish(self, request: str, *, first_token: int = -1) -> TransferManifest | Refusal:
        """The last byte was read; returns the manifest that travels behind it.

        A receiver never takes that of a transfer which did not begin, or which a call that makes no sense has ended.
        """
        begun = self._begun.pop(request, None) or _Begun(misused=True)
        unguarded: TransferManifest | Refusal | None = None
        word = self._ask(request, begun, unguarded, lambda exporter: exporter.finish(request, first_token=first_token))
        if word is not None:
            return word
        return TransferManifest(
            source=self._link.name,
            receiver=begun.receiver,
            request=request,
            ticket=begun.ticket,
            tokens=begun.tokens,
            layout=begun.layout,
            entries=(),
            parts=(),
            first_token=_whole(first_token),
            unverified=MISUSED if begun.misused or self._guard.armed else DISARMED,
        ).signed(self._link.key)

    def cancel(self, request: str) -> None:
        """The transfer will not be finished. No error if there is none."""
        self._begun.pop(request, None)
        if self._exporter is not None:
            self._exporter.cancel(request)

    def _ask(self, request: str, begun: _Begun, unguarded: T, call: Callable[[KVExporter], T]) -> T | Refusal:
        exporter = self._exporter
        if exporter is None:
            return unguarded

        otherwise: T | Refusal = unguarded

        def ask(inner: Guard) -> T | Refusal:
            try:
                return call(exporter)
            except UsageError as error:
                inner.adapter_error(error)
                begun.misused = True
                return exporter.stop(request, error) or unguarded

        return self._guard.kept(otherwise, ask)


class TransferTarget:
    """The decode side. All calls belong to the thread of the guard."""

    def __init__(self, guard: PagedGuard, link: TransferLink, *, layout: KVLayout) -> None:
        self._guard = guard
        self._importer = guard.kept(None, lambda inner: KVImporter(inner, link, layout=layout))

    def expect(self, request: str, *, tokens: int) -> str:
        """A transfer will come for the request, which was started; returns its ticket."""
        importer = self._importer
        return "" if importer is None else self._guard.kept("", lambda _: importer.expect(request, tokens=tokens))

    def place(
        self,
        request: str,
        *,
        ticket: str,
        part: int,
        labels: Sequence[PageLabel],
        pages: PagesByPool,
        layers: Sequence[int] | None = None,
    ) -> Refusal | Wait | None:
        """A part is about to be written into these pages; a Refusal: it must not, a Wait: not yet."""

        def place(importer: KVImporter) -> Refusal | Wait | None:
            return importer.place(request, ticket=ticket, part=part, labels=labels, pages=pages, layers=layers)

        return self._ask(request, ticket, place)

    def finish(
        self,
        request: str,
        *,
        ticket: str,
        manifest: TransferManifest | None,
        pages: PagesByPool,
        first_token: int | None = None,
    ) -> Refusal | None:
        """All parts are written; a Refusal: the request must not decode on them."""

        def finish(importer: KVImporter) -> Refusal | None:
            return importer.finish(request, ticket=ticket, manifest=manifest, pages=pages, first_token=first_token)

        return self._ask(request, ticket, finish)

    def cancel(self, request: str) -> None:
        """The request no longer waits for a transfer."""
        if self._importer is not None:
            self._importer.cancel(request)

    def _ask(self, request: str, ticket: str, call: Callable[[KVImporter], T]) -> T | Refusal | None:
        importer = self._importer
        if importer is None:
            return None

        def ask(inner: Guard) -> T | Refusal | None:
            try:
                return call(importer)
            except UsageError as error:
                inner.adapter_error(error)
                return importer.stop(request, ticket, error)

        return self._guard.kept(None, ask)


def _whole(number: object) -> int:
    """As a Python integer; -1 for what is none, which fits no transfer."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return -1
