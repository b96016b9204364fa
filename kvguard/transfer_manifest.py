"""What crosses with the KV pages of one request from a prefill worker to a decode worker, and how it is vouched for.

A transfer is the copy of one request's KV out of one engine's pages into another engine's pages (`handover.py` is about
pages between an allocator and the requests of one engine). Both engines have a guard, pages and tags of their own, so
no tag means anything on the other side: the manifest says which pages, under which tags, the bytes were copied from,
and a keyed digest over all of it shows that it is the source guard's word, neither altered nor mixed up.

The digest covers what is said about the bytes, not the bytes: that needs seals.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from kvguard.books import Books, GuardHalt, UsageError, page_ids
from kvguard.judge import condemn
from kvguard.ledger import Ledger
from kvguard.requests import RequestState
from kvguard.violation import Action, Kind, Proof, Violation

KEY_BYTES_MIN = 16
VERIFIED = ""
DISARMED = "the source's guard is off or has failed"
OBSERVED = "violations were only observed at the source"
UNCHECKED = "the source does not check its steps on the device"
UNEXAMINED = "the source does not check its transfers"
MISUSED = "the source's adapter made a call that makes no sense"

PagesByPool = Mapping[str, Sequence[int]] | Sequence[int]
"""Pages in column order, per pool name; a plain sequence means the first pool."""


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """What the bytes of a transfer mean; both sides must mean the same.

    model      which weights computed them: a model id, with its revision and adapter where those change
    epoch      counts weight updates under that id
    dtype      of what is on the wire, which is what the receiver stores: `bf16`, `fp8_e4m3`, ...
    order      of the axes in a page: `NHD` is slot, head, dimension
    page_size  in tokens
    shape      (layers, KV heads, head dimension), or whatever else describes the model's KV
    scales     factors by which stored numbers are multiplied when they are read; empty where there are none
    layers     how many layers each pool stores, in the order of the guard's pools; empty: shape[0] in every pool
    """

    model: str
    epoch: int = 0
    dtype: str
    order: str = "NHD"
    page_size: int
    shape: tuple[int, ...]
    scales: tuple[float, ...] = ()
    layers: tuple[int, ...] = ()

    def layers_in(self, pool: int) -> int:
        """How many layers the pool of this index stores. UsageError if `layers` does not say."""
        if not self.layers:
            return self.shape[0] if self.shape else 1
        if pool >= len(self.layers):
            raise UsageError(f"the layout has layers {self.layers}: give one number for each pool of the guard")
        return self.layers[pool]

    def difference(self, other: KVLayout) -> str:
        """`page_size 16, not 64` for every field that differs, this one's value first; empty if none does."""
        mine, theirs = asdict(self), asdict(other)
        return "; ".join(f"{name} {mine[name]}, not {theirs[name]}" for name in mine if mine[name] != theirs[name])


class PageLabel(NamedTuple):
    """Where the bytes of one column came from: the source's pool, page, and the tag that the page carried then."""

    pool: str
    column: int
    page: int
    tag: int


@dataclass(frozen=True, kw_only=True)
class TransferManifest:
    """The source guard's word about one transfer. Plain data: it pickles, and rides on the connector's own messages.

    source, receiver  names of the two links
    request, ticket   whose KV it is, and the receiver's ticket for this one transfer of it (`KVImporter.expect`)
    tokens            KV of the request's first `tokens` tokens is covered
    entries           per column, ascending, the page and tag that it was promised at the source
    parts             per part of the copy, which entries it carried
    layers            per part of the copy, which layers of them, counted within their pool
    first_token       what the source sampled after the prompt; -1 if it does not say
    unverified        why the source does not vouch for the pages; empty if a verified step wrote every one of them
    digest            hexadecimal, keyed with the link's key, over everything above
    """

    source: str
    receiver: str
    request: str
    ticket: str
    tokens: int
    layout: KVLayout
    entries: tuple[PageLabel, ...]
    parts: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, ...], ...] = ()
    first_token: int = -1
    unverified: str = VERIFIED
    digest: str = ""

    def signed(self, key: bytes) -> TransferManifest:
        """The same with its digest under `key`."""
        return replace(self, digest=self._digest(key))

    def is_signed(self, key: bytes) -> bool:
        """Whether the digest is the one under `key`."""
        return hmac.compare_digest(self.digest.encode(), self._digest(key).encode())

    def _digest(self, key: bytes) -> str:
        # `default`: what is no plain data must not raise in an engine; it then fits nothing on the other side.
        plain = {**asdict(self), "digest": ""}
        content = json.dumps(plain, sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.blake2b(content.encode(), key=key, digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TransferLink:
    """One side of the connection between two engines.

    name  how manifests and reports call this side
    key   secret of both sides, 16 to 64 bytes: from configuration, or agreed on when they connect
    """

    name: str
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not KEY_BYTES_MIN <= len(self.key) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(
                f"the key of link {self.name!r} has {len(self.key)} bytes; give {KEY_BYTES_MIN} to "
                f"{hashlib.blake2b.MAX_KEY_SIZE}, for example from secrets.token_bytes(32)"
            )


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A part must not be written yet, and nothing is wrong: place it again after step `step` was judged.

    A step that is in flight was built before one of the pages was allocated, and may still read or write it for its
    former owner: the copy is not ordered behind that step.
    """

    step: int


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A transfer, or a part of one, that must not go on.

    violation      what to tell the client and the operator
    ends_request   end the request with `violation.message`; False: drop this one operation, the request goes on
    foreign_pages  pages that the engine was about to use for the request and that are not its own: do not free them
    """

    violation: Violation
    ends_request: bool
    foreign_pages: tuple[int, ...] = ()


def read_labels(labels: object) -> tuple[PageLabel, ...] | None:
    """Labels as they came, lists of four included: some transports know no tuples. None if they are no labels."""
    try:
        read = tuple(PageLabel(*label) for label in labels)  # type: ignore[attr-defined]
    except Exception:
        return None
    sound = all(isinstance(pool, str) and all(isinstance(n, int) for n in numbers) for pool, *numbers in read)
    return read if sound else None


def signed_word(manifest: object, key: bytes) -> TransferManifest | None:
    """The manifest as its source signed it, whatever a transport made of tuples; None for anything else."""
    try:
        if not isinstance(manifest, TransferManifest) or not manifest.is_signed(key):
            return None
        layout = manifest.layout if isinstance(manifest.layout, KVLayout) else KVLayout(**manifest.layout)
        entries = read_labels(manifest.entries)
        return None if entries is None else replace(
            manifest,
            layout=replace(
                layout, shape=tuple(layout.shape), scales=tuple(layout.scales), layers=tuple(layout.layers)
            ),
            entries=entries,
            parts=tuple(tuple(part) for part in manifest.parts),
            layers=tuple(tuple(part) for part in manifest.layers),
        )  # fmt: skip
    except Exception:
        # It came from outside, and nothing in it counts before the signature holds.
        return None


def by_pool(books: Books, pages: PagesByPool) -> dict[int, list[int]]:
    """Pool index -> pages. UsageError for an unknown pool, or page ids that are no integers."""
    named = pages if isinstance(pages, Mapping) else {books.tables[0].spec.name: pages}
    return {books.index(name): list(page_ids(listed)) for name, listed in named.items()}


def columns_of(ledger: Ledger, tokens: int, page_size: int | None) -> list[tuple[int, int, int]] | None:
    """(column, page, tag) of the live columns that hold the first `tokens` tokens; None if the ledger ends before."""
    entries = list(ledger.entries())
    if page_size is None:
        return entries
    needed = -(-tokens // page_size)
    return [entry for entry in entries if entry[0] < needed] if len(ledger) >= needed else None


def report_refusal(
    books: Books,
    kind: Kind,
    state: RequestState | None,
    request: str,
    detail: str,
    *,
    pool: int = 0,
    column: int = -1,
    page: int = -1,
    expected: int = 0,
    foreign: Sequence[int] = (),
    ends_request: bool = True,
) -> Refusal | None:
    """Record a violation of a transfer. None where violations are only observed; GuardHalt where they stop the engine.

    A page whose tag is not the promised one is quarantined, as it is when a step finds it.
    """
    if state is not None and state.condemned is not None and not state.observed:
        # A violation ended it already, and was reported.
        ends_request = False
    action = Action.ABORTED if ends_request and state is not None else Action.REFUSED
    if not books.enforcing:
        action = Action.OBSERVED
    elif books.config.on_violation == "halt":
        action = Action.HALTED
    table = books.tables[pool]
    known = 0 <= page < table.spec.num_pages
    record = table.record(page) if known else None
    found = record.tag if record else 0
    holders = sorted(record.holders - {request}) if record else []
    stale = books.enforcing and known and expected != 0 and found != expected
    violation = books.violate(
        Violation(
            id="",
            proof=Proof.TRANSFER,
            kind=kind,
            action=action,
            pool=table.spec.name,
            request=request,
            step=books.preparing,
            column=column,
            page=page,
            expected_tag=expected,
            found_tag=found,
            owner=", ".join(holders) or None,
            page_size=table.spec.page_size,
            history=books.recorder.history(table.spec.name, page) if known else None,
            quarantined=stale and books.quarantine_page(pool, page),
            detail=detail,
        )
    )
    if action is Action.HALTED:
        raise GuardHalt(violation)
    if action is Action.OBSERVED:
        return None
    if action is Action.ABORTED and state is not None:
        condemn(books, state, violation)
    return Refusal(violation=violation, ends_request=action is Action.ABORTED, foreign_pages=tuple(foreign))


__all__ = [
    "DISARMED",
    "KVLayout",
    "MISUSED",
    "OBSERVED",
    "PageLabel",
    "PagesByPool",
    "Refusal",
    "TransferLink",
    "TransferManifest",
    "UNCHECKED",
    "UNEXAMINED",
    "UsageError",
    "VERIFIED",
    "Wait",
]
