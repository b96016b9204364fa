"""What an attack on the adapter found: each was wrong once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import structlog.testing

from tests.sglang.apart import Child, on
from tests.sglang.engine import Engine
from tests.sglang.test_victims import ON, before_the_flush


def _prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(count)]


@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("overlap", [True])
@on(environment=ON)
def test_requests_whose_ids_begin_like_the_victims_go_on(engine: Engine, page_size: int, overlap: bool) -> None:
    """A middle chunk is flagged while the last one is in flight; SGLang's own abort goes by the beginning of ids."""
    rng = random.Random(5)
    hit: list[bool] = []
    long, sent = _prompt(rng, 212), list[bool]()

    def client(engine: Engine) -> bool:
        if not sent and engine.request("job-10") is not None and engine.request("job-10").output_ids:
            sent.append(True)
            engine.add("job-1", long, 8)
        req = engine.scheduler.chunked_req
        if not hit and req is not None and req.rid == "job-1" and 65 <= 212 - req.kv.kv_allocated_len <= 128:
            engine.table[req.kv.req_pool_idx, 37] = 0
            hit.append(True)
            engine.add("job-12", _prompt(rng, 30), 8)
        return not hit

    for name in ("job-10", "job-11", "other"):
        engine.add(name, _prompt(rng, 20), 60)
    engine.run(client)
    assert engine.ends["job-1"]["message"].startswith("kvguard ") and not engine.tokens.get("job-1")
    others = ("job-10", "job-11", "job-12", "other")
    assert [engine.ends[name]["type"] for name in others] == ["length"] * 4


@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("overlap", [True])
@on(environment=ON)
def test_a_bad_slot_in_mid_page_of_the_tree_has_one_victim(engine: Engine, page_size: int, overlap: bool) -> None:
    """The row is hit between its last check and its insertion: who takes it first is aborted, later hits are cut."""
    rng = random.Random(5)
    first, tail = _prompt(rng, 20), _prompt(rng, 9)
    with engine.unguarded():
        engine.add("a", first, 60)
        engine.run()
        again = first + engine.tokens["a"][:50] + tail
        for name in "bcd":
            engine.add(name, again, 8)
            engine.run()
        golden = dict(engine.tokens)
    hit: list[bool] = []
    waiting = [("b", "a"), ("c", "b"), ("d", "c")]

    def client(engine: Engine) -> bool:
        req = engine.request("a")
        if not hit and req is not None and req.kv.holds_kv and req.kv.kv_committed_len >= 79:
            engine.table[req.kv.req_pool_idx, 37] = 0
            hit.append(True)
        while hit and waiting and waiting[0][1] in engine.ends:
            engine.add(waiting.pop(0)[0], again, 8)
        return bool(waiting)

    engine.add("keepalive", _prompt(rng, 30), 200)
    engine.add("a", first, 60)
    with before_the_flush(engine, stolen=1):
        engine.run(client)
    assert hit and engine.ends["b"]["type"] == "abort"
    assert [engine.tokens[name] == golden[name] for name in "acd"] == [True, True, True]


@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("overlap", [False])
@on(environment=ON)
def test_a_rank_that_mended_its_free_list_tells_the_others(engine: Engine, page_size: int, overlap: bool) -> None:
    """A wrong free after the last forward: what this rank flushes for, every rank must flush for."""
    told: list[int] = []
    smallest = engine.guard._smallest

    def telling(value: int) -> Any:
        told.append(value)
        return smallest(value)

    engine.guard._smallest = telling
    freed: list[bool] = []

    def client(engine: Engine) -> bool:
        if "x" in engine.ends and not freed:
            freed.append(True)
            engine.allocator.free_page_ids(engine.allocator.free_pages[-1:].clone())
        return not freed

    try:
        engine.add("x", range(3, 43), 4)
        engine.run(client)
    finally:
        del engine.guard._smallest
    assert freed and told[-1] == -1
    assert engine.guard.violations[-1].kind.value == "double-free"


def _start(kept: dict[str, Any]) -> tuple[list[Any], str]:
    with structlog.testing.capture_logs() as logs:
        try:
            Engine()
        except Exception as error:
            return list(logs), f"{type(error).__name__}: {error}"
    return list(logs), ""


def test_with_settings_that_cannot_be_read_no_scheduler_starts() -> None:
    """SGLang only logs what a plug-in raises: a slip of the pen must not serve unguarded."""
    child = Child({"KVGUARD_LEVEL": "tags", "KVGUARD_ON_VIOLATON": "abort"})
    try:
        logs, refused = child.call(_start)
    finally:
        child.hang_up()
    assert "KVGUARD_ON_VIOLATION" in refused and refused.startswith("ConfigError")
    assert [line["event"] for line in logs] == ["not_attached"]


def test_what_a_withheld_token_adds_to_a_list_is_not_sent() -> None:
    """The rows before stay, and can be taken."""
    from kvguard.adapters.sglang.scheduler_guard import _Closed

    class Rows(list[int]):
        def take(self) -> list[int]:
            return list(self)

    closed = _Closed(Rows([1, 2]))
    closed.append(3, 4)
    assert closed.take() == [1, 2]
