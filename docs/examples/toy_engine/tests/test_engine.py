"""The engine's own tests, as any project has them; they run with and without a campaign."""

from toy_engine.block_manager import BlockManager
from toy_engine.engine import Engine


def generate(**prompts: list[int]) -> dict[str, list[int]]:
    engine = Engine(BlockManager(num_blocks=24, block_size=4))
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_new_tokens=6)
    while engine.seqs:
        engine.step()
    return engine.outputs


def test_a_request_gets_the_same_tokens_whoever_runs_beside_it() -> None:
    alone = generate(a=[3, 1, 4, 1, 5, 9, 2, 6])["a"]
    together = generate(a=[3, 1, 4, 1, 5, 9, 2, 6], b=[2, 7, 1, 8], c=[3, 1, 4, 1, 5, 9, 2, 6, 5])
    assert together["a"] == alone and len(alone) == 6
