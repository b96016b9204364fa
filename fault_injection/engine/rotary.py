"""Rotary position embedding: a table that grows with the longest sequence met, and its application."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Llama3Scaling", "RotaryTable", "rotate"]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of slow frequencies, under its names in `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


def _frequencies(head_dim: int, theta: float, scaling: Llama3Scaling | None) -> Tensor:
    """Return radians per position for each pair of dimensions: float32 [head_dim / 2]."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    # 0 where a frequency turns too seldom to be kept (fully stretched), 1 where it is fast enough to stay as it is.
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


class RotaryTable:
    """Cosines and sines by position, computed once for positions up to the longest asked for, doubling."""

    def __init__(self, *, head_dim: int, theta: float, scaling: Llama3Scaling | None) -> None:
        """Prepare an empty table for an even `head_dim`."""
        self._frequencies = _frequencies(head_dim, theta, scaling)
        self._table = torch.empty(0, 2, head_dim)

    def rows(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return cosine and signed sine, float32 [tokens, 1, head_dim], for int64 `positions` [tokens].

        `longest` bounds the positions from above and is known to the host, so that growing needs no look at data.
        Positions outside the table, which only a fault produces, take its nearest row.
        """
        if longest > self._table.shape[0]:
            self._table = self._computed(max(longest, 2 * self._table.shape[0], 512))
        chosen = self._table.index_select(0, positions.clamp(0, self._table.shape[0] - 1))
        return chosen[:, :1], chosen[:, 1:]

    def _computed(self, length: int) -> Tensor:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
        # The sine's first half is negated here, once, instead of the states' second half at each use.
        cosine = torch.cat((angles.cos(), angles.cos()), dim=1)
        sine = torch.cat((-angles.sin(), angles.sin()), dim=1)
        return torch.stack((cosine, sine), dim=1)


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return float32 `states` [tokens, heads, head_dim] turned by the rows that `RotaryTable.rows` gave."""
    swapped = torch.roll(states, states.shape[2] // 2, dims=2)
    return torch.addcmul(states * cosine, swapped, sine)
