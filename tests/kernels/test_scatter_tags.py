"""The tag mirror: both backends apply the same changes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.kernels.scatter_tags import scatter_tags


@given(st.integers(0, 40), st.dictionaries(st.integers(-3, 45), st.integers(-(2**63), 2**63 - 1), max_size=30))
@settings(max_examples=200, deadline=None)
def test_backends_agree_and_foreign_pages_are_ignored(num_pages: int, changes: dict[int, int]) -> None:
    """Pages inside the pool get their tag, pages outside change nothing, in both backends alike."""
    start = np.arange(1, num_pages + 1, dtype=np.int64) * (2**57 - 1)
    pages, tags = np.array(list(changes), np.int64), np.array(list(changes.values()), np.int64)
    oracle, tensor = start.copy(), torch.from_numpy(start.copy())
    scatter_tags(page_tag=oracle, pages=pages, tags=tags)
    scatter_tags(page_tag=tensor, pages=torch.from_numpy(pages), tags=torch.from_numpy(tags))
    assert np.array_equal(oracle, tensor.numpy())
    wanted = [changes.get(page, int(start[page])) for page in range(num_pages)]
    assert oracle.tolist() == wanted
