"""What a forward takes from memory, laid out as a GPU engine lays it out: after padding, in one place.

This is the last moment before the model runs. Here the guard checks what is about to be read and written, and here
faults go in; whatever stands in these tensors afterwards is what the forward uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvguard.fault_injection.engine.model import ForwardBatch, WindowBatch
from kvguard.fault_injection.engine.pool import NULL_PAGE
from kvguard.fault_injection.engine.window import WINDOW_POOL

if TYPE_CHECKING:
    from kvguard.fault_injection.engine.engine import Engine
    from kvguard.fault_injection.engine.scheduler import Sequence

MAIN_POOL = "main"
SKIP_SLOT = -1
"""Writes nowhere (into the null page, in fact)."""


@dataclass(kw_only=True, eq=False)
class StepTensors:
    """Places 0 .. len(requests) - 1 of the batch are requests; those behind them are padding, one token each.

    requests     by place; none in a dummy batch
    token_ids, positions  int64 [tokens]
    query_start  int64 [places + 1]: place p has the tokens query_start[p] to query_start[p + 1] - 1
    lengths      int64 [places]: keys and values after this step's writes
    table_rows   int64 [requests]: each request's row of the block tables
    slots        pool -> int64 [tokens]: where each token is written, page * page_size + offset; padding: SKIP_SLOT
    logits_of    int64 [wanted]: tokens after which the model is asked what comes next
    adapters     request -> names of what is added to the model's weights for it
    """

    requests: list[str]
    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    lengths: Tensor
    table_rows: Tensor
    slots: dict[str, Tensor]
    logits_of: Tensor
    adapters: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def forward_batch(self, engine: Engine) -> ForwardBatch:
        """What the model is given. Padding reads the null page."""
        padding = len(self.lengths) - len(self.requests)

        def rows_of(table: Tensor) -> Tensor:
            rows = table[self.table_rows]
            return torch.cat((rows, rows.new_full((padding, table.shape[1]), NULL_PAGE))) if padding else rows

        window = None
        if engine.window is not None:
            window = WindowBatch(
                kv=engine.window_kv,
                block_table=rows_of(engine.window.block_table),
                slot_mapping=self.slots[WINDOW_POOL],
            )
        starts = tuple(self.query_start.tolist())
        return ForwardBatch(
            token_ids=self.token_ids,
            positions=self.positions,
            query_start=starts,
            adapters=tuple(
                (starts[place], starts[place + 1], engine.model.adapter(name))
                for place, request in enumerate(self.requests)
                for name in self.adapters.get(request, ())
            ),
            seq_lens=tuple(self.lengths.tolist()),
            block_table=rows_of(engine.block_table),
            slot_mapping=self.slots[MAIN_POOL],
            window=window,
            logits_of=self.logits_of,
        )


def step_tensors(engine: Engine, batch: list[Sequence]) -> StepTensors:
    """The tensors of a step; where to write is computed from the block tables, as GPU engines do."""
    size = engine.config.page_size
    tokens: list[int] = []
    positions: list[int] = []
    owner: list[int] = []
    wanted: list[int] = []
    starts = [0]
    for sequence in batch:
        start, stop = sequence.computed, sequence.computed + sequence.scheduled
        tokens += (sequence.tokens + sequence.drafts)[start:stop]
        positions += range(start, stop)
        owner += [sequence.row] * sequence.scheduled
        starts.append(len(tokens))
        wanted += range(len(tokens) - 1 - len(sequence.drafts), len(tokens))
    lanes = _padding(engine, batch)
    position, rows = torch.tensor(positions), torch.tensor(owner)
    skipped = torch.full((lanes,), SKIP_SLOT)

    def slots(table: Tensor) -> Tensor:
        pages = table[rows, position // size].to(torch.int64)
        return torch.cat((pages * size + position % size, skipped))

    mappings = {MAIN_POOL: slots(engine.block_table)}
    if engine.window is not None:
        mappings[WINDOW_POOL] = slots(engine.window.block_table)
    return StepTensors(
        requests=[sequence.id for sequence in batch],
        token_ids=torch.tensor(tokens + [0] * lanes),
        positions=torch.cat((position, torch.zeros(lanes, dtype=torch.int64))),
        query_start=torch.tensor(starts + list(range(len(tokens) + 1, len(tokens) + 1 + lanes))),
        lengths=torch.tensor([sequence.computed + sequence.scheduled for sequence in batch] + [1] * lanes),
        table_rows=torch.tensor([sequence.row for sequence in batch]),
        slots=mappings,
        logits_of=torch.tensor(wanted),
        adapters={sequence.id: names for sequence in batch if (names := engine.adapters_of(sequence.request))},
    )


def _padding(engine: Engine, batch: list[Sequence]) -> int:
    """Lanes to the next size that there is a graph for; none for a batch that computes prompts, or is too large."""
    if any(sequence.scheduled > 1 + len(sequence.drafts) for sequence in batch):
        return 0
    return next((size - len(batch) for size in engine.config.padded_batches if size >= len(batch)), 0)


def dummy_tensors(engine: Engine) -> StepTensors:
    """A forward of the smallest graph with no request in it: every lane is padding."""
    lanes = min(engine.config.padded_batches, default=1)
    pools = [MAIN_POOL] if engine.window is None else [MAIN_POOL, WINDOW_POOL]
    return StepTensors(
        requests=[],
        token_ids=torch.zeros(lanes, dtype=torch.int64),
        positions=torch.zeros(lanes, dtype=torch.int64),
        query_start=torch.arange(lanes + 1),
        lengths=torch.ones(lanes, dtype=torch.int64),
        table_rows=torch.zeros(0, dtype=torch.int64),
        slots={name: torch.full((lanes,), SKIP_SLOT) for name in pools},
        logits_of=torch.zeros(0, dtype=torch.int64),
    )
