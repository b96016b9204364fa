"""`kvguard campaign --engine sglang --fault keys`: wrong keys in a real radix tree, and a harness that would notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.key_options import sglang_key_faults
from kvguard.fault_injection.key_plan import KEYS
from kvguard.fault_injection.options import UsageError
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import MISSED, TrialResult
from kvguard.fault_injection.runs import Run
from kvguard.fault_injection.targets.sglang_key_runs import SglangKeyRuns
from kvguard.fault_injection.targets.sglang_key_watch import KeyWatchedRun, Written
from kvguard.fault_injection.targets.sglang_keys import (
    NOT_IN_SGLANG_KEYS,
    SEEN_BY_TAGS,
    SGLANG_KEY_FAULTS,
    SGLANG_KEY_PROOF_SETS,
)
from kvguard.fault_injection.targets.sglang_templates import templates
from kvguard.fault_injection.trial import run_clean, run_trial
from tests.sglang.test_campaign import ZEROS, command

CELL = Cell(
    engine="sglang", fault="", kv_dtype="fp32", weights="fp32", page_size=16, level=KEYS, scheduling="normal"
)
TEXT = tuple(range(10, 26))
UNGUARDED: dict[str, Run] = {}
HARMLESS = {"wrong-salt"}
"""Pages of one text for two tenants are equal: nobody's tokens change, and nobody may read them all the same."""

SEEN_LATE = {"prefix-ignored"}
"""The pages are in the tree once more, and evicted twice: many steps later tags see that."""


@pytest.fixture(scope="module", autouse=True)
def templates_end_with_the_module() -> Iterator[None]:
    """Engines are forks of this process: those of this module are not those of another."""
    templates.close()
    yield
    templates.close()


@pytest.fixture
def new_templates() -> Iterator[None]:
    """For a test that patches: what it patches is in engines that start after it, and in no later one."""
    templates.close()
    yield
    templates.close()


@pytest.fixture(autouse=True)
def one_unguarded_run_of_each_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same whatever guards the other one."""
    off = SglangKeyRuns.off

    def shared(runs: SglangKeyRuns) -> Run:
        fault = runs._fault.name
        if fault not in UNGUARDED:
            UNGUARDED[fault] = off(runs)
        return UNGUARDED[fault]

    monkeypatch.setattr(SglangKeyRuns, "off", shared)


def trial(fault: str, proofs: str, **cell: Any) -> TrialResult:
    plan = TrialPlan(index=0, cell=replace(CELL, fault=fault, **cell), traffic_seed=1000, fault_seed=3)
    return run_trial(plan, model="tiny", backend="torch", proofs=proofs)


def clean() -> Any:
    fields = {name: getattr(CELL, name) for name in ("engine", "kv_dtype", "weights", "page_size", "scheduling")}
    return run_clean(CleanPlan(index=0, traffic=KEYS, traffic_seed=6, **fields), model="tiny", backend="torch")


def test_every_fault_of_cache_keys_is_made_or_has_its_reason() -> None:
    """Those of the embedded engine, one way or the other; and the command line says the reason."""
    assert SGLANG_KEY_FAULTS.keys() | NOT_IN_SGLANG_KEYS.keys() == KEY_FAULTS.keys()
    assert not SGLANG_KEY_FAULTS.keys() & NOT_IN_SGLANG_KEYS.keys() and len(SGLANG_KEY_FAULTS) >= 8
    assert sglang_key_faults("keys") == tuple(SGLANG_KEY_FAULTS) and sglang_key_faults("stale-row") == ()
    for name, reason in NOT_IN_SGLANG_KEYS.items():
        with pytest.raises(UsageError, match=name) as caught:
            sglang_key_faults(name)
        assert reason in str(caught.value)
    with pytest.raises(UsageError, match="one campaign each"):
        sglang_key_faults("phantom-hit,stale-row")


def test_a_page_is_ones_own_by_what_was_written_into_it() -> None:
    """What the harness holds against a request: another text up to the page's end, tenant, adapter or column."""
    watch: Any = object.__new__(KeyWatchedRun)
    watch._target = SimpleNamespace(page_size=4)
    watch._requests = {
        name: Request(id=name, prompt=tokens, max_new_tokens=1, tenant=tenant, lora=lora)
        for name, tokens, tenant, lora in (
            ("me", TEXT, "red", ""),
            ("like me", TEXT[:9], "red", ""),
            ("other", (*TEXT[:9], 99, *TEXT[10:]), "red", ""),
            ("tenant", TEXT, "blue", ""),
            ("adapter", TEXT, "red", "green"),
        )
    }
    running = {
        name: SimpleNamespace(rid=name, origin_input_ids=[*request.prompt], output_ids=[])
        for name, request in watch._requests.items()
    }

    def is_own(writer: str, column: int, *, as_column: int | None = None, free: bool = False) -> bool:
        watch._holds = {7: Written(running[writer], column if as_column is None else as_column)}
        return bool(watch._is_own(running["me"], column, 7, free, {}))

    assert all(is_own("me", column) for column in range(4)) and is_own("me", 3, free=True)
    assert [is_own("like me", column) for column in range(4)] == [True, True, False, False]
    assert [is_own("other", column) for column in range(4)] == [True, True, False, False]
    assert not is_own("tenant", 0) and not is_own("adapter", 0)
    assert not is_own("like me", 1, as_column=0) and not is_own("me", 1, as_column=0)
    assert not is_own("like me", 0, free=True)
    watch._holds = {}
    assert not watch._is_own(running["me"], 0, 7, False, {})


@pytest.mark.parametrize("fault", SGLANG_KEY_FAULTS)
def test_every_fault_ends_whom_it_leads_astray_and_nobody_else(fault: str) -> None:
    """By the one proof that it is tried with alone, in the very forward that would read the page."""
    alone = SGLANG_KEY_PROOF_SETS[fault][1]
    result = trial(fault, alone)
    assert result.proven and result.affected == result.aborted != (), result
    assert result.detected_by == (alone,) and result.live_step == result.detected_step
    assert result.potent == (fault not in HARMLESS)


@pytest.mark.parametrize("fault", SGLANG_KEY_FAULTS)
def test_without_content_keys_only_paths_that_do_not_add_up_are_found(fault: str) -> None:
    """At level `tags` a sound path of the tree is taken, whatever its pages hold, and wrong tokens leave."""
    result = trial(fault, "tags")
    assert result.affected
    assert result.proven == (fault in SEEN_BY_TAGS), result
    if not result.proven:
        assert result.tokens_after_fault > 3
        assert (result.outcome, result.detected_by) == (MISSED, ()) or fault in SEEN_LATE


def test_with_all_proofs_off_nothing_is_found() -> None:
    """Detections come from the proofs, not from the harness."""
    result = trial("phantom-hit", "none")
    assert result.outcome == MISSED and result.detected_by == ()


def test_clean_runs_are_clean_and_contain_what_they_must() -> None:
    """Tenants, adapters, shared prefixes, retraction, eviction, client aborts and new weights: the same tokens."""
    run = clean()
    assert run.clean, run
    assert min(run.preemptions, run.evictions, run.prefix_hits, run.client_aborts, run.writers["weight_updates"]) > 0


@pytest.mark.usefixtures("new_templates")
def test_a_guard_that_takes_sound_hits_for_wrong_ones_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is aborted on pages that hold what was asked for is a false positive."""
    from kvguard.adapters.sglang.contents import RequestContents

    monkeypatch.setattr(RequestContents, "at", lambda self, content, tokens: [tokens, tokens])
    run = clean()
    assert run.violations and run.requests_changed and not run.clean


@pytest.mark.usefixtures("new_templates")
def test_a_guard_that_lets_wrong_hits_by_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a wrong page and is not stopped makes the trial a miss."""
    from kvguard.adapters.sglang import pages

    own = pages._own_contents

    def agreeable(guard: Any, reqs: Any, fresh: Any, prefixes: Any) -> Any:
        content = own(guard, reqs, fresh, prefixes)
        for place, prefix in enumerate(prefixes):
            if fresh[place] and prefix.shape[0]:
                content[place] = guard.books.page_content[int(prefix[-1]) // guard.books.page_size]
        return content

    monkeypatch.setattr(pages, "_own_contents", agreeable)
    result = trial("wrong-lora", "content_key")
    assert result.outcome == MISSED and result.affected and not result.proven


def test_the_command_line_makes_what_is_tried_above(tmp_path: Path) -> None:
    """Plan, run folder and judgement in fp8, where bystanders are compared with runs of the same hits."""
    setup = ("--fault", "wrong-lora,phantom-hit", "--page-size", "1", "--kv-dtype", "fp8", "--scheduling", "overlap")
    data = command("--engine", "sglang", *setup, "--trials", "2", "--clean-runs", "0", cwd=tmp_path)
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["detected"] == data["trials"] == data["potent"] == 2
    assert {(cell["fault"], cell["level"]) for cell in data["cells"]} == {("wrong-lora", KEYS), ("phantom-hit", KEYS)}

