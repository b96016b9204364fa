"""The decode worker: takes requests over from a prefill worker, with their KV, and generates their tokens.

Pages are allocated when the first layer of a request comes, and each layer is written when it comes. Leading pages that
are in this worker's own prefix cache are shared instead of written. A request that was preempted here starts over
here: its prompt is computed with this worker's own arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.kv_wire import PageBytes, Part, unpack
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.engine.scheduler import Request, Scheduler, Sequence

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.adapters.generic_transfer import TransferTarget
    from kvguard.transfer_manifest import Refusal, Wait

RECENT_TRANSFERS = 8
BEFORE_HERE = 0
"""The step of a token that no forward of this engine computed: the prefill worker's."""


class PrefillDied(RuntimeError):
    """The prefill worker is gone; what it had not handed over is lost."""


class PrefillPort(Protocol):
    """The decode worker's end of the connection to a prefill worker."""

    def tick(
        self, submitted: list[tuple[Request, str]], aborted: list[str]
    ) -> tuple[list[Part], list[tuple[str, str]]]:
        """One tick of the worker, in lock step: parts that it copied, and (request, error) that it ended.

        `submitted`: requests with their tickets. Raises PrefillDied.
        """


@dataclass(eq=False)
class Incoming:
    """A transfer that is expected or under way.

    pages    the connector's own list of the pages to write to, in column order; empty until they are allocated
    shared   leading columns that the prefix cache had: not written
    parts    that came and are not written yet; arrived: all that came
    """

    sequence: Sequence
    ticket: str
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    parts: deque[Part] = field(default_factory=deque)
    arrived: list[Part] = field(default_factory=list)


class _LandingScheduler(Scheduler):
    """A scheduler that lets transfers land before it plans a step."""

    land: Callable[[], None]

    def schedule(self, step: int) -> list[Sequence]:
        self.land()
        return super().schedule(step)


class DecodeEngine(Engine):
    """An engine whose prompts are computed elsewhere.

    `at_land` runs before a request's parts are written, `at_written` after one was. `recent`: descriptors and messages
    of the last transfers that ended well, as a connector keeps them for retries.
    """

    scheduler_type = _LandingScheduler

    def __init__(
        self,
        model: LlamaModel,
        config: EngineConfig,
        prefill: PrefillPort,
        guard: PagedGuard | None = None,
        target: TransferTarget | None = None,
    ) -> None:
        """`target`: the guard's half of transfers, with `guard`. ValueError for a model with windowed layers."""
        if model.config.window is not None:
            raise ValueError("a hand-over carries the pages of one pool: no windowed layers")
        super().__init__(model, config, guard)
        assert isinstance(self.scheduler, _LandingScheduler)
        self.scheduler.land = self._land
        self.prefill: PrefillPort | None = prefill
        self.target = target
        self.incoming: dict[str, Incoming] = {}
        self.recent: deque[Incoming] = deque(maxlen=RECENT_TRANSFERS)
        self.hand_overs = 0
        self.at_land: list[Callable[[DecodeEngine, frozenset[str]], None]] = []
        self.at_written: list[Callable[[DecodeEngine, frozenset[str]], None]] = []
        self._submitted: list[tuple[Request, str]] = []
        self._aborted: list[str] = []

    def submit(self, request: Request) -> None:
        """Queue a request: its prompt goes to the prefill worker. ValueError as in `Engine.submit`.

        Without a prefill worker the request ends at once, with an error.
        """
        super().submit(request)
        sequence = self.scheduler.waiting.pop()
        ticket = request.id
        if self.target is not None:
            ticket = self.target.expect(request.id, tokens=len(request.prompt))
        self.incoming[request.id] = Incoming(sequence, ticket)
        if self.prefill is None:
            self._end(sequence, "there is no prefill worker")
            return
        self._submitted.append((request, ticket))

    def abort(self, request: str) -> None:
        """The client went away; the prefill worker hears of it, too."""
        if request in self.sequences:
            self._aborted.append(request)
        super().abort(request)

    def step(self) -> None:
        """One tick of the prefill worker, then one forward here."""
        submitted, self._submitted = self._submitted, []
        aborted, self._aborted = self._aborted, []
        if self.prefill is not None:
            try:
                parts, ended = self.prefill.tick(submitted, aborted)
            except PrefillDied as error:
                self.prefill = None
                for incoming in list(self.incoming.values()):
                    self._end_before(incoming.sequence, f"{error}: its prompt was not handed over completely")
            else:
                for part in parts:
                    self.receive(part)
                for name, why in ended:
                    if name in self.incoming:
                        self._end_before(self.incoming[name].sequence, why)
        super().step()

    def receive(self, part: Part) -> None:
        """A part came; it is written in the next step. Parts of requests that are over are dropped."""
        incoming = self.incoming.get(part.request)
        if incoming is not None:
            incoming.parts.append(part)
            incoming.arrived.append(part)

    def _end(self, sequence: Sequence, error: str | None, foreign_pages: tuple[int, ...] = ()) -> None:
        if self.incoming.pop(sequence.id, None) is not None and self.target is not None:
            self.target.cancel(sequence.id)
        super()._end(sequence, error, foreign_pages)

    def _end_before(self, sequence: Sequence, error: str, foreign_pages: tuple[int, ...] = ()) -> None:
        """The request is over before the forward of this step: it was last served, if at all, in the step before."""
        if sequence.id in self.sequences:
            self._end(sequence, error, foreign_pages)
            self.outputs[sequence.id].ended_step = self.step_index - 1

    # -- landing --------------------------------------------------------------------------------------------------

    def _land(self) -> None:
        may_allocate = True
        for name, incoming in list(self.incoming.items()):
            if not incoming.pages and incoming.parts:
                # First come, first served: a long prompt must not starve behind short ones.
                may_allocate = may_allocate and self._allocate(incoming)
            if not incoming.pages or not incoming.parts:
                continue
            for hook in self.at_land:
                hook(self, frozenset({name}))
            while incoming.parts and self.incoming.get(name) is incoming:
                if not self._write(incoming, incoming.parts[0]):
                    # A forward in flight may still use one of the pages: in the next step it is over.
                    break

    def _allocate(self, incoming: Incoming) -> bool:
        """Pages for the whole prompt and a row, or nothing."""
        sequence, pool, scheduler = incoming.sequence, self.pool, self.scheduler
        size, tokens = self.config.page_size, len(sequence.request.prompt)
        hits = []
        if self.config.prefix_cache:
            hits = pool.lookup(scheduler.keys_of(sequence, sequence.tokens))
        columns = -(-tokens // size)
        idle_hits = sum(page in pool.idle for _, page in hits)
        spare = pool.available - idle_hits - (columns - len(hits))
        if not scheduler.free_rows or spare < 0:
            return False
        sequence.pages = pool.share(sequence.id, hits)
        incoming.shared = len(sequence.pages)
        while len(sequence.pages) < columns:
            page = pool.take(sequence.id)
            if page is None:
                # The guard passed pages over, so that fewer were there than counted: wait for the next step. Nothing
                # was written yet, and it is no preemption: the request still waits for its transfer.
                if self.guard is not None:
                    self.guard.truncate(sequence.id, 0)
                pool.release(sequence.pages)
                sequence.pages = []
                return False
            sequence.pages.append(page)
        scheduler.counts.prefix_hits += incoming.shared > 0
        scheduler.counts.cached_tokens += incoming.shared * scheduler.page_size
        sequence.row = scheduler.free_rows.pop()
        incoming.pages = list(sequence.pages)
        return True

    def _write(self, incoming: Incoming, part: Part) -> bool:
        """The first waiting part; False: it must wait a step."""
        from kvguard.transfer_manifest import Wait

        name = incoming.sequence.id
        labels = [page.label for page in part.pages if page.label is not None]
        if self.target is not None:
            answer: Refusal | Wait | None = self.target.place(
                name,
                ticket=part.ticket,
                part=part.index,
                labels=labels,
                pages=incoming.pages,
                layers=[part.index],
            )
            if isinstance(answer, Wait):
                return False
            if answer is not None:
                incoming.parts.popleft()
                self._refused(incoming, answer)
                return True
        incoming.parts.popleft()
        pages = part.pages
        if labels:
            # What the source signed says where a page goes; one without a label is missing, and `finish` says so.
            pages = tuple(page._replace(column=page.label.column) for page in pages if page.label is not None)
        payload: list[PageBytes] = [page for page in pages if page.column >= incoming.shared]
        unpack(self.kv, part.index, [incoming.pages[page.column] for page in payload], payload)
        for hook in self.at_written:
            hook(self, frozenset({name}))
        if part.is_last:
            self._take_over(incoming, part)
        return True

    def _take_over(self, incoming: Incoming, part: Part) -> None:
        """Every part is there: the request decodes from now on."""
        sequence = incoming.sequence
        del self.incoming[sequence.id]
        if sequence.computed:
            # A retry of what this engine has: the bytes were written again, and that is all.
            return
        if self.target is not None:
            refusal = self.target.finish(
                sequence.id,
                ticket=part.ticket,
                manifest=part.manifest,
                pages=incoming.pages,
                first_token=part.first_token,
            )
            if refusal is not None:
                self._refused(incoming, refusal)
                return
        self.recent.append(incoming)
        self.hand_overs += 1
        # What was asked for, which is what the manifest must say.
        sequence.computed = len(sequence.request.prompt)
        sequence.published = incoming.shared
        self._emit(sequence, [part.first_token], BEFORE_HERE)
        if sequence.generated >= sequence.request.max_new_tokens:
            self._end(sequence, None)
        else:
            self.scheduler.running.append(sequence)

    def _refused(self, incoming: Incoming, refusal: Refusal) -> None:
        if refusal.ends_request:
            self._end_before(incoming.sequence, refusal.violation.message, refusal.foreign_pages)
        elif incoming.sequence.computed and not incoming.parts:
            self.incoming.pop(incoming.sequence.id, None)
