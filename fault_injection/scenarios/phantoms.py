"""Bugs of a cache that outlives its pages: what it finds is somebody else's by now, or was never computed."""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.scenarios.embedded import PLAIN, EmbeddedReplay, Method, ask, patch, text
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.traffic import Arrival
from kvguard.violation import Proof

__all__ = ["PHANTOM_SCENARIOS"]


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

PHANTOM_SCENARIOS = (
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
