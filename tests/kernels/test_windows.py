"""Pairing and checking the pages of sliding-window layers: torch and interpreted Triton against the oracle, and what
they are for: a healthy history is clean, and a window page that changed hands is seen by every row that reads it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.kernels.interpreted  # noqa: F401 -- before anything imports Triton
from kvguard.kernels.events import DOUBLE_ALLOCATION, NULL, OUT_OF_RANGE, VACANT
from kvguard.kernels.pair_windows import pair_windows
from kvguard.kernels.pair_windows import torch_op as pair_torch
from kvguard.kernels.pair_windows import triton_op as pair_op
from kvguard.kernels.verify_pages.layout import BAD_COLUMN, BAD_ENTRY, FLAG_WINDOW, FLAGS
from kvguard.kernels.verify_windows import torch_op as verify_torch
from kvguard.kernels.verify_windows import triton_op as verify_op
from tests.kernels.cases import int64
from tests.kernels.interpreted import interpreting
from tests.kernels.token_row_cases import Arguments
from tests.kernels.window_cases import OPERATIONS, calls, require_equal, run
from tests.kernels.window_history import Windows

EXAMPLES, TRITON_EXAMPLES = 300, 60
MODULES: dict[str, ModuleType] = {"pair_windows": pair_op, "verify_windows": verify_op}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch_agrees_with_the_oracle(operation: str) -> None:
    """Every array that the operation gets, written or not, in calls of all kinds."""

    @given(calls(operation))
    @settings(max_examples=EXAMPLES, deadline=None)
    def check(arguments: Arguments) -> None:
        require_equal(operation, arguments, "torch")

    check()


@pytest.mark.parametrize("chunk_entries", [1, 1 << 21])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_way_of_devices_agrees(monkeypatch: pytest.MonkeyPatch, operation: str, chunk_entries: int) -> None:
    """Without the short ways that tensors on a CPU may take; `verify_windows` whole and row by row."""
    for module in (pair_torch, verify_torch):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    monkeypatch.setattr(verify_torch, "CHUNK_ENTRIES", chunk_entries)
    test_torch_agrees_with_the_oracle(operation)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_agrees_with_the_oracle(monkeypatch: pytest.MonkeyPatch, operation: str, block: int) -> None:
    """Every array, where a block is short of the batch or the window and where it is not."""
    monkeypatch.setattr(MODULES[operation], "BLOCK", block)

    @given(calls(operation))
    @settings(max_examples=TRITON_EXAMPLES, deadline=None)
    def check(arguments: Arguments) -> None:
        with interpreting():
            require_equal(operation, arguments, "triton")

    check()


# (full slots, window slots, fresh) -> code, page, place; window pages 1 and 2 of four are in use, pages have 2 slots
PAIRED: dict[str, tuple[list[int], list[int], bool, list[int]]] = {
    "a fresh page": ([4, 5], [6, 7], True, [0, 0, 0]),
    "a page in use": ([4, 6], [6, 2], True, [DOUBLE_ALLOCATION, 1, 1]),
    "a page twice": ([4, 6], [6, 6], True, [DOUBLE_ALLOCATION, 3, 0]),
    "a page in use goes over": ([4, 5], [2, 3], False, [0, 0, 0]),
    "a vacant page goes over": ([4, 6], [2, 6], False, [VACANT, 3, 1]),
    "no page": ([4], [0], True, [NULL, 0, 0]),
    "the null page gets one": ([4, 0], [6, 2], False, [VACANT, 3, 0]),
    "a window page outside the pool": ([4], [8], True, [OUT_OF_RANGE, 4, 0]),
    "a full page outside the pool": ([10], [8], True, [OUT_OF_RANGE, 5, 0]),
    "within a page nothing is paired": ([5], [99], True, [0, 0, 0]),
}


@pytest.mark.parametrize("name", PAIRED)
def test_what_is_wrong_with_a_pair_is_reported(name: str) -> None:
    """Code, page and place of the first problem."""
    full, window, fresh, event = PAIRED[name]
    arguments = {
        "full": int64(full), "window": int64(window), "fresh": fresh, "peer_tag": int64([0] * 5),
        "window_tag": int64([0, 11, 12, 0]), "window_holder": int64([0] * 4), "page_size": 2, "base_tag": 100,
        "event": np.zeros(4, np.int64),
    }  # fmt: skip
    assert require_equal("pair_windows", arguments, "torch")["event"].tolist() == [*event, 0]
    with interpreting():
        require_equal("pair_windows", arguments, "triton")


@pytest.mark.parametrize(("page_size", "window", "wrong", "seen"), [
    (1, 3, 6, True), (1, 3, 5, False), (4, 3, 7, True), (4, 3, 5, False), (4, 0, 9, True), (1, 0, 8, False),
])  # fmt: skip
def test_exactly_the_window_of_a_decode_is_looked_at(page_size: int, window: int, wrong: int, seen: bool) -> None:
    """The query at position 9 reads `window` positions before its own, and nothing earlier counts."""
    pages = 10 // page_size + 2
    table = np.arange(page_size, page_size + 10, dtype=np.int32)[None]
    mapping = np.arange(pages * page_size)
    mapping[table[0, wrong]] = 0
    tags = int64([0, *range(1, pages)])
    arguments = {
        "table": table, "rows": int64([0]), "lengths": int64([10]), "window": window, "mapping": mapping,
        "peer_tag": tags, "window_tag": tags.copy(), "page_size": page_size, "enforce": True,
        "record": int64([[0, 5, -1, -1]]), "slot_mapping": int64([17]),
    }  # fmt: skip
    found = require_equal("verify_windows", arguments, "torch")
    assert found["record"].tolist() == ([[FLAG_WINDOW, 5, wrong, 0]] if seen else [[0, 5, -1, -1]])
    assert found["slot_mapping"].tolist() == [0 if seen else 17]


def test_a_window_slot_outside_the_pool_cannot_fault() -> None:
    """With `enforce` it is 0 afterwards; what is not of the row's window stays as it is."""
    mapping = int64([0, 1, 2, 99, -7, 5])
    arguments = {
        "table": np.arange(1, 5, dtype=np.int32)[None], "rows": int64([0]), "lengths": int64([3]), "window": 1,
        "mapping": mapping, "peer_tag": int64([0, 1, 2, 3, 4]), "window_tag": int64([0, 1, 2]), "page_size": 1,
        "enforce": True, "record": int64([[0, 5, -1, -1]]),
    }  # fmt: skip
    found = require_equal("verify_windows", arguments, "torch")
    assert found["record"][0, [FLAGS, BAD_COLUMN, BAD_ENTRY]].tolist() == [FLAG_WINDOW, 2, 99]
    assert found["mapping"].tolist() == [0, 1, 2, 0, -7, 5]
    arguments["enforce"] = False
    assert run("verify_windows", arguments, "torch")["mapping"].tolist() == mapping.tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 4]), st.integers(0, 9))
def test_a_healthy_history_is_clean_and_a_stolen_window_page_is_seen(seed: int, page_size: int, window: int) -> None:
    """Rows grow and free what slides out, pages go over to other full pages; then one is freed under a reader."""
    world = Windows(np.random.default_rng(seed), page_size, window)
    for _ in range(30):
        world.step()
        assert not world.check().any(), "a healthy row was flagged"
    row, page = world.steal()
    if row >= 0:
        flagged = world.check()
        assert flagged[row] and flagged.nonzero()[0].tolist() == world.readers(page)


def test_mismatched_shapes_are_refused() -> None:
    """A caller's mistake is an error before anything runs."""
    one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="one element per token"):
        pair_windows(
            full=one, window=two, fresh=True, peer_tag=two, window_tag=two, window_holder=two, page_size=1, base_tag=1,
            event=one,
        )  # fmt: skip
    arguments = {
        "table": one[None].int(), "rows": one, "lengths": one, "window": 1, "mapping": one, "peer_tag": two,
        "window_tag": two, "page_size": 1, "enforce": False, "record": torch.zeros((1, 4), dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ValueError, match="mapping has 1"):
        OPERATIONS["verify_windows"](**arguments)
    with pytest.raises(ValueError, match="not negative"):
        OPERATIONS["verify_windows"](**(arguments | {"window": -1, "mapping": two}))
