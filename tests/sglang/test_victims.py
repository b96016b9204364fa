"""Page faults in a real SGLang: who ends, what the others get, and what is left afterwards."""

from __future__ import annotations

import array
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import structlog.testing

from kvguard.guard import GuardHalt
from tests.sglang.apart import on
from tests.sglang.engine import Engine
from tests.sglang.scenarios import (
    FAULTS,
    assert_whole,
    at_step,
    free_under,
    null_entry,
    put_on_free_list,
    send,
    stale_row,
    unguarded_tokens,
    victims,
)

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
ON = {"KVGUARD_LEVEL": "tags", "KVGUARD_BREAKER_VIOLATIONS": "1000"}
WANTED = {f"r{place}": 24 for place in range(8)}


@contextmanager
def before_the_flush(engine: Engine, stolen: int = 0) -> Iterator[list[bool]]:
    """Before the guard empties the cache, when nobody runs, every page is where it belongs. [True]: it did that once.

    `stolen`: so many pages that were given away from under the tree may be free while nodes still name them.
    """
    seen: list[bool] = []
    flush = engine.scheduler.flush_cache

    def flushing(*args: Any, **kwargs: Any) -> Any:
        assert_whole(engine, stolen)
        if not stolen:
            observer, checker = engine.scheduler.pool_stats_observer, engine.scheduler.invariant_checker
            leak, messages = checker._check_all_pools(observer.get_pool_stats())
            assert not leak, messages
        seen.append(True)
        return flush(*args, **kwargs)

    engine.scheduler.flush_cache = flushing
    try:
        yield seen
    finally:
        del engine.scheduler.flush_cache


def golden(engine: Engine) -> dict[str, list[int]]:
    """What an unguarded engine without a fault sends."""
    tokens, ends = unguarded_tokens(engine, send)
    assert set(ends.values()) == {"length"}
    return tokens


def in_row(name: str, action: Callable[[Engine, Any], None]) -> Callable[[Engine], None]:
    """The action on a request that runs or is prefilled."""

    def act(engine: Engine) -> None:
        action(engine, engine.request(name))

    return act


def serves_on(engine: Engine, wanted: dict[str, list[int]]) -> None:
    """The same traffic again, on the same engine: golden, and clean."""
    count = len(engine.guard.violations)
    engine.tokens = {}
    send(engine)
    engine.run()
    assert engine.tokens == wanted and len(engine.guard.violations) == count
    assert not engine.guard.audits
    assert_whole(engine)


@LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("fault", FAULTS)
@on(environment=ON)
def test_a_fault_ends_its_victim_and_nobody_else(engine: Engine, fault: str, page_size: int, overlap: bool) -> None:
    """A clean prefix and an error; the others have golden tokens, books are exact, and the next traffic is clean."""
    wanted = golden(engine)
    with before_the_flush(engine) as flushed:
        send(engine)
        engine.run(at_step(18, in_row("r3", FAULTS[fault])))
    assert victims(engine, wanted, WANTED) == ["r3"]
    assert 0 < len(engine.tokens["r3"]) < 24
    found = engine.guard.violations[-2:]
    assert "r3" in [violation.request for violation in found]
    if fault == "use-after-free":
        # The allocation that took the page from under its reader is named as well.
        assert "double-allocation" in [violation.kind.value for violation in found]
    elif fault == "freed-not-reused":
        # SGLang's own free was seen: the page is nobody's, or rightly somebody else's in the same step.
        assert found[-1].kind.value in ("vacant-page", "stale-page")
        assert "double-allocation" not in [violation.kind.value for violation in found]
    assert flushed == [True]
    serves_on(engine, wanted)


@LOOPS
@pytest.mark.parametrize("fault", [null_entry, stale_row, free_under], ids=lambda fault: fault.__name__)
@on(environment=ON)
def test_a_victim_between_two_chunks_of_its_prompt(engine: Engine, fault: Any, overlap: bool) -> None:
    """It has sent nothing yet: an error and no token; what of it is in the tree already is right."""
    long = [token % 240 + 5 for token in range(300)]
    wanted = golden(engine)
    engine.add("long", long, 8)
    engine.run()
    wanted["long"] = engine.tokens.pop("long")
    engine.flush()
    done: list[bool] = []

    def client(engine: Engine) -> bool:
        req = engine.scheduler.chunked_req
        if not done and req is not None and req.rid == "long" and req.kv.kv_allocated_len >= 128:
            done.append(True)
            fault(engine, req)
        return not done

    # A chunk goes into the tree before the next one is checked: the stolen page is the tree's by then.
    with before_the_flush(engine, stolen=fault is free_under) as flushed:
        send(engine)
        engine.add("long", long, 8)
        engine.run(client)
    assert victims(engine, wanted, WANTED | {"long": 8}) == ["long"]
    assert engine.tokens.get("long", []) == []
    assert engine.guard.violations[-1].request == "long" and flushed == [True]
    engine.tokens, engine.ends = {}, {}
    engine.add("long", long, 8)
    engine.run()
    assert engine.tokens == {"long": wanted["long"]}


@LOOPS
@on(environment=ON)
def test_a_second_violation_while_the_first_is_looked_into(engine: Engine, overlap: bool) -> None:
    """Between a violation and the next idle moment hits and frees are checked on the host; another victim ends too."""
    wanted = golden(engine)
    audits: list[bool] = []

    def client(engine: Engine) -> bool:
        first(engine)
        return bool(second(engine))

    def again(engine: Engine) -> None:
        audits.append(engine.guard.audits)
        null_entry(engine, engine.request("r5"))

    first, second = at_step(18, in_row("r3", stale_row)), at_step(22, again)
    with before_the_flush(engine) as flushed:
        send(engine)
        engine.run(client)
    assert victims(engine, wanted, WANTED) == ["r3", "r5"]
    assert audits == [True] and flushed == [True]
    serves_on(engine, wanted)


@LOOPS
@pytest.mark.parametrize("page_size", [1, 16])
@on(environment=ON, schedule_policy="fcfs")
def test_a_page_of_the_tree_that_is_given_away(engine: Engine, page_size: int, overlap: bool) -> None:
    """Who adopts it in the same step ends; who comes later gets a shorter hit, and right tokens."""
    rng = random.Random(11)
    prefix = [rng.randrange(3, 250) for _ in range(48)]
    requests = {name: [*prefix, place + 5, place + 6, place + 7] for place, name in enumerate(("a", "b", "c"))}
    requests["other"] = [rng.randrange(3, 250) for _ in range(20)]
    tokens = {"a": 8, "b": 8, "c": 8, "other": 40}
    with engine.unguarded():
        for name, prompt in requests.items():
            engine.add(name, prompt, tokens[name])
        engine.run()
        wanted = engine.tokens
    engine.add("a", requests["a"], 8)
    engine.run()
    # The second page of the prefix; nobody runs, so the tree has it.
    page = int(tree_pages(engine, requests["a"])[1])
    put_on_free_list(engine, page)
    engine.add("other", requests["other"], 40)
    engine.add("b", requests["b"], 8)
    later: list[int] = []

    def client(engine: Engine) -> bool:
        if not later and "b" in engine.ends:
            later.append(len(engine.tokens["other"]))
            engine.add("c", requests["c"], 8)
        return not later

    with structlog.testing.capture_logs() as logs, before_the_flush(engine, stolen=1) as flushed:
        engine.run(client)
    assert victims(engine, wanted, tokens) == ["b"]
    assert engine.tokens.get("b", []) == [] and later[0] < 20
    cut = [entry for entry in logs if entry["event"] == "hit_shortened"]
    assert [(entry["tokens"], entry["accepted"]) for entry in cut][-1:] == [(48, page_size)]
    assert flushed == [True]


def tree_pages(engine: Engine, prompt: list[int]) -> Any:
    """The pages under which the tree has a prompt."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, size = engine.scheduler.tree_cache, engine.allocator.page_size
    result = tree.match_prefix(MatchPrefixParams(key=RadixKey(array.array("q", prompt), None)))
    return tree.path_device_indices(result.last_device_node)[::size] // size


@LOOPS
@on(environment=ON | {"KVGUARD_ON_VIOLATION": "observe"})
def test_observed_is_not_acted_upon(engine: Engine, overlap: bool) -> None:
    """The violation is named; nobody ends, and SGLang's state is left as the fault made it."""
    wanted = golden(engine)
    send(engine)
    engine.run(at_step(18, in_row("r3", null_entry)))
    assert {end["type"] for end in engine.ends.values()} == {"length"}
    assert all(len(tokens) == 24 for tokens in engine.tokens.values())
    assert {name for name in wanted if engine.tokens[name] != wanted[name]} <= {"r3"}
    assert {(violation.request, violation.action.value) for violation in engine.guard.violations} == {
        ("r3", "observed")
    }
    assert not engine.guard.audits and engine.guard.armed


@LOOPS
@on(environment=ON | {"KVGUARD_ON_VIOLATION": "halt"}, alone=True)
def test_halt_stops_the_engine(engine: Engine, overlap: bool) -> None:
    """No token of the step leaves, of nobody."""
    wanted = golden(engine)
    send(engine)
    with pytest.raises(GuardHalt):
        engine.run(at_step(18, in_row("r3", null_entry)))
    for name, tokens in engine.tokens.items():
        assert tokens == wanted[name][: len(tokens)] and len(tokens) < 24
    assert engine.guard.violations[-1].action.value == "halted"


@LOOPS
@on(environment=ON | {"KVGUARD_CONTROL_PLANE": "false"})
def test_without_the_control_plane_the_reader_still_ends(engine: Engine, overlap: bool) -> None:
    """Allocations and frees are not reported; who reads a page that is not its own any more is."""
    wanted = golden(engine)
    with before_the_flush(engine) as flushed:
        send(engine)
        engine.run(at_step(18, in_row("r3", free_under)))
    assert victims(engine, wanted, WANTED) == ["r3"] and flushed == [True]
    assert {violation.proof.value for violation in engine.guard.violations} == {"tag"}
    serves_on(engine, wanted)


@LOOPS
@on(environment=ON | {"KVGUARD_DEVICE_CHECK": "false"})
def test_without_the_device_check_the_allocation_is_still_named(engine: Engine, overlap: bool) -> None:
    """Rows are not checked, so nobody ends; what the allocator did wrong is reported, and the cache is emptied."""
    wanted = golden(engine)
    send(engine)
    engine.run()
    assert engine.tokens == wanted and engine.guard.violations == ()
    engine.flush()
    # The record of who was not ended goes into the tree, with the page.
    with before_the_flush(engine, stolen=1) as flushed:
        send(engine)
        engine.run(at_step(18, in_row("r3", free_under)))
    assert {end["type"] for end in engine.ends.values()} == {"length"} and flushed == [True]
    assert {name for name in wanted if engine.tokens[name] != wanted[name]} <= {"r3"}
    found = engine.guard.violations
    assert {violation.proof.value for violation in found} == {"control_plane"}
    assert found[0].kind.value == "double-allocation"
    serves_on(engine, wanted)
