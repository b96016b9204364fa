"""Random and broken inputs for `verify_pages` on a device, against the oracle. Needs NumPy and torch only.

Cases are drawn from a seed; every other one expects the digests that it has, so that sound rows are clean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.arrays import words_from, zeros_beside
from kvguard.kernels.scatter_tags import scatter_tags
from kvguard.kernels.verify_pages import layout, verify_pages, verify_step
from kvguard.kernels.verify_pages.descriptor import PoolStep, describe

Int64 = npt.NDArray[np.int64]
PLACES, WIDTH = 2, 24


@dataclass(kw_only=True)
class Inputs:
    """The arrays of one pool, NumPy's or a backend's; see `verify_pages`."""

    table: Any
    page_tag: Any
    row_index: Any
    expected: Any
    extent_offset: Any
    extent_start: Any
    extent_stop: Any
    slot_mapping: Any
    query_start: Any
    query_row: Any
    record: Any
    evidence: Any
    evidence_row: Any

    def moved(self, move: Callable[[Any], Any]) -> Inputs:
        """The same on another device, or back."""
        return Inputs(**{field.name: move(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pool: its arrays and the numbers that go with them."""

    inputs: Inputs
    numbers: dict[str, int]


def draw(rng: np.random.Generator, *, columns_max: int) -> Case:
    """A small table full of trouble, in one of the layouts that engines have."""
    split, rows = int(rng.choice([1, 1, 2, 3])), int(rng.integers(0, 9))
    columns, num_pages = int(rng.integers(1, columns_max)), int(rng.integers(1, 60))
    table_rows, sound = int(rng.integers(1, 10)), bool(rng.random() < 0.6)
    low, high = (0, num_pages * split) if sound else (-2, num_pages * split + 3)
    wide, step = bool(rng.random() < 0.4), int(rng.choice([1, 1, 2]))
    memory = rng.integers(low, high, (table_rows, -(-columns * split // 4) * 4 * step))
    if sound and split > 1:
        memory = np.repeat(memory[:, ::split] // split * split, split, axis=1)[:, : memory.shape[1]]
        memory += np.arange(memory.shape[1]) % split
    table = memory.astype(np.int64 if wide else np.int32)[:, ::step]
    offset, start, stop = [0], [], []
    for _ in range(rows):
        position = 0
        for _ in range(int(rng.integers(1, 4))):
            first = position + int(rng.integers(0, 3))
            start.append(first)
            stop.append(first + int(rng.integers(0, columns)))
            position = stop[-1] + 1
        offset.append(len(start))
    tokens = int(rng.integers(0, 30))
    ints = [np.array(values, np.int64) for values in (offset, start, stop)]
    inputs = Inputs(
        table=table,
        page_tag=rng.integers(1, 2**63 - 1, num_pages) * (rng.random(num_pages) < 0.9),
        row_index=rng.integers(-1, table_rows + 1, rows) if not sound else rng.integers(0, table_rows, rows),
        expected=rng.integers(-(2**62), 2**62, rows),
        extent_offset=ints[0],
        extent_start=ints[1],
        extent_stop=ints[2],
        slot_mapping=rng.integers(0, 99, tokens),
        query_start=np.sort(rng.integers(0, tokens + 1, rows + 1)).astype(np.int32 if wide else np.int64),
        query_row=rng.permutation(rows),
        record=np.full((rows, layout.RECORD_WORDS), -1, np.int64),
        evidence=np.full((PLACES, WIDTH), -7, np.int64),
        evidence_row=np.full(PLACES, -1, np.int64),
    )
    numbers = {
        "columns": int(max(stop, default=0)),
        "key": int(rng.integers(0, 2**63)),
        "split": split,
        "null_page": int(rng.choice([-1, 0, 1])),
        "neutral_page": int(rng.choice([-1, 0])),
        "skip_slot": -1,
    }
    case = Case(inputs=inputs, numbers=numbers)
    if rng.random() < 0.5:
        inputs.expected = after(case, "numpy", np.copy).record[:, layout.DIGEST].copy()
    return case


def after(case: Case, backend: str, move: Callable[[Any], Any]) -> Inputs:
    """The arrays on `backend`, moved there by `move`, after one call of `verify_pages`."""
    inputs = case.inputs.moved(move)
    arrays = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    verify_pages(**arrays, **case.numbers, backend=backend)
    return inputs


def after_one_launch(cases: list[Case], backend: str, move: Callable[[Any], Any]) -> list[Inputs]:
    """The same with every case as a pool of one launch."""
    moved = [case.inputs.moved(move) for case in cases]
    packed, out = move(np.zeros(1, np.int64)), move(np.zeros(1, np.int64))
    pools = [
        PoolStep(
            table=inputs.table,
            page_tag=inputs.page_tag,
            rows=int(inputs.row_index.shape[0]),
            evidence_places=PLACES,
            evidence_width=WIDTH,
            slot_mapping=inputs.slot_mapping,
            query_start=inputs.query_start,
            query_row=inputs.query_row,
            record=words_from(out, inputs.record),
            evidence=words_from(out, inputs.evidence),
            evidence_row=words_from(out, inputs.evidence_row),
            row_index=words_from(packed, inputs.row_index),
            expected=words_from(packed, inputs.expected),
            extent_offset=words_from(packed, inputs.extent_offset),
            extent_start=words_from(packed, inputs.extent_start),
            extent_stop=words_from(packed, inputs.extent_stop),
            **case.numbers,  # type: ignore[arg-type]
        )
        for case, inputs in zip(cases, moved, strict=True)
    ]
    described, launch = describe(pools)
    workspace = zeros_beside(packed, max(1, launch.workspace_words))
    verify_step(
        backend=backend, launch=launch, descriptors=move(described), packed=packed, out=out, workspace=workspace
    )
    return moved


def require_equal(wanted: Inputs, found: Inputs, what: str) -> None:
    """AssertionError, which names the case, unless every array holds the same."""
    for field in fields(wanted):
        left, right = getattr(wanted, field.name), np.asarray(getattr(found, field.name))
        assert np.array_equal(left, right), f"{what}: {field.name} is {right.tolist()}, not {left.tolist()}"


def compare(
    backend: str, move: Callable[[Any], Any], back: Callable[[Any], Any], *, seed: int, cases: int, columns_max: int
) -> int:
    """Compare so many cases, a third of them through the front for one pool; how many were compared.

    `move` and `back` bring an array to the backend and to NumPy. AssertionError where a backend differs.
    """
    rng, fused = np.random.default_rng(seed), backend in ("triton", "cupy")
    compared = 0
    while compared < cases:
        batch = [draw(rng, columns_max=columns_max) for _ in range(16)]
        what = f"{backend}, seed {seed}, cases from {compared}"
        wanted = [after(case, "numpy", np.copy) for case in batch]
        if fused and compared % 3:
            found = [inputs.moved(back) for inputs in after_one_launch(batch, backend, move)]
        else:
            found = [after(case, backend, move).moved(back) for case in batch]
        for one, other in zip(wanted, found, strict=True):
            require_equal(one, other, what)
        tags, pages = rng.integers(1, 2**62, 500), rng.permutation(np.arange(-5, 700))[: int(rng.integers(0, 500))]
        oracle, mirror = tags.copy(), move(tags)
        scatter_tags(page_tag=oracle, pages=pages, tags=pages * 3)
        scatter_tags(page_tag=mirror, pages=move(pages), tags=move(pages * 3), backend=backend)
        assert np.array_equal(oracle, back(mirror)), f"{what}: scatter_tags"
        compared += len(batch)
    return compared
