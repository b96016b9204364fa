"""An engine in small that keeps page ids in a table of token slots, shares prefixes in a tree, and uses the operations.

Its records are plain Python; only slots, rows and lengths reach the operations, as they would on a device.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvguard.kernels.events import EVENT_WORDS, TREE, UNSAID
from kvguard.kernels.verify_pages.layout import FLAGS
from tests.kernels.token_row_cases import KEY, OPERATIONS, Arguments, Int64

Path = tuple[int, ...]


@dataclass
class Request:
    """A row in use: what each of its columns says, the pages that it holds, and how many of these are the tree's."""

    says: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    shared: int = 0


def lanes_of(path: Path) -> list[int]:
    """Two words that stand for everything up to a page's end."""
    digest = hashlib.blake2b(bytes(path), digest_size=16).digest()
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]


class Engine:
    """Rows, a free list, a tree of whole pages by what they say, and the books, with `contents` also of that."""

    def __init__(
        self, *, backend: str, page_size: int, seed: int, pages: int = 24, rows: int = 4, contents: bool = False
    ) -> None:
        self.backend, self.page_size, self.random = backend, page_size, random.Random(seed)
        self.pages_max = 5
        self.free = list(range(1, pages))
        self.live: dict[int, Request] = {}
        self.tree: dict[Path, int] = {}
        self.next_tag = 2**63 - 40  # wraps in most histories
        self.books = {name: np.zeros(pages, np.int64) for name in ("page_tag", "page_owner", "page_chain")}
        self.books["digest"] = np.arange(rows, dtype=np.int64) * 7  # whatever an earlier request left
        self.contents = contents
        if contents:
            self.books["page_content"] = np.full((pages, 2), 3, np.int64)
        self.table = np.zeros((rows, self.pages_max * page_size + 1), np.int32)
        self.event = np.zeros(EVENT_WORDS, np.int64)

    def call(self, operation: str, **arguments: Any) -> None:
        """One operation on the books, with lists as int64 arrays."""
        arrays: Arguments = {
            name: np.array(value, np.int64) if isinstance(value, list) else value for name, value in arguments.items()
        } | self.books
        if operation in ("stamp_rows", "retire_pages") or (operation == "publish_row" and self.contents):
            arrays["event"] = self.event
        unused = {
            "retire_pages": ("digest", "page_content"),
            "verify_rows": ("page_owner", "page_chain", "page_content"),
        }.get(operation, ())
        if self.backend != "numpy":
            arrays = {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in arrays.items()
            }
        passed = {name: value for name, value in arrays.items() if name not in unused}
        OPERATIONS[operation](**passed, backend=self.backend)

    def extend(self, given: dict[int, int], fresh: dict[int, int] | None = None) -> None:
        """Rows get so many tokens more; `fresh` rows begin with a prefix of so many columns that they hold already."""
        slots, rows, first, offset, adopted, paths = [], list(given), [], [0], [], []
        for row, count in given.items():
            request = self.live[row]
            first.append(request.tokens)
            paths.append(tuple(request.says[: len(request.pages)]))
            adopted.append(-1)
            if fresh is not None and row in fresh:
                adopted[-1] = request.tokens and request.pages[-1] * self.page_size + self.page_size - 1
            for _ in range(count):
                position = request.tokens
                if position % self.page_size == 0:
                    request.pages.append(self.free.pop(self.random.randrange(len(self.free))))
                    if len(request.says) < len(request.pages):
                        request.says.append(self.random.randrange(2))
                slot = request.pages[-1] * self.page_size + position % self.page_size
                self.table[row, position] = slot
                slots.append(slot)
                request.tokens += 1
            offset.append(len(slots))
        decode = fresh is None and all(count == 1 for count in given.values())
        self.call(
            "stamp_rows",
            slots=slots, rows=rows, first=[position + 1 for position in first] if decode else first,
            first_delta=-1 if decode else 0, offset=None if decode else offset,
            adopted=adopted if fresh is not None else None,
            page_size=self.page_size, base_tag=self.next_tag, key=KEY, **self.content_of(paths),
        )  # fmt: skip
        self.next_tag += len(slots)
        self.next_tag -= (self.next_tag >> 63) << 64

    def content_of(self, paths: list[Path]) -> dict[str, Int64]:
        """What the rows or columns are, if that is kept."""
        if not self.contents:
            return {}
        return {"content": np.array([lanes_of(path) for path in paths], np.int64).reshape(-1, 2)}

    def admit(self, row: int, path: Path = (), tokens: int = 0, says: Path | None = None) -> None:
        """A request on a free row, with the tree's pages along `path`; `says`: what it is itself, if not that."""
        request = Request(list(path if says is None else says), [self.tree[path[: j + 1]] for j in range(len(path))])
        request.tokens, request.shared = len(path) * self.page_size, len(path)
        self.table[row, : request.tokens] = self.slots_of(request.pages)
        self.live[row] = request
        self.extend({row: tokens}, {row: len(path)})

    def slots_of(self, pages: list[int]) -> Int64:
        """Every slot of the pages."""
        return (np.array(pages, np.int64)[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def publish(self, row: int) -> None:
        """The row's whole pages go into the tree; where it has the same already, the row's own go back."""
        request = self.live[row]
        start, stop = request.shared, request.tokens // self.page_size
        old, spare = list(request.pages), []
        for j in range(start, stop):
            path = tuple(request.says[: j + 1])
            kept = self.tree.setdefault(path, request.pages[j])
            if kept != request.pages[j]:
                spare.append(request.pages[j])
                request.pages[j] = kept
        self.table[row, : stop * self.page_size] = self.slots_of(request.pages[:stop])
        new = self.table[row, max(start - 1, 0) * self.page_size : stop * self.page_size : self.page_size]
        old_slots = (np.array(old[start:], np.int64) * self.page_size).astype(np.int32)
        self.call(
            "publish_row",
            row=row, old=old_slots, new=new, start=start, stop=stop, page_size=self.page_size, key=KEY,
            **self.content_of([tuple(request.says[: j + 1]) for j in range(start, stop)]),
        )  # fmt: skip
        request.shared = stop
        self.retire(spare, row + 1)

    def finish(self, row: int) -> None:
        """The request ends: its own pages go back."""
        request = self.live.pop(row)
        self.retire(request.pages[request.shared :], row + 1)

    def evict(self) -> None:
        """The tree gives up what nobody reads, leaves first."""
        held = {page for request in self.live.values() for page in request.pages}
        for path in sorted(self.tree, key=len, reverse=True):
            if self.tree[path] not in held and not any(other[:-1] == path for other in self.tree):
                self.retire([self.tree.pop(path)], TREE)

    def retire(self, pages: list[int], by: int) -> None:
        """Pages are free again; told by page or by all of their slots, and by whom."""
        divisor = self.random.choice([1, self.page_size])
        given = pages if divisor == 1 else self.slots_of(pages).tolist()
        self.call("retire_pages", pages=given, divisor=divisor, by=self.random.choice([by, UNSAID]) if by else by)
        self.free += pages

    def flagged(self, enforce: bool = False) -> set[int]:
        """The rows that are."""
        rows = list(self.live)
        record = np.full((len(rows), 4), -1, np.int64)
        lengths = np.array([self.live[row].tokens for row in rows], np.int32)
        self.call(
            "verify_rows",
            table=self.table, rows=rows, lengths=lengths, page_size=self.page_size, key=KEY, enforce=enforce,
            record=record,
        )  # fmt: skip
        return {row for row, flags in zip(rows, record[:, FLAGS], strict=True) if flags}

    def step(self) -> None:
        """Something that an engine does."""
        rows = range(len(self.table))
        idle = [row for row in rows if row not in self.live]
        room = {row: self.pages_max * self.page_size - request.tokens for row, request in self.live.items()}
        what = self.random.choice(["admit", "extend", "extend", "decode", "decode", "publish", "publish", "finish"])
        if len(self.free) < len(self.table) * self.pages_max // 2:
            self.evict()
        if len(self.free) < len(self.table) + self.pages_max:
            what = "finish"
        if what == "admit" and idle:
            path = self.random.choice([(), *(path for path in self.tree if len(path) < self.pages_max)])
            most = (self.pages_max - len(path)) * self.page_size
            self.admit(idle[0], path, self.random.randint(1, most))
        elif what == "extend" and any(room.values()):
            row = self.random.choice([row for row in room if room[row]])
            self.extend({row: self.random.randint(1, min(room[row], 2 * self.page_size))}, {})
        elif what == "decode" and any(room.values()):
            self.extend({row: 1 for row in room if room[row]})
        elif what == "publish" and self.live:
            self.publish(self.random.choice(list(self.live)))
        elif what == "finish" and self.live:
            self.finish(self.random.choice(list(self.live)))
