"""The books of a model with sliding-window layers: the chain of proof from a row's pages on to those of these layers.

SGLang allocates every token a slot in the pool of full attention and one in the pool of the window layers; rows and the
prefix tree name the first, and one array on the device, `full_to_swa_index_mapping`, leads to the second. A row's
digest proves the first. `peer_tag` of a full page is the tag that the window page had when the two were paired,
`window_tag` of a window page its tag now: where they are equal, nobody has given the window page back since.

What window layers read (SGLang 0.5.23), and so what is checked: positions from max(0, first query - W) to the end of
the row, W being `ModelRunner.sliding_window_size`.

- The models say W without the query itself (`get_attention_sliding_window_size` is the configuration's window - 1;
  Llama 4 says its chunk, of which a query sees less), and the masks of the attention backends keep keys k >= q - W.
  FlashInfer gathers exactly max(0, prefix - W) to the end, or W + 1 tokens in a decode; Triton W of the prefix, or W in
  a decode; FlashAttention and TRT-LLM translate whole rows and are told a window of W to the left.
- What slides out is given back only below that. A decode frees below (its own position - W), rounded down to a page and
  by a page more with a prefix tree; with overlap the length is one step behind, so that the forward that has not begun
  yet keeps its window as well. Chunks of a prompt free below the last chunk's start - W.
- A cache hit of length L is one only if the last W tokens before L are kept (`create_match_validator`), and a request's
  lock on the tree covers as many. So every position that is checked has its window page, in a healthy engine.
- Tokens before the window have a window slot or 0; nothing is asked of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvguard.adapters.sglang.books import Operation, TokenBooks
from kvguard.adapters.sglang.layout import WindowLayout
from kvguard.kernels.events import NULL_PAGE, ROW_SHIFT, SPOILED, TREE
from kvguard.kernels.pair_windows import pair_windows
from kvguard.kernels.retire_pages import retire_pages
from kvguard.kernels.verify_pages.layout import FLAG_WINDOW, FLAGS
from kvguard.kernels.verify_pages.torch_op import mix_tensor
from kvguard.kernels.verify_windows import verify_windows

WINDOW_POOL = "kv.window"
COLUMN_MASK = (1 << ROW_SHIFT) - 1


class WindowBooks(TokenBooks):
    """See the module."""

    def __init__(self, allocator: Any, window: WindowLayout, **pool: Any) -> None:
        """`allocator`: SGLang's; `pool`: what TokenBooks takes, of the pool of full attention."""
        super().__init__(**pool)
        self.window = window.size
        self.window_tag = torch.zeros(window.num_pages, dtype=torch.int64, device=self.device)
        self.window_holder = torch.zeros_like(self.window_tag)
        """The full page that a window page was paired with last; 0: it is vacant."""
        self.peer_tag = torch.zeros_like(self.page_tag)
        # Window pages are in no prefix tree.
        self._no_chain = torch.zeros_like(self.window_tag)
        self._allocator = allocator

    @property
    def mapping(self) -> Tensor:
        """int64: the window slot of each full slot, 0 for none."""
        mapping: Tensor = self._allocator.full_to_swa_index_mapping
        return mapping

    # -- what the hooks append ------------------------------------------------------------------------------------

    def pair(self, full: Tensor, window: Tensor, *, fresh: bool) -> None:
        """Full slots [n] lead to these window slots from now on; see kernels.pair_windows."""

        def run(event: Tensor) -> None:
            pair_windows(
                full=full,
                window=window,
                fresh=fresh,
                peer_tag=self.peer_tag,
                window_tag=self.window_tag,
                window_holder=self.window_holder,
                page_size=self.page_size,
                base_tag=self._tags.take_many(full.shape[0]).start if fresh else 0,
                event=event,
            )

        self._queue.append(Operation(run, "allocation" if fresh else "hand-over", pool=WINDOW_POOL))

    def retire_windows(self, pages: Tensor) -> None:
        """Window pages [n] went back to their free list."""

        def run(event: Tensor) -> None:
            # A holder here is no owner word, and nobody says who frees: only that the pages were in use is asked.
            retire_pages(
                pages=pages,
                page_tag=self.window_tag,
                page_owner=self.window_holder,
                page_chain=self._no_chain,
                event=event,
            )

        self._queue.append(Operation(run, "free", pool=WINDOW_POOL))

    def take_over(self, place: Operation, *, row: int, replaced: list[tuple[Tensor, Tensor]]) -> None:
        """Before the publication at `place`: the row's pages (slots, second) have replaced pages of the tree (first).

        Only the tree of a model with windows does that, where a node has lost its windows and a request has computed
        them anew: the node gets the request's pages, and whatever hangs below it still counts on the tags of the old
        ones. So the new pages take over the old tags, and the row is promised them.
        """
        publish = place.run

        def run(event: Tensor) -> None:
            for old, new in replaced:
                self._exchange_tags(row, old[:: self.page_size], new[:: self.page_size])
            publish(event)

        place.run = run

    def _exchange_tags(self, row: int, old: Tensor, new: Tensor) -> None:
        """Slots of the first tokens of as many pages: each pair's tags are exchanged, if the one was the tree's and the
        other the row's own. The columns are those at which the row holds the new ones."""
        old, new = old // self.page_size, new // self.page_size
        inside = (old > NULL_PAGE) & (old < self.page_tag.shape[0]) & (new > NULL_PAGE)
        inside = inside & (new < self.page_tag.shape[0])
        old, new = torch.where(inside, old, NULL_PAGE), torch.where(inside, new, NULL_PAGE)
        owner = self.page_owner[new]
        taken = inside & (self.page_owner[old] == TREE) & (owner >> ROW_SHIFT == row + 1)
        old_tag, new_tag = self.page_tag[old], self.page_tag[new]
        taken = taken & (old_tag != 0) & (new_tag != 0)
        column = owner & COLUMN_MASK
        change = mix_tensor(self.key, column, old_tag) - mix_tensor(self.key, column, new_tag)
        self.digest[row : row + 1] += torch.where(taken, change, 0).sum()
        # What is not taken over writes to page 0 what that page holds.
        null = self.page_tag[NULL_PAGE]
        self.page_tag.index_put_((torch.where(taken, new, NULL_PAGE),), torch.where(taken, old_tag, null))
        self.page_tag.index_put_((torch.where(taken, old, NULL_PAGE),), torch.where(taken, new_tag, null))

    def clear(self) -> None:
        """Every page of both pools is vacant."""
        super().clear()
        (reset,) = self._queue
        vacate = reset.run

        def run(event: Tensor) -> None:
            vacate(event)
            for array in (self.window_tag, self.window_holder, self.peer_tag):
                array.zero_()

        reset.run = run

    # -- on the stream of the forward -----------------------------------------------------------------------------

    def verify(
        self,
        *,
        table: Tensor,
        rows: Tensor,
        lengths: Tensor,
        enforce: bool,
        record: Tensor,
        slot_mapping: Tensor | None,
        query_start: Tensor | None,
        writes: Tensor | None = None,
        reads: bool = True,
    ) -> None:
        """Check what the layers of full attention are about to read, then what those of the windows are."""
        super().verify(
            table=table,
            rows=rows,
            lengths=lengths,
            enforce=enforce,
            record=record,
            slot_mapping=slot_mapping,
            query_start=query_start,
            writes=writes,
            reads=reads,
        )
        if not reads:
            return
        verify_windows(
            table=table,
            rows=rows,
            lengths=lengths,
            window=self.window,
            mapping=self.mapping,
            peer_tag=self.peer_tag,
            window_tag=self.window_tag,
            page_size=self.page_size,
            enforce=enforce,
            record=record,
            slot_mapping=slot_mapping,
            query_start=query_start,
            skip_slot=0,
        )
        if enforce:
            known = (rows >= 0) & (rows < self.digest.shape[0])
            flagged = known & ((record[:, FLAGS] & FLAG_WINDOW) != 0)
            self.digest.index_add_(0, torch.where(known, rows, 0), torch.where(flagged, SPOILED, 0))

    # -- on the host ----------------------------------------------------------------------------------------------

    def window_sound(self, slots: Tensor, first: int) -> Tensor:
        """Per token, at positions from `first` on: is its window slot where it was? bool [n]"""
        position = torch.arange(first, first + slots.shape[0], device=self.device)
        slots = slots.to(torch.int64)
        inside = (slots >= 0) & (slots < self.page_tag.shape[0] * self.page_size)
        slots = torch.where(inside, slots, 0)
        peer = self.mapping[slots]
        page = torch.div(peer, self.page_size, rounding_mode="floor")
        inside = inside & (page > NULL_PAGE) & (page < self.window_tag.shape[0])
        tag = self.window_tag[torch.where(inside, page, NULL_PAGE)]
        placed = peer % self.page_size == position % self.page_size
        return inside & placed & (tag != 0) & (tag == self.peer_tag[slots // self.page_size])
