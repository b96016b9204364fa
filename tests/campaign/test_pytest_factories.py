"""Which engine a campaign in pytest runs, and what it leaves as it was: factories, golden runs, members, logging."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from kvguard.fault_injection.pytest_campaign import _goldens_of, _quiet, plan_jobs
from kvguard.fault_injection.targets.own_runs import Goldens, HarnessError, OwnRuns
from tests.campaign.test_pytest_plugin import SAMPLE, run_pytest

TWO_ENGINES = """
import sys
sys.path[:0] = [{sample!r}, {tests!r}]
import pytest
from test_campaign import BLOCK_SIZE, BLOCKS, EngineUnderTest
from toy_engine.engine import Engine
from toy_engine.broken import MANAGERS
from toy_engine.{module} import {manager} as Manager
from kvguard.pools import PoolSpec


def make(make_guard, *, kind=Manager):
    manager = kind(BLOCKS, BLOCK_SIZE)
    guard = make_guard and make_guard([PoolSpec(num_pages=BLOCKS, page_size=BLOCK_SIZE)], backend="numpy")
    return EngineUnderTest(Engine(manager, guard))


class Factory(dict):
    def __init__(self, manager):
        self.manager = MANAGERS[manager]

    def make(self, make_guard):
        return make(make_guard, kind=self.manager)

    __call__ = make


def imported(make_guard):
    return make(make_guard, kind=Manager)


runs = pytest.mark.kvguard(trials=0, clean_runs=1)
both = pytest.mark.parametrize("manager", ["sound", "reissuing"])


@runs
def test_import(kvguard_campaign):
    kvguard_campaign.run(imported)


@runs
@both
def test_bound(kvguard_campaign, manager):
    kvguard_campaign.run(Factory(manager).make)


@runs
@both
def test_unhashable(kvguard_campaign, manager):
    kvguard_campaign.run(Factory(manager))


@runs
@both
def test_default(kvguard_campaign, manager):
    def made(make_guard, *, kind=MANAGERS[manager]):
        return make(make_guard, kind=kind)

    kvguard_campaign.run(made)


@runs
@both
def test_patched(kvguard_campaign, manager, monkeypatch):
    monkeypatch.setitem(globals(), "Manager", MANAGERS[manager])
    kvguard_campaign.run(imported)
"""


@pytest.mark.slow
def test_every_test_runs_the_engine_of_its_own_factory(tmp_path: Path) -> None:
    """Sound and broken engines in turn, from factories that look alike: each test is as green as its engine is."""
    for file, module, manager in (("sound", "block_manager", "BlockManager"), ("worse", "broken", "ReissuingManager")):
        text = TWO_ENGINES.format(sample=str(SAMPLE), tests=str(SAMPLE / "tests"), module=module, manager=manager)
        (tmp_path / f"test_{file}.py").write_text(text)
    done = run_pytest(tmp_path, "--kvguard-campaign", "--kvguard-seed", "3", "-rA")
    found = {name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED) (\S+)", done.stdout, re.MULTILINE)}
    assert len(found) == 18, done.stdout
    for name, outcome in found.items():
        broken = "reissuing" in name or "test_worse.py::test_import" in name
        assert (outcome == "FAILED") == broken, name


def test_a_factory_is_known_again_only_if_it_is_the_same() -> None:
    """Code that is equal is not enough: object, defaults, closure and globals count. A new lambda of one place is."""
    source = "def make(make_guard): return kind(make_guard)"
    first: dict[str, Any] = {"kind": int}
    second: dict[str, Any] = {"kind": str}
    exec(source, first)  # noqa: S102
    exec(source, second)  # noqa: S102
    assert first["make"].__code__ == second["make"].__code__

    class Factory:
        def make(self, make_guard: Any) -> Any: ...

    def defaults(kind: Any) -> Any:
        def made(make_guard: Any, *, kind: Any = kind) -> Any: ...

        return made

    def closes_over(kind: Any) -> Any:
        return lambda make_guard: kind

    bound = Factory()
    others = [first["make"], second["make"], bound.make, Factory().make, defaults(1), defaults(2), closes_over(1),
              closes_over(2), [1], [1]]  # fmt: skip
    goldens: list[Any] = [_goldens_of(factory, "t") for factory in others[-8:]]
    assert len({id(found) for found in goldens}) == 8
    assert _goldens_of(first["make"], "t") is not _goldens_of(second["make"], "t")
    moved = FunctionType(first["make"].__code__, second)
    assert _goldens_of(first["make"], "t") is not _goldens_of(moved, "t")
    assert _goldens_of(first["make"], "t") is not _goldens_of(first["make"], "t[other]")
    assert _goldens_of(bound.make, "t") is _goldens_of(bound.make, "t")
    bare: list[Any] = [lambda make_guard: None for _ in range(2)]
    assert bare[0] is not bare[1] and _goldens_of(bare[0], "t") is _goldens_of(bare[1], "t")


@pytest.mark.parametrize("configured", [False, True])
def test_the_users_logging_is_left_as_it_was(configured: bool) -> None:
    """Also whether it was configured at all: libraries configure it themselves where nobody did."""
    before = structlog.get_config() if structlog.is_configured() else None
    try:
        structlog.reset_defaults()
        if configured:
            structlog.configure(cache_logger_on_first_use=True)
        config = structlog.get_config()
        with _quiet():
            assert structlog.get_config() != config
        assert structlog.is_configured() is configured and structlog.get_config() == config
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


@pytest.mark.parametrize(
    "fault,members,words",
    [
        ("stale-row", {"block_table": [[0]]}, "block_table is a list: it must be the table that attention reads"),
        ("null-entry", {"block_table": np.zeros(4)}, r"ndarray: .* array \[rows, columns\]"),
        ("double-allocation", {"free_pages": {1, 2}}, "free_pages is a set: it must be the allocator's own list"),
        ("stale-cache-entry", {"prefix_cache": [1]}, "prefix_cache is a list: it must be the cache's own dict"),
    ],
)
def test_a_member_that_a_fault_cannot_write_is_named(fault: str, members: dict[str, Any], words: str) -> None:
    """Before any run, and with what it must be; otherwise the fault would only find no place."""
    jobs = plan_jobs(pytest.mark.kvguard(trials=1, clean_runs=0, faults=fault, proofs="all").mark, 1)
    engine = SimpleNamespace(
        null_page=0, block_table=np.zeros((1, 1)), row=min, free_pages=[], prefix_cache={}, prefix_keys=min
    )
    vars(engine).update(members)
    with pytest.raises(HarnessError, match=words):
        OwnRuns(jobs[0].plan, lambda make_guard: engine, Goldens())  # type: ignore[arg-type]
