"""The decode worker's end of a transfer: what it makes of messages that were mixed up, and of a part that must wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvguard.fault_injection.engine.decode import DecodeEngine
from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.kv_wire import Part
from kvguard.fault_injection.engine.prefill_process import PrefillProcess
from kvguard.fault_injection.targets.embedded_runs import load_model
from kvguard.fault_injection.targets.pd_runs import PhasesSetup, serve_run
from kvguard.fault_injection.traffic import trial_traffic
from kvguard.transfer_manifest import Wait
from tests.engine.test_two_phases import guarded

SETUP = PhasesSetup(model="recall", weights="fp32", kv_dtype="fp32", page_size=16, tight=False)


@pytest.fixture(scope="module")
def process() -> Iterator[PrefillProcess]:
    """One prefill worker for all tests here."""
    torch.set_num_threads(1)
    worker = PrefillProcess(serve_run)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    """What one engine without phases makes of the two requests."""
    single = Engine(load_model("recall", "fp32"), SETUP.decode_config())
    for arrival in trial_traffic(9)[2:4]:
        single.submit(arrival.request)
    single.run()
    return {name: output.token_ids for name, output in single.outputs.items()}


def submitted(process: PrefillProcess) -> tuple[DecodeEngine, Any]:
    engine, guard = guarded(process, SETUP, seed=4)
    for arrival in trial_traffic(9)[2:4]:
        engine.submit(arrival.request)
    return engine, guard


def test_a_part_that_must_wait_is_written_later(process: PrefillProcess, expected: dict[str, Any]) -> None:
    """In order, and nobody else waits for it: the same tokens, and nothing is flagged."""
    engine, guard = submitted(process)
    target = engine.target
    assert target is not None
    place, waits = target.place, {0: 3, 1: 1}

    def busy(request: str, **options: Any) -> Any:
        if waits.get(options["part"], 0):
            waits[options["part"]] -= 1
            return Wait(step=1)
        return place(request, **options)

    target.place = busy  # type: ignore[method-assign]
    engine.run()
    assert not any(waits.values()) and engine.hand_overs == 2 and not guard.violations
    assert {name: output.token_ids for name, output in engine.outputs.items()} == expected


def test_pages_go_where_their_signed_labels_say(process: PrefillProcess, expected: dict[str, Any]) -> None:
    """The column and the token count beside a label are nobody's word: here they are all wrong, and do no harm."""
    engine, guard = submitted(process)
    receive = engine.receive

    def mixed_up(part: Part) -> None:
        columns = [page.column for page in part.pages]
        pages = tuple(page._replace(column=other) for page, other in zip(part.pages, columns[::-1], strict=True))
        receive(replace(part, pages=pages, tokens=part.tokens - 1))

    engine.receive = mixed_up  # type: ignore[method-assign]
    engine.run()
    assert engine.hand_overs == 2 and not guard.violations
    assert {name: output.token_ids for name, output in engine.outputs.items()} == expected


def test_two_requests_whose_first_tokens_were_swapped_are_ended(process: PrefillProcess) -> None:
    """Neither client gets a token of the other's."""
    engine, guard = submitted(process)
    receive = engine.receive
    engine.receive = lambda part: receive(  # type: ignore[method-assign]
        replace(part, first_token=part.first_token + 1) if part.is_last else part
    )
    engine.run()
    assert engine.hand_overs == 0 and len(guard.violations) == 2 and guard.health().armed
    for output in engine.outputs.values():
        assert output.tokens == [] and output.error is not None and "manifest" in output.error


def test_pages_that_fall_short_are_given_back_and_the_transfer_is_still_awaited(
    process: PrefillProcess, expected: dict[str, Any]
) -> None:
    """The guard passed pages over while they were allocated: the request tries again, under the same ticket."""
    engine, guard = submitted(process)
    take, refusals = engine.pool.take, [3]

    def short(request: str) -> int | None:
        # After a page or two, so that some are in its ledger by then.
        refusals[0] -= 1
        return None if refusals[0] in (1, -4) else take(request)

    engine.pool.take = short  # type: ignore[method-assign]
    engine.run()
    assert refusals[0] < -4 and engine.hand_overs == 2 and not guard.violations and guard.health().ok
    assert {name: output.token_ids for name, output in engine.outputs.items()} == expected
    assert engine.pool.available == SETUP.decode_config().num_pages - 1
