"""The verification kernel: every backend against the oracle, and the oracle against the contract."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from kvguard.kernels.mixing import mix, mix_array, signed64
from kvguard.kernels.verify_pages import layout
from tests.kernels.cases import Case, cases, clean_case, int64, run_case, with_right_digests

BACKENDS = ("numpy", "torch")


def changed(case: Case, **fields: object) -> Case:
    return dataclasses.replace(case, **fields)  # type: ignore[arg-type]


@given(cases())
@settings(max_examples=1500, deadline=None)
def test_torch_agrees_with_the_oracle_bit_for_bit(case: Case) -> None:
    """On random and adversarial inputs both backends write the same bytes everywhere."""
    for variant in (case, with_right_digests(case)):
        oracle, torch_result = run_case(variant, "numpy"), run_case(variant, "torch")
        for field in dataclasses.fields(oracle):
            left, right = getattr(oracle, field.name), getattr(torch_result, field.name)
            assert np.array_equal(left, right), (field.name, left, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("rows,columns", [(0, 0), (1, 1), (3, 0), (7, 33), (256, 16), (4096, 2)])
def test_clean_rows_are_clean(backend: str, split: int, rows: int, columns: int) -> None:
    """Rows whose pages carry the promised tags get no flag and nothing is written to table or slots."""
    case = clean_case(rows=rows, columns=columns, split=split)
    outcome = run_case(case, backend)
    assert (outcome.record[:, layout.FLAGS] == 0).all()
    assert np.array_equal(outcome.table, case.table)
    assert np.array_equal(outcome.slot_mapping, case.slot_mapping)
    assert (outcome.evidence_row == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_single_wrong_page_is_seen_and_only_its_row_flagged(backend: str) -> None:
    """Any one entry that names another page, and any one tag that changed, flags exactly the rows that read it."""
    case = clean_case(rows=3, columns=4)
    for row in range(3):
        for column in range(4):
            table = case.table.copy()
            table[row, column] = case.table[(row + 1) % 3, column]
            flags = run_case(changed(case, table=table), backend).record[:, layout.FLAGS]
            assert (flags != 0).tolist() == [index == row for index in range(3)]
            tags = case.page_tag.copy()
            tags[case.table[row, column]] += 1
            flags = run_case(changed(case, page_tag=tags), backend).record[:, layout.FLAGS]
            assert (flags == layout.FLAG_DIGEST).tolist() == [index == row for index in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_swapped_pages_of_one_row_are_seen(backend: str) -> None:
    """The digest depends on the column: the right pages in the wrong order are flagged."""
    case = clean_case(rows=1, columns=3)
    table = case.table.copy()
    table[0, [0, 2]] = table[0, [2, 0]]
    assert run_case(changed(case, table=table), backend).record[0, layout.FLAGS] == layout.FLAG_DIGEST


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "entry,flag",
    [(0, layout.FLAG_NULL), (-1, layout.FLAG_RANGE), (10_000, layout.FLAG_RANGE), (2**31 - 1, layout.FLAG_RANGE)],
)
def test_null_and_out_of_range_entries_name_their_column(backend: str, entry: int, flag: int) -> None:
    """A null or out-of-range entry in the live extent is flagged with its column and its value."""
    case = clean_case(rows=2, columns=5)
    table = case.table.copy()
    table[1, 3] = entry
    record = run_case(changed(case, table=table), backend).record
    assert record[0, layout.FLAGS] == 0
    assert record[1].tolist()[0] == flag | layout.FLAG_DIGEST
    assert record[1].tolist()[2:] == [3, entry]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flagged_row_reads_the_null_page_and_writes_nowhere(backend: str) -> None:
    """Neutralising covers the row's live columns and its slots, keeps the rest, and saves the row as evidence."""
    case = clean_case(rows=3, columns=4)
    case = changed(
        case,
        table=np.hstack([case.table, np.full((3, 2), 99, np.int32)]),
        slot_mapping=int64([50, 51, 52, 53, 54, 55]),
        query_start=int64([0, 1, 4, 5]),
    )
    table = case.table.copy()
    table[1, 2] = case.table[0, 0]
    outcome = run_case(changed(case, table=table), backend)
    assert outcome.table[1].tolist() == [0, 0, 0, 0, 99, 99]
    assert np.array_equal(outcome.table[[0, 2]], case.table[[0, 2]])
    assert outcome.slot_mapping.tolist() == [50, -1, -1, -1, 54, 55]
    assert outcome.evidence_row.tolist() == [1, -1]
    assert outcome.evidence[0, :6].tolist() == table[1].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_are_dropped_at_the_rows_place_in_the_batch(backend: str) -> None:
    """Where checked rows stand in another order than the batch, `query_row` says whose tokens a flagged row has."""
    case = clean_case(rows=3, columns=2)
    table = case.table.copy()
    table[0, 0] = case.table[1, 0]
    case = changed(case, table=table, query_start=int64([0, 1, 3, 4]), slot_mapping=int64([5, 6, 7, 8]))
    outcome = run_case(changed(case, query_row=int64([1, 2, 0])), backend)
    assert outcome.slot_mapping.tolist() == [5, -1, -1, 8]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_behind_the_rows_is_nobodys(backend: str) -> None:
    """A batch that was padded to more places than there are rows: a flagged row drops its own writes, no others."""
    case = clean_case(rows=2, columns=2)
    table = case.table.copy()
    table[1, 0] = case.table[0, 0]
    case = changed(case, table=table, query_start=int64([0, 1, 2, 3, 5]), slot_mapping=int64([5, 6, 7, 8, 9]))
    assert run_case(case, backend).slot_mapping.tolist() == [5, -1, 7, 8, 9]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", [-1, 2, 99])
def test_a_row_without_a_place_in_the_batch_drops_nobodys_writes(backend: str, place: int) -> None:
    """It is flagged like any other; an index outside of `query_start` is no index."""
    case = clean_case(rows=2, columns=2)
    table = case.table.copy()
    table[1, 0] = case.table[0, 0]
    case = changed(case, table=table, query_start=int64([0, 1, 2]), slot_mapping=int64([5, 6]))
    outcome = run_case(changed(case, query_row=int64([0, place])), backend)
    assert outcome.record[:, layout.FLAGS].tolist() == [0, layout.FLAG_DIGEST]
    assert outcome.slot_mapping.tolist() == [5, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_outside_the_live_extents_do_not_matter(backend: str) -> None:
    """Whatever stands in dropped window columns, gaps and past the end is never looked at."""
    case = clean_case(rows=1, columns=8)
    case = changed(case, extent_offset=int64([0, 2]), extent_start=int64([1, 5]), extent_stop=int64([3, 7]))
    case = with_right_digests(case)
    table = case.table.copy()
    table[0, [0, 3, 4, 7]] = [-5, 0, 10_000, 2]
    outcome = run_case(changed(case, table=table), backend)
    assert outcome.record[0, layout.FLAGS] == 0
    assert outcome.table[0].tolist() == table[0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_displaced_kernel_page_is_seen(backend: str) -> None:
    """With kernel pages smaller than manager pages, each piece must be the right piece of the right page."""
    case = clean_case(rows=2, columns=3, split=4)
    for column, entry in ((5, case.table[0, 6]), (5, case.table[1, 5]), (4, case.table[0, 5])):
        table = case.table.copy()
        table[0, column] = entry
        record = run_case(changed(case, table=table), backend).record
        assert record[0, layout.FLAGS] & layout.FLAG_SPLIT
        assert record[1, layout.FLAGS] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_live_columns_past_the_table_are_out_of_range(backend: str) -> None:
    """An extent wider than the table, and a row outside it, are flagged instead of read."""
    case = clean_case(rows=2, columns=3)
    wide = run_case(changed(case, extent_stop=int64([5, 3])), backend).record
    assert wide[0, layout.FLAGS] == layout.FLAG_RANGE and wide[0, layout.BAD_COLUMN] == 3
    assert wide[1, layout.FLAGS] == 0
    outside = run_case(changed(case, row_index=int64([0, 2])), backend).record
    assert outside[1, layout.FLAGS] & layout.FLAG_RANGE


def test_mix_is_the_same_for_integers_and_arrays() -> None:
    """The host's Python form and the oracle's array form agree, also at the edges of 64 bits."""
    rng = np.random.default_rng(1)
    tags = np.concatenate([rng.integers(0, 2**63, 50).astype(np.uint64), np.array([0, 1, 2**64 - 1], np.uint64)])
    columns = np.arange(len(tags), dtype=np.uint64)
    for key in (0, 1, 2**64 - 1, 0x1234_5678_9ABC_DEF0):
        terms = mix_array(key, columns, tags)
        assert [mix(key, int(c), int(t)) for c, t in zip(columns, tags, strict=True)] == [int(x) for x in terms]
    assert signed64(2**64 - 1) == -1 and signed64(5) == 5
