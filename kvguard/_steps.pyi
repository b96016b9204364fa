from typing import Any

from kvguard.messages import Int64
from kvguard.page_table import PageTable, Promise

def keep_promises(table: PageTable, promises: list[tuple[int, Promise]], /) -> int: ...
def grown_by_one(
    names: list[str], lists: dict[str, list[Any]], counts: list[int], /
) -> list[tuple[int, Any]] | None: ...
def change_tags(
    tags: Any, writers: Any | None, packed: Int64, pages: int, values: int, words: int, changes: int, /
) -> None: ...
def renew(
    host: Int64,
    tags: Any,
    writers: Any | None,
    rows: Int64,
    row_start: int,
    packed: Int64,
    pages: int,
    values: int,
    words: int,
    changes: int,
    /,
) -> bool: ...
