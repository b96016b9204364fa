from typing import Any

from kvguard.batch import Again, Batch, PendingStep
from kvguard.books import Books
from kvguard.messages import Int64
from kvguard.page_table import PageRecord, PageTable, Promise

def advance(
    books: Books,
    table: PageTable,
    batch: Batch,
    again: Again,
    grown: list[tuple[int, int]],
    published: list[tuple[int, int, Any]],
    contents: list[Any],
    size: int,
    further: int,
    pending: PendingStep,
    packed: Int64 | None,
    page_record: type[PageRecord],
    promise: type[Promise],
    /,
) -> Any: ...
