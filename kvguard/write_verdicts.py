"""What the device found wrong with where a step writes: the violation of a row, and that of the padding lanes.

Wrong tokens were sent to the skip slot in the same launch, so that whoever owns the page has lost nothing: no page is
suspect for it, unless violations are only observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvguard.books import Books
from kvguard.kernels.verify_slots.layout import (
    FIRST,
    FIRST_SLOT,
    FLAGS,
    SLOT_FLOOR,
    SLOT_LOST,
    SLOT_OFFSET,
    SLOT_PAGE,
    SLOT_RANGE,
    WRONG_TOKENS,
)
from kvguard.messages import Int64
from kvguard.violation import Action, Kind, Proof, Violation

if TYPE_CHECKING:
    from kvguard.batch import PendingStep

KINDS = (
    (SLOT_RANGE, Kind.WRITE_OUT_OF_RANGE),
    (SLOT_PAGE, Kind.WRITE_FOREIGN),
    (SLOT_FLOOR, Kind.WRITE_COMPLETE),
    (SLOT_OFFSET, Kind.WRITE_SHIFTED),
    (SLOT_LOST, Kind.WRITE_LOST),
)
"""Of several flags the first one names the violation."""


def kind_of(flags: int) -> Kind:
    """What the flags of a row say that are not 0."""
    return next(kind for flag, kind in KINDS if flags & flag)


def tokens_from(count: int, position: int, slot: int) -> str:
    """So many wrong tokens of a row, where they begin, and where the first would have gone."""
    return f"{_tokens(count)} from position {position} on, the first to slot {slot}"


def rows_flagged(writes: Int64) -> list[int]:
    """Rows that some pool flagged; `writes` int64 [pools, rows + 1, 4]. Where nothing was checked the flags are -1."""
    rows: list[int] = np.flatnonzero((writes[:, :-1, FLAGS] > 0).any(axis=0)).tolist()
    return rows


def padding_flagged(writes: Int64) -> list[int]:
    """Pools into which a padding lane would have written."""
    pools: list[int] = np.flatnonzero(writes[:, -1, FLAGS] > 0).tolist()
    return pools


def describe_write(books: Books, pending: PendingStep, writes: Int64, row: int, action: Action) -> Violation:
    """The violation of a row that would have written to a wrong slot; recorded and counted."""
    pool = int(np.flatnonzero(writes[:, row, FLAGS] > 0)[0])
    record = writes[pool, row]
    flags, count, position, slot = (int(record[word]) for word in (FLAGS, WRONG_TOKENS, FIRST, FIRST_SLOT))
    kind = kind_of(flags)
    size = books.tables[pool].spec.page_size or 1
    detail = f"{tokens_from(count, position, slot)}{_sent(pending)}"
    return _violate(books, pending, kind, action, pool, slot, count, detail, row=row, column=position // size)


def describe_padding(books: Books, pending: PendingStep, writes: Int64, pool: int) -> Violation:
    """The violation of lanes that belong to no request; nobody is aborted for it."""
    count, lane, slot = (int(writes[pool, -1, word]) for word in (WRONG_TOKENS, FIRST, FIRST_SLOT))
    wanted = Action.HALTED if books.config.on_violation == "halt" else Action.REFUSED
    action = wanted if pending.enforce else Action.OBSERVED
    detail = f"{_tokens(count)} without a request from lane {lane} on, the first to slot {slot}{_sent(pending)}"
    return _violate(books, pending, Kind.WRITE_OF_PADDING, action, pool, slot, count, detail)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _sent(pending: PendingStep) -> str:
    return ", sent to the skip slot instead" if pending.enforce else ""


def _violate(
    books: Books,
    pending: PendingStep,
    kind: Kind,
    action: Action,
    pool: int,
    slot: int,
    count: int,
    detail: str,
    *,
    row: int | None = None,
    column: int = -1,
) -> Violation:
    """`slot`: where the first wrong token would have gone: into the page of whoever is named as the owner."""
    table = books.tables[pool]
    page = slot // (table.spec.page_size or 1) if slot >= 0 else -1
    in_pool = 0 <= page < table.spec.num_pages
    record = table.record(page) if in_pool else None
    state = None if row is None else pending.states[row]
    if pending.enforce:
        books.counters.writes_redirected += count
    holders = sorted(record.holders - {state.id if state else ""}) if record else []
    return books.violate(
        Violation(
            id="",
            proof=Proof.WRITE_SLOT,
            kind=kind,
            action=action,
            pool=table.spec.name,
            request=None if state is None else state.id,
            step=pending.step,
            row=-1 if row is None else pending.batch.table_rows[row],
            column=column,
            page=page,
            found_tag=record.tag if record else 0,
            owner=", ".join(holders) or (record.owner if record else None),
            page_size=table.spec.page_size,
            history=books.recorder.history(table.spec.name, page) if in_pool else None,
            detail=detail,
        )
    )
