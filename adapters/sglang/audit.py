"""After a violation: find what is wrong, give back exactly what is a request's own, and look closely until the cache
was emptied.

Everything here reads the books on the host, and waits for the device. Healthy traffic never comes here; between the
first violation and the next idle moment cache hits and frees do, because a prefix tree and a free list that were
wrong once may be wrong elsewhere, and whoever adopts the next bad page has done nothing.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvguard.adapters.sglang.books import Operation, TokenBooks
from kvguard.adapters.sglang.contents import CONTENT, RequestContents
from kvguard.guard import GuardHalt
from kvguard.kernels.events import ANYBODY, ROW_SHIFT, TREE, UNSAID
from kvguard.kernels.verify_pages import layout
from kvguard.kernels.verify_pages.torch_op import mix_tensor
from kvguard.telemetry import emit
from kvguard.violation import Kind, Violation

ENTRIES_MAX = 4096
NO_VERDICT = 1 << 40
"""What a rank that did not check says in a reduction by the largest."""


class Place(NamedTuple):
    """Where a row goes wrong, as its pages say: page and tag found there, and who holds the page now."""

    found: bool
    kind: Kind
    column: int
    page: int
    tag: int
    owner: str | None
    entries: tuple[int, ...]


class Audit:
    """The half of a SchedulerGuard that works on the host."""

    def __init__(self, scheduler: Any, books: TokenBooks) -> None:
        self.scheduler, self.books = scheduler, books
        self.audits = False
        """Whether cache hits and frees are checked on the host: something was wrong, and the cache was not emptied."""
        self.contents: RequestContents | None = None
        """What requests are made of, at level `keys`."""
        self.outdated = False
        """Whether what is cached was computed with other weights than those of now."""
        self.freeing: int = ANYBODY
        """Whose pages are given back right now: TREE, row + 1, or ANYBODY."""
        self.ran = False
        """Whether a step ran since the free list was last looked at."""
        self.inserting: int = ANYBODY
        """row + 1 while that row's record goes into the tree, which frees the row's duplicates then."""
        self.group: list[tuple[int, int]] = []
        """(whose, how many) of what SGLang collected in its free group, in order."""
        self.plain_free = False
        self.plain_collected = False
        """Whether a free by slots is in the free group."""
        self.condemned: dict[int, Any] = {}
        self.condemned_rows: dict[int, bool] = {}
        """Row -> whether its own pages have been given back."""
        server = scheduler.server_args
        self.ranks = int(server.tp_size)
        # Now, and not in the first step: without it nothing can be guarded.
        groups: tuple[Any, Any] = self._groups() if self.ranks > 1 else (None, None)
        self._group, self._host_group = groups

    @property
    def table(self) -> Tensor:
        """req_to_token, int32 [rows, context length]: slots."""
        table: Tensor = self.scheduler.req_to_token_pool.req_to_token
        return table

    # -- ranks ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _groups() -> tuple[Any, Any]:
        """For reductions on the device, and between hosts."""
        from sglang.srt.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return group.device_group, group.cpu_group

    def combine(self, words: Tensor, verdicts: int) -> None:
        """What any rank found, every rank finds: they must abort alike. One reduction, launched in every step.

        The last word: whether any rank saw an event. A negative one, of a row or the last, counts more than any other.
        """
        last = words[-1, :1]
        any_event = torch.where(last < 0, last, words[verdicts:, 0].max())
        shared = torch.cat([words[:verdicts, 0], any_event])
        shared = torch.where(shared < 0, NO_VERDICT, shared)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=self._group)
        shared = torch.where(shared == NO_VERDICT, layout.NOT_CHECKED, shared)
        words[:verdicts, 0] = shared[:verdicts]
        words[-1, 0] = shared[verdicts]

    def _smallest(self, value: int) -> int:
        """The smallest of the ranks' values."""
        if self.ranks == 1:
            return value
        # Between hosts: on the device it would meet the reduction of a forward that is in flight.
        shared = torch.tensor([value], dtype=torch.int64)
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN, group=self._host_group)
        return int(shared[0])

    # -- who is sentenced -----------------------------------------------------------------------------------------

    def start_audits(self) -> None:
        """From now on, until the cache is emptied, hits and frees are checked on the host."""
        if self.audits:
            return
        self.audits = True
        self._settle()
        emit("audits_started", severity="warning", pool="kv")
        self.mend_free_list()

    def condemn(self, req: Any) -> None:
        """The request's row gives back what is its own, and only that."""
        self.condemned[id(req)] = req
        self.condemned_rows[int(req.kv.req_pool_idx)] = False

    def acquit(self, row: int) -> None:
        """The row belongs to somebody else now."""
        if self.condemned_rows.pop(row, None) is not None:
            self.condemned = {key: req for key, req in self.condemned.items() if not req.finished()}

    def cleared(self) -> None:
        """SGLang emptied its cache: nothing that was wrong is left."""
        self.books.clear()
        if self.audits:
            emit("audits_ended", severity="info", pool="kv")
        self.audits = self.outdated = False
        self.condemned.clear()
        self.condemned_rows.clear()

    # -- what the other half does -----------------------------------------------------------------------------------

    @property
    def enforcing(self) -> bool:
        """Violations have consequences; False while they are only observed."""
        raise NotImplementedError

    @property
    def armed(self) -> bool:
        """Whether the guard checks."""
        raise NotImplementedError

    def contained(self) -> AbstractContextManager[None]:
        """Around what must not fail in SGLang's functions; see SchedulerGuard."""
        raise NotImplementedError

    def report(self, operations: list[Operation], events: Any, enforce: bool) -> Violation | None:
        """Allocations and frees that were wrong; see SchedulerGuard."""
        raise NotImplementedError

    def free_list_wrong(self, kind: Kind, page: int, detail: str) -> None:
        """The free list is not what the books say; see SchedulerGuard."""
        raise NotImplementedError

    # -- what changes hands ---------------------------------------------------------------------------------------

    def holder_of(self, action: Any) -> int:
        """Whose the pages are that the tree frees: while a record is inserted, the record's own duplicates."""
        return self.inserting or TREE

    def published(self, place: Operation, row: int) -> None:
        """A publication of this row is queued at `place`."""

    # -- looking --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self.books.device.type == "cuda":
            torch.cuda.synchronize()
        operations, events = self.books.settle()
        halted = self.report(operations, events.cpu().numpy(), self.enforcing)
        if halted is not None:
            raise GuardHalt(halted)

    def _sound(self, pages: Tensor, row: int | None) -> Tensor:
        """Per column 0 .. n-1 of a path: is this page what the tree, or row `row`, was promised there? bool [n]"""
        books = self.books
        columns = torch.arange(pages.shape[0], dtype=torch.int64, device=books.device)
        inside = (pages > 0) & (pages < books.page_tag.shape[0])
        safe = torch.where(inside, pages, 0)
        tag, owner, chain = books.page_tag[safe], books.page_owner[safe], books.page_chain[safe]
        before = torch.nn.functional.pad(chain[:-1], (1, 0))
        of_tree = (owner == TREE) & (chain - before == mix_tensor(books.key, columns, tag))
        sound = of_tree if row is None else of_tree | (owner == ((row + 1) << ROW_SHIFT | columns))
        return sound & inside & (tag != 0)

    def locate(self, row: int, length: int) -> Place:
        """The first column of a row that does not hold what it should."""
        self._settle()
        books, size = self.books, self.books.page_size
        entries = self.table[row, :length:size].to(torch.int64)
        pages = entries // size
        bad = torch.nonzero(~self._sound(pages, row)).flatten().tolist()
        shown = tuple(pages[:ENTRIES_MAX].tolist())
        if not bad:
            return Place(False, Kind.FOREIGN_ROW, -1, -1, 0, None, shown)
        column = int(bad[0])
        page = int(pages[column])
        if not 0 <= page < books.page_tag.shape[0]:
            return Place(True, Kind.OUT_OF_RANGE_ENTRY, column, page, 0, None, shown)
        tag, owner = int(books.page_tag[page]), int(books.page_owner[page])
        kind = Kind.FOREIGN_ROW
        if tag == 0:
            kind = Kind.VACANT_PAGE
        elif len(bad) == 1 or owner == TREE:
            kind = Kind.STALE_PAGE
        return Place(True, kind, column, page, tag, self._name(owner), shown)

    def _name(self, owner: int) -> str | None:
        if owner == TREE:
            return "the prefix cache"
        row = (owner >> ROW_SHIFT) - 1
        running = [*self.scheduler.running_batch.reqs]
        if self.scheduler.chunked_req is not None:
            running.append(self.scheduler.chunked_req)
        return next((req.rid for req in running if req.kv.req_pool_idx == row), None)

    # -- acting ---------------------------------------------------------------------------------------------------

    def release_own(self, row: int) -> None:
        """Give back what the books say is this row's, once, whatever the row says; SGLang gives back nothing for it.

        A row with foreign entries would free another request's pages, and one with lost entries would leak its own.
        """
        if self.condemned_rows[row]:
            return
        self.condemned_rows[row] = True
        self._settle()
        before, self.freeing = self.freeing, row + 1
        try:
            self._give_back(self.books.page_owner >> ROW_SHIFT == row + 1)
        finally:
            self.freeing = before

    def _give_back(self, mine: Tensor) -> None:
        """Free the pages, bool [num_pages], that are a row's own."""
        pages = torch.nonzero(mine).flatten()
        if pages.shape[0]:
            self.scheduler.token_to_kv_pool_allocator.free_page_ids(pages)

    def own_pages(self, pages: Tensor) -> Tensor:
        """Those of the pages that whoever frees them holds; the rest stays where it is. All, if the guard fails."""
        with self.contained():
            return self._own_pages(pages)
        return pages

    def _own_pages(self, pages: Tensor) -> Tensor:
        self._settle()
        owner = self.books.page_owner[pages]
        if self.freeing == TREE:
            mine = owner == TREE
        elif self.freeing in (ANYBODY, UNSAID):
            mine = owner != 0
        else:
            mine = owner >> ROW_SHIFT == self.freeing
        kept = pages[mine]
        if kept.shape[0] < pages.shape[0]:
            emit("frees_refused", severity="error", pages=pages[~mine].tolist()[:64], by=self.freeing)
        return kept

    def check_free_list(self) -> None:
        """Once nobody runs: nothing in the free list may still be somebody's, or stand there twice.

        A page of the tree that was freed, and neither given out nor adopted yet, shows nowhere else.
        """
        self.ran = False
        held: list[int] = []
        twice = 0
        if self.armed:
            with self.contained():
                held, twice = self._free_list_faults()
        # Also for a rank whose guard has failed: the others wait for its word.
        # What this rank has mended by now, and flushes for, the others must flush for as well.
        if self._smallest(-int(bool(held or twice or self.audits))) < 0 and self.enforcing:
            self.audits = True
        if held:
            self.free_list_wrong(Kind.FREE_WHILE_HELD, held[0], f"{len(held)} pages of the free list are held")
        if twice:
            self.free_list_wrong(Kind.DOUBLE_FREE, -1, f"{twice} pages stand in the free list more than once")

    def free_lists(self) -> list[tuple[Any, Tensor]]:
        """Allocators, and for each int64 [pages]: 0 where nobody holds the page."""
        return [(self.scheduler.token_to_kv_pool_allocator, self.books.page_owner)]

    def _free_list_faults(self) -> tuple[list[int], int]:
        """Pages of the free lists that somebody has, and how many stand in them once more."""
        self._settle()
        held: list[int] = []
        twice = 0
        for allocator, holder in self.free_lists():
            listed = allocator.get_all_free_pages()
            held += listed[holder[listed] != 0].tolist()
            twice += int(listed.shape[0] - torch.unique(listed).shape[0])
        return held, twice

    def mend_free_list(self) -> None:
        """Take out of the free lists what somebody holds, and what stands in them twice."""
        for allocator, holder in self.free_lists():
            allocator.merge_and_sort_free()
            listed = allocator.free_pages
            mended = torch.unique(listed[holder[listed] == 0])
            if mended.shape[0] < listed.shape[0]:
                emit("free_list_mended", severity="error", pages=int(listed.shape[0] - mended.shape[0]))
                allocator.free_pages = mended

    def audited_match(self, original: Any, tree: Any, params: Any, result: Any) -> Any:
        """The match up to where the tree's pages are still what was put into it; the rest is computed afresh."""
        while True:
            length = accepted = int(result.device_prefix_len)
            if length and self.armed:
                with self.contained():
                    self._settle()
                    path = tree.path_device_indices(result.last_device_node)[:length]
                    accepted = self._own_length(params.req, path[: self._sound_length(path)])
            # Ranks must agree, and wait for each other: also for one whose guard has failed.
            accepted = self._smallest(accepted)
            if accepted == length:
                return result
            if params.req is not None:
                # Its pages must not be exchanged for the tree's bad ones.
                params.req.skip_radix_cache_insert = True
            emit("hit_shortened", severity="error", tokens=length, accepted=accepted)
            # What remains is looked at as well: with windows it ends in another one.
            params = dataclasses.replace(params, key=params.key[:accepted])
            result = original(tree, params)

    def _sound_length(self, path: Tensor) -> int:
        """How many tokens of a match, slots [tokens], are on pages that still are what was put into the tree."""
        length, size = path.shape[0], self.books.page_size
        pages, place = path[::size] // size, torch.arange(length, device=path.device)
        whole = path == pages[place // size] * size + place % size
        whole = torch.nn.functional.pad(whole, (0, -length % size), value=True).view(-1, size).all(1)
        bad = torch.nonzero(~(self._sound(pages, None) & whole)).flatten().tolist()
        return bad[0] * size if bad else length

    def _own_length(self, req: Any, path: Tensor) -> int:
        """How many tokens of a match, slots [tokens], are on pages that hold what the request is itself."""
        length, size = path.shape[0], self.books.page_size
        if self.contents is None or req is None or self.books.page_content is None or not length:
            return length
        content = getattr(req, CONTENT, None) if req.kv.holds_kv else self.contents.identify(req)
        if content is None:
            return 0
        own = content.lanes(size)[: length // size].view(np.int64)
        held = self.books.page_content[path[::size] // size].cpu().numpy()
        same = (held[: len(own)] == own).all(1) & held[: len(own)].any(1)
        return int(same.argmin()) * size if not same.all() else len(own) * size
