"""What a step of SGLang's scheduler was found guilty of, as violations: events, rows, slots."""

from __future__ import annotations

from typing import Any

import torch

from kvguard.adapters.sglang.audit import ENTRIES_MAX, Audit
from kvguard.adapters.sglang.books import POOL, Operation
from kvguard.adapters.sglang.contents import CONTENT
from kvguard.adapters.sglang.step_words import PendingStep
from kvguard.books import Books
from kvguard.guard import Guard
from kvguard.kernels.events import TREE
from kvguard.kernels.torch_events import holds
from kvguard.kernels.verify_pages import layout
from kvguard.kernels.verify_slots.layout import FIRST, FIRST_SLOT, FLAGS, WRONG_TOKENS
from kvguard.violation import Action, Kind, Proof, Violation
from kvguard.write_verdicts import kind_of, tokens_from

FLAG_KINDS = (
    (layout.FLAG_RANGE, Kind.OUT_OF_RANGE_ENTRY),
    (layout.FLAG_NULL, Kind.NULL_ENTRY),
    (layout.FLAG_VACANT, Kind.VACANT_PAGE),
    (layout.FLAG_SPLIT, Kind.SPLIT_ENTRY),
)
"""What the flags of a row say, without the page tables."""


class Reports(Audit):
    """The part of a SchedulerGuard that writes violations down."""

    guard: Guard
    _host_books: Books
    _step: int

    def _control_violation(
        self,
        kind: Kind,
        page: int,
        detail: str,
        enforce: bool,
        *,
        pool: str = POOL,
        request: str | None = None,
        proof: Proof = Proof.CONTROL_PLANE,
    ) -> Violation:
        """Write down what was wrong with an allocation, a free or the free list: it has taken effect."""
        return self._host_books.violate(
            Violation(
                id="",
                proof=proof,
                kind=kind,
                action=self._action(enforce, Action.OBSERVED),
                pool=pool,
                request=request,
                step=self._step,
                page=page,
                page_size=self.books.page_size,
                detail=detail,
            )
        )

    def _action(self, enforce: bool, wanted: Action) -> Action:
        if not enforce:
            return Action.OBSERVED
        return Action.HALTED if self.guard.config.on_violation == "halt" else wanted

    def _row_violation(self, pending: PendingStep, req: Any, record: Any) -> Violation:
        flags, _, position, entry = (int(word) for word in record)
        row = int(req.kv.req_pool_idx)
        size = self.books.page_size
        where = self.locate(row, int(req.kv.kv_allocated_len))
        # A chunk may be in the tree before this verdict, with the row's error in its chains: what comes first counts.
        violation = self._content_violation(pending, req, where.column if where.found else None)
        if violation is not None:
            return violation
        kind = next((kind for flag, kind in FLAG_KINDS if flags & flag), None)
        column, page = (position // size, entry // size) if position >= 0 else (where.column, where.page)
        if kind is None or (kind is Kind.SPLIT_ENTRY and size == 1):
            kind = where.kind
        return self._host_books.violate(
            Violation(
                id="",
                proof=Proof.TAG,
                kind=kind,
                action=self._action(pending.enforce, Action.ABORTED),
                pool=POOL,
                request=req.rid,
                step=pending.step,
                row=row,
                column=column,
                page=page,
                found_tag=where.tag if column == where.column else 0,
                owner=where.owner,
                page_size=size,
                row_entries=where.entries,
                detail="" if where.found else "found by another rank, or gone by the time it was looked for",
            )
        )

    def _content_violation(self, pending: PendingStep, req: Any, before: int | None) -> Violation | None:
        """The violation of a row whose pages are in order, and hold, one of them, something else than its own.

        before: the first column that is not in order, if any. None where no page of the tree before it does.
        """
        books, contents = self.books, self.contents
        if contents is None or books.page_content is None:
            return None
        row, size = int(req.kv.req_pool_idx), books.page_size
        pages = self.table[row, : int(req.kv.kv_allocated_len) // size * size : size].to(torch.int64) // size
        own = torch.from_numpy(contents.of_columns(req, 0, pages.shape[0], size)).to(books.device)
        wrong = torch.nonzero((books.page_owner[pages] == TREE) & ~holds(books.page_content[pages], own)).flatten()
        if not wrong.shape[0]:
            return None
        column = int(wrong[0])
        if before is not None and column >= before:
            return None
        page, held = int(pages[column]), books.page_content[pages[column]].tolist()
        kind, detail = contents.difference(getattr(req, CONTENT, None), (column + 1) * size, held)
        return self._host_books.violate(
            Violation(
                id="",
                proof=Proof.CONTENT_KEY,
                kind=kind,
                action=self._action(pending.enforce, Action.ABORTED),
                pool=POOL,
                request=req.rid,
                step=pending.step,
                row=row,
                column=column,
                page=page,
                found_tag=int(books.page_tag[page]),
                owner=self._name(TREE),
                page_size=size,
                row_entries=tuple(pages[:ENTRIES_MAX].tolist()),
                detail=detail,
            )
        )

    def _content_event(self, operation: Operation, page: int, at: int, enforce: bool) -> Violation | None:
        """The violation of a record that was put on a page of other content as it went into the tree.

        None for a hit: its row is flagged in the step that is judged now, and says more.
        """
        if operation.subject is None or self.contents is None or self.books.page_content is None:
            return None
        req, tokens = operation.subject(at)
        held = self.books.page_content[page].tolist()
        kind, detail = self.contents.difference(getattr(req, CONTENT, None), tokens, held)
        return self._control_violation(
            kind,
            page,
            f"as its record went into the prefix cache, which had the page already; {detail}",
            enforce,
            request=req.rid,
            proof=Proof.CONTENT_KEY,
        )

    def _violation_of(self, pending: PendingStep, req: Any, record: Any, writes: Any) -> Violation:
        """The violation of a flagged row: of what it reads, if that is wrong, else of what it writes."""
        if int(record[layout.FLAGS]) not in (layout.FLAG_WRITE, layout.NOT_CHECKED):
            return self._row_violation(pending, req, record)
        flags, position, slot = (int(writes[word]) for word in (FLAGS, FIRST, FIRST_SLOT))
        detail = tokens_from(self._count_redirected(pending, writes), position, slot)
        column = position // self.books.page_size
        return self._write_violation(pending, kind_of(flags), slot, detail, req=req, column=column)

    def _padding_violation(self, pending: PendingStep, writes: Any) -> Violation:
        """The violation of lanes that belong to no request; nobody is aborted for it."""
        lane, slot, count = int(writes[FIRST]), int(writes[FIRST_SLOT]), self._count_redirected(pending, writes)
        detail = f"{count} without a request from lane {lane} on, the first to slot {slot}"
        return self._write_violation(pending, Kind.WRITE_OF_PADDING, slot, detail)

    def _count_redirected(self, pending: PendingStep, writes: Any) -> int:
        count = int(writes[WRONG_TOKENS])
        if pending.enforce:
            self._host_books.counters.writes_redirected += count
        return count

    def _write_violation(
        self, pending: PendingStep, kind: Kind, slot: int, detail: str, *, req: Any = None, column: int = -1
    ) -> Violation:
        size = self.books.page_size
        page = slot // size if slot >= 0 else -1
        inside = 0 <= page < self.books.page_owner.shape[0]
        # The books as they are by now: a page may have changed hands since.
        owner = self._name(int(self.books.page_owner[page])) if inside else None
        return self._host_books.violate(
            Violation(
                id="",
                proof=Proof.WRITE_SLOT,
                kind=kind,
                action=self._action(pending.enforce, Action.REFUSED if req is None else Action.ABORTED),
                pool=POOL,
                request=None if req is None else req.rid,
                step=pending.step,
                row=-1 if req is None else int(req.kv.req_pool_idx),
                column=column,
                page=page,
                found_tag=int(self.books.page_tag[page]) if inside else 0,
                owner=owner,
                page_size=size,
                detail=f"{detail}, sent to slot 0 instead" if pending.enforce else detail,
            )
        )
