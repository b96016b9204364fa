"""The Triton kernel of `verify_slots`, under Triton's interpreter, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvguard.kernels.verify_slots import verify_slots
from kvguard.kernels.verify_slots.descriptor import BLOCK, PROGRAMS, SlotStep, describe_slots
from tests.kernels.cases import int64
from tests.kernels.interpreted import interpreting
from tests.kernels.slot_cases import SPECIAL, healthy_step, nonsense, require_equal, require_same, run, run_step
from tests.kernels.slot_faults import FAULTS, planted_step, require_planted
from tests.kernels.test_verify_slots import ODD, decode
from tests.kernels.token_row_cases import Arguments

LAUNCHES = {"one block": (64, 1), "several blocks": (8, 1), "several parts": (8, 3)}
SIZES = (1, 2, 3, 16)
"""Spans of most of them are longer than a short block."""


def require_step(cases: list[Arguments], block: int, chunks: int) -> None:
    """All of them in one launch."""
    for case, left in zip(cases, run_step(cases, backend="triton", block=block, chunks=chunks), strict=True):
        require_same(case, run(case, "numpy"), left)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_triton_agrees_with_the_oracle(launch: str) -> None:
    """Every word, in calls of all kinds, a dozen pools to a launch."""
    for number in range(4):
        random = np.random.default_rng([number, len(launch)])
        require_step([nonsense(random, SIZES[index % 4]) for index in range(12)], *LAUNCHES[launch])


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_triton_agrees_with_the_oracle_in_many_calls(launch: str) -> None:
    """Several times as many."""
    for number in range(4, 40):
        random = np.random.default_rng([number, len(launch)])
        require_step([nonsense(random, SIZES[index % 4]) for index in range(12)], *LAUNCHES[launch])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_odd_steps_and_faults_are_as_in_the_oracle(launch: str) -> None:
    """Each that has a name, and healthy steps between them."""
    healthy = [healthy_step(np.random.default_rng(n), SIZES[n % 4], skip_allowed=n % 2 == 1) for n in range(8)]
    cases = [decode(**changes) | {"null_page": changes.get("null_page", 0)} for changes, _, _ in ODD.values()]
    cases += [step.arguments for step in healthy]
    planted = [
        planted_step(name, number, page_size)
        for number, name in enumerate(FAULTS)
        for page_size in (1, 16)
        if name != "an offset that is shifted" or page_size > 1
    ]
    require_step(cases, *LAUNCHES[launch])
    block, chunks = LAUNCHES[launch]
    found = run_step([step.arguments for step, _ in planted], backend="triton", block=block, chunks=chunks)
    for (step, faults), left in zip(planted, found, strict=True):
        require_planted(step, faults, left)


def test_one_pool_through_the_usual_front() -> None:
    """`verify_slots` takes the backend by name, whatever the gaps and types; what it would read wrongly is refused."""
    with interpreting():
        for number in range(6):
            step = healthy_step(np.random.default_rng(number), 2, special=SPECIAL[number])
            require_planted(step, {}, require_equal(step.arguments, "triton"))
        for name in ("clean", "no rows: all is padding", "two rows of one place: each judges"):
            require_equal(decode(**ODD[name][0]), "triton")
    for changes in (
        {"writer": torch.zeros(4, dtype=torch.int64)[::2]},
        {"page_writer": torch.zeros(8, dtype=torch.int64)[::2]},
        {"record": torch.zeros((3, 8), dtype=torch.int64)[:, ::2]},
        {"writer": torch.zeros(2, dtype=torch.int64), "floor": torch.zeros(2, dtype=torch.int32)},
        {"lengths": torch.zeros(2, dtype=torch.int16)},
        {"slot_mapping": torch.zeros(3, dtype=torch.int16)},
        {"query_start": torch.zeros(3, dtype=torch.int16)},
        {"query_row": torch.zeros(2, dtype=torch.int32)},
    ):
        tensors: Arguments = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in decode().items()
        }
        with pytest.raises(ValueError, match="gaps|int32 or int64|int64"):
            verify_slots(**tensors | changes, backend="triton")


def test_the_launch_depends_on_shapes_alone_and_fits_the_work() -> None:
    """Few rows of many tokens are shared among programs, many rows are not."""

    def launch(rows: int, tokens: int, pools: int = 1) -> Any:
        blank = torch.zeros(tokens, dtype=torch.int64)
        pool = SlotStep(
            slot_mapping=blank, lengths=blank[:rows], page_writer=blank, rows=rows, writer=0, floor=None, page_size=16,
            skip_slot=-1, skip_allowed=False, enforce=True, record=0,
        )  # fmt: skip
        return describe_slots([pool] * pools)[1]

    assert launch(1, 4 * BLOCK).chunks == 4 and launch(BLOCK, BLOCK).chunks == 1
    assert launch(PROGRAMS, 8 * BLOCK).chunks == 1 and launch(PROGRAMS // 8, 8 * BLOCK, pools=4).chunks == 2
    assert launch(3, 10, pools=2).workspace_words == 2 * (1 + 3 * 4 + 10)
    assert describe_slots([])[1].pools == 0
    assert launch(0, 0).chunks == 1 and launch(0, 0).rows == 0


def test_a_workspace_serves_one_launch_after_another() -> None:
    """A wrong step leaves nothing behind for the clean one."""
    wrong, clean = decode(slot_mapping=int64([2, 7, 3]), null_page=0), decode(null_page=0)
    for chunks in (1, 3):
        for case in (wrong, clean, wrong):
            (left,) = run_step([case], backend="triton", block=4, chunks=chunks)
            require_same(case, run(case, "numpy"), left)
