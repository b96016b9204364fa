"""Traffic for a real SGLang, page faults in it, and what every test asks of an engine afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.sglang.engine import Client, Engine

Scenario = Callable[[Engine], Client | None]
"""Adds requests, and returns what is to be done while they run."""


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    """10 to 140 tokens, most with a prefix of 32 or 96 tokens in common, the last two equal."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, 250) for _ in range(96)]
    made = [
        shared[: rng.choice((0, 32, 96))] + [rng.randrange(3, 250) for _ in range(rng.randrange(10, 45))]
        for _ in range(count)
    ]
    made[-1] = made[-2]
    return made


def send(engine: Engine, seed: int = 1, count: int = 8, tokens: int = 24, exact: bool = True) -> None:
    """Requests r0 to r<count - 1>."""
    for place, prompt in enumerate(prompts(seed, count)):
        engine.add(f"r{place}", prompt, tokens, exact=exact)


def at_step(number: int, action: Callable[[Engine], Any]) -> Client:
    """A client that does this once, when the engine has made `number` steps from now; True while it waits."""
    start: list[int] = []
    done: list[bool] = []

    def client(engine: Engine) -> bool:
        start.append(engine.steps) if not start else None
        if not done and engine.steps - start[0] >= number:
            done.append(True)
            action(engine)
        return not done

    return client


def unguarded_tokens(engine: Engine, scenario: Scenario) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Tokens and ends of a scenario as if no guard were attached."""
    with engine.unguarded():
        engine.tokens, engine.ends = {}, {}
        engine.run(scenario(engine))
        return engine.tokens, {name: end["type"] for name, end in engine.ends.items()}


def assert_clean(engine: Engine, steps: int = 1) -> None:
    """No violation, no event, nothing in flight, every step verified, and SGLang's books in order."""
    guard = engine.guard
    health = guard.health()
    assert [violation.message for violation in guard.violations] == []
    assert health.ok and health.in_flight == 0 and not guard.audits, health
    assert health.counters["steps_seen"] == health.counters["steps_verified"] >= steps, health
    assert health.counters["guard_faults"] == health.counters["adapter_errors"] == 0
    assert not guard._said_unchecked
    assert_whole(engine)


def assert_whole(engine: Engine, stolen: int = 0) -> None:
    """At idle every page is in the free list or in the tree, once.

    `stolen`: so many pages that were given away from under the tree may be named by one place more.
    """
    allocator, tree = engine.allocator, engine.scheduler.tree_cache
    size = allocator.page_size
    lists = [pages for pages in (allocator.free_pages, allocator.release_pages) if pages is not None]
    free = torch.cat(lists).tolist()
    cached = (tree.all_values_flatten()[::size] // size).tolist() if not tree.disable else []
    assert len(set(free)) == len(free)
    assert set(free) | set(cached) == set(range(1, allocator.size // size + 1))
    assert len(free) + len(cached) <= allocator.size // size + stolen
    assert len(engine.scheduler.req_to_token_pool.free_slots) == engine.scheduler.req_to_token_pool.size


def same_as_unguarded(engine: Engine, scenario: Scenario, steps: int = 5) -> None:
    """The scenario is healthy, and the guard changes neither a token nor an end."""
    tokens, ends = unguarded_tokens(engine, scenario)
    engine.run(scenario(engine))
    assert engine.tokens == tokens
    assert {name: end["type"] for name, end in engine.ends.items()} == ends
    assert_clean(engine, steps)


# -- faults: SGLang's state only --------------------------------------------------------------------------------------


def page_of(engine: Engine, req: Any, column: int) -> int:
    size = engine.allocator.page_size
    return int(engine.table[req.kv.req_pool_idx, column * size] // size)


def put_on_free_list(engine: Engine, page: int) -> None:
    """The next allocation gets this page, whoever has it."""
    allocator = engine.allocator
    given = torch.tensor([page], dtype=allocator.free_pages.dtype)
    allocator.free_pages = torch.cat([given, allocator.free_pages])


def columns_of(engine: Engine, req: Any) -> int:
    """Full columns of a request's row."""
    return int(req.kv.kv_allocated_len) // int(engine.allocator.page_size)


def free_under(engine: Engine, req: Any) -> None:
    """Use after free: the last full page of a running request is given to whoever asks next."""
    put_on_free_list(engine, page_of(engine, req, columns_of(engine, req) - 1))


def free_through_the_engine(engine: Engine, req: Any) -> None:
    """The same, by a call of SGLang's own free: from then on nobody has the page."""
    size = engine.allocator.page_size
    page = page_of(engine, req, columns_of(engine, req) - 1)
    engine.allocator.free(torch.arange(page * size, (page + 1) * size))


def stale_row(engine: Engine, req: Any) -> None:
    """The row of a request names the first pages of another one."""
    other = next(one for one in engine.running() if one is not req and one.kv.holds_kv)
    size = int(engine.allocator.page_size)
    length = min(req.kv.kv_allocated_len, other.kv.kv_allocated_len) // size * size
    table = engine.table
    table[req.kv.req_pool_idx, :length] = table[other.kv.req_pool_idx, :length]


def null_entry(engine: Engine, req: Any) -> None:
    """One entry of a row is 0."""
    engine.slots(req)[int(req.kv.kv_allocated_len) // 2] = 0


def out_of_range_entry(engine: Engine, req: Any) -> None:
    """One entry of a row lies far behind the pool."""
    engine.slots(req)[int(req.kv.kv_allocated_len) // 2] = 10**6


FAULTS: dict[str, Callable[[Engine, Any], None]] = {
    "use-after-free": free_under,
    "freed-not-reused": free_through_the_engine,
    "stale-row": stale_row,
    "null-entry": null_entry,
    "out-of-range-entry": out_of_range_entry,
}


def victims(engine: Engine, golden: dict[str, list[int]], wanted: dict[str, int]) -> list[str]:
    """Who was aborted by the guard; everybody else has all golden tokens, and nobody has a wrong one.

    `wanted`: request -> tokens that were asked for.
    """
    found = []
    assert engine.late == []
    for name, count in wanted.items():
        sent, end = engine.tokens.get(name, []), engine.ends[name]
        assert sent == golden[name][: len(sent)], (name, sent, golden[name])
        if end["type"] == "abort":
            assert end["message"].startswith("kvguard kvg-"), end
            assert end["status_code"] == 503
            found.append(name)
        else:
            assert len(sent) == count, name
    return found
