"""Bugs of an external store of pages: what its entries are found by, and what it says that it has loaded."""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.pool import chain_keys
from kvguard.fault_injection.scenarios.embedded import PLAIN, EmbeddedReplay, ask, text, when
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.traffic import Arrival
from kvguard.violation import Proof

__all__ = ["STORE_SCENARIOS"]

STORED = replace(PLAIN, external_store=True)


def _evict_everything(engine: Engine) -> None:
    for page in list(engine.pool.idle):
        engine.pool.evict(page)


def _only_the_store_answers(engine: Engine) -> None:
    """The engine's own prefix cache is off: pages are kept for the store only, which has them before step 8."""
    engine.pool.lookup = lambda keys: []  # type: ignore[method-assign]
    when(8, _evict_everything)(engine)


def _store_knows_no_adapter(engine: Engine) -> None:
    size = engine.config.page_size
    engine.scheduler.keys_of = lambda sequence, tokens: chain_keys(tokens, size, sequence.request.tenant)


def _two_adapters(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("one", prompt, new=4, lora="fr"), ask("two", prompt, at=8, new=60, lora="de")]


def _new_weights(engine: Engine) -> None:
    """Everything is in the store before step 8; the engine then restarts with other weights."""

    def restart(running: Engine) -> None:
        _evict_everything(running)
        running.update_weights()

    when(8, restart)(engine)


def _store_is_kept(engine: Engine) -> None:
    """Files are named after the served model, not after its weights: they are all still there."""
    assert engine.pool.store is not None
    engine.pool.store.clear = lambda: None  # type: ignore[method-assign]


def _before_and_after(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 70)
    return [ask("before", prompt, new=4), ask("after", prompt, at=9, new=60)]


def _count_before_copy(engine: Engine) -> None:
    """The counter of completed tokens moves when the load begins; the bytes come later, if at all."""
    store = engine.pool.store
    assert store is not None

    def load(keys: list[int], pages: list[int]) -> int:
        store.completed = []
        return len(keys)

    store.load = load  # type: ignore[method-assign,assignment]


def _room_for_two(engine: Engine) -> None:
    """The staging pool has room for two pages: the others are allocated, not loaded, and reported all the same."""
    store = engine.pool.store
    assert store is not None
    plain = store.load

    def load(keys: list[int], pages: list[int]) -> int:
        plain(keys[:2], pages[:2])
        return len(keys)

    store.load = load  # type: ignore[method-assign,assignment]


def _twice_with_another_between(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 46)
    return [ask("a", prompt, new=4), ask("between", text(rng, 46), at=9, new=3), ask("again", prompt, at=14, new=14)]


def _evicted_early(engine: Engine) -> None:
    """The first request's pages are in the store before step 8, and the last one finds them nowhere else."""
    when(8, _evict_everything)(engine)
    when(14, _evict_everything)(engine)


def _store_scenario(name: str, link: str, reported_in: str, story: str, replay: EmbeddedReplay) -> Scenario:
    """The comparison of contents finds it, before what was loaded counts: nobody is ended."""
    return Scenario(
        name=name, link=link, reported_in=reported_in, family="stores", proof=Proof.CONTENT_KEY, story=story,
        replay=replay, page_size=replay.config.page_size,
    )


STORE_SCENARIOS = (
    _store_scenario(
        "store-key-without-adapter",
        "https://github.com/vllm-project/vllm/issues/44250",
        "vLLM + LMCache",
        "Keys of the external store leave out the adapter; the engine's own cache is off.",
        EmbeddedReplay(
            arrivals=_two_adapters, bug=_store_knows_no_adapter, setting=_only_the_store_answers, config=STORED
        ),
    ),
    _store_scenario(
        "store-named-after-served-model",
        "https://github.com/sgl-project/sglang/issues/24758",
        "SGLang",
        "Files of the store carry the served model's name and not its weights: another checkpoint under that name "
        "loads them.",
        EmbeddedReplay(arrivals=_before_and_after, bug=_store_is_kept, setting=_new_weights, config=STORED),
    ),
    _store_scenario(
        "loaded-count-before-copy",
        "https://github.com/sgl-project/sglang/pull/8901",
        "SGLang",
        "The counter of loaded tokens moves before the bytes are copied: pages are read that nothing was put into.",
        EmbeddedReplay(
            arrivals=_twice_with_another_between, bug=_count_before_copy, setting=_evicted_early, config=STORED
        ),
    ),
    _store_scenario(
        "staging-pool-runs-out",
        "https://github.com/LMCache/LMCache/issues/3022",
        "LMCache",
        "The staging pool runs out in the middle of a batch, and entries that were never loaded are returned as hits.",
        EmbeddedReplay(arrivals=_twice_with_another_between, bug=_room_for_two, setting=_evicted_early, config=STORED),
    ),
)
