"""Bugs of who owns a page: frees, counts, and a cache that outlives its pages."""

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


def _entry_outlives_page(engine: Engine) -> None:
    pool = engine.pool

    def make(plain: Method) -> Method:
        def give_back(page: int) -> None:
            key = pool.key_of.get(page)
            plain(page)
            if key is not None:
                pool.cached[key] = page

        return give_back

    patch(pool, "give_back", make)


def _same_again_after_another(rng: random.Random) -> list[Arrival]:
    first = text(rng, 46)
    return [ask("a", first, new=4), ask("b", text(rng, 110), at=6, new=4), ask("again", first, at=12, new=16)]


def _index_keeps_evicted(engine: Engine) -> None:
    """The scheduler looks hits up in an index of its own, which nobody tells of evictions."""
    pool = engine.pool
    index: dict[int, int] = {}

    def make(plain: Method) -> Method:
        def publish(request: str, column: int, page: int, key: int) -> None:
            plain(request, column, page, key)
            if pool.cached.get(key) == page:
                index.setdefault(key, page)

        return publish

    def lookup(keys: list[int]) -> list[tuple[int, int]]:
        hits: list[tuple[int, int]] = []
        for key in keys:
            if key not in index:
                break
            hits.append((key, index[key]))
        return hits

    patch(pool, "publish", make)
    pool.lookup = lookup  # type: ignore[method-assign,assignment]


def _pressure(rng: random.Random) -> list[Arrival]:
    """A prefix, requests that take the whole pool, the prefix again."""
    prefix = text(rng, 46)
    fillers = [ask(f"f{number}", text(rng, 60), at=6 + 3 * number, new=3) for number in range(3)]
    return [ask("a", prefix, new=4), *fillers, ask("again", prefix, at=20, new=16)]


def _trust_first_count(engine: Engine) -> None:
    """What a request had computed when it was first looked at is kept, though it was not scheduled then."""
    seen: dict[str, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}

    def make(plain: Method) -> Method:
        def hits(sequence: Sequence) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
            return seen.setdefault(sequence.id, plain(sequence))

        return hits

    patch(engine.scheduler, "_hits", make)


def _refused_once(rng: random.Random) -> list[Arrival]:
    first = text(rng, 38)
    return [
        ask("a", first, new=2),
        ask("hog", text(rng, 60), at=3, new=44),
        ask("again", first + text(rng, 22), at=4, new=14),
    ]


def _lease_not_renewed(engine: Engine) -> None:
    """The second turn reads the pages that the first one had, by their numbers; their lease ended long ago."""
    first: list[tuple[int, int]] = []

    def remember(plain: Method) -> Method:
        def end(sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
            if sequence.id == "turn1":
                keys = engine.scheduler.keys_of(sequence, sequence.tokens)
                first.extend(zip(keys, sequence.pages, strict=False))
            plain(sequence, foreign_pages)

        return end

    def read(plain: Method) -> Method:
        def hits(sequence: Sequence) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
            return (first[:5], []) if sequence.id == "turn2" else plain(sequence)

        return hits

    patch(engine.scheduler, "end", remember)
    patch(engine.scheduler, "_hits", read)


def _two_turns(rng: random.Random) -> list[Arrival]:
    talk = text(rng, 46)
    others = [ask(f"other{number}", text(rng, 60), at=5 + 2 * number, new=3) for number in range(2)]
    return [ask("turn1", talk, new=3), *others, ask("turn2", talk + text(rng, 10), at=14, new=14)]


def _requeue_unwritten(engine: Engine) -> None:
    """A batch that is too small to run gives its request back to the queue, and keeps what it published."""
    done: list[str] = []

    def make(plain: Method) -> Method:
        def schedule(step: int) -> list[Sequence]:
            batch: list[Sequence] = plain(step)
            for sequence in batch:
                if sequence.id == "a" and not done:
                    done.append("a")
                    batch.remove(sequence)
                    engine.scheduler._preempt(sequence)
                    engine.scheduler.waiting.rotate(-1)
                    break
            return batch

        return schedule

    patch(engine.scheduler, "schedule", make)


def _same_prefix_behind(rng: random.Random) -> list[Arrival]:
    prefix = text(rng, 46)
    return [ask("before", text(rng, 46), new=2), ask("a", prefix, at=3), ask("b", prefix, at=4, new=16)]


def _whole_prompt_at_once(engine: Engine) -> None:
    """Pages for the whole prompt are taken when a request is admitted."""

    def make(plain: Method) -> Method:
        def grow(sequence: Sequence, count: int) -> bool:
            return bool(plain(sequence, max(count, len(sequence.tokens) - sequence.computed)))

        return grow

    patch(engine.scheduler, "_grow", make)


def _store_beyond_chunk(engine: Engine) -> None:
    """A request that ends after its first chunk leaves all pages of its prompt to the cache."""

    def make(plain: Method) -> Method:
        def end(sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
            keys = engine.scheduler.keys_of(sequence, sequence.tokens)
            for column in range(sequence.published, min(len(keys), len(sequence.pages))):
                engine.pool.publish(sequence.id, column, sequence.pages[column], keys[column])
            plain(sequence, foreign_pages)

        return end

    patch(engine.scheduler, "end", make)


def _leaves_after_a_chunk(rng: random.Random) -> list[Arrival]:
    prompt = text(rng, 60)
    return [ask("before", text(rng, 70), new=2), ask("a", prompt, at=4, leaves=5), ask("b", prompt, at=7, new=16)]


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
    Scenario(
        name="hash-entry-outlives-page",
        link="https://github.com/GeeeekExplorer/nano-vllm/issues/163",
        reported_in="nano-vllm",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("again",)},
        story="A page that is handed out anew is reset, the entry of its old hash is not: the same prefix later gets "
        "unrelated KV.",
        replay=EmbeddedReplay(arrivals=_same_again_after_another, bug=_entry_outlives_page, config=TIGHT),
    ),
    Scenario(
        name="index-survives-eviction",
        link="https://github.com/local-inference-lab/vllm/issues/480",
        reported_in="vLLM (fork)",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("again",)},
        story="After requests that took the whole pool, the scheduler's index still finds pages of the first prefix.",
        replay=EmbeddedReplay(arrivals=_pressure, bug=_index_keeps_evicted, config=replace(PLAIN, num_pages=1 + 14)),
    ),
    Scenario(
        name="computed-count-of-refused-request",
        link="https://github.com/vllm-project/vllm/pull/18957",
        reported_in="vLLM",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("again",)},
        story="A request that could not be scheduled keeps what it had found in the cache; its next attempt trusts "
        "that, though the pages were evicted in between.",
        replay=EmbeddedReplay(arrivals=_refused_once, bug=_trust_first_count, config=replace(PLAIN, num_pages=1 + 15)),
    ),
    Scenario(
        name="lease-ended-before-second-turn",
        link="https://github.com/vllm-project/vllm/pull/47021",
        reported_in="vLLM",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("turn2",)},
        story="The second turn reads the pages of the first by their numbers; they were leased for a fixed time, "
        "which is over, and other traffic has them.",
        replay=EmbeddedReplay(arrivals=_two_turns, bug=_lease_not_renewed, config=replace(PLAIN, num_pages=1 + 14)),
    ),
    Scenario(
        name="prefix-published-never-computed",
        link="https://github.com/huggingface/text-generation-inference/pull/2489",
        reported_in="TGI",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("a", "b")},
        story="A batch below the minimum size gives its request back to the queue; its prefix pages, in the cache "
        "already, were never computed, and the next identical prefix takes them.",
        replay=EmbeddedReplay(arrivals=_same_prefix_behind, bug=_requeue_unwritten),
    ),
    Scenario(
        name="pages-beyond-chunk-stored",
        link="https://github.com/NVIDIA/TensorRT-LLM/pull/12673",
        reported_in="TensorRT-LLM",
        family="pages",
        proof=Proof.CONTROL_PLANE,
        alone=(Proof.TAG,),
        ended={"tag": ("b",)},
        story="A request that leaves after the first chunk of its prompt stores all pages of the prompt for reuse.",
        replay=EmbeddedReplay(
            arrivals=_leaves_after_a_chunk,
            bug=_store_beyond_chunk,
            setting=_whole_prompt_at_once,
            config=replace(PLAIN, token_budget=24),
        ),
    ),
)
