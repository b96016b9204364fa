"""Tensor parallel: what one rank finds, all ranks act upon, in the same step."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvguard.violation import Action, Kind
from tests.sglang.apart import Child
from tests.sglang.engine import Engine
from tests.sglang.scenarios import assert_whole, at_step, null_entry, send, stale_row
from tests.sglang.test_contents import OTHER, PROMPT, every_request

RANKS = 2
FAULTS = {"null-entry": null_entry, "stale-row": stale_row}
TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def build(kept: dict[str, Any], rank: int, ports: Any, overlap: bool) -> bool:
    """One rank's scheduler; both must be built at the same time. Returns whether it is guarded."""
    import torch._dynamo

    # SGLang compiles its masks for parallel embeddings: for a few steps that is a minute of C++.
    torch._dynamo.config.disable = True
    kept["engine"] = engine = Engine(rank=rank, ports=ports, tp_size=RANKS, overlap=overlap)
    return engine.guard is not None


def break_guard(kept: dict[str, Any], rank: int) -> None:
    """From now on, the tenth check of rank 1 raises."""
    calls, books = 0, importlib.import_module("kvguard.adapters.sglang.books")
    verify = books.verify_rows

    def failing(**arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise ZeroDivisionError("made to fail")
        verify(**arguments)

    if rank == 1:
        books.verify_rows = failing  # type: ignore[attr-defined]


def traffic(kept: dict[str, Any], rank: int, fault: str) -> dict[str, Any]:
    """The same requests on both ranks; the fault only on rank 1."""
    engine: Engine = kept["engine"]
    engine.flush()
    guard, before = engine.guard, len(engine.guard.violations) if engine.guard is not None else 0
    start, aborted_at = engine.steps, {}
    if guard is not None:
        abort = type(guard)._abort

        def noted(batch: Any, req: Any, message: str) -> None:
            aborted_at[req.rid] = batch.forward_iter - start
            abort(guard, batch, req, message)

        guard._abort = noted
    send(engine)

    def act(engine: Engine) -> None:
        if fault and rank == 1:
            FAULTS[fault](engine, engine.request("r3"))

    engine.run(at_step(18, act))
    assert_whole(engine)
    return {
        "tokens": engine.tokens,
        "ends": {name: end["type"] for name, end in engine.ends.items()},
        "messages": {name: end.get("message", "") for name, end in engine.ends.items()},
        "aborted_at": aborted_at,
        "violations": len(guard.violations) - before if guard is not None else 0,
        "health": guard.health() if guard is not None else None,
    }


def tenants(kept: dict[str, Any], rank: int, lost: bool) -> dict[str, Any]:
    """A tenant's prompt, and then the same of another tenant; `lost`: SGLang has lost what keeps them apart."""
    engine: Engine = kept["engine"]
    engine.flush()
    before = len(engine.guard.violations)
    engine.add("a", PROMPT, 20, tenant="a")
    engine.add("other", OTHER, 40)

    def lose(req: Any) -> None:
        if lost:
            req.extra_key = None

    with every_request(engine, lose):
        engine.run(at_step(12, lambda engine: engine.add("b", PROMPT, 12, tenant="b")))
    assert_whole(engine)
    return {
        "tokens": engine.tokens,
        "violations": [(v.request, v.kind, v.action, v.step) for v in engine.guard.violations[before:]],
    }


def ports_of(kept: dict[str, Any]) -> Any:
    """Ports that both ranks use."""
    from sglang.srt.server_args import PortArgs, ServerArgs

    from tests.sglang.engine import ARGUMENTS, checkpoint

    server = ServerArgs(**ARGUMENTS | {"model_path": str(checkpoint()), "tp_size": RANKS})
    server.resolve_once()
    return PortArgs.init_new(server)


class Pair:
    """Both ranks."""

    def __init__(self, environment: dict[str, str], overlap: bool) -> None:
        helper = Child({})
        ports = helper.call(ports_of)
        helper.stop()
        self._ranks = [Child(TWO | environment) for _ in range(RANKS)]
        self.guarded = self._both(build, ports, overlap)

    def _both(self, function: Any, *args: Any) -> list[Any]:
        with ThreadPoolExecutor(RANKS) as threads:
            calls = [threads.submit(child.call, function, rank, *args) for rank, child in enumerate(self._ranks)]
            return [call.result() for call in calls]

    def run(self, fault: str = "") -> list[dict[str, Any]]:
        """What both ranks saw."""
        return self._both(traffic, fault)

    def tenants(self, lost: bool) -> list[dict[str, Any]]:
        """The same of two tenants with one prompt."""
        return self._both(tenants, lost)

    def fail(self) -> None:
        """Have the guard of rank 1 fail in its next traffic."""
        self._both(break_guard)

    def stop(self) -> None:
        """End both."""
        for child in self._ranks:
            child.stop()


@pytest.mark.parametrize(("overlap", "level"), [(False, "tags"), (True, "keys")], ids=["normal", "overlap"])
def test_a_fault_on_one_rank_is_everyones(overlap: bool, level: str) -> None:
    """Clean runs are as without a guard; a fault on rank 1 ends the same request on both ranks in the same step.

    At level `keys` so does a hit on another tenant's pages.
    """
    plain = Pair({"SGLANG_PLUGINS": "none"}, overlap)
    try:
        assert plain.guarded == [False, False]
        wanted = plain.run()
    finally:
        plain.stop()
    pair = Pair({"KVGUARD_LEVEL": level}, overlap)
    try:
        assert pair.guarded == [True, True]
        clean = pair.run()
        for found, golden in zip(clean, wanted, strict=True):
            # Only rank 0 answers clients.
            assert found["tokens"] == golden["tokens"] and found["ends"] == golden["ends"]
            assert found["violations"] == 0 and found["health"].ok
            counters = found["health"].counters
            assert counters["steps_seen"] == counters["steps_verified"] > 20
        for fault in FAULTS:
            first, second = pair.run(fault)
            assert set(first["aborted_at"]) == set(second["aborted_at"]) == {"r3"}
            assert first["aborted_at"] == second["aborted_at"], "not in the same step"
            assert first["violations"] >= 1 and second["violations"] >= 1
            golden_tokens = wanted[0]["tokens"]
            for name, tokens in first["tokens"].items():
                assert tokens == golden_tokens[name][: len(tokens)]
                assert len(tokens) == 24 or name == "r3"
            assert first["ends"]["r3"] == "abort" and 0 < len(first["tokens"]["r3"]) < 24
            assert first["messages"]["r3"].startswith("kvguard kvg-")
        if level == "keys":
            sound, led = pair.tenants(lost=False), pair.tenants(lost=True)
            assert [found["violations"] for found in sound] == [[], []]
            assert led[0]["violations"] == led[1]["violations"], "not alike, or not in the same step"
            ((request, kind, action, _),) = led[0]["violations"]
            assert (request, kind, action) == ("b", Kind.CONTENT_DOMAIN, Action.ABORTED)
            assert len(sound[0]["tokens"]["b"]) == 12
            # An empty list: SGLang says that it is over.
            assert led[0]["tokens"] | {"b": []} == sound[0]["tokens"] | {"b": []}
            assert led[0]["tokens"].get("b", []) == []
        # And healthy again.
        again = pair.run()
        assert again[0]["tokens"] == wanted[0]["tokens"] and again[0]["violations"] == 0
        # A guard that fails on one rank: the others must neither wait for it nor go on alone.
        pair.fail()
        for _ in range(2):
            unguarded = pair.run()
            assert [found["health"].armed for found in unguarded] == [False, False]
            assert unguarded[0]["tokens"] == wanted[0]["tokens"]
            assert [found["violations"] for found in unguarded] == [0, 0]
    finally:
        pair.stop()
