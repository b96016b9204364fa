"""Stamp, retire, publish, verify: torch against the oracle, call by call, and what each of them reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings

import kvguard.kernels.stamp_rows.torch_op as stamp_torch
import kvguard.kernels.verify_rows.torch_op as verify_torch
from kvguard.kernels.events import (
    ANYBODY,
    CONTENT,
    DOUBLE_ALLOCATION,
    DOUBLE_FREE,
    FREE_UNOWNED,
    NULL,
    OUT_OF_RANGE,
    SPOILED,
    TREE,
    owner_of,
)
from kvguard.kernels.mixing import mix, signed64
from kvguard.kernels.verify_pages.layout import FLAG_DIGEST, FLAG_NULL, FLAG_RANGE, FLAG_SPLIT, FLAG_VACANT, FLAG_WRITE
from tests.kernels.cases import int64
from tests.kernels.token_row_cases import (
    KEY,
    OPERATIONS,
    Arguments,
    calls,
    copied,
    empty_books,
    repeated_page,
    require_equal,
    shared_table_row,
    sound_publish,
    sound_verify,
)

EXAMPLES = 150


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch_agrees_with_the_oracle(operation: str) -> None:
    """Every array that the operation gets, written or not, in calls of all kinds."""

    _check(operation)


def _check(operation: str) -> None:
    @given(calls(operation))
    @settings(max_examples=EXAMPLES, deadline=None)
    def check(arguments: Arguments) -> None:
        require_equal(operation, arguments, "torch")

    check()


@pytest.mark.parametrize("chunk_entries", [1, 1 << 21])
def test_rows_the_way_of_devices_agree_with_the_oracle(monkeypatch: pytest.MonkeyPatch, chunk_entries: int) -> None:
    """`verify_rows` without the short way that tensors on a CPU may take, whole and row by row."""
    monkeypatch.setattr(verify_torch, "on_host", lambda tensor: False)
    monkeypatch.setattr(verify_torch, "CHUNK_ENTRIES", chunk_entries)
    _check("verify_rows")


def test_stamps_the_way_of_devices_agree_with_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stamp_rows` without its short way for decode."""
    monkeypatch.setattr(stamp_torch, "on_host", lambda tensor: False)
    _check("stamp_rows")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_way_of_devices_never_waits(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """No value of a tensor is looked at, and no shape depends on one: the operation runs on tensors without data."""
    monkeypatch.setattr(verify_torch, "on_host", lambda tensor: False)
    monkeypatch.setattr(stamp_torch, "on_host", lambda tensor: False)

    @given(calls(operation))
    @settings(max_examples=30, deadline=None)
    def check(arguments: Arguments) -> None:
        meta = {
            name: torch.from_numpy(copied(value)).to("meta") if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        OPERATIONS[operation](**meta, backend="torch")

    check()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cupy_is_refused(operation: str) -> None:
    """With a message, before anything is done."""
    arguments = find(calls(operation), lambda arguments: True)
    with pytest.raises(ValueError, match="no cupy backend"):
        OPERATIONS[operation](**arguments, backend="cupy")


def stamp(**changes: Any) -> Arguments:
    """Rows 0 and 2 get the tokens of a prompt: five and two, in pages of two; row 2 adopts one column."""
    arguments = empty_books() | {
        "slots": int64([2, 3, 8, 9, 4, 6, 7]),
        "rows": int64([0, 2]),
        "first": int64([0, 2]),
        "offset": int64([0, 5, 7]),
        "adopted": int64([0, 10]),
        "page_size": 2,
        "base_tag": 100,
        "key": KEY,
        "event": np.zeros(4, np.int64),
    }
    arguments["page_chain"][5], arguments["digest"][0] = 55, 99
    return arguments | changes


def test_stamped_pages_are_promised_to_their_rows() -> None:
    """Tags and owners by hand; a fresh row starts at nothing, or at the chain of the page its prefix ends in."""
    left = require_equal("stamp_rows", stamp(), "torch")
    assert left["page_tag"].tolist() == [0, 100, 104, 105, 102, 0]
    assert left["page_owner"].tolist() == [0, owner_of(0, 0), owner_of(0, 2), owner_of(2, 1), owner_of(0, 1), 0]
    wanted = mix(KEY, 0, 100) + mix(KEY, 1, 102) + mix(KEY, 2, 104)
    assert left["digest"].tolist() == [signed64(wanted), 0, signed64(55 + mix(KEY, 1, 105))]
    assert not left["event"].any()


def test_decode_takes_lengths_for_positions() -> None:
    """One token per row at length - 1: a page opens where that is the first of a column, and the row goes on."""
    arguments = stamp(slots=int64([4, 7]), first=np.array([3, 4], np.int32), first_delta=-1, offset=None, adopted=None)
    left = require_equal("stamp_rows", arguments, "torch")
    assert left["page_tag"].tolist() == [0, 0, 100, 0, 0, 0]
    assert left["digest"].tolist() == [signed64(99 + mix(KEY, 1, 100)), 0, 0]


STAMPED_WRONG: dict[str, tuple[Arguments, list[int]]] = {
    "a slot past the pool": ({"slots": int64([2, 3, 12, 13, 4, 6, 7])}, [OUT_OF_RANGE, 6, 2]),
    "a negative slot": ({"slots": int64([2, 3, 8, 9, -1, 6, 7])}, [OUT_OF_RANGE, -1, 4]),
    "a slot of the null page": ({"slots": int64([1, 3, 8, 9, 4, 6, 7])}, [NULL, 0, 0]),
    "a page in use": ({"page_tag": int64([0, 0, 0, 7, 0, 0])}, [DOUBLE_ALLOCATION, 3, 5]),
    "a page opened twice": ({"slots": int64([2, 3, 8, 9, 2, 6, 7])}, [DOUBLE_ALLOCATION, 1, 0]),
    "a row outside the table": ({"rows": int64([0, 3])}, [OUT_OF_RANGE, -1, 1]),
    "a prefix outside the pool": ({"adopted": int64([0, 12])}, [OUT_OF_RANGE, 6, 1]),
    "two, of which the first counts": ({"slots": int64([2, 3, 1, 0, 99, 0, 0])}, [NULL, 0, 2]),
    "a row's before its token's": ({"rows": int64([-1, 2]), "slots": int64([0] * 7)}, [OUT_OF_RANGE, -1, 0]),
}


@pytest.mark.parametrize("name", STAMPED_WRONG)
def test_what_is_wrong_with_new_tokens_is_reported(name: str) -> None:
    """Code, page and place of the first problem."""
    changes, event = STAMPED_WRONG[name]
    assert require_equal("stamp_rows", stamp(**changes), "torch")["event"].tolist() == [*event, 0]


RETIRED_WRONG: dict[str, tuple[list[int], int, list[int]]] = {
    "nothing": ([], 1, [0, 0, 0]),
    "pages in use": ([3, 1], 1, [0, 0, 0]),
    "a vacant page": ([3, 2], 1, [DOUBLE_FREE, 2, 1]),
    "a page twice": ([3, 1, 3], 1, [DOUBLE_FREE, 3, 2]),
    "the null page": ([1, 0], 1, [NULL, 0, 1]),
    "a page past the pool": ([6, 1], 1, [OUT_OF_RANGE, 6, 0]),
    "a negative page": ([1, -1], 1, [OUT_OF_RANGE, -1, 1]),
    "tokens": ([6, 3, 7, 2, 6], 2, [0, 0, 0]),
    "tokens of a vacant page": ([6, 7, 5, 4], 2, [DOUBLE_FREE, 2, 2]),
    "a negative token": ([6, -1], 2, [OUT_OF_RANGE, -1, 1]),
}


@pytest.mark.parametrize("name", RETIRED_WRONG)
def test_what_is_wrong_with_pages_given_back_is_reported(name: str) -> None:
    """Code, page and place of the first problem; what can be given back is vacant afterwards."""
    given_back, divisor, event = RETIRED_WRONG[name]
    arguments = {key: int64([7, 7, 0, 7, 0, 7]) for key in ("page_tag", "page_owner", "page_chain")} | {
        "pages": int64(given_back), "divisor": divisor, "event": np.zeros(4, np.int64)
    }  # fmt: skip
    left = require_equal("retire_pages", arguments, "torch")
    assert left["event"].tolist() == [*event, 0]
    vacant = {entry // divisor for entry in given_back} | {2, 4}
    assert left["page_chain"].tolist() == [7, 7, 0, 7, 0, 7], "no page is the tree's"
    for key in ("page_tag", "page_owner"):
        assert left[key].tolist() == [0 if page in vacant and page else 7 for page in range(6)]


def test_a_page_that_somebody_else_holds_is_not_given_back() -> None:
    """Its holder has done nothing: tag, owner and chain stay. What a row and the tree hold themselves is given back."""
    owners = [0, owner_of(4, 0), owner_of(4, 1), owner_of(5, 0), TREE, 0]
    books = {
        "page_tag": int64([0, 11, 12, 13, 14, 0]), "page_owner": int64(owners), "page_chain": int64([0, 0, 0, 0, 9, 0])
    }  # fmt: skip
    for by, gone, event in (
        (5, {1, 2}, [FREE_UNOWNED, 3, 2, 0]),
        (TREE, {4}, [FREE_UNOWNED, 1, 0, 0]),
        (int64([5, 5, 6, TREE]), {1, 2, 3, 4}, [0, 0, 0, 0]),
        (int64([5, 6, ANYBODY, 5]), {1, 3}, [FREE_UNOWNED, 2, 1, 0]),
    ):
        arguments = {key: array.copy() for key, array in books.items()} | {
            "pages": int64([1, 2, 3, 4]), "by": by, "event": np.zeros(4, np.int64)
        }  # fmt: skip
        left = require_equal("retire_pages", arguments, "torch")
        assert left["event"].tolist() == event
        assert left["page_tag"].tolist() == [0 if page in gone else tag for page, tag in enumerate(books["page_tag"])]


@pytest.mark.parametrize("error", [0, 5])
def test_a_row_goes_on_with_the_chain_of_the_page_that_the_tree_had_and_keeps_its_error(error: int) -> None:
    """Chains, owners and digest by hand; what the row is off by is in each chain that it adds."""
    arguments = sound_publish()
    arguments["digest"][1] += error
    left = require_equal("publish_row", arguments, "torch")
    chains = {1: 1000, 6: 2000, 2: 1000 + mix(KEY, 1, 12) + error, 4: 2000 + mix(KEY, 3, 14) + error}
    assert left["page_chain"].tolist() == [signed64(chains.get(page, 0)) for page in range(10)]
    assert left["page_owner"].tolist() == [0, -1, -1, owner_of(1, 2), -1, owner_of(1, 4), -1, 0, 0, 0]
    assert left["digest"].tolist() == [0, signed64(2000 + mix(KEY, 3, 14) + mix(KEY, 4, 15) + error)]


@pytest.mark.parametrize("changes", [{"row": 2}, {"stop": 0}, {"stop": 5}, {"start": -1}, {"page_size": 0}])
def test_columns_that_do_not_fit_are_refused(changes: Arguments) -> None:
    """All of it is known to the host."""
    for backend in ("numpy", "torch"):
        with pytest.raises(ValueError):
            require_equal("publish_row", sound_publish(**changes), backend)


@pytest.mark.parametrize("changes", [
    {"content": None}, {"page_content": None}, {"event": None}, {"content": np.zeros((2, 2), np.int64)},
    {"page_content": np.zeros((10, 3), np.int64)},
])  # fmt: skip
def test_contents_that_do_not_fit_are_refused(changes: Arguments) -> None:
    """Before anything is changed: two lanes for each column and page, and somewhere to say what is wrong."""
    contents = {"content": np.ones((3, 2), np.int64), "page_content": np.ones((10, 2), np.int64)}
    arguments = sound_publish(event=np.zeros(4, np.int64), **contents)
    left = require_equal("publish_row", arguments, "torch")
    assert not left["event"].any(), "the case that is changed below"
    for backend in ("numpy", "torch"):
        with pytest.raises(ValueError, match=r"content|event"):
            require_equal("publish_row", arguments | changes, backend)
    if "event" not in changes:
        batch = {name: array if name == "page_content" else array[:2] for name, array in contents.items()}
        books = {"page_content": np.ones((6, 2), np.int64)}
        changed = {name: None if array is None else array[:1] for name, array in changes.items()}
        with pytest.raises(ValueError, match="content"):
            require_equal("stamp_rows", stamp(**(batch | books | changed)), "torch")


def test_a_page_takes_the_place_of_the_rows_only_with_the_content_of_the_row() -> None:
    """Lanes and event by hand; the error is in every chain that the row adds, and in its digest."""
    contents = {"content": int64([[1, 2], [3, 4], [5, 6]]), "page_content": np.zeros((10, 2), np.int64)}
    for there, wrong in (([3, 4], 0), ([3, 5], SPOILED), ([2, 4], SPOILED), ([0, 0], SPOILED)):
        contents["page_content"][6] = there
        left = require_equal("publish_row", sound_publish(event=np.zeros(4, np.int64), **contents), "torch")
        assert left["event"].tolist() == ([CONTENT, 6, 1, 0] if wrong else [0] * 4)
        assert left["page_content"][[2, 4, 6]].tolist() == [[1, 2], [5, 6], there]
        assert left["digest"][1] == signed64(2000 + mix(KEY, 3, 14) + mix(KEY, 4, 15) + wrong)
        assert left["page_chain"][4] == signed64(2000 + mix(KEY, 3, 14) + wrong)


def test_a_prefix_of_other_content_spoils_the_row_that_begins_with_it() -> None:
    """What the page was published with against what the row says that it is."""
    for there, wrong in (([7, -8], 0), ([7, 8], SPOILED), ([-7, -8], SPOILED), ([0, 0], SPOILED)):
        contents = {"content": int64([[0, 0], [7, -8]]), "page_content": int64([[0, 0]] * 5 + [there])}
        left = require_equal("stamp_rows", stamp(**contents), "torch")
        assert left["event"].tolist() == ([CONTENT, 5, 1, 0] if wrong else [0] * 4)
        assert left["digest"][2] == signed64(55 + mix(KEY, 1, 105) + wrong)


VERIFIED_WRONG: dict[str, tuple[int, int, int]] = {
    # the slot that is written to row 0, at a position: its flag
    "out of range": (-1, 4, FLAG_RANGE | FLAG_DIGEST),
    "past the pool": (12, 1, FLAG_RANGE),
    "null": (0, 4, FLAG_NULL | FLAG_DIGEST),
    "vacant": (10, 2, FLAG_VACANT | FLAG_SPLIT | FLAG_DIGEST),
    "another's page": (8, 4, FLAG_DIGEST),
    "another piece": (4, 3, FLAG_SPLIT),
    "a piece of another page": (9, 3, FLAG_SPLIT),
}


@pytest.mark.parametrize("name", VERIFIED_WRONG)
def test_what_is_wrong_with_a_slot_is_flagged_and_its_row_is_taken_off(name: str) -> None:
    """Flags, position and slot by hand; the other row stays clean and writes what it wrote."""
    slot, position, flags = VERIFIED_WRONG[name]
    arguments = sound_verify()
    arguments["table"][0, position] = slot
    left = require_equal("verify_rows", arguments, "torch")
    where = [-1, -1] if flags == FLAG_DIGEST else [position, slot]
    assert left["record"][0, [0, 2, 3]].tolist() == [flags, *where]
    assert left["record"][1, [0, 2, 3]].tolist() == [0, -1, -1]
    assert left["slot_mapping"].tolist() == [0, 4]
    arguments["table"][0, position] = slot if 0 <= slot < 12 else 0
    assert np.array_equal(left["table"], arguments["table"])


def test_rows_that_are_as_promised_are_clean() -> None:
    """The case that the ones above are made of."""
    left = require_equal("verify_rows", sound_verify(), "torch")
    assert not left["record"][:, 0].any() and left["slot_mapping"].tolist() == [6, 4]
    assert left["record"][:, 1].tolist() == sound_verify()["digest"].tolist()


def test_a_row_whose_slots_were_wrong_is_taken_off_and_spoiled() -> None:
    """What `verify_slots` flagged is flagged here, so that what the row publishes later adds up for nobody."""
    arguments = sound_verify() | {"writes": np.array([[0, 0, -1, -1], [256, 1, 4, 7], [512, 1, 0, 9]])}
    left = require_equal("verify_rows", arguments, "torch")
    assert left["record"][:, 0].tolist() == [0, FLAG_WRITE] and left["slot_mapping"].tolist() == [6, 0]
    spoiled = left["digest"] != sound_verify()["digest"]
    assert spoiled.tolist() == [False, True]
    with pytest.raises(ValueError, match="one record of four words"):
        require_equal("verify_rows", sound_verify() | {"writes": np.zeros((1, 4), np.int64)}, "torch")


def test_all_rows_are_judged_before_any_is_changed() -> None:
    """Two that are one row of the table say the same."""
    left = require_equal("verify_rows", shared_table_row(), "torch")
    assert left["record"][0].tolist() == left["record"][1].tolist() and left["record"][0, 2:].tolist() == [4, -1]
    assert left["table"][0, 4] == 0


def test_chains_are_read_before_any_is_written() -> None:
    """A row that holds a page twice goes on with the chain that the page had, which does not add up."""
    left = require_equal("publish_row", repeated_page(), "torch")
    assert left["digest"][1] == signed64(777 + mix(KEY, 4, 15))


@pytest.mark.parametrize(("slots", "in_use", "event"), [
    ([6, 8], 0, [0, 0, 0]),
    ([6, 8], 3, [DOUBLE_ALLOCATION, 3, 0]),
    ([6, 8], 4, [DOUBLE_ALLOCATION, 4, 1]),
    ([6, 6], 0, [DOUBLE_ALLOCATION, 3, 0]),
])  # fmt: skip
def test_a_decode_that_opens_pages_in_use_or_one_twice_is_reported(
    slots: list[int], in_use: int, event: list[int]
) -> None:
    """Also on a CPU, where a decode without a problem takes a short way."""
    arguments = stamp(slots=int64(slots), rows=int64([0, 2]), first=int64([2, 2]), offset=None, adopted=None)
    arguments["page_tag"][in_use] = 7 if in_use else 0
    left = require_equal("stamp_rows", arguments, "torch")
    assert left["event"].tolist() == [*event, 0]
    assert left["digest"][2] == signed64(int(arguments["digest"][2]) + mix(KEY, 1, 101))
