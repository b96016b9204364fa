"""Low-rank adapters on the projections to queries, keys and values: small, random, and different in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["LoraAdapter", "add_deltas", "random_adapter"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoraAdapter:
    """down: per layer float32 [hidden, rank]; up: per layer float32 [rank, query, key and value features]."""

    down: tuple[Tensor, ...]
    up: tuple[Tensor, ...]


@lru_cache(maxsize=32)
def random_adapter(
    name: str, *, layers: int, hidden: int, outputs: int, rank: int = 2, strength: float = 0.3
) -> LoraAdapter:
    """The adapter of this name for a model of this shape: the same name gives the same weights."""
    generator = torch.Generator().manual_seed(int.from_bytes(name.encode()[:7].ljust(7, b"."), "little"))

    def drawn(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn((rows, columns), generator=generator) * scale

    return LoraAdapter(
        down=tuple(drawn(hidden, rank, hidden**-0.5) for _ in range(layers)),
        up=tuple(drawn(rank, outputs, strength) for _ in range(layers)),
    )


def add_deltas(
    projected: Tensor, states: Tensor, layer: int, adapters: Sequence[tuple[int, int, LoraAdapter]]
) -> Tensor:
    """`projected` [tokens, outputs] plus each adapter's delta of `states` [tokens, hidden] in tokens [start, stop)."""
    for start, stop, adapter in adapters:
        delta = states[start:stop].float() @ adapter.down[layer] @ adapter.up[layer]
        projected[start:stop] += delta.to(projected.dtype)
    return projected
