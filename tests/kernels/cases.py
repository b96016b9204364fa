"""Random and adversarial inputs for `verify_pages`, drawn by hypothesis, and a runner that feeds one backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvguard.kernels.verify_pages import verify_pages

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of `verify_pages`, as plain NumPy arrays."""

    table: npt.NDArray[np.integer]
    column_stride: int
    page_tag: Int64
    row_index: Int64
    expected: Int64
    extent_offset: Int64
    extent_start: Int64
    extent_stop: Int64
    key: int
    split: int
    null_page: int
    neutral_page: int
    slot_mapping: Int64
    query_start: Int64
    query_row: Int64 | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything a backend wrote."""

    table: npt.NDArray[np.integer]
    record: Int64
    evidence: Int64
    evidence_row: Int64
    slot_mapping: Int64


def int64(values: Any) -> Int64:
    return np.array(values, dtype=np.int64)


def run_case(case: Case, backend: str) -> Outcome:
    """Run the case on a backend, on the CPU, with strided tables where the case asks for them."""
    wide = np.full((case.table.shape[0], case.table.shape[1] * case.column_stride), 77, dtype=case.table.dtype)
    wide[:, :: case.column_stride] = case.table
    rows = len(case.row_index)
    record, evidence = np.full((rows, 4), -1, np.int64), np.full((2, 9), -7, np.int64)
    evidence_row, slots = np.full(2, -1, np.int64), case.slot_mapping.copy()
    wrap: Callable[[Any], Any]
    if backend == "numpy":
        wrap = lambda array: array  # noqa: E731
    else:
        import torch

        wrap = torch.from_numpy
    table = wrap(wide)[:, :: case.column_stride]
    arrays: dict[str, Any] = {}
    names = ("page_tag", "row_index", "expected", "extent_offset", "extent_start", "extent_stop", "query_start")
    for name in names:
        arrays[name] = wrap(getattr(case, name).copy())
    verify_pages(
        table=table,
        columns=int(max(case.extent_stop, default=0)),
        key=case.key,
        split=case.split,
        null_page=case.null_page,
        neutral_page=case.neutral_page,
        record=wrap(record),
        evidence=wrap(evidence),
        evidence_row=wrap(evidence_row),
        slot_mapping=wrap(slots),
        query_row=None if case.query_row is None else wrap(case.query_row.copy()),
        backend=backend,
        **arrays,
    )
    padding = np.delete(wide, np.s_[:: case.column_stride], axis=1)
    assert (padding == 77).all(), "columns between the strided ones were written"
    return Outcome(
        table=wide[:, :: case.column_stride].copy(),
        record=record,
        evidence=evidence,
        evidence_row=evidence_row,
        slot_mapping=slots,
    )


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    rows_max: int = 6,
    extents_max: int = 3,
    dtypes: tuple[Any, ...] = (np.int32, np.int64),
    splits: tuple[int, ...] = (1, 1, 2, 4),
    column_counts: tuple[int, ...] = tuple(range(8)),
    column_strides: tuple[int, ...] = (1, 1, 3),
) -> Case:
    """Small tables full of trouble: null, vacant, negative and out-of-range entries, several extents, aliased rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    split = draw(st.sampled_from(splits))
    rows = draw(st.integers(0, rows_max))
    columns, num_pages = draw(st.sampled_from(column_counts)), draw(st.integers(1, 9))
    table_rows = draw(st.integers(0, 7))
    sound = draw(st.booleans())
    tags = rng.integers(1, 2**63 - 1, num_pages) * (rng.random(num_pages) < 0.8)
    low, high = (0, num_pages * split) if sound else (-2, num_pages * split + 3)
    table = rng.integers(low, max(high, low + 1), (table_rows, columns * split))
    if sound and split > 1 and table.size:
        table = np.repeat(table[:, ::split] // split * split, split, axis=1) + np.arange(columns * split) % split
    table = table.astype(draw(st.sampled_from(dtypes)))
    offset, start, stop = [0], [], []
    for _ in range(rows):
        position = 0
        for _ in range(draw(st.integers(1, extents_max))):
            first = position + int(rng.integers(0, 3))
            start.append(first)
            stop.append(first + int(rng.integers(0, 4)))
            position = stop[-1] + 1
        offset.append(len(start))
    tokens = draw(st.integers(0, 12))
    query_row = int64(rng.permutation(rows)) if draw(st.booleans()) else None
    return Case(
        table=table,
        column_stride=draw(st.sampled_from(column_strides)),
        page_tag=int64(tags),
        row_index=int64(rng.integers(-1, table_rows + 1, rows)),
        expected=int64(rng.integers(-(2**62), 2**62, rows)),
        extent_offset=int64(offset),
        extent_start=int64(start),
        extent_stop=int64(stop),
        key=draw(st.integers(0, 2**64 - 1)),
        split=split,
        null_page=draw(st.sampled_from([-1, 0, 1])),
        neutral_page=draw(st.sampled_from([-1, 0])),
        slot_mapping=int64(rng.integers(0, 99, tokens)),
        query_start=int64(np.sort(rng.integers(0, tokens + 1, rows + 1))),
        query_row=query_row,
    )


def with_right_digests(case: Case) -> Case:
    """The same case, expecting what the oracle computes: rows with no other fault are then clean."""
    record = run_case(case, "numpy").record
    values = dict(vars(case))
    values["expected"] = record[:, 1].copy()
    return Case(**values)


def clean_case(
    *, rows: int, columns: int, split: int = 1, dtype: Any = np.int32, seed: int = 0, num_pages: int = 0
) -> Case:
    """Rows of the given length, each with pages of its own, and the digests they should have."""
    rng = np.random.default_rng(seed)
    num_pages = num_pages or rows * columns + 1
    pages = (rng.permutation(num_pages - 1)[: rows * columns] + 1).reshape(rows, columns)
    table = (pages[:, :, None] * split + np.arange(split)).reshape(rows, columns * split).astype(dtype)
    case = Case(
        table=table,
        column_stride=1,
        page_tag=int64(rng.integers(1, 2**62, num_pages)),
        row_index=int64(range(rows)),
        expected=int64([0] * rows),
        extent_offset=int64(range(rows + 1)),
        extent_start=int64([0] * rows),
        extent_stop=int64([columns] * rows),
        key=int(rng.integers(0, 2**63)),
        split=split,
        null_page=0,
        neutral_page=0,
        slot_mapping=int64(range(rows)),
        query_start=int64(range(rows + 1)),
    )
    return with_right_digests(case)
