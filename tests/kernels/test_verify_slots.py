"""`verify_slots`: healthy steps are clean, each fault is flagged where it is and nowhere else; torch is the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import kvguard.kernels.verify_slots.torch_op as torch_op
from kvguard.kernels.events import owner_of
from kvguard.kernels.verify_pages import layout as pages_layout
from kvguard.kernels.verify_slots import layout, verify_slots, verify_slots_step
from kvguard.kernels.verify_slots.host_op import all_slots_right
from kvguard.kernels.verify_slots.layout import (
    SLOT_FLOOR,
    SLOT_LOST,
    SLOT_OFFSET,
    SLOT_PADDING,
    SLOT_PAGE,
    SLOT_RANGE,
)
from tests.kernels.cases import int64
from tests.kernels.slot_cases import PAGE_SIZES, SPECIAL, calls, healthy_step, nonsense, require_equal, run
from tests.kernels.slot_faults import FAULTS, planted_step, require_planted
from tests.kernels.token_row_cases import Arguments, copied

EXAMPLES = 300


@pytest.fixture(params=["host", "device", "device, row by row"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Through torch: with the short way for host memory; as on a device, whole and row by row."""
    if request.param != "host":
        monkeypatch.setattr(torch_op, "on_host", lambda tensor: False)
    if request.param == "device, row by row":
        monkeypatch.setattr(torch_op, "CHUNK_ENTRIES", 1)
    return str(request.param)


def test_torch_agrees_with_the_oracle(way: str) -> None:
    """Every array that the operation gets, written or not, in calls of all kinds."""

    @given(calls())
    @settings(max_examples=EXAMPLES, deadline=None)
    def check(arguments: Arguments) -> None:
        require_equal(arguments, "torch")

    check()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_healthy_steps_are_clean_and_stay_as_they_are(way: str, page_size: int) -> None:
    """Chunks, decodes, rewritten drafts, windows, padded batches, with every kind of null page and skip slot."""
    for number in range(48):
        random = np.random.default_rng([number, page_size])
        allowed = number // len(SPECIAL) % 2 == 1
        step = healthy_step(random, page_size, special=SPECIAL[number % len(SPECIAL)], skip_allowed=allowed)
        for left in (run(step.arguments, "numpy"), run(step.arguments, "torch")):
            require_planted(step, {}, left)


def test_the_short_way_is_taken_by_healthy_steps() -> None:
    """Else it would be of no use."""
    for number in range(60):
        random = np.random.default_rng(number)
        step = healthy_step(random, PAGE_SIZES[number % 4], special=SPECIAL[number % 5], skip_allowed=number % 3 == 0)
        arguments = {name: value for name, value in step.arguments.items() if name != "enforce"}
        assert all_slots_right(**arguments)
        assert (arguments["record"] == [0, 0, -1, -1]).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_flagged_where_it_is_and_nowhere_else(way: str, name: str, page_size: int) -> None:
    """Flags, count, position and slot by hand; exactly the wrong slots are redirected, no victim is touched."""
    if name == "an offset that is shifted" and page_size == 1:
        pytest.skip("a page of one token has one offset")
    for number in range(6):
        step, planted = planted_step(name, number, page_size)
        require_planted(step, planted, run(step.arguments, "numpy"))
        require_planted(step, planted, run(step.arguments, "torch"))


def test_no_value_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: no shape depends on a value either, as the operation runs on tensors without data."""
    monkeypatch.setattr(torch_op, "on_host", lambda tensor: False)
    for number in range(60):
        arguments = nonsense(np.random.default_rng(number), PAGE_SIZES[number % 4])
        meta: Arguments = {
            name: torch.from_numpy(copied(value)).to("meta") if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        verify_slots(**meta, backend="torch")


def decode(**changes: Any) -> Arguments:
    """Rows 0 and 1 write position 5 and 2, in pages 3 and 1 of two tokens; a lane of padding follows."""
    return {
        "slot_mapping": int64([7, 2, -1]), "query_start": None, "query_row": None, "lengths": int64([6, 3]),
        "writer": int64([owner_of(4, 0), owner_of(9, 0)]), "floor": None,
        "page_writer": int64([0, owner_of(9, 1), 0, owner_of(4, 2)]), "page_size": 2, "skip_slot": -1,
        "skip_allowed": False, "enforce": True, "record": np.full((3, 4), -7, np.int64),
    } | changes  # fmt: skip


CLEAN = [0, 0, -1, -1]
# changes -> records, slots afterwards
ODD: dict[str, tuple[Arguments, list[list[int]], list[int]]] = {
    "clean": ({}, [CLEAN, CLEAN, CLEAN], [7, 2, -1]),
    "no rows: all is padding": (
        {"writer": int64([]), "record": np.zeros((1, 4), np.int64)}, [[SLOT_PADDING, 2, 0, 7]], [-1, -1, -1]
    ),
    "no tokens": ({"slot_mapping": int64([])}, [CLEAN, CLEAN, CLEAN], []),
    "no places": ({"lengths": int64([])}, [CLEAN, CLEAN, [SLOT_PADDING, 2, 0, 7]], [-1, -1, -1]),
    "fewer tokens than rows": ({"slot_mapping": int64([7])}, [CLEAN, CLEAN, CLEAN], [7]),
    "a row without a place": (
        {"query_row": int64([0, 2])}, [CLEAN, CLEAN, [SLOT_PADDING, 1, 1, 2]], [7, -1, -1]
    ),
    "a row with a negative place": (
        {"query_row": int64([-1, 1])}, [CLEAN, CLEAN, [SLOT_PADDING, 1, 0, 7]], [-1, 2, -1]
    ),
    "two rows of one place: each judges": (
        {"query_row": int64([0, 0])},
        [CLEAN, [SLOT_PAGE, 1, 5, 7], [SLOT_PADDING, 1, 1, 2]], [-1, -1, -1],
    ),
    "two rows of one word and one place": (
        {"query_row": int64([0, 0]), "writer": int64([owner_of(4, 0)] * 2)},
        [CLEAN, CLEAN, [SLOT_PADDING, 1, 1, 2]], [7, -1, -1],
    ),
    "spans past the tokens": (
        {"query_start": int64([0, 1, 9]), "lengths": int64([6, 10])}, [CLEAN, [SLOT_LOST, 1, 3, -1], CLEAN], [7, 2, -1]
    ),
    "a span that ends before it starts": (
        {"query_start": int64([1, 0, 2]), "lengths": int64([6, 3])},
        [CLEAN, [SLOT_PAGE, 1, 1, 7], CLEAN], [-1, 2, -1],
    ),
    "spans that overlap: wrong for one is wrong": (
        {"query_start": int64([0, 2, 1]), "lengths": int64([7, 3])},
        [[SLOT_PAGE, 1, 6, 2], CLEAN, CLEAN], [7, -1, -1],
    ),
    "a negative start": ({"query_start": int64([-5, 1, 2])}, [CLEAN, CLEAN, CLEAN], [7, 2, -1]),
    "more places than rows": (
        {"query_start": int64([0, 1, 2, 2, 3]), "lengths": int64([6, 3, 0])}, [CLEAN, CLEAN, CLEAN], [7, 2, -1]
    ),
    "lengths smaller than the query": (
        {"query_start": int64([0, 1, 3]), "lengths": int64([6, 1]), "slot_mapping": int64([7, 2, 2])},
        [CLEAN, [SLOT_FLOOR | SLOT_PAGE, 2, -1, 2], CLEAN], [7, -1, -1],
    ),
    "out of range below the floor": (
        {"floor": int64([6, 0]), "slot_mapping": int64([99, 2, -1])},
        [[SLOT_FLOOR | SLOT_RANGE, 1, 5, 99], CLEAN, CLEAN], [-1, 2, -1],
    ),
    "sent nowhere below the floor": (
        {"floor": int64([6, 0]), "slot_mapping": int64([-1, 1, -1]), "skip_allowed": True},
        [CLEAN, CLEAN, CLEAN], [-1, 1, -1],
    ),
    "padding in the null page": (
        {"slot_mapping": int64([7, 2, 1])}, [CLEAN, CLEAN, [SLOT_PADDING, 1, 2, 1]], [7, 2, -1]
    ),
    "page 0 where there is no null page": (
        {"slot_mapping": int64([1, 2, -1]), "page_writer": int64([owner_of(4, 2), owner_of(9, 1), 0, 0]),
         "null_page": -1}, [CLEAN, CLEAN, CLEAN], [1, 2, -1]
    ),
    "a null page that has a word": (
        {"slot_mapping": int64([1, 2, -1]), "page_writer": int64([owner_of(4, 2), owner_of(9, 1), 0, 0])},
        [[SLOT_LOST, 1, 5, 1], CLEAN, CLEAN], [-1, 2, -1]
    ),
    "a skip slot in a page that has a word": (
        {"slot_mapping": int64([7, 2, 7]), "skip_slot": 7}, [[SLOT_LOST, 1, 5, 7], CLEAN, CLEAN], [7, 2, 7]
    ),
    "a column that is in no word": (
        {"lengths": int64([2**33 + 6, 3]), "page_writer": int64([0, owner_of(9, 1), 0, owner_of(5, 2)])},
        [[SLOT_PAGE, 1, 2**33 + 5, 7], CLEAN, CLEAN], [-1, 2, -1],
    ),
    "only observed": (
        {"slot_mapping": int64([6, 3, 7]), "enforce": False},
        [[SLOT_OFFSET, 1, 5, 6], [SLOT_OFFSET, 1, 2, 3], [SLOT_PADDING, 1, 2, 7]], [6, 3, 7],
    ),
    "the first of several, and a right one that stays": (
        {"query_start": int64([0, 3, 3]), "lengths": int64([6, 0]), "slot_mapping": int64([5, 7, 99]),
         "page_writer": int64([0, owner_of(9, 1), owner_of(4, 1), owner_of(4, 2)])},
        [[SLOT_OFFSET | SLOT_RANGE, 2, 4, 7], CLEAN, CLEAN], [5, -1, -1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_no_engine_should_do_is_defined(way: str, name: str) -> None:
    """Records and slots by hand."""
    changes, records, slots = ODD[name]
    left = require_equal(decode(**changes), "torch")
    assert left["record"].tolist() == records
    assert left["slot_mapping"].tolist() == slots


def test_what_does_not_fit_is_refused() -> None:
    """A caller's mistake is an error before anything runs."""
    for changes, message in (
        ({"page_size": 0}, "positive"),
        ({"record": np.zeros((2, 4), np.int64)}, "four words"),
        ({"floor": int64([0])}, "one element per checked row"),
        ({"query_row": int64([0])}, "one element per checked row"),
        ({"query_start": int64([0, 1])}, "one element more"),
        ({"page_writer": int64([])}, "one element per page"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_slots(**decode(**changes))
    with pytest.raises(ValueError, match="no launch for all pools"):
        empty: Any = None
        verify_slots_step(
            backend="torch", launch=type("Launch", (), {"pools": 1}), descriptors=empty, packed=empty, out=empty,
            workspace=empty,
        )  # fmt: skip


def test_the_backend_is_that_of_the_arrays() -> None:
    """NumPy for arrays, torch for tensors on a CPU."""
    arguments = decode()
    verify_slots(**arguments)
    assert (arguments["record"] == CLEAN).all()
    tensors: Arguments = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in decode().items()
    }
    verify_slots(**tensors)
    assert tensors["record"].tolist() == [CLEAN] * 3


def test_one_word_holds_the_flags_of_pages_and_of_slots() -> None:
    """They have no bit in common, and each is a bit of its own."""
    flags = [value for name, value in vars(layout).items() if name.startswith("SLOT_")]
    flags += [value for name, value in vars(pages_layout).items() if name.startswith("FLAG_")]
    assert len(flags) == 13 and sum(flags) == int(np.bitwise_or.reduce(flags))
    assert all(value.bit_count() == 1 for value in flags)
