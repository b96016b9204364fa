"""The books of one KV pool, on the device, and the operations that wait to be run on them.

SGLang's allocators slice device tensors: page ids never reach the host, so neither do tags. A page has a tag, an owner
and, once it is in the prefix tree, the digest of the whole path that leads to it; a row of `req_to_token` has the
digest of what it was promised. Hooks only append to a queue. It is run right before the check, on the stream of
the forward: with overlap scheduling the scheduler prepares step n + 1 while the forward of step n is still to start,
and a change of the books at once would reach step n's check. Tensors in the queue must keep their values until then;
hooks copy those that the engine writes into again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvguard.kernels import events
from kvguard.kernels.events import ANYBODY, CONTENT_LANES, EVENT_WORDS, ROW_SHIFT
from kvguard.kernels.publish_row import publish_row
from kvguard.kernels.retire_pages import retire_pages
from kvguard.kernels.stamp_rows import stamp_rows
from kvguard.kernels.verify_rows import verify_rows
from kvguard.kernels.verify_slots import verify_slots
from kvguard.staging import Uploads
from kvguard.tags import TagCounter
from kvguard.violation import Kind

EVENT_KINDS = {
    events.OUT_OF_RANGE: Kind.PAGE_OUT_OF_RANGE,
    events.NULL: Kind.NULL_PAGE_USED,
    events.DOUBLE_ALLOCATION: Kind.DOUBLE_ALLOCATION,
    events.DOUBLE_FREE: Kind.DOUBLE_FREE,
    events.FREE_UNOWNED: Kind.FREE_UNOWNED,
    events.VACANT: Kind.VACANT_PAGE,
    events.CONTENT: Kind.CONTENT_TOKENS,
}
"""What the first word of an event says; 0: nothing is wrong."""
POOL = "kv"
"""What a report calls the pool of a model, or that of its layers of full attention."""


@dataclass(eq=False, slots=True)
class Operation:
    """One queued call: `run(event)` enqueues its kernels. names: whose pages they were, place by place, if known; pool:
    which pages; subject: place by place the request that a page's content was compared with, and up to which token."""

    run: Callable[[Tensor], None]
    what: str
    names: Callable[[int], str | None] | None = None
    pool: str = POOL
    subject: Callable[[int], tuple[Any, int]] | None = None
    open: bool = False
    """Reserved, and not known yet: neither it nor what is behind it in the queue can be run."""


class TokenBooks:
    """See the module. One pool; slots are int32 or int64 tensors on the device, page = slot // page_size."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        rows: int,
        device: Any,
        tags: TagCounter,
        key: int,
        contents: bool = False,
    ) -> None:
        """`num_pages`: with the null page 0; `rows`: of req_to_token; `contents`: what pages hold is kept as well."""
        self.device = torch.device(device)
        self.page_size, self.key = page_size, key
        self._tags = tags
        self.upload = Uploads(self.device).upload
        self.page_tag = torch.zeros(num_pages, dtype=torch.int64, device=self.device)
        self.page_owner = torch.zeros_like(self.page_tag)
        self.page_chain = torch.zeros_like(self.page_tag)
        self.page_content: Tensor | None = None
        """int64 [num_pages, 2]: of a page in the tree, the lanes of the content key at its end. Written where the chain
        is, and never taken away: once the page is handed out again, its chain satisfies nobody."""
        if contents:
            self.page_content = torch.zeros((num_pages, CONTENT_LANES), dtype=torch.int64, device=self.device)
        self.digest = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._writers = (torch.arange(rows, device=self.device) + 1) << ROW_SHIFT
        self._queue: list[Operation] = []
        # What an adopted-slot list is put together from: "the row goes on" and "no prefix".
        constants = self.upload(np.array([-1, 0], np.int64))
        self.goes_on, self.no_prefix = constants[:1], constants[1:]

    def __len__(self) -> int:
        """Operations that wait."""
        return len(self._queue)

    # -- what the hooks append ------------------------------------------------------------------------------------

    def stamp(
        self,
        slots: Tensor,
        rows: Tensor,
        first: Tensor,
        *,
        offset: Tensor | None = None,
        adopted: Tensor | None = None,
        content: Tensor | None = None,
        names: Callable[[int], str | None] | None = None,
    ) -> None:
        """New tokens got slots; see kernels.stamp_rows. `content`: wanted with `adopted` where contents are kept."""

        def run(event: Tensor) -> None:
            stamp_rows(
                slots=slots,
                rows=rows,
                first=first,
                offset=offset,
                adopted=adopted,
                content=content,
                page_content=None if content is None else self.page_content,
                page_tag=self.page_tag,
                page_owner=self.page_owner,
                page_chain=self.page_chain,
                digest=self.digest,
                page_size=self.page_size,
                base_tag=self._tags.take_many(slots.shape[0]).start,
                key=self.key,
                event=event,
            )

        self._queue.append(Operation(run, "allocation", names))

    def retire(self, pages: Tensor, holders: Sequence[tuple[int, int]]) -> None:
        """Pages [n] went back to the free list. holders: (whose: row + 1, TREE or ANYBODY; how many), in order."""
        kinds = {by for by, _ in holders}
        by: int | Tensor = kinds.pop() if len(kinds) == 1 else ANYBODY
        if kinds:
            by = self.upload(np.repeat(*np.array(holders, np.int64).T))

        def run(event: Tensor) -> None:
            retire_pages(
                pages=pages,
                page_tag=self.page_tag,
                page_owner=self.page_owner,
                page_chain=self.page_chain,
                by=by,
                event=event,
            )

        self._queue.append(Operation(run, "free"))

    def reserve(self) -> Operation:
        """A place in the queue for `publish`, whose arguments are known only once later calls have been queued."""
        place = Operation(lambda event: None, "publication", open=True)
        self._queue.append(place)
        return place

    @staticmethod
    def give_up(place: Operation) -> None:
        """Nothing was published after all."""
        place.open = False

    def publish(
        self,
        place: Operation,
        *,
        row: int,
        start: int,
        stop: int,
        old: Tensor,
        new: Tensor,
        content: Tensor | None = None,
    ) -> None:
        """Columns start .. stop of a row went into the prefix tree; see kernels.publish_row.

        `content`: wanted where contents are kept.
        """

        def run(event: Tensor) -> None:
            publish_row(
                row=row,
                old=old,
                new=new,
                start=start,
                stop=stop,
                content=content,
                page_content=None if content is None else self.page_content,
                event=event,
                page_tag=self.page_tag,
                page_owner=self.page_owner,
                page_chain=self.page_chain,
                digest=self.digest,
                page_size=self.page_size,
                key=self.key,
            )

        place.run = run
        place.open = False

    def clear(self) -> None:
        """Every page is vacant: the engine emptied its cache, and nobody runs."""

        def run(event: Tensor) -> None:
            for array in (self.page_tag, self.page_owner, self.page_chain):
                array.zero_()
            if self.page_content is not None:
                self.page_content.zero_()

        # What was queued before would only be undone.
        self._queue = [Operation(run, "reset")]

    # -- on the stream of the forward -----------------------------------------------------------------------------

    def take(self) -> list[Operation]:
        """What waits, to be run now and in this order; while a record is inserted, what came before that."""
        queue, self._queue = self._queue, []
        for place, operation in enumerate(queue):
            if operation.open:
                self._queue = queue[place:]
                return queue[:place]
        return queue

    def run(self, operations: list[Operation], found: Sequence[Tensor]) -> None:
        """Run them; operation i writes into found[i], int64 [4], zero before."""
        for place, operation in enumerate(operations):
            operation.run(found[place])

    def settle(self) -> tuple[list[Operation], Tensor]:
        """Run what waits at once; returns it with its events: for paths that read the books on the host."""
        operations = self.take()
        found = torch.zeros((len(operations), EVENT_WORDS), dtype=torch.int64, device=self.device)
        self.run(operations, list(found))
        return operations, found

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
        """Check where the step writes, if there are records for that, and what attention is about to read.

        See kernels.verify_slots and kernels.verify_rows. `writes` int64 [batch + 1, 4]: the owner of a page is its one
        designated writer until the page is in the prefix tree. `reads`: False for a campaign that has switched the tag
        proof off.
        """
        if writes is not None and slot_mapping is not None:
            verify_slots(
                slot_mapping=slot_mapping,
                query_start=query_start,
                query_row=None,
                lengths=lengths,
                writer=self._writers[rows],
                floor=None,
                page_writer=self.page_owner,
                page_size=self.page_size,
                skip_slot=0,
                skip_allowed=False,
                enforce=enforce,
                record=writes,
                null_page=events.NULL_PAGE,
            )
        else:
            writes = None
        if not reads:
            return
        verify_rows(
            table=table,
            rows=rows,
            lengths=lengths,
            page_tag=self.page_tag,
            digest=self.digest,
            page_size=self.page_size,
            key=self.key,
            enforce=enforce,
            record=record,
            slot_mapping=slot_mapping,
            query_start=query_start,
            skip_slot=0,
            writes=writes,
        )
