"""The embedded engine: a small, honest paged serving engine that runs anywhere PyTorch does.

One step: schedule, bring the block tables up to date, compute where to write, let the guard check what attention is
about to read, run the model, take the verdicts, let tokens out. The engine knows the guard only as an object with the
calls of `kvguard.adapters.generic.PagedGuard`; without one it runs the very same code.

Decode batches may be padded to the sizes that graphs were captured for, forwards may run without any request, guesses
may be verified several tokens at a time (`EngineConfig`): such tokens write, too, and belong to nobody or may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvguard.fault_injection.engine.drafts import accepted
from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.engine.pool import NULL_PAGE, PagePool
from kvguard.fault_injection.engine.scheduler import Request, Scheduler, Sequence
from kvguard.fault_injection.engine.step import MAIN_POOL, StepTensors, dummy_tensors, step_tensors
from kvguard.fault_injection.engine.store import ExternalStore
from kvguard.fault_injection.engine.window import WINDOW_POOL, WindowPages

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.judge import Judgement
    from kvguard.verifier import PendingVerdicts


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """num_pages includes the null page; page_size in tokens; token_budget in tokens a step.

    padded_batches  sizes, ascending, to the next of which a batch without prompts is padded; (): it is not
    dummy_every     a forward without requests runs before every so many-th step, and where a step has nothing to run,
                    as ranks do whose peers have work; 0: never
    draft_tokens    guesses that are verified with a generating row's next token, at most
    publish_ahead   see `scheduler`
    external_store  evicted pages go to one, and come back from it (not with windowed layers)
    window_pages    pages for the windowed layers of a model that has any, the null page included; None: num_pages
    """

    num_pages: int = 64
    page_size: int = 16
    kv_dtype: KVDtype = "fp32"
    max_rows: int = 8
    token_budget: int = 128
    prefix_cache: bool = True
    max_tokens: int = 448
    padded_batches: tuple[int, ...] = ()
    dummy_every: int = 0
    draft_tokens: int = 0
    publish_ahead: bool = False
    window_pages: int | None = None
    external_store: bool = False


class Emitted(NamedTuple):
    """A token that left the engine, and the step that computed it."""

    step: int
    token: int


@dataclass(eq=False)
class Output:
    """What the client of one request sees.

    error     why it ended early, None if it did not; ended_step: the step after which it was over, -1 while it runs
    """

    request: Request
    tokens: list[Emitted] = field(default_factory=list)
    error: str | None = None
    ended_step: int = -1

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(emitted.token for emitted in self.tokens)


class Engine:
    """One model, one pool (two if it has windowed layers), one prefix cache.

    `at_schedule` runs in every step before scheduling, `at_launch` before each forward and the guard's check of it,
    with the requests that it serves (a dummy batch: none): fault injectors and probes hook in there, on the engine's
    state alone. `tensors`: all that the forward about to run takes from memory; `last_served`: what the last one with
    requests took.
    """

    scheduler_type: type[Scheduler] = Scheduler

    def __init__(self, model: LlamaModel, config: EngineConfig, guard: PagedGuard | None = None) -> None:
        self.model = model
        self.config = config
        self.guard = guard
        self.kv = model.new_kv(num_pages=config.num_pages, page_size=config.page_size, dtype=config.kv_dtype)
        self.pool = PagePool(config.num_pages, guard)
        if guard is not None:
            guard.all_is_told()
        self.weights_epoch = 0
        if config.external_store:
            self.pool.store = ExternalStore(self.kv, guard, capacity=4 * config.num_pages)
        columns = -(-config.max_tokens // config.page_size)
        self.window: WindowPages | None = None
        if model.config.window is not None:
            window_pages = config.num_pages if config.window_pages is None else config.window_pages
            self.window = WindowPages(
                window=model.config.window,
                num_pages=window_pages,
                page_size=config.page_size,
                rows=config.max_rows,
                columns=columns,
                guard=guard,
            )
            self.window_kv = model.new_kv(
                num_pages=window_pages, page_size=config.page_size, dtype=config.kv_dtype, windowed=True
            )
        self.scheduler = self.scheduler_type(
            self.pool,
            page_size=config.page_size,
            max_rows=config.max_rows,
            token_budget=config.token_budget,
            prefix_cache=config.prefix_cache,
            guard=guard,
            publish_ahead=config.publish_ahead,
            draft_tokens=config.draft_tokens,
            window=self.window,
        )
        self.block_table = torch.full((config.max_rows, columns), NULL_PAGE, dtype=torch.int32)
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, Output] = {}
        self.step_index = 0
        self.tensors: StepTensors | None = None
        self.last_served: StepTensors | None = None
        self.at_schedule: list[Callable[[Engine], None]] = []
        self.at_launch: list[Callable[[Engine, list[Sequence]], None]] = []

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if its id is taken, it is empty, or it can never fit."""
        if 0 < request.keep_last < len(request.prompt):
            request = replace(request, prompt=request.prompt[-request.keep_last :], untruncated=request.prompt)
        total = len(request.prompt) + request.max_new_tokens
        usable = (self.config.num_pages - 1) * self.config.page_size
        if request.id in self.outputs:
            raise ValueError(f"request id {request.id!r} was used before")
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(f"request {request.id!r} has no prompt or asks for no tokens")
        if total > min(self.config.max_tokens, usable):
            raise ValueError(
                f"request {request.id!r} needs {total} tokens; the engine has room for "
                f"{min(self.config.max_tokens, usable)}"
            )
        if self.window is not None:
            need = self.window.pages_for(min(total, self.config.token_budget))
            if need > self.window.pool.num_pages - 1:
                raise ValueError(f"request {request.id!r} needs {need} pages at once for its windowed layers")
        sequence = Sequence(request=request, tokens=list(request.prompt))
        self.sequences[request.id] = sequence
        self.outputs[request.id] = Output(request=request)
        if self.guard is not None:
            self.guard.start(request.id)
            self._identify(sequence)
        self.scheduler.waiting.append(sequence)

    def _identify(self, sequence: Sequence) -> None:
        """Tell a guard that asks for it what the request is made of."""
        if self.guard is not None and self.guard.wants_contents:
            from kvguard.content_key import ContentDomain

            request, config = sequence.request, self.config
            domain = ContentDomain(
                model=f"{self.model.config.layers} layers, {self.model.weights}",
                weights_epoch=self.weights_epoch,
                kv_layout="NHD",
                kv_dtype=config.kv_dtype,
                lora=request.lora or None,
                tenant=request.tenant or None,
            )
            self.guard.identify(request.id, domain, sequence.tokens)

    def adapters_of(self, request: Request) -> tuple[str, ...]:
        """What is added to the weights for a request: its adapter, and what weight updates have brought."""
        updates = tuple(f"update{epoch}" for epoch in range(1, self.weights_epoch + 1))
        return updates if not request.lora else (request.lora, *updates)

    def update_weights(self, *, keep_cache: bool = False) -> None:
        """Other weights from now on: everybody starts over, and no page of before may be found any more.

        `keep_cache`: it may, which is a fault.
        """
        self.weights_epoch += 1
        self.scheduler.counts.weight_updates += 1
        self.scheduler.restart_all()
        if not keep_cache:
            self.pool.reset_cache()
            if self.pool.store is not None:
                self.pool.store.clear()
        for sequence in self.sequences.values():
            self._identify(sequence)

    def abort(self, request: str) -> None:
        """The client went away; nothing more is emitted. No error if the request is over already."""
        sequence = self.sequences.get(request)
        if sequence is not None:
            self.scheduler.counts.client_aborts += 1
            self._end(sequence, "aborted by the client")

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.sequences)

    def step(self) -> None:
        """Run one forward, if there is anything to run."""
        self.step_index += 1
        self.scheduler.counts.steps += 1
        for hook in self.at_schedule:
            hook(self)
        batch = self.scheduler.schedule(self.step_index)
        self.scheduler.counts.evictions = self.pool.evictions
        every = self.config.dummy_every
        if every and (not batch or self.step_index % every == 0):
            self.scheduler.counts.dummy_batches += 1
            self._forward(dummy_tensors(self), [])
        if not batch:
            return
        self._update_block_table(batch)
        tensors = step_tensors(self, batch)
        self.scheduler.counts.padding_lanes += len(tensors.lengths) - len(batch)
        sampled, judgement = self._forward(tensors, batch)
        withheld: frozenset[str] = frozenset()
        if judgement is not None:
            withheld = judgement.withheld
            self._enforce(judgement)
        for sequence in batch:
            tokens, sampled = sampled[: 1 + len(sequence.drafts)], sampled[1 + len(sequence.drafts) :]
            self._advance(sequence, tokens, sequence.id in withheld)

    def _forward(self, tensors: StepTensors, batch: list[Sequence]) -> tuple[list[int], Judgement | None]:
        """Run the model on what lies in `tensors` once hooks and guard have seen it; the tokens that it would say."""
        self.tensors = tensors
        for hook in self.at_launch:
            hook(self, batch)
        pending = None
        if self.guard is not None:
            pending = self._check(tensors)
        # Rows are gathered after the check, which changes rows and slots in place.
        logits = self.model.forward(tensors.forward_batch(self), self.kv)
        sampled: list[int] = logits.argmax(dim=1).tolist()
        self.last_served = tensors if batch else self.last_served
        return sampled, None if self.guard is None else self.guard.after_forward(pending)

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.busy:
            self.step()

    def _update_block_table(self, batch: list[Sequence]) -> None:
        """Write the entries that are new since the row's last step: the rest stays on the device as it is."""
        for sequence in batch:
            start, stop = sequence.written, len(sequence.pages)
            if stop > start:
                entries = torch.tensor(sequence.pages[start:stop], dtype=torch.int32)
                self.block_table[sequence.row, start:stop] = entries
                sequence.written = stop
            if self.window is not None:
                self.window.update_block_table(sequence)

    def _check(self, tensors: StepTensors) -> PendingVerdicts | None:
        from kvguard.verifier import PoolInputs

        assert self.guard is not None

        def inputs(name: str, table: Tensor) -> PoolInputs:
            return PoolInputs(
                table=table,
                slot_mapping=tensors.slots[name],
                query_start=tensors.query_start,
                lengths=tensors.lengths,
            )

        main = inputs(MAIN_POOL, self.block_table)
        # With one pool the guard may call it what it likes.
        both = (
            main
            if self.window is None
            else {MAIN_POOL: main, WINDOW_POOL: inputs(WINDOW_POOL, self.window.block_table)}
        )
        served = len(tensors.requests)
        return self.guard.before_forward(
            tensors.requests,
            tensors.table_rows.tolist(),
            tensors.lengths.tolist()[:served],
            both,
            tokens_start=tensors.positions[tensors.query_start[:served]].tolist(),
        )

    def _enforce(self, judgement: Judgement) -> None:
        for abort in judgement.aborts:
            sequence = self.sequences.get(abort.request)
            if sequence is not None:
                foreign = dict(abort.foreign_pages)
                sequence.foreign_window = foreign.pop(WINDOW_POOL, ())
                self._end(
                    sequence, abort.violation.message, tuple(page for pages in foreign.values() for page in pages)
                )
        for name, page in judgement.evict:
            pool = self.window.pool if self.window is not None and name == WINDOW_POOL else self.pool
            pool.forget(page)

    def _advance(self, sequence: Sequence, sampled: list[int], withheld: bool) -> None:
        """`sampled`: what the model says behind the row's last known token, and behind each draft if it is right."""
        if sequence.id not in self.sequences:
            return
        drafts = len(sequence.drafts)
        right = 0 if withheld else accepted(sequence.drafts, sampled)
        sequence.computed += sequence.scheduled - drafts + right
        if drafts > right and self.guard is not None:
            # Their keys and values stay where they are until the tokens that come instead are written over them.
            self.guard.rewind(sequence.id, sequence.computed)
        self.scheduler.counts.accepted_drafts += right
        self.scheduler.counts.rejected_drafts += drafts - right
        if withheld or sequence.computed < len(sequence.tokens):
            return
        self._emit(sequence, sampled[: 1 + right], self.step_index)
        if sequence.generated >= sequence.request.max_new_tokens:
            self._end(sequence, None)

    def _emit(self, sequence: Sequence, tokens: list[int], step: int) -> None:
        """The request goes on by these tokens, which the forward of `step` computed; client and guard are told."""
        sequence.tokens += tokens
        if self.guard is not None and self.guard.wants_contents:
            self.guard.add_tokens(sequence.id, tokens)
        self.outputs[sequence.id].tokens += [Emitted(step, token) for token in tokens]

    def _end(self, sequence: Sequence, error: str | None, foreign_pages: tuple[int, ...] = ()) -> None:
        self.scheduler.end(sequence, foreign_pages)
        if self.window is not None:
            self.scheduler.counts.window_pages_passed = self.window.passed
        del self.sequences[sequence.id]
        output = self.outputs[sequence.id]
        output.error, output.ended_step = error, self.step_index
