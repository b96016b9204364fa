from typing import Any

class HostCheck:
    def __new__(
        cls,
        arrays: tuple[Any, ...],
        columns: int,
        key: int,
        split: int,
        null_page: int,
        page_size: int,
        skip_slot: int,
        skip_allowed: bool,
        /,
    ) -> HostCheck: ...
    def check(self, record: Any, pool: int, /) -> bool: ...
