"""Faults of a KV transfer from a prefill worker to a decode worker: wrong pages, lost pages, and copies out of order.

Like the faults of `pages.py` they know nothing of a guard. `side` says in which worker a fault is injected, `moment`
when it is asked whether it is live: before a copy is taken, before a part is written, or after one was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvguard.fault_injection.faults.pages import Injection, free_early
from kvguard.fault_injection.transfer_target import SinkTarget, SourceTarget, TransferView

NEAR_TOKENS = 12
"""How far ahead a victim must have to recite what is broken, where there is a choice."""


@dataclass(frozen=True, kw_only=True)
class TransferFault:
    """Base of the faults below. `proofs`: the sets of proofs that can find it; `uncovered`: why none can, if so."""

    seed: int
    target: Any

    name: ClassVar[str]
    summary: ClassVar[str]
    side: ClassVar[Literal["source", "sink"]]
    moment: ClassVar[Literal["copy", "land", "written"]]
    proofs: ClassVar[tuple[str, ...]] = ("all", "transfer")
    uncovered: ClassVar[str] = ""

    def inject(self) -> Injection | None:
        """Break something, or answer None if nothing suitable is there yet."""
        raise NotImplementedError

    def _rng(self) -> random.Random:
        return random.Random(f"{self.name}-{self.seed}")

    def _column(self, rng: random.Random, transfer: TransferView) -> int:
        """One of the columns that are written and still to be recited, a near one."""
        worth = [column for column in transfer.worth if column >= transfer.first_column]
        worth = worth or list(range(transfer.first_column, len(transfer.pages)))
        return rng.choice(worth[: max(1, NEAR_TOKENS // self.target.page_size)])


def _of(request: str) -> dict[str, Any]:
    """Live with the victim's next copy or landing; nobody else is affected."""
    return {
        "victims": (request,),
        "live_when": lambda names: request in names,
        "affected": lambda: frozenset({request}),
    }


def _readers(target: SourceTarget | SinkTarget, page: int) -> Any:
    """Everyone who lists the page, but not a rightful new owner."""
    before, _ = target.handed_out(page)

    def affected() -> frozenset[str]:
        count, taker = target.handed_out(page)
        names = {request.id for request in target.running() if page in request.pages}
        return frozenset(names - {taker} if count > before and taker is not None else names)

    return affected


@dataclass(frozen=True, kw_only=True)
class SourcePageReused(TransferFault):
    """The prefill worker frees a page before its last layer was copied, and the next prompt overwrites it."""

    target: SourceTarget

    name: ClassVar[str] = "source-page-reused"
    summary: ClassVar[str] = "source page freed and reused while it is copied"
    side: ClassVar[Literal["source", "sink"]] = "source"
    moment: ClassVar[Literal["copy", "land", "written"]] = "copy"
    proofs: ClassVar[tuple[str, ...]] = ("all", "transfer", "control_plane")

    def inject(self) -> Injection | None:
        target = self.target
        if not any(request.fits for request in target.waiting()):
            return None
        half_done = [one for one in target.outgoing() if one.done_parts]
        if not half_done:
            return None
        rng = self._rng()
        transfer = rng.choice(half_done)
        column = self._column(rng, transfer)
        page = transfer.pages[column]
        victims = target.users(page)
        freed = free_early(target, page, reused=True)
        return Injection(
            victims=victims,
            page=page,
            column=column,
            live_when=lambda names: freed and bool(names & set(victims)),
            affected=_readers(target, page),
            description=f"source page {page} of {transfer.request} freed after {transfer.done_parts} of "
            f"{transfer.parts} parts were copied",
        )


@dataclass(frozen=True, kw_only=True)
class SourcePagesSwapped(TransferFault):
    """The connector reads a column from another request's page; where that is handed over too, they are swapped."""

    target: SourceTarget

    name: ClassVar[str] = "source-pages-swapped"
    summary: ClassVar[str] = "connector reads pages of another request"
    side: ClassVar[Literal["source", "sink"]] = "source"
    moment: ClassVar[Literal["copy", "land", "written"]] = "copy"

    def inject(self) -> Injection | None:
        rng = self._rng()
        fresh = [one for one in self.target.outgoing() if not one.done_parts]
        if not fresh:
            return None
        transfer = rng.choice(fresh)
        column = self._column(rng, transfer)
        page = transfer.pages[column]
        partners = [
            (other, place)
            for other in self.target.outgoing()
            for place, theirs in enumerate(other.pages)
            if theirs not in transfer.pages and page not in other.pages and not other.done_parts
        ]
        if partners:
            other, place = rng.choice(partners)
            foreign = other.pages[place]
            self.target.read_from(other.request, place, page)
            victims: tuple[str, ...] = (transfer.request, other.request)
        else:
            others = sorted(p for p in self.target.used_pages() if p not in transfer.pages)
            if not others:
                return None
            foreign, victims = rng.choice(others), (transfer.request,)
        self.target.read_from(transfer.request, column, foreign)
        return Injection(
            victims=victims,
            page=foreign,
            column=column,
            live_when=lambda names: bool(names & set(victims)),
            affected=lambda: frozenset(victims),
            description=f"column {column} of {transfer.request} is read from page {foreign} instead of {page}"
            + (f", and the other way round for {victims[1]}" if len(victims) > 1 else ""),
        )


@dataclass(frozen=True, kw_only=True)
class FormatMismatch(TransferFault):
    """One transfer is sent in another layout or dtype than the decode worker stores, in as many bytes."""

    target: SourceTarget

    name: ClassVar[str] = "format-mismatch"
    summary: ClassVar[str] = "KV sent in a layout or dtype that the receiver misreads"
    side: ClassVar[Literal["source", "sink"]] = "source"
    moment: ClassVar[Literal["copy", "land", "written"]] = "copy"

    def inject(self) -> Injection | None:
        rng = self._rng()
        fresh = [one for one in self.target.outgoing() if not one.done_parts]
        if not fresh:
            return None
        transfer = rng.choice(fresh)
        what = self.target.change_format(transfer.request, rng)
        description = f"the KV of {transfer.request} is sent as {what}"
        return Injection(page=transfer.pages[0], column=0, description=description, **_of(transfer.request))


def _landing(target: SinkTarget) -> list[TransferView]:
    """Transfers of which a part was written and another is about to be."""
    return [one for one in target.incoming() if one.pages and one.done_parts and one.waiting_parts]


@dataclass(frozen=True, kw_only=True)
class SinkPageFreed(TransferFault):
    """A page that the decode worker allocated for a transfer is freed before the copy lands, next to be handed out."""

    target: SinkTarget

    name: ClassVar[str] = "sink-page-freed"
    summary: ClassVar[str] = "destination page freed before the copy lands"
    side: ClassVar[Literal["source", "sink"]] = "sink"
    moment: ClassVar[Literal["copy", "land", "written"]] = "land"
    proofs: ClassVar[tuple[str, ...]] = ("all", "transfer", "control_plane")

    def inject(self) -> Injection | None:
        landing = [one for one in _landing(self.target) if one.first_column < len(one.pages)]
        if not landing:
            return None
        rng = self._rng()
        transfer = rng.choice(landing)
        column = self._column(rng, transfer)
        page, request, target = transfer.pages[column], transfer.request, self.target
        freed = free_early(target, page, reused=True)
        return Injection(
            victims=(request,),
            page=page,
            column=column,
            live_when=lambda names: freed and request in names,
            affected=_readers(target, page),
            description=f"page {page}, allocated for column {column} of {request}, freed before all of it had come",
        )


@dataclass(frozen=True, kw_only=True)
class SinkPageSwapped(TransferFault):
    """The connector writes a column into the page of a request that is decoding."""

    target: SinkTarget

    name: ClassVar[str] = "sink-page-swapped"
    summary: ClassVar[str] = "connector writes into a page of another request"
    side: ClassVar[Literal["source", "sink"]] = "sink"
    moment: ClassVar[Literal["copy", "land", "written"]] = "land"

    def inject(self) -> Injection | None:
        landing = [one for one in _landing(self.target) if one.first_column < len(one.pages)]
        names = {one.request for one in landing}
        others = [other for other in self.target.running() if other.id not in names and other.computed_tokens]
        if not landing or not others:
            return None
        rng = self._rng()
        transfer, other = rng.choice(landing), rng.choice(others)
        column = self._column(rng, transfer)
        foreign = [page for page in other.pages if page not in transfer.pages]
        if not foreign:
            return None
        # What it has still to recite, where that is known.
        ahead = (other.generated_tokens + 2) // self.target.page_size
        page = foreign[min(ahead, len(foreign) - 1)]
        self.target.write_to(transfer.request, column, page)
        description = f"column {column} of {transfer.request} is written to page {page} of {other.id}"
        return Injection(page=page, column=column, description=description, **_of(transfer.request))


@dataclass(frozen=True, kw_only=True)
class PageLost(TransferFault):
    """A page is missing from what came; the connector goes on as if it had come."""

    target: SinkTarget

    name: ClassVar[str] = "page-lost"
    summary: ClassVar[str] = "page of the transfer never came"
    side: ClassVar[Literal["source", "sink"]] = "sink"
    moment: ClassVar[Literal["copy", "land", "written"]] = "land"

    def inject(self) -> Injection | None:
        coming = [one for one in self.target.incoming() if one.waiting_parts and one.worth]
        if not coming:
            return None
        rng = self._rng()
        transfer = rng.choice(coming)
        column = self._column(rng, transfer)
        self._lose(transfer.request, column)
        page = transfer.pages[column] if transfer.pages else -1
        description = f"column {column} of {transfer.request} is missing from a part that came"
        return Injection(page=page, column=column, description=description, **_of(transfer.request))

    def _lose(self, request: str, column: int) -> None:
        self.target.lose_page(request, column)


@dataclass(frozen=True, kw_only=True)
class BytesLost(PageLost):
    """A page comes under its own label, but its bytes were never copied."""

    name: ClassVar[str] = "bytes-lost"
    summary: ClassVar[str] = "page came with its label and without its bytes"
    uncovered: ClassVar[str] = "every page and tag is right, the bytes are not: that takes seals, which are not built"

    def _lose(self, request: str, column: int) -> None:
        self.target.blank_page(request, column)


@dataclass(frozen=True, kw_only=True)
class RepeatedTransfer(TransferFault):
    """A finished transfer comes once more, into pages that decode by now, the request's own or somebody else's."""

    target: SinkTarget

    name: ClassVar[str] = "repeated-transfer"
    summary: ClassVar[str] = "request handed over a second time"
    side: ClassVar[Literal["source", "sink"]] = "sink"
    moment: ClassVar[Literal["copy", "land", "written"]] = "written"

    def inject(self) -> Injection | None:
        candidates = [(one, users) for one, users in self.target.finished() if users]
        if not candidates:
            return None
        reused: Sequence[tuple[TransferView, tuple[str, ...]]]
        reused = [(one, users) for one, users in candidates if set(users) != {one.request}]
        rng = self._rng()
        transfer, users = rng.choice(reused or candidates)
        self.target.repeat(transfer.request)
        return Injection(
            victims=users,
            page=transfer.pages[0],
            column=0,
            live_when=lambda names: transfer.request in names,
            affected=lambda: frozenset(users),
            description=f"{transfer.request} is handed over again, into pages that {', '.join(users)} use",
        )


TRANSFER_FAULTS: dict[str, type[TransferFault]] = {
    fault.name: fault
    for fault in (
        SourcePageReused,
        SourcePagesSwapped,
        FormatMismatch,
        SinkPageFreed,
        SinkPageSwapped,
        PageLost,
        RepeatedTransfer,
        BytesLost,
    )
}
"""Every fault of this module by name, in the order of the report."""
