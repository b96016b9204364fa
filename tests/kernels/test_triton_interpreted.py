"""The Triton kernels, under Triton's interpreter, against the oracle: all backends write the same bytes everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.kernels.cases import Case, cases, run_case, with_right_digests
from tests.kernels.interpreted import run_step

pytestmark = pytest.mark.slow

SEED = 20_261
CASES_MIN = 5000
LAYOUTS: dict[str, dict[str, Any]] = {
    "int32, 16 bytes at a time": {"dtypes": (np.int32,), "column_counts": (4, 8), "column_strides": (1,)},
    "int64, 16 bytes at a time": {"dtypes": (np.int64,), "column_counts": (4, 8), "column_strides": (1,)},
    "int32, any strides": {"dtypes": (np.int32,)},
    "int64, any strides": {"dtypes": (np.int64,)},
    "both in one launch": {},
}
SPLITS: dict[bool, tuple[int, ...]] = {False: (1,), True: (1, 2, 3, 4)}
counted: dict[str, int] = {}


@st.composite
def batches(draw: st.DrawFn, /, name: str, splits: tuple[int, ...], **limits: Any) -> list[Case]:
    """Pools of one launch; every other one expects the digests that it has."""
    drawn = draw(st.lists(cases(splits=splits, **(LAYOUTS[name] | limits)), min_size=14, max_size=14))
    return [with_right_digests(case) if index % 2 else case for index, case in enumerate(drawn)]


def require_equal(batch: list[Case], outcomes: list[Any]) -> None:
    """The oracle, torch and `outcomes` are the same, in every field."""
    for case, outcome in zip(batch, outcomes, strict=True):
        oracle, portable = run_case(case, "numpy"), run_case(case, "torch")
        for field in dataclasses.fields(oracle):
            wanted = getattr(oracle, field.name)
            assert np.array_equal(wanted, getattr(portable, field.name)), (field.name, "torch", case)
            found = getattr(outcome, field.name)
            assert np.array_equal(wanted, found), (field.name, wanted, found, case)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_pools_in_one_launch_agree_with_the_oracle(name: str, split: bool) -> None:
    """Pools of all shapes, sound and broken, a dozen to a launch."""

    @seed(SEED)
    @given(batches(name, SPLITS[split], rows_max=2, extents_max=2))
    @settings(max_examples=38, deadline=None, database=None)
    def check(batch: list[Case]) -> None:
        require_equal(batch, run_step(batch, backend="triton", block=16, programs=1))
        counted[name] = counted.get(name, 0) + len(batch)

    check()


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_cut_into_parts_agree_with_the_oracle(name: str) -> None:
    """The same with rows of several blocks that several programs share, and up to six rows of three extents."""

    @seed(SEED)
    @given(batches(name, SPLITS[True]), st.sampled_from([1, 20, 1000]))
    @settings(max_examples=2, deadline=None, database=None)
    def check(batch: list[Case], programs: int) -> None:
        require_equal(batch, run_step(batch, backend="triton", block=4, programs=programs))
        counted[name] = counted.get(name, 0) + len(batch)

    check()


def test_there_were_enough_cases(record_property: Any) -> None:
    """At least 5,000 pools were compared by the two tests above."""
    print(f"{sum(counted.values())} cases, seed {SEED}: {counted}")
    record_property("kernel_cases", sum(counted.values()))
    if len(counted) < len(LAYOUTS):
        pytest.skip("only some of the tests above were run")
    assert sum(counted.values()) >= CASES_MIN
