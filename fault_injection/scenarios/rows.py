"""Bugs of block-table rows: the allocator is right, and what attention reads through is not."""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.pool import NULL_PAGE
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.scenarios.embedded import PLAIN, EmbeddedReplay, Method, ask, patch, text, when
from kvguard.fault_injection.scenarios.scenario import Scenario
from kvguard.fault_injection.traffic import Arrival
from kvguard.violation import Proof

__all__ = ["ROW_SCENARIOS"]


def _named(engine: Engine, name: str) -> Sequence | None:
    return engine.sequences.get(name)


def _transfers_hold(engine: Engine) -> None:
    """A transfer holds the pages of requests that have ended, until step 14."""
    pool, held = engine.pool, list[list[int]]()

    def make(plain: Method) -> Method:
        def end(sequence: Sequence, foreign_pages: tuple[int, ...] = ()) -> None:
            if sequence.id.startswith("sent"):
                for page in sequence.pages:
                    pool.references[page] += 1
                held.append(list(sequence.pages))
            plain(sequence, foreign_pages)

        return end

    def let_go(running: Engine) -> None:
        for pages in held:
            pool.release(pages)

    patch(engine.scheduler, "end", make)
    when(14, let_go)(engine)


def _common_by_count(engine: Engine) -> None:
    """Pages whose count is that of the running requests are taken for a prefix of all of them."""

    def share(running: Engine, batch: list[Sequence]) -> None:
        if len(batch) < 2:
            return
        first, common = batch[0], 0
        for page in first.pages:
            if running.pool.references[page] != len(running.scheduler.running):
                break
            common += 1
        for other in batch[1:]:
            running.block_table[other.row, :common] = running.block_table[first.row, :common]

    engine.at_launch.append(share)


def _shared_and_different(rng: random.Random) -> list[Arrival]:
    prefix = text(rng, 24)
    sent = [ask(f"sent{number}", prefix + text(rng, 10), new=3) for number in range(2)]
    others = [ask(f"other{number}", text(rng, 34), at=5, new=14) for number in range(2)]
    return [ask("first", prefix + text(rng, 10), new=18), *sent, *others]


def _wait_for_transfer(engine: Engine) -> None:
    """`prefilled` gives its row back after its prompt and keeps its pages for a transfer, until step 12."""

    def park(running: Engine) -> None:
        sequence = _named(running, "prefilled")
        assert sequence is not None
        running.scheduler.park(sequence)

    def done(running: Engine) -> None:
        sequence = _named(running, "prefilled")
        assert sequence is not None
        running._end(sequence, None)

    when(3, park)(engine)
    when(12, done)(engine)


def _clear_the_old_row(engine: Engine) -> None:
    """While it waits it still writes to the row that it had: nothing but invalid ids."""
    def clear(running: Engine, batch: list[Sequence]) -> None:
        waiting = _named(running, "prefilled")
        if running.step_index == 8 and waiting is not None:
            # The first request had the first row.
            running.block_table[0, : len(waiting.pages)] = -1

    engine.at_launch.append(clear)


def _one_waits_one_comes(rng: random.Random) -> list[Arrival]:
    return [ask("prefilled", text(rng, 30), new=12), ask("next", text(rng, 30), at=3, new=14)]


def _compare_with_itself(engine: Engine) -> None:
    """Rows are sent where the list of pages is another than last time; what is kept of last time is the list itself."""
    last: dict[int, list[int]] = {}

    def make(plain: Method) -> Method:
        def update(batch: list[Sequence]) -> None:
            for sequence in batch:
                if last.get(sequence.row) is sequence.pages:
                    sequence.written = len(sequence.pages)
                last[sequence.row] = sequence.pages
            plain(batch)

        return update

    patch(engine, "_update_block_table", make)


def _one_after_another(rng: random.Random) -> list[Arrival]:
    """The second and third share the pages that the first gave back; the second has its row."""
    return [
        ask("first", text(rng, 60), new=6),
        ask("second", text(rng, 20), at=8, new=20),
        ask("third", text(rng, 44), at=9, new=20),
    ]


def _swap_rows(engine: Engine, *, whole: bool) -> None:
    """Requests `a` and `b` change rows, as compaction does. `whole`: all entries move, else those that are valid."""

    def swap(running: Engine) -> None:
        a, b = _named(running, "a"), _named(running, "b")
        assert a is not None and b is not None
        table, valid = running.block_table, a.written
        before = table.clone()
        a.row, b.row = b.row, a.row
        table[b.row] = before[a.row]
        table[a.row, :valid] = before[b.row, :valid]
        if whole:
            table[a.row] = before[b.row]
        else:
            # The full width counts as written, though only the valid entries were moved.
            a.written = b.written

    when(4, swap)(engine)


def _chunked_behind_short(rng: random.Random) -> list[Arrival]:
    return [ask("b", text(rng, 46), new=24), ask("a", text(rng, 60), at=2, new=8)]


def _row_wraps(engine: Engine) -> None:
    """The array that a joining request's state is taken from has room for one: an index past its end wraps to 0."""

    def wrap(running: Engine, batch: list[Sequence]) -> None:
        for sequence in batch:
            if sequence.id == "joins" and not sequence.computed:
                running.block_table[sequence.row] = running.block_table[sequence.row % 1]

    engine.at_launch.append(wrap)


def _one_joins(rng: random.Random) -> list[Arrival]:
    return [ask("first", text(rng, 30), new=16), ask("joins", text(rng, 30), at=2, new=10)]


def _dummy_uses_shared_rows(engine: Engine) -> None:
    def overwrite(running: Engine, batch: list[Sequence]) -> None:
        if not batch:
            running.block_table[: min(running.config.padded_batches)] = NULL_PAGE

    engine.at_launch.append(overwrite)


def _one_alone(rng: random.Random) -> list[Arrival]:
    return [ask("a", text(rng, 30), new=12), ask("b", text(rng, 30), new=12)]


def _ring_is_kept(engine: Engine) -> None:
    """The windowed layers' row is a ring of the row's own: what a prefix hit covers is not written to it."""
    window = engine.window
    assert window is not None

    def make(plain: Method) -> Method:
        def update(sequence: Sequence) -> None:
            if not sequence.window_written:
                sequence.window_written = sequence.computed // engine.config.page_size
            plain(sequence)

        return update

    patch(window, "update_block_table", make)


def _prefix_again_in_a_used_row(rng: random.Random) -> list[Arrival]:
    prefix = text(rng, 40)
    return [
        ask("first", prefix + text(rng, 6), new=4),
        ask("between", text(rng, 46), at=6, new=4),
        ask("again", prefix + text(rng, 12), at=12, new=12),
    ]


def _one_context_for_beams(engine: Engine) -> None:
    def make(plain: Method) -> Method:
        def update(batch: list[Sequence]) -> None:
            plain(batch)
            one, two = _named(engine, "beam1"), _named(engine, "beam2")
            if one is not None and two is not None and one.row >= 0 and two.row >= 0:
                width = min(one.written, two.written)
                engine.block_table[two.row, :width] = engine.block_table[one.row, :width]

        return update

    patch(engine, "_update_block_table", make)


def _two_beams(rng: random.Random) -> list[Arrival]:
    prefix = text(rng, 26)
    return [ask("beam1", prefix + "abcde xyz", new=36), ask("beam2", prefix + "abcfg uvw", new=36)]


def _row_scenario(name: str, link: str, reported_in: str, ended: tuple[str, ...], story: str, replay: EmbeddedReplay,
                  alone: tuple[Proof, ...] = ()) -> Scenario:
    """The device's check finds it, and ends who would have read through the row."""
    return Scenario(
        name=name,
        link=link,
        reported_in=reported_in,
        family="rows",
        proof=Proof.TAG,
        alone=alone,
        ended=dict.fromkeys(("all", "tag", *(str(proof) for proof in alone)), ended),
        story=story,
        replay=replay,
        page_size=replay.config.page_size,
    )


ROW_SCENARIOS = (
    _row_scenario(
        "common-prefix-by-count",
        "https://github.com/vllm-project/vllm/pull/55227",
        "vLLM",
        ("other0", "other1"),
        "Pages count as a prefix of all requests where their count equals the number of running ones; references that "
        "transfers of ended requests still hold satisfy that for requests that share nothing.",
        EmbeddedReplay(
            arrivals=_shared_and_different, bug=_common_by_count, setting=_transfers_hold,
            config=replace(PLAIN, max_rows=6),
        ),
    ),
    _row_scenario(
        "row-cleared-after-reuse",
        "https://github.com/NVIDIA/TensorRT-LLM/pull/14423",
        "TensorRT-LLM",
        ("next",),
        "A prefilled request gives its row back and waits for its transfer; later it writes invalid ids into the row, "
        "which is another request's by then.",
        EmbeddedReplay(arrivals=_one_waits_one_comes, bug=_clear_the_old_row, setting=_wait_for_transfer),
    ),
    _row_scenario(
        "table-change-unseen",
        "https://github.com/tenstorrent/tt-metal/pull/32007",
        "tt-metal",
        ("first", "second", "third"),
        "The change detector keeps a reference to the page table, so that a change in place looks like none, and the "
        "row keeps what a former request had there.",
        EmbeddedReplay(arrivals=_one_after_another, bug=_compare_with_itself),
    ),
    _row_scenario(
        "row-tail-left-behind",
        "https://github.com/tenstorrent/vllm-tt-plugin/pull/103",
        "vLLM-TT plugin",
        ("a",),
        "Moving a request to another row copies its valid entries; the next chunk of its prompt uses the full width, "
        "whose tail names another live request's pages.",
        EmbeddedReplay(
            arrivals=_chunked_behind_short,
            bug=lambda engine: _swap_rows(engine, whole=False),
            setting=lambda engine: _swap_rows(engine, whole=True),
            config=replace(PLAIN, token_budget=24),
        ),
    ),
    _row_scenario(
        "row-index-wraps",
        "https://github.com/ml-explore/mlx-lm/pull/1169",
        "MLX-LM",
        ("joins",),
        "A request joins a batch whose state has room for one: its index wraps to 0, and it is given another's state.",
        EmbeddedReplay(arrivals=_one_joins, bug=_row_wraps),
    ),
    _row_scenario(
        "dummy-batch-in-shared-rows",
        "https://github.com/vllm-project/vllm-ascend/issues/10245",
        "vllm-ascend",
        ("a",),
        "A keep-alive dummy batch sets up its tables in the buffers that a request's rows are still needed from.",
        EmbeddedReplay(
            arrivals=_one_alone, bug=_dummy_uses_shared_rows,
            config=replace(PLAIN, padded_batches=(1, 2, 4), dummy_every=5),
        ),
    ),
    _row_scenario(
        "window-ring-kept",
        "https://github.com/sgl-project/sglang/pull/30339",
        "SGLang",
        ("again",),
        "Windowed layers have a ring per row; the slots that a reused prefix covers keep the row's former window.",
        EmbeddedReplay(arrivals=_prefix_again_in_a_used_row, bug=_ring_is_kept, window=16),
    ),
    _row_scenario(
        "beams-in-one-context",
        "https://github.com/ggml-org/llama.cpp/issues/3802",
        "llama.cpp",
        ("beam2",),
        "Two beams, a-b-c-d-e and a-b-c-f-g, go on in one context behind their common prefix: each reads and writes "
        "the other's tokens.",
        EmbeddedReplay(arrivals=_two_beams, bug=_one_context_for_beams),
    ),
)
