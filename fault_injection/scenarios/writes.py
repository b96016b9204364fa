"""Bugs of where a step writes: the slot is somebody else's, or nobody's."""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.engine.step import MAIN_POOL, SKIP_SLOT
from kvguard.fault_injection.engine.window import WINDOW_POOL
from kvguard.fault_injection.scenarios.embedded import PLAIN, EmbeddedReplay, Method, ask, patch, text, when
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.traffic import Arrival
from kvguard.violation import Proof

__all__ = ["WRITE_SCENARIOS"]


def _last_page_first(engine: Engine) -> None:
    """The allocator hands out the last page first."""
    engine.pool.free.rotate(1)


def _skip_slot_as_index(engine: Engine) -> None:
    def wrap(running: Engine, batch: list[Sequence]) -> None:
        assert running.tensors is not None
        slots = running.tensors.slots[MAIN_POOL]
        slots[slots < 0] += running.config.num_pages * running.config.page_size

    engine.at_launch.append(wrap)


def _one_request(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 30), new=24)]


def _offsets_of_the_last_step(engine: Engine) -> None:
    """Padded lanes keep what stood in their place of the buffer in the step before."""

    def keep(running: Engine, batch: list[Sequence]) -> None:
        assert running.tensors is not None
        former = running.last_served
        if former is None or not batch:
            return
        real, places = len(batch), len(running.tensors.lengths)
        before = former.slots[MAIN_POOL]
        for lane in range(real, min(places, len(before))):
            running.tensors.slots[MAIN_POOL][lane] = before[lane]

    engine.at_launch.append(keep)


def _three_then_two(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 22), new=6), ask("b", text(rng, 30), new=16), ask("c", text(rng, 30), new=16)]


def _dummy_through_column_zero(engine: Engine) -> None:
    """A dummy run writes through the first column of rows as the last real step left them."""

    def write(running: Engine, batch: list[Sequence]) -> None:
        if not batch:
            assert running.tensors is not None
            lanes = len(running.tensors.lengths)
            first = running.block_table[:lanes, 0].long() * running.config.page_size
            running.tensors.slots[MAIN_POOL][:] = first + running.config.page_size - 1

    engine.at_launch.append(write)


def _two_requests(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 30), new=14), ask("b", text(rng, 30), new=14)]


def _past_length_too_high(engine: Engine) -> None:
    """Decode is told one token too many in the past: each token is written one slot further on."""

    def shift(running: Engine, batch: list[Sequence]) -> None:
        tensors, size = running.tensors, running.config.page_size
        assert tensors is not None
        for place, sequence in enumerate(batch):
            if sequence.scheduled == 1 and sequence.generated:
                further = sequence.computed + 1
                token = int(tensors.query_start[place])
                page = int(running.block_table[sequence.row, further // size])
                tensors.slots[MAIN_POOL][token] = page * size + further % size

    engine.at_launch.append(shift)


def _short_prompt(rng: random.Random) -> list[Arrival]:
    """Nine tokens, as in the report, and an answer that reads them."""
    return [ask("a", text(rng, 7), new=8)]


def _drafts_next_to_each_other(engine: Engine) -> None:
    """Drafted tokens are written to the slots behind the first one's, whatever page those are in."""

    def line_up(running: Engine, batch: list[Sequence]) -> None:
        tensors = running.tensors
        assert tensors is not None
        for place, sequence in enumerate(batch):
            start, count = int(tensors.query_start[place]), len(sequence.drafts)
            slots = tensors.slots[MAIN_POOL]
            for further in range(1, count + 1):
                slots[start + further] = slots[start] + further

    engine.at_launch.append(line_up)


def _prefix_hit_and_neighbour(rng: random.Random) -> list[Arrival]:
    """The second request's pages follow the last page of the first one's prompt."""
    talk = "one two three four, one two three four, one"
    return [ask("a", talk, new=24), ask("b", text(rng, 36), new=24)]


def _retracted_once(engine: Engine) -> None:
    """`a` is retracted before step 6 and waits behind `b`, which is given its row."""

    def retract(running: Engine) -> None:
        sequence = running.sequences["a"]
        running.scheduler._preempt(sequence)
        running.scheduler.waiting.rotate(-1)

    when(6, retract)(engine)


def _flush_through_old_row(engine: Engine) -> None:
    """What is written for a retracted request when it is back goes through the row that it had before."""
    old: dict[str, int] = {}

    def preempt(plain: Method) -> Method:
        def preempted(sequence: Sequence) -> None:
            old[sequence.id] = sequence.row
            plain(sequence)

        return preempted

    def flush(running: Engine, batch: list[Sequence]) -> None:
        tensors, size = running.tensors, running.config.page_size
        assert tensors is not None
        for place, sequence in enumerate(batch):
            row = old.pop(sequence.id, None)
            if row is None or row == sequence.row:
                continue
            own = slice(int(tensors.query_start[place]), int(tensors.query_start[place + 1]))
            positions = tensors.positions[own]
            pages = running.block_table[row, positions // size].long()
            tensors.slots[MAIN_POOL][own] = pages * size + positions % size

    patch(engine.scheduler, "_preempt", preempt)
    engine.at_launch.append(flush)


def _retracted_and_its_heir(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 30), new=14), ask("b", text(rng, 46), at=5, new=18)]


def _translation_is_kept(engine: Engine) -> None:
    """Full page -> window page is looked up once and kept, though the mapping has been replaced since."""
    known: dict[int, int] = {}

    def translate(running: Engine, batch: list[Sequence]) -> None:
        tensors, size = running.tensors, running.config.page_size
        assert tensors is not None
        full, windowed = tensors.slots[MAIN_POOL], tensors.slots[WINDOW_POOL]
        for token in range(len(full)):
            slot = int(full[token])
            if slot >= 0:
                page = known.setdefault(slot // size, int(windowed[token]) // size)
                windowed[token] = page * size + slot % size

    engine.at_launch.append(translate)


def _pool_twice_over(rng: random.Random) -> list[Arrival]:
    return [
        ask("first", text(rng, 62), new=20),
        ask("second", text(rng, 46), at=14, new=24),
        ask("third", text(rng, 46), at=24, new=24),
    ]


def _every_second_token(engine: Engine) -> None:
    """The transform of a pool that is split over two ranks is applied to one that every rank has whole."""

    def transform(running: Engine, batch: list[Sequence]) -> None:
        tensors = running.tensors
        assert tensors is not None
        slots = tensors.slots[WINDOW_POOL]
        odd = tensors.positions % 2 == 1
        slots[odd & (slots >= 0)] = SKIP_SLOT
        even = ~odd & (slots >= 0)
        slots[even] = slots[even] // 2

    engine.at_launch.append(transform)


def _write_scenario(name: str, link: str, reported_in: str, ended: tuple[str, ...], story: str,
                    replay: EmbeddedReplay) -> Scenario:
    """The check of what is written finds it; `ended`: whose token it was."""
    return Scenario(
        name=name,
        link=link,
        reported_in=reported_in,
        family="writes",
        proof=Proof.WRITE_SLOT,
        ended={"all": ended, "write_slot": ended},
        story=story,
        replay=replay,
        page_size=replay.config.page_size,
    )


PADDED = replace(PLAIN, padded_batches=(2, 4))

WRITE_SCENARIOS = (
    _write_scenario(
        "padding-slot-as-index",
        "https://github.com/vllm-project/vllm/issues/43810",
        "vLLM",
        (),
        "Slot -1 of a padded lane is taken for an index: the last slot of the last page, whose owner loses a token.",
        EmbeddedReplay(arrivals=_one_request, bug=_skip_slot_as_index, setting=_last_page_first, config=PADDED),
    ),
    _write_scenario(
        "padding-keeps-offsets",
        "https://github.com/InternLM/lmdeploy/pull/4569",
        "lmdeploy",
        (),
        "A batch that is smaller than the one before leaves that one's offsets in its padded lanes.",
        EmbeddedReplay(
            arrivals=_three_then_two, bug=_offsets_of_the_last_step, config=replace(PLAIN, padded_batches=(3,))
        ),
    ),
    _write_scenario(
        "dummy-run-through-rows",
        "https://github.com/vllm-project/vllm/pull/49757",
        "vLLM",
        (),
        "A dummy run writes through column 0 of rows that the last real step left, into state that was just received.",
        EmbeddedReplay(
            arrivals=_two_requests, bug=_dummy_through_column_zero, config=replace(PADDED, dummy_every=4)
        ),
    ),
    _write_scenario(
        "past-length-one-too-high",
        "https://github.com/microsoft/onnxruntime-genai/pull/2354",
        "onnxruntime-genai",
        ("a",),
        "Decode reports the past length one too high (0, 10, 11 instead of 0, 9, 10): a slot that is read is never "
        "written, and every token lies one further on.",
        EmbeddedReplay(arrivals=_short_prompt, bug=_past_length_too_high),
    ),
    _write_scenario(
        "draft-slots-in-a-line",
        "https://github.com/huggingface/text-generation-inference/pull/2711",
        "TGI",
        ("a", "b"),
        "Slots of drafted tokens are the next ordinals, though pages do not follow each other.",
        EmbeddedReplay(
            arrivals=_prefix_hit_and_neighbour, bug=_drafts_next_to_each_other, config=replace(PLAIN, draft_tokens=3)
        ),
    ),
    _write_scenario(
        "flush-through-old-row",
        "https://github.com/sgl-project/sglang/issues/33547",
        "SGLang (MLX)",
        ("a",),
        "What a retracted request has still to write goes through its old index row, which is another request's now.",
        EmbeddedReplay(arrivals=_retracted_and_its_heir, bug=_flush_through_old_row, setting=_retracted_once),
    ),
    _write_scenario(
        "translation-kept-after-remap",
        "https://github.com/sgl-project/sglang/pull/25889",
        "SGLang",
        ("first", "second", "third"),
        "A cached translation from full to windowed pages outlives the mapping: writes go to the old place.",
        EmbeddedReplay(
            arrivals=_pool_twice_over, bug=_translation_is_kept, config=replace(PLAIN, num_pages=1 + 16), window=16
        ),
    ),
    _write_scenario(
        "owner-transform-on-whole-pool",
        "https://github.com/vllm-project/vllm/pull/57260",
        "vLLM",
        ("a",),
        "The transform to a context-parallel rank's share is applied to a group that every rank has whole: half of the "
        "tokens are dropped, the others land in wrong slots.",
        EmbeddedReplay(arrivals=_one_request, bug=_every_second_token, window=16),
    ),
)
