"""The Triton kernels of the operations on token rows, under Triton's interpreter, against the oracle."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import tests.kernels.interpreted  # noqa: F401 -- before anything imports Triton
from kvguard.kernels.events import CONTENT, DOUBLE_ALLOCATION
from kvguard.kernels.publish_row import triton_op as publish_op
from kvguard.kernels.retire_pages import triton_op as retire_op
from kvguard.kernels.stamp_rows import triton_op as stamp_op
from kvguard.kernels.verify_pages.layout import FLAGS
from kvguard.kernels.verify_rows import triton_op as verify_op
from kvguard.kernels.verify_rows import verify_rows
from tests.kernels.interpreted import interpreting
from tests.kernels.token_row_cases import (
    KEY,
    OPERATIONS,
    Arguments,
    calls,
    page_opened_twice,
    repeated_page,
    require_equal,
    shared_table_row,
    sound_publish,
)
from tests.kernels.token_row_history import Engine

MODULES: dict[str, ModuleType] = {
    "stamp_rows": stamp_op,
    "retire_pages": retire_op,
    "publish_row": publish_op,
    "verify_rows": verify_op,
}
SMALL_BLOCKS = {"stamp_rows": 2, "retire_pages": 4, "publish_row": 2, "verify_rows": 8}
"""Short of most batches, rows and paths."""
EXAMPLES = 30


@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_agrees_with_the_oracle(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Every array, in calls of all kinds; for most of them one block is enough."""
    monkeypatch.setattr(MODULES[operation], "BLOCK", 64)
    _check(operation, (1, 2, 16, 64), EXAMPLES)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_agrees_with_the_oracle_block_by_block(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """The same in several blocks, and rows in parts of several programs with several blocks each."""
    monkeypatch.setattr(MODULES[operation], "BLOCK", SMALL_BLOCKS[operation])
    monkeypatch.setattr(verify_op, "PROGRAMS", 8)
    _check(operation, (1, 2, 16), EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_triton_agrees_with_the_oracle_in_many_calls(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Twenty times as many."""
    monkeypatch.setattr(MODULES[operation], "BLOCK", SMALL_BLOCKS[operation])
    monkeypatch.setattr(verify_op, "PROGRAMS", 8)
    _check(operation, (1, 2, 3, 16), 20 * EXAMPLES)


def _check(operation: str, sizes: tuple[int, ...], examples: int) -> None:
    @given(calls(operation, sizes))
    @settings(max_examples=examples, deadline=None)
    def check(arguments: Arguments) -> None:
        with interpreting():
            require_equal(operation, arguments, "triton")

    check()


def test_the_workspace_is_left_at_zero_and_one_that_is_too_short_is_refused() -> None:
    """So that the next launch may use it: rows in several parts, all of them flagged."""
    table = torch.arange(3 * 40, dtype=torch.int32).reshape(3, 40)
    arguments: Arguments = {
        "table": table,
        "rows": torch.tensor([0, 2]),
        "lengths": torch.tensor([40, 33]),
        "page_tag": torch.zeros(9, dtype=torch.int64),
        "digest": torch.ones(3, dtype=torch.int64),
        "page_size": 4,
        "key": KEY,
        "enforce": True,
        "record": torch.full((2, 4), -1),
        "backend": "triton",
    }
    workspace = torch.zeros(verify_op.workspace_words(2), dtype=torch.int64)
    with interpreting(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_op, "BLOCK", 8)
        verify_rows(**arguments, workspace=workspace)
        assert not workspace.any() and (arguments["record"][:, FLAGS] != 0).all()
        assert table[0].tolist() == [*range(36), 0, 0, 0, 0] and table[1, 0] == 40 and not table[2, :33].any()
        with pytest.raises(ValueError, match="words"):
            verify_rows(**arguments, workspace=workspace[1:])
        with pytest.raises(ValueError, match="int32"):
            verify_rows(**arguments | {"table": table.long()})


def test_what_depends_on_the_order_in_a_launch_is_as_in_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are judged before any is changed; all chains are read before any is written."""
    monkeypatch.setattr(publish_op, "BLOCK", 2)
    with interpreting():
        require_equal("verify_rows", shared_table_row(), "triton")
        require_equal("publish_row", repeated_page(), "triton")
        found = require_equal("stamp_rows", page_opened_twice(), "triton")
        assert found["event"].tolist()[:3] == [DOUBLE_ALLOCATION, 1, 0], "where it was given for the first time"


def test_a_page_of_which_nothing_was_said_is_nobodys_in_triton() -> None:
    """Not even of a row that is said to be nothing at that column."""
    contents = {"content": np.zeros((3, 2), np.int64), "page_content": np.zeros((10, 2), np.int64)}
    with interpreting():
        left = require_equal("publish_row", sound_publish(event=np.zeros(4, np.int64), **contents), "triton")
    assert left["event"].tolist() == [CONTENT, 6, 1, 0]


@pytest.mark.parametrize("contents", [False, True])
def test_an_engine_in_small_on_triton(contents: bool) -> None:
    """One healthy history."""
    engine = Engine(backend="triton", page_size=2, seed=3, contents=contents)
    with interpreting():
        for _ in range(40):
            engine.step()
            assert not engine.event.any()
            assert not engine.flagged() if engine.live else True
