"""Sliding-window models in a real SGLang: two pools, and a chain of proof from the one to the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.adapters.sglang.window_books import WINDOW_POOL
from kvguard.violation import Kind
from tests.sglang import windowed
from tests.sglang.apart import Child, on
from tests.sglang.engine import Client, Engine
from tests.sglang.scenarios import Scenario, at_step, prompts, victims

windowed.install()
CHECKPOINT = windowed.window_checkpoint()
WINDOW = windowed.WINDOW
TOKENS = 70
"""Of an answer: the windows leave the prompt behind."""


# -- what every test asks of an engine --------------------------------------------------------------------------------


@contextmanager
def unguarded(engine: Engine) -> Iterator[None]:
    """As if no guard had been attached. The cache is empty before and after."""
    allocator = engine.allocator
    owners = [engine.scheduler, allocator, allocator.full_attn_allocator, allocator.swa_attn_allocator]
    owners += [engine.scheduler.tree_cache, engine.scheduler.tp_worker.model_runner]
    guards = [getattr(owner, ATTACHED) for owner in owners]
    for owner in owners:
        delattr(owner, ATTACHED)
    try:
        yield
    finally:
        for owner, guard in zip(owners, guards, strict=True):
            setattr(owner, ATTACHED, guard)
        engine.flush()


def golden_of(engine: Engine, scenario: Scenario) -> dict[str, list[int]]:
    """Tokens of a scenario without the guard."""
    with unguarded(engine):
        engine.tokens, engine.ends = {}, {}
        engine.run(scenario(engine))
        return engine.tokens


def assert_whole(engine: Engine) -> None:
    """At idle every full page is free or in the tree, once, and every window page is free or beside one of the tree."""
    allocator, tree, size = engine.allocator, engine.scheduler.tree_cache, engine.allocator.page_size
    cached = tree.all_values_flatten() if not tree.disable else torch.zeros(0, dtype=torch.int64)
    free = allocator.full_attn_allocator.get_all_free_pages().tolist()
    assert sorted([*free, *(cached[::size] // size).tolist()]) == list(range(1, allocator.size_full // size + 1))
    peers = allocator.full_to_swa_index_mapping[cached[::size]] // size
    free = allocator.swa_attn_allocator.get_all_free_pages().tolist()
    assert sorted([*free, *peers[peers > 0].tolist()]) == list(range(1, allocator.size_swa // size + 1))


def assert_clean(engine: Engine) -> None:
    """No violation, no event, every step verified, and the books of both pools say what SGLang's do."""
    guard = engine.guard
    health = guard.health()
    assert [violation.message for violation in guard.violations] == []
    assert health.ok and health.in_flight == 0 and not guard.audits, health
    assert health.counters["steps_seen"] == health.counters["steps_verified"] > 0, health
    assert health.counters["guard_faults"] == health.counters["adapter_errors"] == 0
    assert_whole(engine)
    guard._settle()
    allocator, size = engine.allocator, engine.allocator.page_size
    free = allocator.swa_attn_allocator.get_all_free_pages()
    assert not guard.books.window_tag[free].any()
    assert int((guard.books.window_tag != 0).sum()) == allocator.size_swa // size - free.shape[0]


def same_as_unguarded(engine: Engine, scenario: Scenario) -> None:
    """The scenario is healthy, and the guard changes no token."""
    golden = golden_of(engine, scenario)
    engine.tokens, engine.ends = {}, {}
    engine.run(scenario(engine))
    assert engine.tokens == golden
    assert_clean(engine)


def talk(engine: Engine) -> None:
    """Prefixes in common, and answers that are longer than the window."""
    for place, prompt in enumerate(prompts(1, 6)):
        engine.add(f"r{place}", prompt, TOKENS)


class Counted:
    """How often the books were told of each kind of change."""

    def __init__(self, engine: Engine) -> None:
        self.counts: Counter[str] = Counter()
        books, guard = engine.guard.books, engine.guard
        originals = {name: getattr(books, name) for name in ("pair", "retire_windows", "take_over")}

        def pair(full: Any, window: Any, *, fresh: bool) -> None:
            self.counts["allocations" if fresh else "hand-overs"] += 1
            originals["pair"](full, window, fresh=fresh)

        def retire(pages: Any) -> None:
            whose = "tree" if guard.freeing < 0 else "rows"
            self.counts[f"window frees, {whose}"] += 1
            originals["retire_windows"](pages)

        def take_over(*args: Any, **kwargs: Any) -> None:
            self.counts["exchanges"] += 1
            originals["take_over"](*args, **kwargs)

        books.pair, books.retire_windows, books.take_over = pair, retire, take_over


# -- healthy life -----------------------------------------------------------------------------------------------------


def _tokens(kept: dict[str, Any], **settings: Any) -> dict[str, list[int]]:
    engine = Engine(model_path=CHECKPOINT, **settings)
    talk(engine)
    return engine.run().tokens


def test_the_tests_read_windows_as_the_model_means_them() -> None:
    """With windows in a pool of their own the tokens are those of one pool for all layers, where nothing is ever freed
    under a window: what the tests do for the torch_native backend is right."""
    found = []
    for settings in ({}, {"disable_hybrid_swa_memory": True}):
        child = Child()
        try:
            found.append(child.call(_tokens, **settings))
        finally:
            child.stop()
    assert found[0] == found[1] and len(found[0]) == 6


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (16, True)])
@on(model_path=CHECKPOINT)
def test_plain_traffic(engine: Engine, page_size: int, overlap: bool) -> None:
    """Chunked prefill, shared prefixes, answers past the window; and once more from the cache."""
    counted = Counted(engine)
    same_as_unguarded(engine, talk)
    first, engine.tokens = engine.tokens, {}
    talk(engine)
    engine.run()
    assert engine.tokens == first
    assert_clean(engine)
    assert counted.counts["allocations"] > TOKENS and counted.counts["window frees, rows"] > 0, counted.counts


def conversation(turns: int, seed: int = 3) -> list[list[tuple[str, list[int]]]]:
    """Prompts in turns: long beginnings that come again, with other tails, when their windows are long gone."""
    rng = random.Random(seed)
    begins = [[rng.randrange(3, 250) for _ in range(160)] for _ in range(4)]
    return [
        [
            (
                f"t{turn}-{place}",
                begins[place][: rng.choice((64, 112, 160))] + [rng.randrange(3, 250) for _ in range(20)],
            )
            for place in rng.sample(range(4), 3)
        ]
        for turn in range(turns)
    ]


def chat(engine: Engine) -> Client:
    """A turn's requests once the last one's are done."""
    turns = iter(conversation(8))
    sent: list[str] = []

    def client(engine: Engine) -> bool:
        if all(name in engine.ends for name in sent):
            turn = next(turns, None)
            if turn is None:
                return False
            for name, prompt in turn:
                sent.append(name)
                engine.add(name, prompt, 50)
        return True

    return client


def _press(engine: Engine) -> Counter[str]:
    counted = Counted(engine)
    same_as_unguarded(engine, chat)
    return counted.counts


PRESSED: dict[str, Any] = {
    "model_path": CHECKPOINT, "max_total_tokens": 1024, "swa_full_tokens_ratio": 0.3, "max_running_requests": 3,
}  # fmt: skip
SIZES = pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])


@SIZES
@on(**PRESSED)
def test_a_pool_of_windows_that_is_too_small(engine: Engine, page_size: int, overlap: bool) -> None:
    """Windows of the tree are evicted under beginnings that come again: a node that has lost them gets the pages of
    the request that computed them anew, and what hangs below it still holds."""
    counts = _press(engine)
    assert counts["window frees, tree"] > 3 and counts["exchanges"] > 0, counts


@SIZES
@on(environment={"KVGUARD_LEVEL": "tags", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}, **PRESSED)
def test_the_same_with_the_tree_in_python(engine: Engine, page_size: int, overlap: bool) -> None:
    """SGLang has two; the hooks are on what both tell the cache to do."""
    counts = _press(engine)
    assert counts["window frees, tree"] > 3 and counts["exchanges"] > 0, counts


@SIZES
@on(environment={"KVGUARD_LEVEL": "keys"}, **PRESSED)
def test_the_same_at_level_keys(engine: Engine, page_size: int, overlap: bool) -> None:
    """Pages that a node gets in exchange hold what those held that they replace."""
    counts = _press(engine)
    assert counts["window frees, tree"] > 3 and counts["exchanges"] > 0, counts
    assert (engine.guard.books.page_content != 0).any()


@on(model_path=CHECKPOINT, disable_radix_cache=True, page_size=16)
def test_without_a_prefix_cache(engine: Engine) -> None:
    """Windows are freed right up to the last token that is read."""
    counted = Counted(engine)
    same_as_unguarded(engine, talk)
    assert counted.counts["window frees, rows"] > 0


# -- faults -----------------------------------------------------------------------------------------------------------


def _slot(engine: Engine, req: Any, back: int) -> int:
    """The full slot of the token `back` positions before the last full page's end."""
    size = engine.allocator.page_size
    end = int(req.kv.kv_allocated_len) // size * size
    return int(engine.table[req.kv.req_pool_idx, end - 1 - back])


def _window_page(engine: Engine, req: Any) -> int:
    return int(engine.allocator.full_to_swa_index_mapping[_slot(engine, req, 0)] // engine.allocator.page_size)


def window_page_freed(engine: Engine, req: Any) -> None:
    """By a call of SGLang's own free."""
    engine.allocator.swa_attn_allocator.free_page_ids(torch.tensor([_window_page(engine, req)]))


def window_page_on_the_free_list(engine: Engine, req: Any) -> None:
    """Whoever allocates next gets it."""
    pool = engine.allocator.swa_attn_allocator
    pool.free_pages = torch.cat([torch.tensor([_window_page(engine, req)]), pool.free_pages])


def full_page_on_the_free_list(engine: Engine, req: Any) -> None:
    """The same in the pool of full attention."""
    pool, size = engine.allocator.full_attn_allocator, engine.allocator.page_size
    pool.free_pages = torch.cat([torch.tensor([_slot(engine, req, 0) // size]), pool.free_pages])


def mapping_of_another(engine: Engine, req: Any) -> None:
    """A page of the window leads to another request's window page."""
    other = next(one for one in engine.running() if one is not req)
    size, mapping = engine.allocator.page_size, engine.allocator.full_to_swa_index_mapping
    slot, foreign = _slot(engine, req, 0) // size * size, _slot(engine, other, 0) // size * size
    mapping[slot : slot + size] = mapping[foreign : foreign + size].clone()


def mapping_cleared(engine: Engine, req: Any) -> None:
    """A token of the window has no window slot."""
    engine.allocator.full_to_swa_index_mapping[_slot(engine, req, WINDOW // 2)] = 0


def mapping_out_of_range(engine: Engine, req: Any) -> None:
    """A token of the window leads far behind the pool."""
    engine.allocator.full_to_swa_index_mapping[_slot(engine, req, WINDOW // 2)] = 10**6


Fault = Callable[[Engine, Any], None]
FAULTS: dict[str, tuple[Fault, str, set[Kind]]] = {
    "window page freed": (window_page_freed, WINDOW_POOL, {Kind.VACANT_PAGE, Kind.STALE_PAGE}),
    "window page stolen": (window_page_on_the_free_list, WINDOW_POOL, {Kind.STALE_PAGE}),
    "full page stolen": (full_page_on_the_free_list, "kv", {Kind.STALE_PAGE, Kind.FOREIGN_ROW, Kind.VACANT_PAGE}),
    "mapping of another": (mapping_of_another, WINDOW_POOL, {Kind.STALE_PAGE}),
    "mapping cleared": (mapping_cleared, WINDOW_POOL, {Kind.NULL_ENTRY}),
    "mapping out of range": (mapping_out_of_range, WINDOW_POOL, {Kind.OUT_OF_RANGE_ENTRY}),
}


@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
@on(model_path=CHECKPOINT)
def test_faults_under_a_window_end_who_reads_them(engine: Engine, page_size: int, overlap: bool) -> None:
    """Whoever reads the page is aborted without a wrong token, everybody else has every token; nothing is lost."""
    golden = golden_of(engine, talk)
    wanted = dict.fromkeys(golden, TOKENS)
    for name, (inject, pool, kinds) in FAULTS.items():
        hit: list[str] = []

        def fault(engine: Engine, inject: Fault = inject, hit: list[str] = hit) -> None:
            req = engine.running()[1]
            hit.append(req.rid)
            inject(engine, req)

        engine.tokens, engine.ends = {}, {}
        seen = len(engine.guard.violations)
        talk(engine)
        engine.run(at_step(30, fault))
        found = list(engine.guard.violations)[seen:]
        assert hit and hit[0] in victims(engine, golden, wanted), (name, hit, engine.ends)
        mine = [violation for violation in found if violation.request == hit[0]]
        assert {(one.pool, one.kind in kinds) for one in mine} == {(pool, True)}, (name, mine)
        assert engine.guard.armed and not engine.guard.audits, name
        assert_whole(engine)
        assert not engine.scheduler.tree_cache.all_values_flatten().numel(), "emptied once nobody ran"
    engine.tokens, engine.ends = {}, {}
    talk(engine)
    engine.run()
    assert engine.tokens == golden
