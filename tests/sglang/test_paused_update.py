"""New weights while SGLang is paused, as in reinforcement learning: afterwards requests find their own pages again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.apart import on
from tests.sglang.engine import Engine, checkpoint
from tests.sglang.scenarios import assert_clean, at_step
from tests.sglang.test_contents import LOOPS, ON, PROMPT, TOKENS, hits_of

ASKED = 6


def paused_update(engine: Engine, flushed_by: str) -> dict[str, int]:
    """Hits of requests with one prompt that wait, retracted, while the weights are changed. They never let the
    scheduler come to rest until all of them are done."""
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        ContinueGenerationReqInput,
        EndWeightUpdateReqInput,
        FlushCacheReqInput,
        PauseGenerationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    def update(engine: Engine) -> None:
        path = str(checkpoint())
        engine.send(PauseGenerationReqInput(mode="retract"))
        if flushed_by == "before":
            engine.send(FlushCacheReqInput())
            engine.send(UpdateWeightFromDiskReqInput(model_path=path, load_format="auto", flush_cache=False))
        else:
            engine.send(BeginWeightUpdateReqInput())
            engine.send(UpdateWeightFromDiskReqInput(model_path=path, load_format="auto", flush_cache=True))
            engine.send(EndWeightUpdateReqInput())
        engine.send(ContinueGenerationReqInput(torch_empty_cache=False))

    with hits_of(engine) as hits:
        engine.add("running", PROMPT[::-1], 60)
        for place in range(ASKED):
            engine.add(f"r{place}", PROMPT, TOKENS)
        engine.run(at_step(8, update))
    refused = [answer for answer in engine.control if getattr(answer, "success", True) is not True]
    assert not refused, refused
    engine.control.clear()
    return dict(hits)


@LOOPS
@pytest.mark.parametrize("flushed_by", ["before", "session"])
@on(environment=ON, max_running_requests=2)
def test_after_an_update_of_an_empty_cache_hits_are_those_of_an_unguarded_engine(
    engine: Engine, flushed_by: str, overlap: bool
) -> None:
    """The cache was emptied before the weights changed, or in between: nothing in it is of other weights."""
    with engine.unguarded():
        engine.tokens, engine.ends = {}, {}
        wanted: Any = paused_update(engine, flushed_by), engine.tokens
    epoch = engine.guard.contents.epoch
    assert (paused_update(engine, flushed_by), engine.tokens) == wanted
    assert sum(count > 0 for count in wanted[0].values()) >= ASKED - 2
    assert engine.guard.contents.epoch > epoch
    assert_clean(engine)
