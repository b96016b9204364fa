"""Books of pages on the device: a tag for each page, and for each block-table row the digest of what it was promised.

Every call enqueues a few small operations and reads nothing back: how many pages there are is known from shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvguard.guard import UsageError
from kvguard.kernels.verify_pages.torch_op import mix_tensor
from kvguard.pools import PoolSpec
from kvguard.staging import Uploads
from kvguard.tags import TagCounter
from kvguard.violation import Kind

__all__ = ["EVENT_KINDS", "DeviceBooks", "DeviceRow", "Event"]

EVENT_KINDS = (
    Kind.PAGE_OUT_OF_RANGE,
    Kind.NULL_PAGE_USED,
    Kind.DOUBLE_ALLOCATION,
    Kind.DOUBLE_FREE,
    Kind.ADOPT_VACANT,
    Kind.ADOPT_STALE,
)
OUT_OF_RANGE, NULL, DOUBLE_ALLOCATION, DOUBLE_FREE, ADOPT_VACANT, ADOPT_STALE = range(1, len(EVENT_KINDS) + 1)
"""What the first word of an event's record says; 0: nothing is wrong."""


@dataclass(eq=False, slots=True)
class DeviceRow:
    """A live request. columns: pages that it was promised; condemned: its tokens may not leave any more."""

    id: str
    row: int
    columns: int = 0
    condemned: bool = False


@dataclass(frozen=True, kw_only=True)
class Event:
    """One call, and what was wrong with it.

    record    int64 [4] on the device: an index into EVENT_KINDS plus 1 (0: nothing), the first such page, its place in
              the call, 0
    requests, counts  whose pages they were: counts[i] of them are requests[i]'s
    """

    record: Tensor
    requests: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


class DeviceBooks:
    """See the module. Page tensors are int32 or int64 [pages] on the device; UsageError for what makes no sense."""

    def __init__(self, pool: PoolSpec, tags: TagCounter, key: int, *, table_rows: int, device: Any) -> None:
        """`key`: the digest key; `table_rows`: rows of the engine's block table."""
        self._pool, self._tags, self._key = pool, tags, key
        self.device = torch.device(device)
        self.upload = Uploads(self.device).upload
        # One word more than there are pages: what is no page of the pool is stamped there instead.
        self._store = torch.zeros(pool.num_pages + 1, dtype=torch.int64, device=self.device)
        self.page_tag = self._store[: pool.num_pages]
        self.digest = torch.zeros(table_rows, dtype=torch.int64, device=self.device)
        self.rows: dict[str, DeviceRow] = {}
        self._taken: dict[int, str] = {}
        self._events: list[Event] = []

    def start(self, request: str, row: int) -> None:
        """The request has this row, which is no live request's, and no pages."""
        if not isinstance(request, str):
            raise UsageError(f"request ids are strings; {request!r} is a {type(request).__name__}")
        if request in self.rows:
            raise UsageError(f"request {request!r} is live already")
        if not isinstance(row, (int, np.integer)) or not 0 <= row < self.digest.shape[0]:
            raise UsageError(f"request {request!r}: row {row} is none of {self.digest.shape[0]}")
        if row in self._taken:
            raise UsageError(f"request {request!r}: row {row} is that of {self._taken[row]!r}; finish it first")
        self.digest[row].zero_()
        self.rows[request] = DeviceRow(request, row)
        self._taken[row] = request

    def finish(self, request: str) -> None:
        """The row is promised nothing any more."""
        state = self.rows.pop(request, None)
        if state is not None:
            del self._taken[state.row]
            self.digest[state.row].zero_()

    def state(self, request: str) -> DeviceRow:
        """The live request."""
        try:
            return self.rows[request]
        except KeyError:
            raise UsageError(f"request {request!r} was not started, or has finished") from None

    def allocate(self, requests: Sequence[str], counts: Sequence[int], pages: Tensor) -> None:
        """Fresh tags for the pages, promised to the requests' next columns."""
        if not _some(pages) and not any(counts):
            return
        rows, columns = self._places(requests, counts, pages)
        slots, problem = self._slots(pages)
        problem = torch.where((problem == 0) & (self._store[slots] != 0), DOUBLE_ALLOCATION, problem)
        tags = self._fresh_tags(pages.shape[0])
        # A plain scatter: of a page that is there twice one place wins, and the other row is flagged.
        self._store.scatter_(0, slots, tags)
        problem = torch.where((problem == 0) & (self._store[slots] != tags), DOUBLE_ALLOCATION, problem)
        self._promise(rows, columns, tags)
        self._note(problem, pages, tuple(requests), tuple(counts))

    def published(self, pages: Tensor) -> Tensor:
        """The tags of the pages now, int64 [pages]."""
        _some(pages)
        return self._store[self._slots(pages)[0]]

    def adopt(self, request: str, pages: Tensor, published: Tensor) -> None:
        """What was published is promised to the request's next columns, whatever the pages hold by now."""
        if not _some(pages) and not _some(published, "publications"):
            return
        if _some(published, "publications") != _some(pages):
            raise UsageError(f"{tuple(pages.shape)} pages and {tuple(published.shape)} publications: one each")
        rows, columns = self._places([request], [pages.shape[0]], pages)
        slots, problem = self._slots(pages)
        found = self._store[slots]
        stale = torch.where(found == 0, ADOPT_VACANT, ADOPT_STALE)
        problem = torch.where((problem == 0) & (found != published), stale, problem)
        self._promise(rows, columns, published)
        self._note(problem, pages, (request,), (pages.shape[0],))

    def truncate(self, request: str, pages: Tensor) -> None:
        """The request's last columns, which hold `pages`, are promised nothing any more."""
        state, count = self.state(request), _some(pages)
        if count > state.columns:
            raise UsageError(f"request {request!r} gives up {count} pages and has {state.columns}")
        columns = torch.arange(state.columns - count, state.columns, device=self.device)
        self.digest[state.row].sub_(mix_tensor(self._key, columns, self.published(pages)).sum())
        state.columns -= count

    def free(self, pages: Tensor) -> None:
        """The pages are vacant."""
        if not _some(pages):
            return
        slots, problem = self._slots(pages)
        problem = torch.where((problem == 0) & (self._store[slots] == 0), DOUBLE_FREE, problem)
        # Marks first: a page that is in the list twice carries one mark only.
        marks = self._fresh_tags(pages.shape[0])
        self._store.scatter_(0, slots, marks)
        problem = torch.where((problem == 0) & (self._store[slots] != marks), DOUBLE_FREE, problem)
        self._store.index_fill_(0, slots, 0)
        self._note(problem, pages, (), ())

    def reset(self) -> None:
        """Every page is vacant."""
        if self.rows:
            raise UsageError(f"{len(self.rows)} requests still run: finish them before the reset")
        self._store.zero_()

    def take_events(self) -> list[Event]:
        """What was called since the last time."""
        events, self._events = self._events, []
        return events

    def _places(self, requests: Sequence[str], counts: Sequence[int], pages: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column of each page, uploaded; the requests have that many columns more from now on."""
        if not all(isinstance(count, (int, np.integer)) and count >= 0 for count in counts):
            raise UsageError(f"counts of pages are integers from 0 on, not {list(counts)}")
        if len(requests) != len(counts) or sum(counts) != _some(pages):
            raise UsageError(f"{len(requests)} requests with {sum(counts)} pages were given {tuple(pages.shape)} pages")
        states = [self.state(request) for request in requests]
        rows = np.repeat(np.array([state.row for state in states], np.int64), counts)
        columns = []
        for state, count in zip(states, counts, strict=True):
            columns.append(np.arange(state.columns, state.columns + count, dtype=np.int64))
            state.columns += count
        placed = self.upload(np.concatenate([rows, *columns]))
        return placed[: len(rows)], placed[len(rows) :]

    def _slots(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Where each page's tag lies, the spare word for what is no page; and the problem with it, 0 if none."""
        pages = pages.to(torch.int64)
        outside = (pages < 0) | (pages >= self._pool.num_pages)
        problem = torch.where(outside, OUT_OF_RANGE, 0)
        if self._pool.null_page is not None:
            problem = torch.where(pages == self._pool.null_page, NULL, problem)
        return torch.where(problem == 0, pages, self._pool.num_pages), problem

    def _fresh_tags(self, count: int) -> Tensor:
        tags = self._tags.take_many(count)
        return torch.arange(tags.start, tags.stop, dtype=torch.int64, device=self.device)

    def _promise(self, rows: Tensor, columns: Tensor, tags: Tensor) -> None:
        self.digest.index_add_(0, rows, mix_tensor(self._key, columns, tags))

    def _note(self, problem: Tensor, pages: Tensor, requests: tuple[str, ...], counts: tuple[int, ...]) -> None:
        """One record per call: the first problem in it, its page and its place; read with the next step's verdicts."""
        first = (problem != 0).to(torch.uint8).argmax().view(1)
        event = torch.cat([problem[first], pages.to(torch.int64)[first], first, torch.zeros_like(first)])
        self._events.append(Event(record=event, requests=requests, counts=counts))


def _some(pages: Tensor, what: str = "pages") -> int:
    """How many there are. UsageError for what is no tensor [pages] of integers: a shape tells without a wait."""
    if not isinstance(pages, Tensor):
        raise UsageError(f"{what} are a tensor, not a {type(pages).__name__}")
    if pages.dim() != 1 or (pages.dtype not in (torch.int32, torch.int64) and pages.shape[0]):
        raise UsageError(f"{what} are int32 or int64 [pages], not {pages.dtype} {list(pages.shape)}")
    return int(pages.shape[0])
