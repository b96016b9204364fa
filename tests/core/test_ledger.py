"""Ledgers: digest, extents and pages against a plain list of columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from kvguard.kernels.mixing import mix
from kvguard.ledger import GAP, Ledger

KEY = 0xFEED_FACE_CAFE_BEEF

Columns = list[tuple[int, int] | None]

operation = st.one_of(
    st.tuples(st.just("append"), st.integers(-1, 50), st.just(0)),
    st.tuples(st.just("skip"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("put"), st.integers(0, 14), st.integers(-1, 50)),
    st.tuples(st.just("drop"), st.integers(0, 14), st.integers(0, 16)),
    st.tuples(st.just("truncate"), st.integers(0, 14), st.just(0)),
    st.tuples(st.just("clear"), st.just(0), st.just(0)),
)


def model_apply(columns: Columns, what: str, first: int, second: int, tag: int) -> list[tuple[int, int]] | None:
    """The operation on the plain list; returns what it took out, as (page, tag), None if it takes none out."""
    if what == "append":
        columns.append((first, tag))
    elif what == "skip":
        columns.extend([None] * first)
    elif what == "put":
        columns.extend([None] * (first + 1 - len(columns)))
        columns[first] = (second, tag)
    elif what == "drop":
        out = [entry for entry in columns[first:second] if entry is not None]
        columns[first:second] = [None] * len(columns[first:second])
        return out
    elif what == "truncate":
        out = [entry for entry in columns[first:] if entry is not None]
        del columns[first:]
        return out
    else:
        columns.clear()
    return None


def ledger_apply(ledger: Ledger, what: str, first: int, second: int, tag: int) -> list[tuple[int, int]] | None:
    """The same operation on the ledger."""
    if what == "append":
        ledger.append(first, tag)
    elif what == "skip":
        ledger.skip(first)
    elif what == "put":
        ledger.put(first, second, tag)
    elif what == "drop":
        return ledger.drop(first, second)
    elif what == "truncate":
        return ledger.truncate(first)
    else:
        ledger.clear()
    return None


def live_ranges(columns: Columns) -> list[tuple[int, int]]:
    """Maximal runs of live columns."""
    runs: list[tuple[int, int]] = []
    for column, entry in enumerate(columns):
        if entry is not None:
            start = runs.pop()[0] if runs and runs[-1][1] == column else column
            runs.append((start, column + 1))
    return runs


@given(st.lists(operation, max_size=40))
@example([("append", -1, 0), ("drop", 0, 1)])
@example([("append", 1, 0), ("append", 2, 0), ("append", 3, 0), ("drop", 1, 2), ("put", 1, 9), ("truncate", 1, 0)])
@settings(max_examples=600, deadline=None, derandomize=True)
def test_a_ledger_agrees_with_a_plain_list_of_columns(operations: list[tuple[str, int, int]]) -> None:
    """After any changes digest, extents, pages, tags and lengths are those of a plain list of columns."""
    ledger, columns = Ledger(KEY), Columns()
    for tag, (what, first, second) in enumerate(operations, start=1000):
        assert ledger_apply(ledger, what, first, second, tag) == model_apply(columns, what, first, second, tag)
        live = [(column, *entry) for column, entry in enumerate(columns) if entry is not None]
        assert ledger.digest == sum(mix(KEY, column, tag) for column, _, tag in live) % 2**64
        assert ledger.extents == live_ranges(columns)
        assert ledger.extent_count == len(live_ranges(columns))
        assert ledger.first_extent == (live_ranges(columns) or [(0, 0)])[0]
        assert list(ledger.entries()) == live
        assert len(ledger) == len(columns)
        assert ledger.in_one_run == bool(live and live_ranges(columns) == [(live[0][0], len(columns))])
        for column in range(-1, len(columns) + 2):
            entry = columns[column] if 0 <= column < len(columns) else None
            assert (ledger.page(column), ledger.tag(column)) == (entry or (GAP, 0))


def test_append_answers_the_column() -> None:
    """A page goes to the column after the last, gaps counted."""
    ledger = Ledger(KEY)
    assert ledger.append(5, 1) == 0
    ledger.skip(3)
    assert ledger.append(6, 2) == 4


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_is_extended_as_by_appending(asked: bool) -> None:
    """Whether or not the digest was asked for since the last page; behind columns that a window has dropped, too."""
    for dropped in (0, 2):
        appended, extended = Ledger(KEY), Ledger(KEY)
        for ledger in (appended, extended):
            for page in range(3):
                ledger.append(page, page + 10)
            ledger.drop(0, dropped)
            ledger.append(7, 17)
            assert not asked or ledger.digest
        for tag in (20, 21):
            appended.append(9, tag)
            assert extended.in_one_run and extended.extend_run(9, tag) == appended.digest == extended.digest
        assert list(extended.entries()) == list(appended.entries()) and extended.extents == appended.extents


def test_the_digest_depends_on_key_column_and_tag() -> None:
    """The same page under another key, in another column or under another tag has another digest."""
    digests = set()
    for key, column, tag in ((1, 0, 7), (2, 0, 7), (1, 1, 7), (1, 0, 8)):
        ledger = Ledger(key)
        ledger.skip(column)
        ledger.append(3, tag)
        digests.add(ledger.digest)
    assert len(digests) == 4


class CountingList(list[int]):
    """A list that counts the entries that are read or walked over."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.reads += len(self)
        return super().__iter__()


def counted_ledger(columns: int) -> tuple[Ledger, CountingList]:
    """A ledger of live columns whose tags count how often they are read."""
    ledger = Ledger(KEY)
    for column in range(columns):
        ledger.append(column, column + 1)
    assert ledger.digest, "asked for: the terms of appended columns are summed then"
    tags = ledger._tags = CountingList(ledger._tags)
    return ledger, tags


def test_a_window_that_always_drops_from_column_0_costs_what_it_drops() -> None:
    """Two thousand moves of a window over a long request, each told as [0, stop), read each column a few times."""
    ledger, tags = counted_ledger(4_000)
    for stop in range(1, 2_001):
        assert ledger.drop(0, stop) == [(stop - 1, stop)]
    assert ledger.extents == [(2_000, 4_000)]
    assert tags.reads <= 8 * 2_000


def test_a_drop_in_the_middle_of_a_long_ledger_costs_what_it_drops() -> None:
    """A gap in the middle of 100,000 columns, and the cut of the tail behind it, do not walk the ledger."""
    ledger, tags = counted_ledger(100_000)
    assert ledger.drop(50_000, 50_010) == [(column, column + 1) for column in range(50_000, 50_010)]
    assert ledger.extents == [(0, 50_000), (50_010, 100_000)]
    assert ledger.truncate(99_990) == [(column, column + 1) for column in range(99_990, 100_000)]
    assert ledger.drop(49_995, 50_020) == [
        (column, column + 1) for column in (*range(49_995, 50_000), *range(50_010, 50_020))
    ]
    assert ledger.extents == [(0, 49_995), (50_020, 99_990)]
    assert tags.reads <= 8 * 35
