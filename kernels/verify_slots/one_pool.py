"""`verify_slots` of one pool on a GPU: the step's launch with a single pool, made up afresh for each call.

For tests, tools and engines with one pool that are in no hurry: it uploads a descriptor and clears a workspace each
time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvguard.kernels.arrays import require_dense, upload_beside, words_from, zeros_beside
from kvguard.kernels.verify_slots.descriptor import SlotStep, describe_slots


def verify_slots_by(launch_step: Callable[..., None]) -> Callable[..., None]:
    """`verify_slots` by a backend's `verify_slots_step`."""
    return partial(_verify_slots, launch_step)


def _verify_slots(
    launch_step: Callable[..., None],
    *,
    slot_mapping: Any,
    query_start: Any,
    query_row: Any,
    lengths: Any,
    writer: Any,
    floor: Any,
    page_writer: Any,
    page_size: int,
    skip_slot: int,
    skip_allowed: bool,
    enforce: bool,
    record: Any,
    null_page: int,
) -> None:
    """See `kvguard.kernels.verify_slots.verify_slots` for the contract."""
    require_dense(writer=writer, floor=floor, record=record)
    # Every array is named by its distance from one of them, so that nothing is copied together.
    packed, out = writer, record
    pool = SlotStep(
        slot_mapping=slot_mapping,
        lengths=lengths,
        page_writer=page_writer,
        rows=int(writer.shape[0]),
        writer=0,
        floor=None if floor is None else words_from(packed, floor),
        page_size=page_size,
        skip_slot=skip_slot,
        skip_allowed=skip_allowed,
        enforce=enforce,
        record=0,
        null_page=null_page,
        query_start=query_start,
        query_row=query_row,
    )
    described, launch = describe_slots([pool])
    launch_step(
        launch=launch,
        descriptors=upload_beside(slot_mapping, described),
        packed=packed,
        out=out,
        workspace=zeros_beside(slot_mapping, launch.workspace_words),
    )
