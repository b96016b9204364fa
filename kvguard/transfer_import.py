"""The receiver's half of a KV transfer: bytes go into the request's own pages, and count once the manifest holds.

The receiver allocates pages of its own, under tags of its own, with the ordinary calls of its guard. Before each part
is written the target pages are compared with the request's ledger: a write into a page that was freed and handed on
would hit somebody else, and nobody could tell afterwards. When the manifest has come and everything fits, the tokens
count as verified, and the request may decode.

From the first part on the pages stay what they are: KV that was written into pages which the request then lost is not
in those that it has instead. A ticket is closed when its request is preempted, for it then waits for nothing.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvguard.books import page_ids
from kvguard.guard import Guard
from kvguard.page_table import Promise
from kvguard.requests import RequestState
from kvguard.tags import VACANT
from kvguard.telemetry import emit
from kvguard.transfer_manifest import (
    DISARMED,
    UNCHECKED,
    KVLayout,
    PageLabel,
    PagesByPool,
    Refusal,
    TransferLink,
    TransferManifest,
    UsageError,
    Wait,
    by_pool,
    columns_of,
    read_labels,
    report_refusal,
    signed_word,
)
from kvguard.violation import Kind, Proof


@dataclass(eq=False)
class _Import:
    """A transfer that is expected: for whom, how long, and the labels of the parts that have come.

    promise  what the request depends on meanwhile: a row of it that runs before the transfer is complete is flagged
    layers   of parts: which layers were written, where the engine said so
    placed   pool -> column -> (page, tag) that the first part was written to; adopted columns left out
    """

    state: RequestState
    incarnation: int
    tokens: int
    promise: Promise
    parts: dict[int, tuple[PageLabel, ...]] = field(default_factory=dict)
    layers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    placed: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Its request has ended, or was preempted since: it computes its prompt itself, or is expected afresh."""
        return not self.state.alive or self.state.incarnation != self.incarnation


class KVImporter:
    """Belongs to the guard's thread. Call `expect`, `place` before each part is written, `finish` after all.

    The request lives in the receiver's guard from `expect` on (`start` it before), and its pages are allocated or
    adopted with the guard's ordinary calls before the first `place`.
    """

    def __init__(self, guard: Guard, link: TransferLink, *, layout: KVLayout) -> None:
        """`layout`: what this engine's pages hold; a transfer in any other is refused."""
        self._books = guard._books
        self._checks = Proof.TRANSFER in self._books.proofs
        self._refuse = partial(report_refusal, self._books)
        self._link = link
        self._layout = layout
        self._imports: dict[str, _Import] = {}
        # Tickets of an earlier process of the same name must not fit.
        seed = self._books.config.seed
        self._tickets = f"{link.name}/{secrets.token_hex(8) if seed is None else f'seed-{seed}'}"
        self._numbers = itertools.count(1)

    def expect(self, request: str, *, tokens: int) -> str:
        """A transfer of the request's first `tokens` tokens will come; returns the ticket that it must carry.

        Pass the ticket to the source with the request. It fits one transfer. UsageError if the request is not live.
        """
        state = self._books.state(request)
        tokens = page_ids([tokens])[0]
        self._forget(state)
        ticket = f"{self._tickets}/{next(self._numbers)}"
        source = RequestState(id=f"with ticket {ticket}", slot=-1, incarnation=-1, ledgers=())
        pool = self._books.tables[0].spec.name
        promise = Promise(pool=pool, page=-1, tag=VACANT, writer=source, need_tokens=tokens)
        if self._checks:
            state.depends.append(promise)
            self._books.marked.add(state)
        self._imports[ticket] = _Import(state, state.incarnation, tokens, promise)
        return ticket

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
        """Part `part` of a transfer has come with these labels, and its bytes are about to be written into `pages`.

        `pages`: the request's pages as the write will use them, all live columns of each pool that the part is for.
        `layers`: those that will be written, if they are to be compared with what the source copied. The answer may say
        that the request goes on: then only this part is dropped. A Wait: nothing is wrong, but a step in flight may
        still use a page; keep the part, and place it again when that step was judged.
        """
        if not self._checks:
            return None
        expected = self._open(ticket, request)
        named = read_labels(labels)
        if expected is None:
            page = self._first_page(pages)
            came = f"a part from page {named[0].page} of its source" if named else "a part"
            detail = f"{came} came to {self._link.name} with ticket {ticket!r}, which is not open for this request"
            return self._refuse(Kind.TRANSFER_REPEATED, None, request, detail, page=page, ends_request=False)
        if part in expected.parts:
            detail = f"part {part} came to {self._link.name} a second time"
            return self._refuse(Kind.TRANSFER_REPEATED, expected.state, request, detail, ends_request=False)
        if named is None:
            detail = f"part {part} came to {self._link.name} with labels that are none"
            refused = self._refuse(Kind.TRANSFER_MANIFEST, expected.state, request, detail)
        else:
            refused = self._compare(expected, request, pages, named)
        if refused is not None:
            self._imports.pop(ticket, None)
            return refused
        wait = self._wait(expected)
        if wait is not None:
            if not expected.parts:
                # Nothing is written yet, so that the pages may still change.
                expected.placed.clear()
            return wait
        expected.parts[part] = named or ()
        if layers is not None:
            expected.layers[part] = tuple(page_ids(layers))
        return None

    def finish(
        self,
        request: str,
        *,
        ticket: str,
        manifest: TransferManifest | None,
        pages: PagesByPool,
        first_token: int | None = None,
    ) -> Refusal | None:
        """All parts are written: compare them with the manifest. If nothing stands against it, the tokens are verified.

        `pages`: as in `place`, of every pool. `first_token`: what came with the last part, if it is to be compared with
        what the source signed. None as an answer: the request may decode. After any other the transfer is over.
        """
        expected = self._open(ticket, request)
        if expected is not None:
            del self._imports[ticket]
        if not self._checks:
            if expected is not None:
                self._adopt(expected)
            return None
        if expected is None:
            detail = f"a manifest came to {self._link.name} with ticket {ticket!r}, which is not open for this request"
            return self._refuse(Kind.TRANSFER_REPEATED, None, request, detail, ends_request=False)
        word = signed_word(manifest, self._link.key)
        try:
            problem = self._problem(expected, request, ticket, manifest, word, first_token)
        except Exception as error:
            # Signed nonsense is the source's fault, and costs this transfer, not the receiver's guard.
            problem = Kind.TRANSFER_MANIFEST, f"the manifest could not be read: {type(error).__name__}: {error}"
        if problem is not None:
            refused = self._refuse(problem[0], expected.state, request, problem[1])
        else:
            labels = word.entries if word is not None else ()
            refused = self._compare(expected, request, pages, labels, whole=True)
        if refused is None:
            self._adopt(expected)
        return refused

    def cancel(self, request: str) -> None:
        """The request no longer waits for a transfer; what still comes for it is refused. No error if it never did.

        Its pages hold nothing then: end it, or compute its prompt here.
        """
        for ticket in [ticket for ticket, one in self._imports.items() if one.state.id == request]:
            self._keep(self._imports.pop(ticket))

    def stop(self, request: str, ticket: str, why: object) -> Refusal | None:
        """A call about this transfer made no sense: its pages were not compared, and must not be used."""
        if not self._checks:
            return None
        expected = self._open(ticket, request)
        if expected is not None:
            del self._imports[ticket]
        state = self._books.requests.get(request)
        return self._refuse(Kind.TRANSFER_TARGET_PAGE, state, request, f"{self._link.name}: {why}")

    def _open(self, ticket: object, request: str) -> _Import | None:
        """The transfer that waits under this ticket, if it is this request's and the request still waits for it."""
        expected = self._imports.get(ticket) if isinstance(ticket, str) else None
        return None if expected is None or expected.is_over or expected.state.id != request else expected

    def _first_page(self, pages: PagesByPool) -> int:
        try:
            return next((page for listed in by_pool(self._books, pages).values() for page in listed), -1)
        except UsageError:
            return -1

    def _wait(self, expected: _Import) -> Wait | None:
        """The last step in flight that was built before one of the transfer's pages was allocated.

        Whoever had the page then may be in it, rightly; a copy that is not ordered behind it would change its bytes.
        """
        tags = [tag for columns in expected.placed.values() for _, tag in columns.values()]
        newest = max(tags, default=VACANT)
        steps = [pending.step for pending in self._books.pending.values() if pending.next_tag <= newest]
        return Wait(step=max(steps)) if steps else None

    def _forget(self, state: RequestState) -> None:
        """Expectations that ended with their request, and an earlier one of this request."""
        gone = [ticket for ticket, one in self._imports.items() if one.state is state or one.is_over]
        for ticket in gone:
            self._keep(self._imports.pop(ticket))

    @staticmethod
    def _keep(expected: _Import) -> None:
        """The request no longer depends on the transfer."""
        expected.promise.kept = True

    def _adopt(self, expected: _Import) -> None:
        self._keep(expected)
        expected.state.computed = max(expected.state.computed, expected.tokens)

    def _problem(
        self,
        expected: _Import,
        request: str,
        ticket: str,
        came_with: object,
        manifest: TransferManifest | None,
        first_token: int | None,
    ) -> tuple[Kind, str] | None:
        """What stands against the manifest itself, and the parts that came: the first thing found."""
        here = self._link.name
        if came_with is None:
            return Kind.TRANSFER_MANIFEST, f"no manifest came to {here}"
        if manifest is None:
            named = getattr(came_with, "source", f"no source (a {type(came_with).__name__})")
            return Kind.TRANSFER_MANIFEST, f"the manifest that names {named} is not signed with the key of {here}"
        source = manifest.source
        wanted = (here, request, ticket)
        if (manifest.receiver, manifest.request, manifest.ticket) != wanted:
            detail = f"the manifest of {source} is about request {manifest.request} for {manifest.receiver}"
            detail += f", ticket {manifest.ticket!r}; {here} expected {request}, ticket {ticket!r}"
            return Kind.TRANSFER_MANIFEST, detail
        if manifest.layout != self._layout:
            return Kind.TRANSFER_LAYOUT, f"{source} sent {manifest.layout.difference(self._layout)} as in {here}"
        if manifest.tokens != expected.tokens:
            detail = f"{source} sent {manifest.tokens} tokens, {here} expected {expected.tokens}"
            return Kind.TRANSFER_INCOMPLETE, detail
        if manifest.unverified == DISARMED and self._books.config.on_guard_error == "disarm":
            # It has no books any more: its manifest cannot name pages.
            emit("transfer_unverified", severity="warning", request=request, source=source, why=manifest.unverified)
            return None
        if first_token is not None and manifest.first_token != first_token:
            detail = f"token {first_token} came to {here} as the first one, {source} signed {manifest.first_token}"
            return Kind.TRANSFER_MANIFEST, detail
        # No more is asked of the source than is done here.
        as_here = manifest.unverified == UNCHECKED and not self._books.checks_tags
        if manifest.unverified and not as_here:
            return Kind.TRANSFER_UNVERIFIED, f"{source} does not vouch for it: {manifest.unverified}"
        for part, places in enumerate(manifest.parts):
            came = expected.parts.get(part)
            if came is None:
                return Kind.TRANSFER_INCOMPLETE, f"part {part} of {source} never came to {here}"
            meant = tuple(manifest.entries[place] for place in places)
            if came != meant:
                return self._other_labels(part, came, meant, source)
        if len(expected.parts) != len(manifest.parts):
            return Kind.TRANSFER_MANIFEST, f"{len(expected.parts)} parts came, {source} copied {len(manifest.parts)}"
        return self._missing(expected, manifest)

    def _missing(self, expected: _Import, manifest: TransferManifest) -> tuple[Kind, str] | None:
        """A layer of a column that this side's ledger needs and that no part carried, or one written as another."""
        here, source, books = self._link.name, manifest.source, self._books
        carried: dict[tuple[str, int], set[int]] = {}
        for part, (places, layers) in enumerate(zip(manifest.parts, manifest.layers, strict=True)):
            if expected.layers.get(part, layers) != layers:
                detail = f"part {part} was written as layers {expected.layers[part]}, {source} copied {layers}"
                return Kind.TRANSFER_MANIFEST, detail
            for place in places:
                label = manifest.entries[place]
                carried.setdefault((label.pool, label.column), set()).update(layers)
        pools = {label.pool for label in manifest.entries}
        for index, table in enumerate(books.tables):
            name = table.spec.name
            if len(books.tables) == 1 and len(pools) == 1:
                # The source may call its only pool by another name.
                name = next(iter(pools))
            promised = columns_of(expected.state.ledgers[index], expected.tokens, table.spec.page_size)
            for column, _, tag in promised or ():
                lacking = set(range(self._layout.layers_in(index))) - carried.get((name, column), set())
                if lacking and tag not in expected.state.adopted:
                    detail = f"{source} copied column {column} of pool {name} without layers {sorted(lacking)}"
                    return Kind.TRANSFER_INCOMPLETE, f"{detail}; {here} needs them"
        return None

    @staticmethod
    def _other_labels(
        part: int, came: tuple[PageLabel, ...], meant: tuple[PageLabel, ...], source: str
    ) -> tuple[Kind, str]:
        missing = [label for label in meant if all(label[:2] != other[:2] for other in came)]
        if missing:
            return Kind.TRANSFER_INCOMPLETE, f"part {part} came without column {missing[0].column} of {source}"
        label, other = next(
            ((a, b) for a, b in itertools.zip_longest(meant, came) if a != b), (meant[:1] or None, None)
        )
        return Kind.TRANSFER_FOREIGN_PAGE, f"part {part} of {source} came with {other} instead of {label}"

    def _compare(
        self,
        expected: _Import,
        request: str,
        pages: PagesByPool,
        labels: Sequence[PageLabel],
        *,
        whole: bool = False,
    ) -> Refusal | None:
        """Whether the pages written to are the request's own: those of its ledger, under the tags that it promises.

        And the same ones as in earlier parts. `whole`: all parts are written, so that no page may be new to it.
        """
        books, state = self._books, expected.state
        given = by_pool(books, pages)
        for pool, table in enumerate(books.tables):
            name = table.spec.name
            named = [label for label in labels if len(books.tables) == 1 or label.pool == name]
            if pool not in given and not whole and not named:
                # A part of another pool's layers.
                continue
            listed = given.get(pool, [])
            promised = columns_of(state.ledgers[pool], expected.tokens, table.spec.page_size)
            if promised is None or len(listed) < len(promised):
                detail = f"{self._link.name} lists {len(listed)} pages of pool {name} for {expected.tokens} tokens"
                return self._refuse(Kind.TRANSFER_INCOMPLETE, state, request, detail, pool=pool)
            wrong = [
                (column, page, tag, written)
                for (column, page, tag), written in zip(promised, listed, strict=False)
                if page != written or not table.spec.num_pages > page >= 0 or table.tag(page) != tag
            ]
            if not wrong:
                refused = self._moved(expected, request, pool, promised, whole=whole)
                if refused is not None:
                    return refused
                continue
            column, page, tag, written = wrong[0]
            same = [label for label in named if label.column == column]
            bytes_of = f"bytes of the source's page {same[0].page}" if same else "a part"
            found = f"page {written} instead of {page}" if page != written else f"page {page}, which changed hands"
            return self._refuse(
                Kind.TRANSFER_TARGET_PAGE,
                state,
                request,
                f"column {column}: {bytes_of} would go to {found} in {self._link.name}",
                pool=pool,
                column=column,
                page=written,
                expected=tag if page == written else 0,
                foreign=[written for _, _, _, written in wrong],
            )
        return None

    def _moved(
        self, expected: _Import, request: str, pool: int, promised: list[tuple[int, int, int]], *, whole: bool
    ) -> Refusal | None:
        """Whether a page took the place of one that earlier parts were written to; notes the first part's pages."""
        state = expected.state
        written = {column: (page, tag) for column, page, tag in promised if tag not in state.adopted}
        placed = expected.placed.get(pool)
        if placed is None and not whole:
            expected.placed[pool] = written
            return None
        for column, (page, tag) in written.items():
            before = (placed or {}).get(column)
            if before != (page, tag):
                went = "no part was written" if before is None else f"earlier parts went to page {before[0]}"
                detail = f"column {column}: {went}, and {self._link.name} now has page {page} there"
                return self._refuse(
                    Kind.TRANSFER_TARGET_PAGE, state, request, detail, pool=pool, column=column, page=page
                )
        return None


__all__ = ["KVImporter"]
