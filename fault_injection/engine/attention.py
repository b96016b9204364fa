"""Paged attention for one step: which queries see which slots, worked out once and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvguard.fault_injection.engine.kv_cache import PagedKV

__all__ = ["AttentionPlan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _RowGroup:
    """Rows that are computed together, their queries padded to the longest."""

    query_tokens: Tensor | None
    """int64 [rows * max_query]: the token behind each padded query; None: the group is all tokens, in order."""
    answer_index: Tensor | None
    """int64 [tokens of the group]: where each real token's answer stands among the padded ones; None: in order."""
    tokens: Tensor | None
    """int64 [tokens of the group]: the step's tokens that the group holds; None: all."""
    slots: Tensor
    """int64 [rows, context]: the slot of each position; past a row's end, the slot of its last position."""
    mask: Tensor
    """float32 [rows, 1, group * max_query, context]: 0 where a query sees a key, else -inf."""
    max_query: int


class AttentionPlan:
    """Indices and masks of a step, made from its block table. Rows of one query and longer rows go apart.

    Decoding rows padded to the length of somebody's prompt chunk would cost as much as the chunk itself.
    """

    def __init__(
        self,
        *,
        kv: PagedKV,
        heads: int,
        positions: Tensor,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        window: int | None = None,
    ) -> None:
        """Read the block table once for all layers; arguments are as in `model.ForwardBatch`.

        `window`: tokens that a query sees, itself included; None: all up to itself.
        """
        self._kv = kv
        self._window = window
        self._heads = heads
        self._tokens = positions.shape[0]
        lengths = [end - start for start, end in zip(query_start, query_start[1:], strict=False)]
        single = [row for row, length in enumerate(lengths) if length == 1]
        longer = [row for row, length in enumerate(lengths) if length > 1]
        self._groups = [
            self._group(rows, positions, query_start, lengths, seq_lens, block_table)
            for rows in (single, longer)
            if rows
        ]

    def _group(
        self,
        rows: list[int],
        positions: Tensor,
        query_start: Sequence[int],
        lengths: list[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
    ) -> _RowGroup:
        kv = self._kv
        whole_batch = len(rows) == len(lengths)
        ends = torch.tensor([seq_lens[row] for row in rows]).unsqueeze(1)
        context = max(seq_lens[row] for row in rows)
        max_query = max(lengths[row] for row in rows)
        query_tokens = answer_index = tokens = None
        if not (whole_batch and max_query == 1):
            starts = torch.tensor([query_start[row] for row in rows]).unsqueeze(1)
            counts = torch.tensor([lengths[row] for row in rows]).unsqueeze(1)
            steps = torch.arange(max_query)
            # Padding repeats a row's last query: a real position, so that no softmax runs over nothing.
            query_tokens = (starts + torch.minimum(steps, counts - 1)).flatten()
            positions = positions.index_select(0, query_tokens)
            if max_query > 1:
                answer_index = (steps < counts).flatten().nonzero().squeeze(1)
            if not whole_batch:
                tokens = query_tokens if answer_index is None else query_tokens.index_select(0, answer_index)
        table = block_table if whole_batch else block_table.index_select(0, torch.tensor(rows))
        key_positions = torch.arange(context)
        slots = kv.slots(table, -(-context // kv.page_size))
        # A masked key still enters the arithmetic, and 0 times NaN is NaN: past its end a row reads its own last
        # slot again, never what stands in the rest of the page or in pages that pad the table.
        read = torch.minimum(key_positions, ends - 1)
        limits = torch.minimum(positions.clamp_min(0).view(len(rows), max_query), ends - 1)
        hidden = key_positions > limits.unsqueeze(2)
        if self._window is not None:
            first = limits - (self._window - 1)
            hidden |= key_positions < first.unsqueeze(2)
            # Nor what stands where the window of its earliest query has passed: those pages are somebody else's.
            read = torch.maximum(read, first.amin(1, keepdim=True))
        slots = slots.gather(1, read)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _RowGroup(
            query_tokens=query_tokens,
            answer_index=answer_index,
            tokens=tokens,
            slots=slots,
            mask=mask.repeat(1, self._heads // kv.kv_heads, 1).unsqueeze(1),
            max_query=max_query,
        )

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Return float32 [tokens, heads * head_dim] for float32 `query` [tokens, heads, head_dim].

        Keys and values come from the pages alone, this step's own included.
        """
        if len(self._groups) == 1:
            return self._attend_group(layer, query, self._groups[0])
        attended = torch.empty(self._tokens, self._heads * self._kv.head_dim)
        for group in self._groups:
            assert group.tokens is not None
            attended.index_copy_(0, group.tokens, self._attend_group(layer, query, group))
        return attended

    def _attend_group(self, layer: int, query: Tensor, group: _RowGroup) -> Tensor:
        key, value = self._kv.gather(layer, group.slots)
        if group.query_tokens is not None:
            query = query.index_select(0, group.query_tokens)
        rows, kv_heads, head_dim = group.slots.shape[0], self._kv.kv_heads, self._kv.head_dim
        sharing = self._heads // kv_heads
        # Heads that share a KV head become further queries of it, so that keys and values are never copied per head.
        query = query.view(rows, group.max_query, kv_heads, sharing, head_dim).permute(0, 2, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query.reshape(rows, kv_heads, sharing * group.max_query, head_dim),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=group.mask,
        )
        attended = attended.view(rows, kv_heads, sharing, group.max_query, head_dim).permute(0, 3, 1, 2, 4)
        answers = attended.reshape(rows * group.max_query, self._heads * head_dim)
        return answers if group.answer_index is None else answers.index_select(0, group.answer_index)
