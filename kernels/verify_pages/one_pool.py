"""`verify_pages` of one pool on a GPU: the step's launch with a single pool, made up afresh for each call.

For tests, tools and engines with one pool that are in no hurry: it uploads a descriptor and clears a workspace each
time. A Verifier keeps both (`kvguard/fused.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvguard.kernels.arrays import is_dense, upload_beside, words_from, zeros_beside
from kvguard.kernels.verify_pages.descriptor import PoolStep, describe


def verify_pages(
    launch_step: Callable[..., None],
    *,
    table: Any,
    page_tag: Any,
    row_index: Any,
    expected: Any,
    extent_offset: Any,
    extent_start: Any,
    extent_stop: Any,
    columns: int,
    key: int,
    split: int,
    null_page: int,
    neutral_page: int,
    record: Any,
    evidence: Any,
    evidence_row: Any,
    slot_mapping: Any,
    query_start: Any,
    query_row: Any,
    skip_slot: int,
) -> None:
    """See `kvguard.kernels.verify_pages.verify_pages`. `launch_step`: a backend's `verify_step`."""
    rows = int(row_index.shape[0])
    if rows == 0:
        return
    for name, array in (("record", record), ("evidence", evidence), ("evidence_row", evidence_row)):
        if not is_dense(array):
            raise ValueError(f"{name} must have no gaps")
    # Every array is named by its distance from one of them, so that nothing is copied together.
    packed, out = row_index, record
    pool = PoolStep(
        table=table,
        page_tag=page_tag,
        rows=rows,
        columns=columns,
        split=split,
        null_page=null_page,
        neutral_page=neutral_page,
        skip_slot=skip_slot,
        row_index=0,
        expected=words_from(packed, expected),
        extent_offset=words_from(packed, extent_offset),
        extent_start=words_from(packed, extent_start),
        extent_stop=words_from(packed, extent_stop),
        record=0,
        evidence=words_from(out, evidence),
        evidence_row=words_from(out, evidence_row),
        evidence_places=int(evidence_row.shape[0]),
        evidence_width=int(evidence.shape[1]),
        key=key,
        slot_mapping=slot_mapping,
        query_start=query_start,
        query_row=query_row,
    )
    described, launch = describe([pool])
    launch_step(
        launch=launch,
        descriptors=upload_beside(table, described),
        packed=packed,
        out=out,
        workspace=zeros_beside(table, launch.workspace_words),
    )
