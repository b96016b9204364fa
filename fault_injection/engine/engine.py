"""The embedded engine: a small, honest paged serving engine that runs anywhere PyTorch does.

One step: schedule, bring the block table up to date, compute where to write, let the guard check what attention is
about to read, run the model, take the verdicts, let tokens out. The engine knows the guard only as an object with the
calls of `kvguard.adapters.generic.PagedGuard`; without one it runs the very same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.model import ForwardBatch, LlamaModel
from kvguard.fault_injection.engine.pool import NULL_PAGE, PagePool
from kvguard.fault_injection.engine.scheduler import Request, Scheduler, Sequence

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.judge import Judgement
    from kvguard.verifier import PendingVerdicts


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """num_pages includes the null page; page_size in tokens; token_budget in tokens a step."""

    num_pages: int = 64
    page_size: int = 16
    kv_dtype: KVDtype = "fp32"
    max_rows: int = 8
    token_budget: int = 128
    prefix_cache: bool = True
    max_tokens: int = 448


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
    """One model, one pool, one prefix cache.

    `at_schedule` and `at_launch` run in every step before scheduling and before the guard's check: fault injectors and
    probes hook in there, on the engine's state alone.
    """

    def __init__(self, model: LlamaModel, config: EngineConfig, guard: PagedGuard | None = None) -> None:
        self.model = model
        self.config = config
        self.guard = guard
        self.kv = model.new_kv(num_pages=config.num_pages, page_size=config.page_size, dtype=config.kv_dtype)
        self.pool = PagePool(config.num_pages, guard)
        self.scheduler = Scheduler(
            self.pool,
            page_size=config.page_size,
            max_rows=config.max_rows,
            token_budget=config.token_budget,
            prefix_cache=config.prefix_cache,
            guard=guard,
        )
        columns = -(-config.max_tokens // config.page_size)
        self.block_table = torch.full((config.max_rows, columns), NULL_PAGE, dtype=torch.int32)
        self.sequences: dict[str, Sequence] = {}
        self.outputs: dict[str, Output] = {}
        self.step_index = 0
        self.at_schedule: list[Callable[[Engine], None]] = []
        self.at_launch: list[Callable[[Engine, list[Sequence]], None]] = []

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if its id is taken, it is empty, or it can never fit."""
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
        sequence = Sequence(request=request, tokens=list(request.prompt))
        self.sequences[request.id] = sequence
        self.outputs[request.id] = Output(request=request)
        if self.guard is not None:
            self.guard.start(request.id)
        self.scheduler.waiting.append(sequence)

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
        if not batch:
            return
        self._update_block_table(batch)
        forward, query_start, table_rows = self._prepare(batch)
        for launch_hook in self.at_launch:
            launch_hook(self, batch)
        pending = None
        if self.guard is not None:
            pending = self._check(batch, forward, query_start, table_rows)
        # Rows are gathered after the check, which changes rows and slots in place.
        logits = self.model.forward(
            ForwardBatch(
                token_ids=forward.token_ids,
                positions=forward.positions,
                query_start=forward.query_start,
                seq_lens=forward.seq_lens,
                block_table=self.block_table[table_rows],
                slot_mapping=forward.slot_mapping,
            ),
            self.kv,
        )
        sampled = logits.argmax(dim=1).tolist()
        withheld: frozenset[str] = frozenset()
        if self.guard is not None:
            judgement = self.guard.after_forward(pending)
            withheld = judgement.withheld
            self._enforce(judgement)
        for sequence, token in zip(batch, sampled, strict=True):
            self._advance(sequence, int(token), sequence.id in withheld)

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

    def _prepare(self, batch: list[Sequence]) -> tuple[ForwardBatch, Tensor, Tensor]:
        """The step's tensors; where to write is computed from the block table, as GPU engines do."""
        size = self.config.page_size
        tokens: list[int] = []
        positions: list[int] = []
        owner: list[int] = []
        starts = [0]
        for sequence in batch:
            stop = sequence.computed + sequence.scheduled
            tokens += sequence.tokens[sequence.computed : stop]
            positions += range(sequence.computed, stop)
            owner += [sequence.row] * sequence.scheduled
            starts.append(len(tokens))
        position = torch.tensor(positions)
        pages = self.block_table[torch.tensor(owner), position // size].to(torch.int64)
        table_rows = torch.tensor([sequence.row for sequence in batch])
        forward = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=position,
            query_start=tuple(starts),
            seq_lens=tuple(sequence.computed + sequence.scheduled for sequence in batch),
            block_table=self.block_table[table_rows],
            slot_mapping=pages * size + position % size,
        )
        return forward, torch.tensor(starts), table_rows

    def _check(
        self, batch: list[Sequence], forward: ForwardBatch, query_start: Tensor, rows: Tensor
    ) -> PendingVerdicts | None:
        from kvguard.verifier import PoolInputs

        assert self.guard is not None
        return self.guard.before_forward(
            [sequence.id for sequence in batch],
            rows.tolist(),
            forward.seq_lens,
            PoolInputs(table=self.block_table, slot_mapping=forward.slot_mapping, query_start=query_start),
        )

    def _enforce(self, judgement: Judgement) -> None:
        for abort in judgement.aborts:
            sequence = self.sequences.get(abort.request)
            if sequence is not None:
                foreign = tuple(page for pages in abort.foreign_pages.values() for page in pages)
                self._end(sequence, abort.violation.message, foreign)
        for _, page in judgement.evict:
            self.pool.forget(page)

    def _advance(self, sequence: Sequence, token: int, withheld: bool) -> None:
        if sequence.id not in self.sequences:
            return
        sequence.computed += sequence.scheduled
        if withheld or sequence.computed < len(sequence.tokens):
            return
        sequence.tokens.append(token)
        output = self.outputs[sequence.id]
        output.tokens.append(Emitted(self.step_index, token))
        if sequence.generated >= sequence.request.max_new_tokens:
            self._end(sequence, None)

    def _end(self, sequence: Sequence, error: str | None, foreign_pages: tuple[int, ...] = ()) -> None:
        self.scheduler.end(sequence, foreign_pages)
        del self.sequences[sequence.id]
        output = self.outputs[sequence.id]
        output.error, output.ended_step = error, self.step_index
