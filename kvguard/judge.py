"""From the verdicts of a step to its consequences: who is aborted, what must not leave, which pages are suspect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvguard.batch import PendingStep
from kvguard.books import Books
from kvguard.kernels.verify_pages.layout import (
    BAD_COLUMN,
    BAD_ENTRY,
    FLAG_NULL,
    FLAG_RANGE,
    FLAG_SPLIT,
    FLAG_VACANT,
    FLAGS,
    NOT_CHECKED,
)
from kvguard.messages import Verdicts
from kvguard.requests import RequestState
from kvguard.steps import never_ran
from kvguard.tags import VACANT
from kvguard.violation import Action, Kind, Proof, Violation
from kvguard.write_verdicts import describe_padding, describe_write, padding_flagged, rows_flagged


class UncheckedStep(RuntimeError):
    """The device half returned no verdict for a row that it was asked to check: a fault of the guard itself."""


@dataclass(frozen=True, kw_only=True)
class Abort:
    """One request to end with an error.

    foreign_pages  per pool name, pages that its block table or the engine's books still list and that are no longer
                   its own: the engine must not free, publish or zero them
    """

    request: str
    violation: Violation
    foreign_pages: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Judgement(NamedTuple):
    """What the engine must do before anything of the step leaves.

    withheld  requests of the step whose token must be dropped, those aborted for an earlier step included
    aborts    requests to end now, in the step or not: dependents may not have been scheduled yet
    evict     (pool, page): prefix-cache entries that must be forgotten
    halt      the engine must stop (on_violation = halt)
    """

    step: int
    violations: tuple[Violation, ...] = ()
    withheld: frozenset[str] = frozenset()
    aborts: tuple[Abort, ...] = ()
    evict: tuple[tuple[str, int], ...] = ()
    halt: bool = False

    @property
    def clean(self) -> bool:
        """Every row of the step was proven and may emit its token."""
        return not (self.violations or self.withheld or self.aborts)


# Half of what a call of the named tuple's class takes, and every step of decode makes a few.
_new = tuple.__new__
NOBODY: frozenset[str] = frozenset()


class _Mismatch(NamedTuple):
    pool: int
    column: int
    page: int
    expected: int
    found: int


def judge_step(books: Books, pending: PendingStep, verdicts: Verdicts) -> Judgement:
    """Settle one step. Clean steps take the short way: two array operations and the promises of the step."""
    records, writes, rows = verdicts.records, verdicts.writes, len(pending.batch.states)
    flagged: list[int] = []
    if books.checks_tags and rows:
        # What is written is judged where an adapter lets it be checked.
        shape = None if records is None else records.shape[:2]
        if shape != (len(books.tables), rows):
            raise UncheckedStep(f"step {pending.step}: verdicts of shape {shape}; the verification did not run")
    if records is not None and not verdicts.clean:
        flags = records[:, :, FLAGS]
        if np.count_nonzero(flags):
            if (flags == NOT_CHECKED).any():
                raise UncheckedStep(f"step {pending.step}: no verdict for some rows; the verification did not run")
            flagged = np.flatnonzero(flags.any(axis=0)).tolist()
    padding: list[int] = []
    if writes is not None and not verdicts.clean:
        flagged = sorted({*flagged, *rows_flagged(writes)})
        padding = padding_flagged(writes)
    for row, promise in pending.waiting:
        if promise.kept is False:
            # Broken after this step was built: its writer's forward failed, or its tokens were taken back.
            pending.suspects.setdefault(row, never_ran(promise))
    if not (flagged or pending.suspects or pending.condemned or padding):
        before = books.progress
        if pending.unmoved and (before is None or before.base is pending.base):
            # It ends no earlier than the one whose place it takes.
            books.progress = pending
        else:
            _confirm(books, pending, None)
        if pending.promises:
            books.settle_verified(pending.promises)
        return _new(Judgement, (pending.step, (), NOBODY, (), (), False))
    of_padding = [describe_padding(books, pending, writes, pool) for pool in padding if writes is not None]
    judgement = _judge_flagged(books, pending, verdicts, sorted({*flagged, *pending.suspects}))
    if not of_padding:
        return judgement
    halt = judgement.halt or any(violation.action is Action.HALTED for violation in of_padding)
    return judgement._replace(violations=(*of_padding, *judgement.violations), halt=halt)


def _confirm(books: Books, pending: PendingStep, unproven: set[int] | None) -> None:
    """Verified rows of requests that are still in the same incarnation have computed up to their end."""
    batch = pending.batch
    books.write_progress()
    for row, state in enumerate(batch.states):
        if unproven and row in unproven or state.stalled:
            continue
        if state.incarnation == batch.incarnations[row]:
            state.computed = max(state.computed, pending.end(row))


def _judge_flagged(books: Books, pending: PendingStep, verdicts: Verdicts, rows: list[int]) -> Judgement:
    violations: list[Violation] = []
    aborts: list[Abort] = []
    evict: set[tuple[str, int]] = set()
    # What was verified before stands, also of requests that stall now.
    books.write_progress()
    unproven = set(rows) | pending.condemned
    for row in rows:
        state = pending.states[row]
        if state.condemned is not None:
            continue
        violation, mismatches = _describe(books, pending, verdicts, row)
        condemn(books, state, violation)
        violations.append(violation)
        evict.update((books.tables[m.pool].spec.name, m.page) for m in mismatches)
        if state.alive:
            aborts.append(_abort(books, state, violation))
        _condemn_dependents(books, state, violation, violations, aborts, evict)
    # Dependents of a flagged writer are unproven too, also those whose own row in this step was clean.
    unproven |= {row for row, state in enumerate(pending.states) if state.condemned is not None}
    if not pending.enforce:
        for row in unproven:
            # Its later steps build on what this one may have written wrongly, and will be let through.
            pending.states[row].stalled = True
    _confirm(books, pending, unproven)
    for row, promise in pending.promises:
        books.settle(promise, kept=row not in unproven and not promise.writer.stalled)
        if promise.kept is False:
            evict.add((promise.pool, promise.page))
    if not pending.enforce:
        return Judgement(step=pending.step, violations=tuple(violations))
    return Judgement(
        step=pending.step,
        violations=tuple(violations),
        withheld=frozenset(pending.states[row].id for row in unproven),
        aborts=tuple(aborts),
        evict=tuple(sorted(evict)),
        halt=bool(violations) and books.config.on_violation == "halt",
    )


def condemn(books: Books, state: RequestState, violation: Violation) -> None:
    """The request is over, and so are its rows in every step in flight, clean on the device or not."""
    state.condemned, state.observed = violation.id, violation.action is Action.OBSERVED
    books.marked.add(state)
    for pending in books.pending.values():
        pending.condemned.update(pending.rows_of(state))


def _action(books: Books, pending: PendingStep) -> Action:
    if not pending.enforce:
        return Action.OBSERVED
    return Action.HALTED if books.config.on_violation == "halt" else Action.ABORTED


def _mismatches(books: Books, state: RequestState) -> list[_Mismatch]:
    """Pages of the ledger that the books no longer see under the promised tag: the slow path that locates a fault."""
    found = []
    for index, (table, ledger) in enumerate(zip(books.tables, state.ledgers, strict=True)):
        for column, page, tag in ledger.entries():
            in_pool = 0 <= page < table.spec.num_pages
            now = table.tag(page) if in_pool else VACANT
            if now != tag:
                found.append(_Mismatch(index, column, page, tag, now))
    return found


_PROOFS = {Kind.WRITE_COMPLETE: Proof.WRITE_SLOT, Kind.CONTENT_UNWRITTEN: Proof.CONTENT_KEY}
"""Of what the host has found in a row: what names it, if not the tag proof."""


def _device_kind(flags: int, mismatches: list[_Mismatch]) -> Kind:
    """What a device verdict says, the books' view of the promised pages taken in."""
    for bit, kind in (
        (FLAG_RANGE, Kind.OUT_OF_RANGE_ENTRY),
        (FLAG_NULL, Kind.NULL_ENTRY),
        (FLAG_SPLIT, Kind.SPLIT_ENTRY),
    ):
        if flags & bit:
            return kind
    if mismatches:
        return Kind.VACANT_PAGE if mismatches[0].found == VACANT else Kind.STALE_PAGE
    return Kind.VACANT_PAGE if flags & FLAG_VACANT else Kind.FOREIGN_ROW


def _describe(books: Books, pending: PendingStep, verdicts: Verdicts, row: int) -> tuple[Violation, list[_Mismatch]]:
    """The violation of one row, its fault located, the pages involved quarantined."""
    state = pending.states[row]
    reads_flagged = verdicts.records is not None and (verdicts.records[:, row, FLAGS] > 0).any()
    if verdicts.writes is not None and not reads_flagged and row not in pending.suspects:
        # Pages of it that changed hands must leave the cache, though this is not what it is ended for.
        mismatches = _mismatches(books, state) if state.alive else []
        return describe_write(books, pending, verdicts.writes, row, _action(books, pending)), mismatches
    mismatches = _mismatches(books, state) if state.alive else []
    pool, flags, column, page = 0, 0, -1, -1
    if verdicts.records is not None:
        hit = np.flatnonzero(verdicts.records[:, row, FLAGS])
        if len(hit):
            pool = int(hit[0])
            record = verdicts.records[pool, row]
            flags, column = int(record[FLAGS]), int(record[BAD_COLUMN])
            split = books.tables[pool].spec.split
            if column >= 0:
                column, page = column // split, int(record[BAD_ENTRY]) // split
    suspect = pending.suspects.get(row)
    kind = suspect[0] if suspect is not None else _device_kind(flags, mismatches)
    expected = found = 0
    in_books = [m for m in mismatches if m.pool == pool] or mismatches
    if kind in (Kind.STALE_PAGE, Kind.VACANT_PAGE) and in_books:
        pool, column, page, expected, found = in_books[0]
    table, ledger = books.tables[pool], state.ledgers[pool]
    entries: tuple[int, ...] = ()
    for evidence in verdicts.evidence.get(table.spec.name, ()):
        if evidence.row == row:
            width = min(len(evidence.entries), len(ledger) * table.spec.split)
            entries = tuple(int(entry) // table.spec.split for entry in evidence.entries[: width : table.spec.split])
    promised = tuple(ledger.page(index) for index in range(len(ledger)))
    if kind is Kind.FOREIGN_ROW and page < 0:
        for index, (entry, wanted) in enumerate(zip(entries, promised, strict=False)):
            if entry != wanted:
                column, page = index, entry
                break
    if expected == 0 and column >= 0:
        expected = ledger.tag(column)
    in_pool = 0 <= page < table.spec.num_pages
    record_now = table.record(page) if in_pool else None
    if record_now is not None:
        found = found or record_now.tag
    quarantined = False
    if pending.enforce:
        for mismatch in mismatches:
            kept_out = books.quarantine_page(mismatch.pool, mismatch.page)
            quarantined = quarantined or (kept_out and mismatch.page == page)
    others = len(mismatches) - 1
    detail = suspect[1] if suspect is not None else ""
    if others > 0:
        detail = f"{detail}; {others} more of its pages" if detail else f"{others} more of its pages are not its own"
    holders = sorted(record_now.holders - {state.id}) if record_now else []
    violation = books.violate(
        Violation(
            id="",
            proof=_PROOFS.get(kind, Proof.TAG),
            kind=kind,
            action=_action(books, pending),
            pool=table.spec.name,
            request=state.id,
            step=pending.step,
            row=pending.batch.table_rows[row],
            column=column,
            page=page,
            expected_tag=expected,
            found_tag=found,
            owner=", ".join(holders) or None,
            page_size=table.spec.page_size,
            row_entries=entries,
            promised_pages=promised if entries else (),
            history=books.recorder.history(table.spec.name, page) if in_pool else None,
            quarantined=quarantined,
            detail=detail,
        )
    )
    return violation, mismatches


def _abort(books: Books, state: RequestState, violation: Violation) -> Abort:
    foreign: dict[str, list[int]] = {}
    for mismatch in _mismatches(books, state):
        holders = books.tables[mismatch.pool].record(mismatch.page).holders if mismatch.page >= 0 else set()
        if mismatch.found != VACANT and not holders - {state.id}:
            # Revoked or republished, but nobody else's: this request gives it back like any other.
            continue
        foreign.setdefault(books.tables[mismatch.pool].spec.name, []).append(mismatch.page)
    return Abort(
        request=state.id,
        violation=violation,
        foreign_pages={pool: tuple(pages) for pool, pages in foreign.items()},
    )


def _reads_promise(books: Books, dependent: RequestState, incarnation: int) -> bool:
    """Whether the adopter still has the promised page, or a step in flight that reads it."""
    if dependent.alive and dependent.incarnation == incarnation:
        return True
    return any(
        pending.incarnations[row] == incarnation
        for pending in books.pending.values()
        for row in pending.rows_of(dependent)
    )


def _condemn_dependents(
    books: Books,
    writer: RequestState,
    cause: Violation,
    violations: list[Violation],
    aborts: list[Abort],
    evict: set[tuple[str, int]],
) -> None:
    """A flagged writer's promised pages keep a former owner's bytes: whoever adopted them goes with it, and so on."""
    chain = [(writer, cause)]
    while chain:
        writer, cause = chain.pop()
        for promise in books.open_promises(writer):
            books.settle(promise, kept=False)
            evict.add((promise.pool, promise.page))
            for dependent, incarnation in promise.dependents:
                if dependent.condemned is not None or not _reads_promise(books, dependent, incarnation):
                    continue
                violation = books.violate(
                    Violation(
                        id="",
                        proof=Proof.TAG,
                        kind=Kind.WRITER_FLAGGED,
                        action=cause.action,
                        pool=promise.pool,
                        request=dependent.id,
                        step=cause.step,
                        page=promise.page,
                        expected_tag=promise.tag,
                        found_tag=books.tables[books.pool_index[promise.pool]].tag(promise.page),
                        owner=writer.id,
                        history=books.recorder.history(promise.pool, promise.page),
                        cause=cause.id,
                    )
                )
                condemn(books, dependent, violation)
                violations.append(violation)
                if dependent.alive:
                    aborts.append(_abort(books, dependent, violation))
                chain.append((dependent, violation))
        writer.promises.clear()
