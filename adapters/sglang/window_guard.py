"""The guard of a scheduler whose model has sliding-window layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvguard.adapters.sglang.books import Operation
from kvguard.adapters.sglang.layout import PoolLayout
from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard
from kvguard.adapters.sglang.step_words import PendingStep
from kvguard.adapters.sglang.window_books import WINDOW_POOL, WindowBooks
from kvguard.adapters.sglang.windows import WindowPages
from kvguard.config import GuardConfig
from kvguard.kernels.events import ANYBODY, NULL_PAGE, ROW_SHIFT, TREE, UNSAID
from kvguard.kernels.verify_pages.layout import BAD_COLUMN, BAD_ENTRY, FLAG_WINDOW, FLAGS
from kvguard.pools import PoolSpec
from kvguard.telemetry import emit
from kvguard.violation import Action, Kind, Proof, Violation


class WindowGuard(SchedulerGuard):
    """See the module. Two pools: rows and tree name pages of full attention, each of which leads to a window page."""

    books: WindowBooks

    def __init__(self, scheduler: Any, pool: PoolLayout, config: GuardConfig) -> None:
        super().__init__(scheduler, pool, config)
        self.pairs_are_fresh = False
        """While SGLang allocates."""
        self.replaced: list[tuple[Tensor, Tensor]] = []
        """(slots of the tree, slots of the row) that an insertion exchanges."""
        self.allocator = scheduler.token_to_kv_pool_allocator
        setattr(self.allocator.full_attn_allocator, ATTACHED, self)
        setattr(self.allocator.swa_attn_allocator, ATTACHED, WindowPages(self))

    def _pools(self, pool: PoolLayout) -> list[PoolSpec]:
        assert pool.window is not None
        window = PoolSpec(name=WINDOW_POOL, num_pages=pool.window.num_pages, page_size=pool.page_size, null_page=0)
        return [*super()._pools(pool), window]

    def _new_books(self, scheduler: Any, pool: PoolLayout) -> WindowBooks:
        assert pool.window is not None
        return WindowBooks(
            scheduler.token_to_kv_pool_allocator,
            pool.window,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            rows=pool.rows,
            device=pool.device,
            tags=self._host_books.tags,
            key=self._host_books.key,
            contents=Proof.CONTENT_KEY in self._host_books.proofs,
        )

    # -- what changes hands ---------------------------------------------------------------------------------------

    def holder_of(self, action: Any) -> int:
        """As for other models, but that a node may give its old pages back in exchange for the record's."""
        freed = getattr(action, "indices", None) or (None,)
        if any(old is freed[0] for old, _ in self.replaced):
            return UNSAID
        return super().holder_of(action)

    def published(self, place: Operation, row: int) -> None:
        """The pages that the tree took in exchange get the tags of those that they replace, before all else."""
        replaced, self.replaced = self.replaced, []
        if replaced:
            self.books.take_over(place, row=row, replaced=replaced)

    def cleared(self) -> None:
        """SGLang emptied its cache: nothing that was wrong is left."""
        self.replaced = []
        super().cleared()

    # -- its verdict ----------------------------------------------------------------------------------------------

    def _row_violation(self, pending: PendingStep, req: Any, record: Any) -> Violation:
        if int(record[FLAGS]) != FLAG_WINDOW:
            return super()._row_violation(pending, req, record)
        self._settle()
        books, row = self.books, int(req.kv.req_pool_idx)
        position, peer = int(record[BAD_COLUMN]), int(record[BAD_ENTRY])
        size, page = books.page_size, int(record[BAD_ENTRY]) // books.page_size
        tag = holder = 0
        if not 0 <= page < books.window_tag.shape[0]:
            kind = Kind.OUT_OF_RANGE_ENTRY
        elif page == NULL_PAGE:
            kind = Kind.NULL_ENTRY
        else:
            tag, holder = int(books.window_tag[page]), int(books.window_holder[page])
            kind = Kind.VACANT_PAGE if tag == 0 else Kind.STALE_PAGE
            if peer % size != position % size:
                kind = Kind.SPLIT_ENTRY
        full = int(self.table[row, position]) // size
        expected = int(books.peer_tag[full]) if 0 <= full < books.peer_tag.shape[0] else 0
        owner = int(books.page_owner[holder]) if 0 < holder < books.page_owner.shape[0] else 0
        return self._host_books.violate(
            Violation(
                id="",
                proof=Proof.TAG,
                kind=kind,
                action=self._action(pending.enforce, Action.ABORTED),
                pool=WINDOW_POOL,
                request=req.rid,
                step=pending.step,
                row=row,
                column=position // size,
                page=page,
                expected_tag=expected,
                found_tag=tag,
                owner=self._name(owner),
                page_size=size,
                detail=f"the window page beside page {full} of the pool of full attention",
            )
        )

    # -- acting ---------------------------------------------------------------------------------------------------

    def _give_back(self, mine: Tensor) -> None:
        """Free them, and the window pages that are still paired with them, wherever the mapping leads."""
        books, allocator = self.books, self.allocator
        pages = torch.nonzero(mine).flatten()
        window_pages = torch.nonzero(mine[books.window_holder] & (books.window_tag != 0)).flatten()
        if window_pages.shape[0]:
            allocator.swa_attn_allocator.free_page_ids(window_pages)
        if pages.shape[0]:
            pieces = torch.arange(books.page_size, device=books.device)
            allocator.clear_full_to_swa_mapping((pages[:, None] * books.page_size + pieces).flatten())
            allocator.full_attn_allocator.free_page_ids(pages)

    def own_window_pages(self, pages: Tensor) -> Tensor:
        """Those of the window pages that are in use and, as far as it is known who frees, beside a page of theirs."""
        self._settle()
        books = self.books
        inside = (pages > NULL_PAGE) & (pages < books.window_tag.shape[0])
        safe = torch.where(inside, pages, NULL_PAGE)
        owner = books.page_owner[books.window_holder[safe]]
        mine = inside & (books.window_tag[safe] != 0)
        if self.freeing not in (ANYBODY, UNSAID):
            mine = mine & ((owner == 0) | (torch.where(owner == TREE, TREE, owner >> ROW_SHIFT) == self.freeing))
        kept: Tensor = torch.unique(pages[mine])
        if kept.shape[0] < pages.shape[0]:
            emit("frees_refused", severity="error", pool=WINDOW_POOL, pages=pages[~mine].tolist()[:64], by=self.freeing)
        return kept

    def free_lists(self) -> list[tuple[Any, Tensor]]:
        """Of both pools."""
        full, window = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        return [(full, self.books.page_owner), (window, self.books.window_tag)]

    def _sound_length(self, path: Tensor) -> int:
        """As for other models, and where the window before the end of that is kept."""
        length, size = super()._sound_length(path), self.books.page_size
        if length < path.shape[0]:
            return length
        first = max(0, length - self.books.window)
        bad = torch.nonzero(~self.books.window_sound(path[first:], first)).flatten().tolist()
        return (first + bad[0]) // size * size if bad else length
