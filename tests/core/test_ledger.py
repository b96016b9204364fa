"""Ledgers: digest, extents and pages against a plain list of columns."""

from __future__ import annotations

import hypothesis.strategies as st
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


def model_apply(columns: Columns, what: str, first: int, second: int, tag: int) -> list[int] | None:
    """The operation on the plain list; returns the pages that it took out, None if it takes none out."""
    if what == "append":
        columns.append((first, tag))
    elif what == "skip":
        columns.extend([None] * first)
    elif what == "put":
        columns.extend([None] * (first + 1 - len(columns)))
        columns[first] = (second, tag)
    elif what == "drop":
        out = [entry[0] for entry in columns[first:second] if entry is not None]
        columns[first:second] = [None] * len(columns[first:second])
        return out
    elif what == "truncate":
        out = [entry[0] for entry in columns[first:] if entry is not None]
        del columns[first:]
        return out
    else:
        columns.clear()
    return None


def ledger_apply(ledger: Ledger, what: str, first: int, second: int, tag: int) -> list[int] | None:
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
        for column in range(-1, len(columns) + 2):
            entry = columns[column] if 0 <= column < len(columns) else None
            assert (ledger.page(column), ledger.tag(column)) == (entry or (GAP, 0))


def test_append_answers_the_column() -> None:
    """A page goes to the column after the last, gaps counted."""
    ledger = Ledger(KEY)
    assert ledger.append(5, 1) == 0
    ledger.skip(3)
    assert ledger.append(6, 2) == 4


def test_the_digest_depends_on_key_column_and_tag() -> None:
    """The same page under another key, in another column or under another tag has another digest."""
    digests = set()
    for key, column, tag in ((1, 0, 7), (2, 0, 7), (1, 1, 7), (1, 0, 8)):
        ledger = Ledger(key)
        ledger.skip(column)
        ledger.append(3, tag)
        digests.add(ledger.digest)
    assert len(digests) == 4
