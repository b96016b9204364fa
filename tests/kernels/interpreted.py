"""Our Triton kernels under Triton's interpreter, and a runner that feeds many cases to one launch of a step.

TRITON_INTERPRET counts when Triton and the kernels are imported, parts of it at the first launch. It is set for as long
as that takes and put back: what other tests start in processes of their own is compiled as ever.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvguard.kernels.verify_pages import verify_step
from kvguard.kernels.verify_pages.descriptor import PoolStep, describe
from tests.kernels.cases import Case, Int64, Outcome

EVIDENCE_PLACES, EVIDENCE_WIDTH = 2, 9


@contextmanager
def interpreting() -> Iterator[None]:
    """TRITON_INTERPRET=1 for the time being."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if "triton" in sys.modules and "kvguard.kernels.verify_pages.triton_op" not in sys.modules:
    raise RuntimeError("Triton was imported before TRITON_INTERPRET could be set: import this module first")
with interpreting():
    import kvguard.kernels.pair_windows.triton_op
    import kvguard.kernels.publish_row.triton_op
    import kvguard.kernels.retire_pages.triton_op
    import kvguard.kernels.scatter_tags.triton_op
    import kvguard.kernels.stamp_rows.triton_op
    import kvguard.kernels.verify_pages.triton_op
    import kvguard.kernels.verify_rows.triton_op
    import kvguard.kernels.verify_slots.triton_op
    import kvguard.kernels.verify_windows.triton_op
assert kvguard.kernels.verify_pages.triton_op.INTERPRETED


class Packer:
    """int64 arrays put one behind the other, as a step's delta has them."""

    def __init__(self) -> None:
        self.parts: list[Int64] = []
        self.words = 0

    def add(self, array: Int64) -> int:
        """Where it begins."""
        start = self.words
        self.parts.append(array.ravel())
        self.words += array.size
        return start

    def packed(self) -> Int64:
        """All of them."""
        return np.concatenate([*self.parts, np.zeros(1, np.int64)])


def strided_table(case: Case) -> torch.Tensor:
    """The case's table with the gaps it asks for, which hold 77, on a multiple of 64 bytes."""
    rows, columns = case.table.shape
    shape = (rows, columns * case.column_stride)
    size = rows * shape[1] * case.table.itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    wide = memory[start : start + size].view(case.table.dtype).reshape(shape)
    wide[:] = 77
    wide[:, :: case.column_stride] = case.table
    return torch.from_numpy(wide)[:, :: case.column_stride]


def pool_of(case: Case, packer: Packer | None = None, out: Packer | None = None) -> PoolStep:
    """The case as a pool of a step, its arrays appended to `packer`, and room for what it writes to `out`."""
    packer, out = packer or Packer(), out or Packer()
    rows = len(case.row_index)
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(getattr(case, name)).copy())
        for name in ("page_tag", "slot_mapping", "query_start")
    }
    offsets = {
        name: packer.add(getattr(case, name))
        for name in ("row_index", "expected", "extent_offset", "extent_start", "extent_stop")
    }
    return PoolStep(
        table=strided_table(case),
        rows=rows,
        columns=int(max(case.extent_stop, default=0)),
        key=case.key,
        split=case.split,
        null_page=case.null_page,
        neutral_page=case.neutral_page,
        skip_slot=-1,
        record=out.add(np.full((rows, 4), -1, np.int64)),
        evidence=out.add(np.full((EVIDENCE_PLACES, EVIDENCE_WIDTH), -7, np.int64)),
        evidence_row=out.add(np.full(EVIDENCE_PLACES, -1, np.int64)),
        evidence_places=EVIDENCE_PLACES,
        evidence_width=EVIDENCE_WIDTH,
        query_row=None if case.query_row is None else torch.from_numpy(case.query_row.copy()),
        **tensors,  # type: ignore[arg-type]
        **offsets,  # type: ignore[arg-type]
    )


def run_step(cases: Sequence[Case], *, backend: str, block: int, programs: int) -> list[Outcome]:
    """Every case as a pool of one launch; tensors on the CPU."""
    packer, out = Packer(), Packer()
    pools, places = [], []
    for case in cases:
        pool = pool_of(case, packer, out)
        pools.append(pool)
        places.append((pool.record, pool.evidence, pool.evidence_row, pool.rows))
    described, launch = describe(pools, block=block, programs=programs)
    packed, written = torch.from_numpy(packer.packed()), torch.from_numpy(out.packed())
    workspace = torch.zeros(max(1, launch.workspace_words), dtype=torch.int64)
    descriptors = torch.from_numpy(described)
    with interpreting():
        verify_step(
            backend=backend, launch=launch, descriptors=descriptors, packed=packed, out=written, workspace=workspace
        )
    assert not workspace.any(), "the workspace was not left at zero for the next launch"
    result, outcomes = written.numpy(), []
    for case, pool, (record, evidence, evidence_row, rows) in zip(cases, pools, places, strict=True):
        padding = np.delete(pool.table._base.numpy(), np.s_[:: case.column_stride], axis=1)
        assert (padding == 77).all(), "columns between the strided ones were written"
        outcomes.append(
            Outcome(
                table=pool.table.numpy().copy(),
                record=result[record : record + rows * 4].reshape(rows, 4),
                evidence=result[evidence : evidence + EVIDENCE_PLACES * EVIDENCE_WIDTH].reshape(EVIDENCE_PLACES, -1),
                evidence_row=result[evidence_row : evidence_row + EVIDENCE_PLACES],
                slot_mapping=pool.slot_mapping.numpy(),
            )
        )
    return outcomes
