"""Bugs of who owns a page: frees and counts."""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.scenarios.embedded import PLAIN, EmbeddedReplay, Method, ask, patch, text
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.traffic import Arrival
from kvguard.violation import Proof

__all__ = ["PAGE_SCENARIOS"]


def _decrement_first(engine: Engine) -> None:
    pool, batch = engine.pool, list[int]()

    def free_batch(running: Engine) -> None:
        for page in batch:
            pool.references[page] -= 1
        queued = [page for page in batch if pool.references[page] <= 0]
        batch.clear()
        for page in queued:
            pool.give_back(page)

    pool.release = lambda pages: batch.extend(reversed(pages))  # type: ignore[method-assign]
    engine.at_schedule.append(free_batch)


def _twins_then_two(rng: random.Random) -> list[Arrival]:
    shared = text(rng, 38)
    twins = [ask("a", shared, new=4), ask("b", shared, new=4)]
    return [*twins, ask("c", text(rng, 52), at=6, new=14), ask("d", text(rng, 52), at=6, new=14)]


def _evict_in_use(engine: Engine) -> None:
    pool = engine.pool

    def make(plain: Method) -> Method:
        def take(request: str) -> int | None:
            page: int | None = plain(request)
            if page is None and pool.cached:
                oldest = next(iter(pool.cached.values()))
                pool.references[oldest] = 0
                pool.evict(oldest)
                page = plain(request)
            return page

        return take

    patch(pool, "take", make)


def _two_that_grow(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 46), new=26), ask("b", text(rng, 46), at=1, new=26)]


def _count_from_zero(engine: Engine) -> None:
    pool = engine.pool

    def make(plain: Method) -> Method:
        def take(request: str) -> int | None:
            page: int | None = plain(request)
            if page is not None:
                pool.references[page] = 0
            return page

        return take

    patch(pool, "take", make)


def _sharer_leaves_first(rng: random.Random) -> list[Arrival]:
    shared = text(rng, 46)
    filler = ask("c", text(rng, 70), at=4, new=20)
    return [ask("a", shared, new=30), ask("b", shared, at=1, new=2), filler]


def _revive_without_unlisting(engine: Engine) -> None:
    pool = engine.pool

    def make(plain: Method) -> Method:
        def share(request: str, hits: list[tuple[int, int]]) -> list[int]:
            idle = list(pool.idle)
            pages = plain(request, hits)
            for page in idle:
                if page in pages:
                    pool.idle[page] = None
                    pool.idle.move_to_end(page, last=False)
            return list(pages)

        return share

    patch(pool, "share", make)


def _second_turn_and_filler(rng: random.Random) -> list[Arrival]:
    talk = text(rng, 46)
    return [ask("a", talk, new=2), ask("b", talk, at=4, new=24), ask("c", text(rng, 70), at=5, new=20)]


def _last_slot_again(engine: Engine) -> None:
    def make(plain: Method) -> Method:
        def end(sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
            for page in sequence.pages[-1:]:
                engine.pool.give_back(page)
            plain(sequence, foreign_pages)

        return end

    patch(engine.scheduler, "end", make)


def _one_then_two(rng: random.Random) -> list[Arrival]:
    return [
        ask("a", text(rng, 12), new=6),
        ask("b", text(rng, 20), at=8, new=14),
        ask("c", text(rng, 20), at=8, new=14),
    ]


TIGHT = replace(PLAIN, num_pages=1 + 18)

PAGE_SCENARIOS = (
    Scenario(
        name="page-queued-twice",
        link="https://github.com/ai-dynamo/dynamo/pull/13398",
        reported_in="Dynamo",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("d",)},
        story="The free path lowers all counts first and looks for zeros afterwards: a page that two ending requests "
        "share is queued twice, and two later requests are given it.",
        replay=EmbeddedReplay(arrivals=_twins_then_two, bug=_decrement_first, config=replace(PLAIN, num_pages=1 + 14)),
    ),
    Scenario(
        name="eviction-ignores-count",
        link="https://github.com/Avarok-Cybersecurity/atlas/pull/373",
        reported_in="atlas",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("a",)},
        story="Evicting a node sets its count to zero instead of dropping one reference: a page of a running request "
        "is handed to the next who needs one.",
        replay=EmbeddedReplay(arrivals=_two_that_grow, bug=_evict_in_use, config=replace(PLAIN, num_pages=1 + 16)),
    ),
    Scenario(
        name="count-starts-at-zero",
        link="https://github.com/Wenyueh/MinivLLM/pull/87",
        reported_in="MinivLLM",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("a",)},
        story="A new page has count 0, so that the first sharer who leaves frees it under its owner.",
        replay=EmbeddedReplay(arrivals=_sharer_leaves_first, bug=_count_from_zero, config=TIGHT),
    ),
    Scenario(
        name="revived-page-still-listed",
        link="https://github.com/jjang-ai/vmlx/issues/198",
        reported_in="vMLX",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("b",)},
        story="A cached page that nobody used is taken again and stays in the list of pages that may be evicted.",
        replay=EmbeddedReplay(arrivals=_second_turn_and_filler, bug=_revive_without_unlisting, config=TIGHT),
    ),
    Scenario(
        name="last-slot-freed-twice",
        link="https://github.com/sgl-project/sglang-jax/pull/994",
        reported_in="sglang-jax",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("c",)},
        story="The last slot of a request is released by the overlap path, and once more where the request ends; pages "
        "of one token, no prefix cache.",
        replay=EmbeddedReplay(
            arrivals=_one_then_two,
            bug=_last_slot_again,
            config=replace(PLAIN, page_size=1, num_pages=1 + 72, prefix_cache=False),
        ),
        page_size=1,
    ),
)
