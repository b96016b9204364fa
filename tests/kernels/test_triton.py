"""What the Triton kernels must get right one by one, under Triton's interpreter; quick enough for every change."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from kvguard.kernels.scatter_tags import scatter_step, scatter_tags
from kvguard.kernels.scatter_tags.descriptor import describe_scatter
from kvguard.kernels.verify_pages import layout, verify_pages
from kvguard.kernels.verify_pages.descriptor import BLOCK, MIXED, NARROW, PROGRAMS, WIDE, describe
from tests.kernels.cases import Case, clean_case, int64, run_case, with_right_digests
from tests.kernels.interpreted import Packer, interpreting, pool_of, run_step

MAP_NORESERVE = 0x4000
"""Linux's flag for address space that no memory is set aside for."""


def changed(case: Case, **fields: Any) -> Case:
    return dataclasses.replace(case, **fields)


def with_entries(case: Case, *entries: tuple[int, int, int]) -> Case:
    """The case with (row, column, entry) written into its table."""
    table = case.table.copy()
    for row, column, entry in entries:
        table[row, column] = entry
    return changed(case, table=table)


def broken_cases() -> dict[str, Case]:
    """One of everything that can be wrong with a row, in tables of both types."""
    plain, pieces = clean_case(rows=3, columns=4), clean_case(rows=2, columns=3, split=4)
    wide = clean_case(rows=3, columns=8, dtype=np.int64, seed=4)
    gap = with_right_digests(
        changed(
            clean_case(rows=2, columns=9),
            extent_offset=int64([0, 2, 3]), extent_start=int64([1, 6, 0]), extent_stop=int64([3, 9, 9]),
        )
    )  # fmt: skip
    vacant = plain.page_tag.copy()
    vacant[plain.table[1, 2]] = 0
    shared = changed(plain, row_index=int64([1, 1, 2]), extent_start=int64([0, 2, 0]), extent_stop=int64([2, 4, 4]))
    return {
        "clean": plain,
        "clean, int64": wide,
        "clean, in pieces": pieces,
        "clean, with a gap": gap,
        "another row's page": with_entries(plain, (1, 2, plain.table[0, 0])),
        "a null page": with_entries(plain, (2, 3, 0)),
        "a negative entry": with_entries(wide, (0, 7, -3)),
        "an entry past the pool": with_entries(wide, (0, 5, 2**40)),
        "an entry past the pool, int32": with_entries(plain, (0, 3, 2**31 - 1)),
        "a vacant page": changed(plain, page_tag=vacant),
        "pages swapped": with_entries(plain, (0, 0, plain.table[0, 1]), (0, 1, plain.table[0, 0])),
        "a displaced piece": with_entries(pieces, (0, 5, pieces.table[0, 6])),
        "another page's piece": with_entries(pieces, (1, 6, pieces.table[0, 6])),
        "a negative piece": with_entries(pieces, (0, 4, -1), (0, 5, -2)),
        "columns past the table": changed(plain, extent_stop=int64([6, 4, 4])),
        "an extent past the table": changed(plain, extent_start=int64([9, 0, 0]), extent_stop=int64([11, 4, 4])),
        "a row outside of the table": changed(plain, row_index=int64([0, 3, -1])),
        "rows that share a table row": with_entries(shared, (1, 3, 0)),
        "slots by place": with_entries(
            changed(plain, query_row=int64([2, 0, 1]), query_start=int64([0, 1, 3, 6]), slot_mapping=int64(range(7))),
            (0, 0, 0), (1, 1, 0),
        ),
        "an int64 neutral entry": with_entries(changed(wide, split=1), (1, 1, 0)),
        "only observed": with_entries(changed(plain, neutral_page=-1), (1, 1, 0)),
        "a null page that is not page 0": changed(plain, null_page=int(plain.table[0, 2])),
        "more flagged rows than places for evidence": with_entries(plain, (0, 1, 0), (1, 1, 0), (2, 1, 0)),
        "a gap that is broken": with_entries(gap, (0, 7, 0)),
        "several extents that are neutralised": with_entries(gap, (0, 1, gap.table[1, 1])),
        "an expectation that is off by one bit": changed(plain, expected=plain.expected ^ int64([0, -(2**63), 0])),
    }  # fmt: skip


BROKEN = broken_cases()


@pytest.mark.parametrize("block,programs", [(4, 1), (4, 1000)])
def test_whatever_is_wrong_with_a_row_is_written_as_the_oracle_writes_it(block: int, programs: int) -> None:
    """Every kind of fault as a pool of one launch, rows in one part and in several: the same bytes everywhere."""
    outcomes = run_step(list(BROKEN.values()), backend="triton", block=block, programs=programs)
    for (name, case), outcome in zip(BROKEN.items(), outcomes, strict=True):
        oracle = run_case(case, "numpy")
        for field in dataclasses.fields(oracle):
            assert np.array_equal(getattr(oracle, field.name), getattr(outcome, field.name)), (name, field.name)
        assert (oracle.record[:, layout.FLAGS] == 0).all() == name.startswith("clean"), name


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tables_of_one_type_are_read_16_bytes_at_a_time(dtype: Any) -> None:
    """The launch that a usual engine gets: aligned tables of one type, extents that begin and end within a group."""
    case = clean_case(rows=2, columns=12, dtype=dtype, num_pages=40)
    ragged = with_right_digests(changed(case, extent_start=int64([3, 0]), extent_stop=int64([10, 5])))
    foreign, unread = (0, 9, int(ragged.table[1, 1])), ((1, 5, 0), (0, 2, 0))
    for broken in (ragged, with_entries(ragged, foreign), with_entries(ragged, *unread)):
        (outcome,) = run_step([broken], backend="triton", block=8, programs=1000)
        assert np.array_equal(run_case(broken, "numpy").record, outcome.record)
        assert np.array_equal(run_case(broken, "numpy").table, outcome.table)


def test_one_pool_through_the_usual_front() -> None:
    """`verify_pages` takes the backend by name and gives what the oracle gives; a step without rows does nothing."""
    for name in ("clean", "another row's page", "slots by place"):
        with interpreting():
            found = run_case(BROKEN[name], "triton")
        wanted = run_case(BROKEN[name], "numpy")
        for field in dataclasses.fields(wanted):
            assert np.array_equal(getattr(wanted, field.name), getattr(found, field.name)), (name, field.name)
    with interpreting():
        run_case(clean_case(rows=0, columns=0), "triton")


@pytest.mark.parametrize("place", [-1, 2, 99])
def test_a_row_without_a_place_in_the_batch_drops_nobodys_writes(place: int) -> None:
    """It is flagged like any other; an index outside of `query_start` is no index."""
    case = with_entries(clean_case(rows=2, columns=2), (1, 0, 1))
    case = changed(case, query_start=int64([0, 1, 2]), slot_mapping=int64([5, 6]), query_row=int64([0, place]))
    with interpreting():
        found = run_case(case, "triton")
    wanted = run_case(case, "numpy")
    assert found.record[1, layout.FLAGS] and found.slot_mapping.tolist() == [5, 6]
    assert np.array_equal(found.record, wanted.record) and np.array_equal(found.table, wanted.table)


def test_arrays_with_gaps_and_of_other_types_are_refused() -> None:
    """What a kernel would read wrongly is refused with a message, before anything is launched."""
    case = BROKEN["clean"]
    arrays: dict[str, Any] = {
        name: torch.from_numpy(np.ascontiguousarray(getattr(case, name)).copy())
        for name in ("table", "page_tag", "row_index", "expected", "extent_offset", "extent_start", "extent_stop")
    } | {
        "record": torch.zeros((3, 4), dtype=torch.int64),
        "evidence": torch.zeros((2, 8), dtype=torch.int64),
        "evidence_row": torch.zeros(2, dtype=torch.int64),
    }
    for name, wrong in (
        ("record", torch.zeros((3, 8), dtype=torch.int64)[:, ::2]),
        ("page_tag", torch.zeros(64, dtype=torch.int64)[::2]),
        ("expected", torch.zeros(3, dtype=torch.int32)),
        ("table", arrays["table"].to(torch.int16)),
    ):
        with pytest.raises(ValueError, match="gaps|int32 or int64"):
            verify_pages(**(arrays | {name: wrong}), columns=4, key=1, backend="triton")


def test_tag_changes_of_several_pools_in_one_launch() -> None:
    """Each pool gets its own changes; pages outside of a pool change nothing; 300 changes take two programs."""
    packer, pools, wanted = Packer(), [], []
    rng = np.random.default_rng(3)
    descriptors = []
    for num_pages, changes in ((5, 0), (400, 300), (9, 4)):
        page_tag = rng.integers(1, 2**62, num_pages)
        pages = rng.permutation(np.arange(-2, num_pages + 2))[:changes]
        tags = rng.integers(-(2**62), 2**62, changes)
        oracle, tensor = page_tag.copy(), torch.from_numpy(page_tag.copy())
        scatter_tags(page_tag=oracle, pages=pages, tags=tags)
        descriptors.append(
            describe_scatter(page_tag=tensor, pages=packer.add(pages), tags=packer.add(tags), changes=changes)
        )
        pools.append(tensor)
        wanted.append(oracle)
    with interpreting():
        scatter_step(
            backend="triton",
            pools=3,
            changes=300,
            descriptors=torch.from_numpy(np.array(descriptors, np.int64)),
            packed=torch.from_numpy(packer.packed()),
        )
    for oracle, tensor in zip(wanted, pools, strict=True):
        assert np.array_equal(oracle, tensor.numpy())


def test_tag_changes_of_one_pool_through_the_usual_front() -> None:
    """`scatter_tags` takes the backend by name; without changes it does nothing."""
    for pages in ([], [0, 3, 4, -1]):
        tensor = torch.arange(1, 5)
        tags = torch.arange(len(pages)) + 2**40
        with interpreting():
            scatter_tags(page_tag=tensor, pages=torch.tensor(pages, dtype=torch.int64), tags=tags, backend="triton")
        assert tensor.tolist() == ([2**40, 2, 3, 2**40 + 1] if pages else [1, 2, 3, 4])


def test_offsets_of_big_tables_have_64_bits() -> None:
    """A row 2**33 bytes from the table's beginning is read where it lies: the stride is that of a table that big."""
    case = with_right_digests(BROKEN["another row's page"])
    wanted = run_case(case, "numpy").record
    # Address space without memory behind it: only the pages that are touched exist.
    stride = 2**33
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    with mmap.mmap(-1, 2 * stride + 4096, flags=flags) as space:
        memory = torch.frombuffer(space, dtype=torch.int32)
        table = memory.as_strided(case.table.shape, (stride // 4, 1))
        table.copy_(torch.from_numpy(case.table))
        record = torch.full((3, 4), -1, dtype=torch.int64)
        arrays: dict[str, Any] = {
            name: torch.from_numpy(getattr(case, name).copy())
            for name in ("page_tag", "row_index", "expected", "extent_offset", "extent_start", "extent_stop")
        }
        with interpreting():
            verify_pages(
                table=table, columns=4, key=case.key, null_page=0, neutral_page=0, record=record, **arrays,
                evidence=torch.zeros((1, 4), dtype=torch.int64), evidence_row=torch.zeros(1, dtype=torch.int64),
                backend="triton",
            )  # fmt: skip
        assert np.array_equal(record.numpy(), wanted)
        del memory, table


def test_the_launch_fits_the_work() -> None:
    """Few long rows are shared among programs, many short ones are not, and only what needs it takes the slow ways."""

    def launch(*cases: Case) -> Any:
        return describe([pool_of(case) for case in cases])[1]

    long = clean_case(rows=2, columns=4 * BLOCK)
    assert launch(long).chunks == 4 and launch(clean_case(rows=300, columns=8)).chunks == 1
    assert launch(clean_case(rows=PROGRAMS, columns=8), long).chunks == 1
    narrow, wide = clean_case(rows=2, columns=8), clean_case(rows=2, columns=8, dtype=np.int64)
    types = [launch(*pools).table_types for pools in ((narrow,), (wide,), (narrow, wide))]
    assert types == [NARROW, WIDE, MIXED]
    assert launch(narrow).vector and launch(wide).vector
    for case in (clean_case(rows=2, columns=7), changed(narrow, column_stride=3)):
        assert not launch(case).vector
    for split, (one, two) in itertools.product((False, True), ((narrow, wide), (wide, narrow))):
        pieces = [clean_case(rows=1, columns=2, split=2)] if split else []
        assert launch(one, two, *pieces).split == split
