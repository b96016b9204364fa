"""kvguard's fault campaign against this engine: pytest --kvguard-campaign"""

import os
from collections.abc import Sequence

import pytest
from toy_engine.broken import MANAGERS
from toy_engine.engine import MAX_ROWS, VOCAB, Engine

from kvguard.pools import PoolSpec

BLOCKS, BLOCK_SIZE = 30, 4


class EngineUnderTest:
    """What kvguard's faults may touch of the engine, and how its clients use it."""

    page_size, num_pages, null_page, vocab_size = BLOCK_SIZE, BLOCKS, 0, VOCAB
    max_prompt_tokens, max_new_tokens = 20, 14
    exact = True  # integers: what runs beside a request cannot change its tokens

    def __init__(self, engine: Engine) -> None:
        self.engine, self.manager = engine, engine.manager
        self.block_table = engine.block_table
        self.submit, self.step = engine.submit, engine.step

    def busy(self) -> bool:
        return bool(self.engine.seqs)

    def abort(self, request: str) -> None:
        if request in self.engine.seqs:
            self.engine.end(self.engine.seqs[request], "the client left")

    def tokens(self, request: str) -> Sequence[int]:
        return self.engine.outputs[request]

    def error(self, request: str) -> str | None:
        return self.engine.errors[request]

    def pages(self, request: str) -> Sequence[int]:
        return self.engine.seqs[request].block_table if request in self.engine.seqs else ()

    # For the faults.

    def row(self, request: str) -> int:
        return self.engine.seqs[request].row

    @property
    def free_pages(self) -> object:
        return self.manager.free_blocks

    def release(self, page: int) -> None:
        self.manager.ref_count[page] = 0
        self.manager.give_back(page)

    def fits(self, request: str) -> bool:
        blocks = len(self.manager.free_blocks) + len(self.manager.idle)
        return len(self.engine.running) < MAX_ROWS and blocks * BLOCK_SIZE > len(self.engine.seqs[request].tokens)

    @property
    def prefix_cache(self) -> dict[int, int]:
        return self.manager.cached

    def prefix_keys(self, request: str) -> list[int]:
        seq = self.engine.seqs[request]
        return self.manager.keys(seq.tokens if seq.block_table else seq.tokens[:-1])


def make_engine(make_guard):
    """A fresh engine for each run; `make_guard` is None for the runs without a guard."""
    manager = MANAGERS[os.environ.get("TOY_ENGINE_MANAGER", "sound")](BLOCKS, BLOCK_SIZE)
    guard = make_guard and make_guard([PoolSpec(num_pages=BLOCKS, page_size=BLOCK_SIZE)], backend="numpy")
    return EngineUnderTest(Engine(manager, guard))


@pytest.mark.kvguard(trials=36, clean_runs=6)
def test_campaign(kvguard_campaign):
    kvguard_campaign.run(make_engine)
