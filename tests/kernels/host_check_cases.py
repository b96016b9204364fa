"""What a bound check is asked, and what it must answer: steps that are clean, and steps with one thing wrong in them.

Where something lies outside of an array, what lies there in memory is right: only the look at the bound finds it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import owner_of
from kvguard.kernels.mixing import mix, signed64
from kvguard.kernels.verify_pages import verify_pages
from kvguard.kernels.verify_slots import verify_slots
from tests.kernels.cases import int64
from tests.kernels.slot_cases import PAGE_SIZES, SPECIAL, healthy_step, nonsense
from tests.kernels.slot_faults import FAULTS, planted_step
from tests.kernels.test_verify_slots import ODD, decode
from tests.kernels.token_row_cases import copied

Int64 = npt.NDArray[np.int64]
Given = dict[str, Any]
SLACK = 4
"""Elements on either side of an array that belong to somebody else."""
COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """reads, writes: what is bound; None: not checked. clean: what must be answered; record: what is then written."""

    name: str
    reads: Given | None
    writes: Given | None
    clean: bool
    record: Int64


def asked(name: str, reads: Given | None, writes: Given | None, *, clean: bool | None = None) -> Asked:
    """`clean`: where the oracles are not asked, as the call is outside of their contract or must not be long."""
    records = [np.zeros((0, 4), np.int64)]
    if clean is False:
        return Asked(name=name, reads=reads, writes=writes, clean=False, record=records[0])
    if reads is not None:
        rows = np.full((len(reads["row_index"]), 4), -7, np.int64)
        nowhere = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
        verify_pages(**reads, neutral_page=-1, record=rows, evidence=nowhere[0], evidence_row=nowhere[1])
        records.append(rows)
    if writes is not None:
        tokens = np.full((len(writes["writer"]) + 1, 4), -7, np.int64)
        slots = copied(writes["slot_mapping"])
        verify_slots(**(writes | {"slot_mapping": slots, "enforce": False, "record": tokens}), backend="numpy")
        records.append(tokens)
    record = np.concatenate(records)
    found = not record[:, 0].any()
    assert clean is None or found == clean, name
    return Asked(name=name, reads=reads, writes=writes, clean=found, record=record)


class Reads:
    """Clean rows, amid memory that looks like more of them."""

    def __init__(self, random: np.random.Generator, split: int) -> None:
        self.random, self.split = random, split
        rows, pages = int(random.integers(1, 6)), 40
        table_rows, width = rows + 2, COLUMNS * split + int(random.integers(split))
        kind = np.int32 if random.integers(2) else np.int64
        stride = int(random.integers(1, 3))
        self.null_page = int(random.integers(-1, 2))
        self.tags = random.integers(1, 2**63 - 1, pages + 2 * SLACK) * random.choice([-1, 1], pages + 2 * SLACK)
        shape = table_rows + 2 * SLACK, (width // split + 1) + 2 * SLACK
        own = random.choice([page for page in range(pages) if page != self.null_page], shape)
        entries = (own[:, :, None] * split + np.arange(split)).reshape(shape[0], -1).astype(kind)
        memory = np.repeat(entries, stride, axis=1)
        if random.integers(2):
            memory = memory.T.copy().T
        self.memory = memory[:, ::stride]
        if random.integers(3) == 0:
            # The columns of the memory run backwards.
            self.memory = self.memory[:, ::-1].copy()[:, ::-1]
        self.table = self.memory[SLACK : SLACK + table_rows, SLACK * split : SLACK * split + width]
        self.row_index = random.permutation(table_rows)[:rows]
        start, stop, offset = [], [], [0]
        for _ in range(rows):
            edges = np.sort(random.choice(COLUMNS + 1, 2 * int(random.integers(1, 4)), replace=False))
            start += edges[::2].tolist()
            stop += edges[1::2].tolist()
            offset.append(len(start))
        # What lies behind the extents reads nothing, as the second half of some rows.
        self.start, self.stop = int64([*start, *[0] * SLACK]), int64([*stop, *[0] * SLACK])
        self.extents, self.offset = len(start), int64(offset)
        self.key = int(random.integers(2**63)) * 2 + 1
        self.live = {(row, column) for row in range(rows) for column in self.columns(row)}
        for row, table_row in enumerate(self.row_index):
            for column in range(COLUMNS):
                if (row, column) not in self.live:
                    self.cell(int(table_row), column)[:] = random.integers(-9, 2**31 - 1, split)
        self.promise()

    def columns(self, row: int) -> list[int]:
        """Live columns of a row."""
        extents = range(int(self.offset[row]), int(self.offset[row + 1]))
        return [column for extent in extents for column in range(int(self.start[extent]), int(self.stop[extent]))]

    def cell(self, table_row: int, column: int) -> Any:
        """The kernel pages of a column, in the table or beside it."""
        begin = (SLACK + column) * self.split
        return self.memory[SLACK + table_row, begin : begin + self.split]

    def promise(self) -> None:
        """Each row expects what lies there, whether it may be read or not."""
        expected = []
        for row, table_row in enumerate(self.row_index):
            digest = 0
            for column in self.columns(row):
                page = int(self.cell(int(table_row), column)[0]) // self.split
                digest += mix(self.key, column % 2**64, int(self.tags[SLACK + page]) % 2**64)
            expected.append(signed64(digest))
        self.expected = int64(expected)

    def any_live(self) -> tuple[int, int]:
        """A row and a live column of it."""
        row, column = sorted(self.live)[int(self.random.integers(len(self.live)))]
        return row, column

    def put(self, row: int, column: int, page: int) -> None:
        """Let a row read another page."""
        self.cell(int(self.row_index[row]), column)[:] = page * self.split + np.arange(self.split)

    def fill(self, row: int) -> None:
        """Let a row read some page in each of its columns."""
        for column in self.columns(row):
            self.put(row, column, int(self.random.choice([2, 3, 5, 7, 11])))

    def given(self) -> Given:
        """For `bind` and the oracle."""
        return dict(
            table=self.table,
            page_tag=self.tags[SLACK:-SLACK],
            row_index=int64(self.row_index),
            expected=self.expected,
            extent_offset=self.offset,
            extent_start=self.start[: self.extents],
            extent_stop=self.stop[: self.extents],
            columns=COLUMNS,
            key=self.key,
            split=self.split,
            null_page=self.null_page,
        )


def _wrong_digest(world: Reads) -> None:
    world.expected[world.random.integers(len(world.expected))] ^= np.int64(1) << world.random.integers(63)


def _another_page(world: Reads) -> None:
    row, column = world.any_live()
    page = int(world.cell(int(world.row_index[row]), column)[0]) // world.split
    others = [other for other in range(40) if other not in (page, world.null_page)]
    world.put(row, column, int(world.random.choice(others)))


def _vacant(world: Reads) -> None:
    row, column = world.any_live()
    world.tags[SLACK + int(world.cell(int(world.row_index[row]), column)[0]) // world.split] = 0
    world.promise()


def _null(world: Reads) -> None:
    world.null_page = max(world.null_page, 0)
    world.put(*world.any_live(), world.null_page)
    world.promise()


def _negative_page(world: Reads) -> None:
    world.put(*world.any_live(), -1)
    world.promise()


def _past_the_pool(world: Reads) -> None:
    world.put(*world.any_live(), 40)
    world.promise()


def _row_past_the_table(world: Reads) -> None:
    row, _ = world.any_live()
    world.row_index[row] = len(world.table)
    world.promise()


def _row_before_the_table(world: Reads) -> None:
    row, _ = world.any_live()
    world.row_index[row] = -1
    world.promise()


def _columns_past_the_table(world: Reads) -> None:
    row, _ = world.any_live()
    world.stop[world.offset[row + 1] - 1] = COLUMNS + 1
    world.fill(row)
    world.promise()


def _columns_before_the_table(world: Reads) -> None:
    row, _ = world.any_live()
    world.start[world.offset[row]] = -1
    world.fill(row)
    world.promise()


def _pieces_out_of_order(world: Reads) -> None:
    row, column = world.any_live()
    cell = world.cell(int(world.row_index[row]), column)
    cell[-1] = cell[0] if world.split == 2 else cell[1]


def _a_piece_of_another_page(world: Reads) -> None:
    row, column = world.any_live()
    world.cell(int(world.row_index[row]), column)[-1] += world.split


def _pieces_from_the_second_on(world: Reads) -> None:
    row, column = world.any_live()
    world.cell(int(world.row_index[row]), column)[:] += 1


READ_FAULTS: dict[str, Callable[[Reads], None]] = {
    "a digest of which a bit is wrong": _wrong_digest,
    "another page": _another_page,
    "a vacant page": _vacant,
    "the null page": _null,
    "a negative page": _negative_page,
    "a page past the pool": _past_the_pool,
    "a row past the table": _row_past_the_table,
    "a row before the table": _row_before_the_table,
    "columns past the table": _columns_past_the_table,
    "columns before the table": _columns_before_the_table,
}
SPLIT_FAULTS: dict[str, Callable[[Reads], None]] = {
    "pieces out of order": _pieces_out_of_order,
    "a piece of another page": _a_piece_of_another_page,
    "pieces from the second on": _pieces_from_the_second_on,
}


def _offsets(world: Reads, place: int, value: int) -> Given:
    world.offset[place] = value
    return world.given()


def of_reads(seeds: range) -> Iterator[Asked]:
    """Clean rows, and each fault."""
    for seed in seeds:
        split = (1, 2, 4, 3)[seed % 4]
        yield asked("clean rows", Reads(np.random.default_rng(seed), split).given(), None, clean=True)
        for name, plant in (READ_FAULTS | (SPLIT_FAULTS if split > 1 else {})).items():
            world = Reads(np.random.default_rng(seed), split)
            plant(world)
            found = asked(name, world.given(), None)
            assert not found.clean, name
            yield found
        # The oracle does not look whether there are such extents.
        world = Reads(np.random.default_rng(seed), split)
        yield asked("extents past the list", _offsets(world, -1, world.extents + 1), None, clean=False)
        world = Reads(np.random.default_rng(seed), split)
        world.offset[0] = world.offset[1]
        world.promise()
        yield asked("no extents", world.given(), None, clean=False)
        world = Reads(np.random.default_rng(seed), split)
        yield asked("extents before the list", _offsets(world, 0, -1), None, clean=False)
        world = Reads(np.random.default_rng(seed), split)
        row = int(world.row_index[0])
        world.start[world.offset[0] : world.offset[1]] = world.stop[world.offset[0] : world.offset[1]] = 0
        world.row_index[0] = -3
        world.promise()
        yield asked(f"a row that reads nothing, instead of {row}", world.given(), None, clean=True)


def _overlap(arguments: Given) -> bool:
    """Whether rows have more tokens than there are."""
    places, tokens, total = len(arguments["lengths"]), len(arguments["slot_mapping"]), 0
    for row in range(len(arguments["writer"])):
        place = row if arguments["query_row"] is None else int(arguments["query_row"][row])
        if 0 <= place < places:
            starts = arguments["query_start"]
            start, stop = (place, place + 1) if starts is None else (int(starts[place]), int(starts[place + 1]))
            total += max(0, min(stop, tokens) - max(start, 0))
    return total > tokens


def amid(before: list[int], array: Any, after: list[int]) -> Any:
    """The array, with these neighbours in memory."""
    return np.concatenate((before, array, after)).astype(array.dtype)[len(before) : len(before) + len(array)]


def _odd_writes() -> Iterator[tuple[str, Given, bool]]:
    """By hand, with what a check that looks too little at bounds, signs or sums would take for right."""
    writer = owner_of(4, 0)
    base: Given = decode(null_page=0)
    yield "a page past the pool", base | {
        "slot_mapping": int64([9, 2, -1]), "page_writer": amid([], base["page_writer"], [writer + 2]),
    }, False  # fmt: skip
    yield "a page past the pool of pages of three", base | {
        "slot_mapping": int64([14, 3, -1]), "page_writer": amid([], int64([0, owner_of(9, 0), 0, 0]), [writer + 1]),
        "page_size": 3, "lengths": int64([6, 1]),
    }, False  # fmt: skip
    yield "pages of three", base | {
        "slot_mapping": int64([11, 3, -1]), "page_writer": int64([0, owner_of(9, 0), 0, writer + 1]),
        "page_size": 3, "lengths": int64([6, 1]),
    }, True  # fmt: skip
    yield "an offset in pages of three", base | {
        "slot_mapping": int64([10, 3, -1]), "page_writer": int64([0, owner_of(9, 0), 0, writer + 1]),
        "page_size": 3, "lengths": int64([6, 1]),
    }, False  # fmt: skip
    yield "a negative slot beside the null page", base | {
        "slot_mapping": int64([-2, 3, -1]), "page_writer": int64([0, owner_of(9, 0), 0, 0]), "page_size": 3,
        "lengths": int64([6, 1]), "skip_allowed": True,
    }, False  # fmt: skip
    yield "a negative slot where there is no null page", base | {
        "slot_mapping": int64([-2, 2, -1]), "null_page": -1, "skip_allowed": True,
    }, False  # fmt: skip
    for floor in (None, int64([-5, -5])):
        yield "a negative position in a page of that column", base | {
            "slot_mapping": int64([7, 2, -1]), "lengths": int64([0, 3]), "floor": floor,
            "page_writer": int64([0, owner_of(9, 1), 0, writer - 1]),
        }, False  # fmt: skip
    yield "rows without a place", base | {
        "query_row": int64([2, 1]), "slot_mapping": int64([-1, 2, -1]), "lengths": amid([], base["lengths"], [6]),
    }, True  # fmt: skip
    yield "spans past the tokens", base | {
        "query_start": int64([0, 1, 9]), "lengths": int64([6, 10]), "slot_mapping": amid([-8], int64([7, 2, 3]), [-8]),
    }, True  # fmt: skip
    yield "spans before the tokens", base | {
        "query_start": int64([-5, 1, 2]), "slot_mapping": amid([-8], base["slot_mapping"], [-8]),
    }, True  # fmt: skip
    yield "a stop that wraps", base | {
        "query_start": int64([0, 1, 2**63 - 1]), "lengths": int64([6, -(2**63)]),
    }, False  # fmt: skip
    yield "tokens in the gap between two rows", base | {
        "query_start": int64([0, 1, 2, 3]), "query_row": int64([0, 2]), "lengths": int64([6, 1, 3]),
        "slot_mapping": int64([7, 7, 2]),
    }, False  # fmt: skip


def of_writes(seeds: range) -> Iterator[Asked]:
    """Healthy steps, planted faults, nonsense, and what is done by hand."""
    for name, (changes, records, _) in ODD.items():
        arguments = {"null_page": 0} | decode(**changes)
        if not _overlap(arguments):
            yield asked(name, None, arguments, clean=not any(record[0] for record in records))
    for name, arguments, clean in _odd_writes():
        yield asked(name, None, arguments, clean=clean)
    overlapping = decode(null_page=0, skip_allowed=True, slot_mapping=int64([-1] * 3), query_start=int64([0, 3, 3]))
    overlapping["query_row"] = int64([0, 0])
    yield asked("more tokens than there are", None, overlapping, clean=False)
    for seed in seeds:
        random = np.random.default_rng(seed)
        size = PAGE_SIZES[seed % len(PAGE_SIZES)]
        allowed, special = seed // 4 % 2 == 1, SPECIAL[seed // 8 % len(SPECIAL)]
        step = healthy_step(random, size, special=special, skip_allowed=allowed)
        yield asked("a healthy step", None, step.arguments, clean=True)
        for name in FAULTS:
            if name != "an offset that is shifted" or size > 1:
                planted = asked(name, None, planted_step(name, seed, size)[0].arguments)
                assert not planted.clean or name == "slots of two rows swapped", name
                yield planted
        for _ in range(4):
            arguments = nonsense(random, size)
            if not _overlap(arguments):
                yield asked("nonsense", None, arguments)


def of_both(seeds: range) -> Iterator[Asked]:
    """Reads and writes of one pool, of which one may be wrong."""
    for seed in seeds:
        world = Reads(np.random.default_rng(seed), 1 + seed % 2)
        if seed % 3 == 1:
            _vacant(world)
        random = np.random.default_rng(seed)
        writes = healthy_step(random, 16).arguments
        if seed % 3 == 2:
            writes = planted_step("a negative slot", seed, 16)[0].arguments
        writes["null_page"] = world.null_page = 0 if (writes["null_page"] == world.null_page == 0) else -1
        world.promise()
        yield asked("both", world.given(), writes)


def all_asked(count: int) -> list[Asked]:
    """All kinds, with so many seeds each."""
    return [*of_reads(range(count)), *of_writes(range(count)), *of_both(range(count))]


def problem(bind: Callable[..., Any], case: Asked) -> str | None:
    """What is wrong with the answer, if something is. The record is the second of three pools' at once."""
    check = bind(case.reads, case.writes)
    if check is None:
        return "it was not bound"
    rows = 0 if case.reads is None else len(case.reads["row_index"])
    rows += 0 if case.writes is None else len(case.writes["writer"]) + 1
    record = np.full((3, rows, 4), -7, np.int64)
    wanted = record.copy()
    if case.clean:
        wanted[1] = case.record
    if check(record, 1) is not case.clean:
        return f"it says {not case.clean}"
    return None if np.array_equal(record, wanted) else f"it writes {record.tolist()}"
