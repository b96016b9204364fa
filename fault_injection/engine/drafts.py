"""Speculation by prompt look-up: what followed the last few tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence

NGRAMS = (3, 2)
"""Lengths of the tail that is looked for, the longest first: a longer match is more often right."""


def draft(tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that may come next: those behind the latest earlier occurrence of the tail; often none."""
    for length in NGRAMS:
        tail = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == tail:
                return list(tokens[start + length : start + length + count])
    return []


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading drafts are what the model says itself; `sampled`: its tokens before and after each draft."""
    for place, token in enumerate(drafts):
        if sampled[place] != token:
            return place
    return len(drafts)
