"""`kvguard campaign --engine vllm --fault keys`: wrong cache keys in a real vLLM, and a harness that would notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvguard.content_calls import ContentCalls
from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.key_options import vllm_key_faults
from kvguard.fault_injection.key_plan import KEY_PROOF_SETS, KEYS
from kvguard.fault_injection.options import UsageError
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import MISSED, TrialResult
from kvguard.fault_injection.targets.vllm_keys import NOT_IN_VLLM_KEYS, VLLM_KEY_FAULTS
from kvguard.fault_injection.trial import run_clean, run_trial
from kvguard.handover import PageHandover
from kvguard.violation import Kind
from tests.vllm.test_campaign import ZEROS, campaign
from tests.vllm.tiny import unguarded

CELL = Cell(
    engine="vllm", fault="", kv_dtype="fp32", weights="fp32", page_size=32, level=KEYS, runner="v1", scheduling="async"
)
FOUND_BY_CONTROL = {"phantom-hit", "block-range-shifted", "stale-after-eviction"}
"""vLLM's key of a page says its column, so that the books alone see a page that moved."""
HARMLESS = {"wrong-salt"}
"""Pages of one text for two tenants are equal: nobody's tokens change, and nobody may read them all the same."""


@pytest.fixture(autouse=True)
def without_plugin() -> Iterator[None]:
    """Engines of the harness start without the plug-in, whatever an earlier test registered."""
    environment = dict(os.environ)
    with unguarded():
        yield
    os.environ.clear()
    os.environ.update(environment)


def trial(fault: str, proofs: str, **cell: Any) -> TrialResult:
    plan = TrialPlan(index=0, cell=replace(CELL, fault=fault, **cell), traffic_seed=3, fault_seed=3)
    return run_trial(plan, model="tiny", backend="torch", proofs=proofs)


def clean() -> Any:
    fields = {name: getattr(CELL, name) for name in ("engine", "kv_dtype", "weights", "page_size", "runner")}
    return run_clean(
        CleanPlan(index=0, scheduling="sync", traffic=KEYS, traffic_seed=4, **fields), model="tiny", backend="torch"
    )


def test_every_fault_of_cache_keys_is_made_or_has_its_reason() -> None:
    """Those of the embedded engine, one way or the other; and the command line says the reason."""
    assert VLLM_KEY_FAULTS.keys() | NOT_IN_VLLM_KEYS.keys() == KEY_FAULTS.keys()
    assert not VLLM_KEY_FAULTS.keys() & NOT_IN_VLLM_KEYS.keys() and len(VLLM_KEY_FAULTS) >= 8
    assert vllm_key_faults("keys") == tuple(VLLM_KEY_FAULTS) and vllm_key_faults("stale-row") == ()
    for name, reason in NOT_IN_VLLM_KEYS.items():
        with pytest.raises(UsageError, match=name) as caught:
            vllm_key_faults(name)
        assert reason in str(caught.value)
    with pytest.raises(UsageError, match="one campaign each"):
        vllm_key_faults("phantom-hit,stale-row")


@pytest.mark.parametrize("proofs", KEY_PROOF_SETS)
@pytest.mark.parametrize("fault", VLLM_KEY_FAULTS)
def test_every_fault_is_refused_and_nobody_is_harmed(fault: str, proofs: str) -> None:
    """With all proofs and with content keys alone; it would have changed tokens, but for the one that only leaks."""
    result = trial(fault, proofs)
    assert result.proven and result.aborted == () and result.affected == (), result
    assert result.potent == (fault not in HARMLESS)
    by_control = fault in FOUND_BY_CONTROL and proofs == "all"
    assert ("control_plane" in result.detected_by) == by_control
    assert by_control or result.detected_by == ("content_key",)


@pytest.mark.parametrize("fault", VLLM_KEY_FAULTS)
def test_without_content_keys_only_three_are_found(fault: str) -> None:
    """At level `tags` pages that are alive and current are taken, whatever they hold."""
    result = trial(fault, "tags")
    assert result.proven == (fault in FOUND_BY_CONTROL), result
    assert result.outcome == MISSED or result.proven


@pytest.mark.parametrize("fault", sorted(FOUND_BY_CONTROL))
def test_with_all_proofs_off_nothing_is_found(fault: str) -> None:
    """Detections come from the proofs, not from the harness."""
    result = trial(fault, "none")
    assert result.outcome == MISSED and result.detected_by == ()


def test_clean_runs_are_clean_and_contain_what_they_must() -> None:
    """Salts, shared prefixes, preemption, eviction, client aborts and new weights: no violation, the same tokens."""
    run = clean()
    assert run.clean, run
    assert min(run.preemptions, run.evictions, run.prefix_hits, run.client_aborts, run.writers["weight_updates"]) > 0


def test_a_guard_that_refuses_sound_hits_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of a page that holds what was asked for is a false positive, in a trial and in a clean run."""
    monkeypatch.setattr(ContentCalls, "_problem_with_content", lambda *args: (Kind.CONTENT_TOKENS, "suspicious"))
    assert not clean().clean
    result = trial("phantom-hit", "content_key")
    assert result.false_positives and not result.proven


def test_a_guard_that_lets_wrong_hits_by_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a wrong page and is not stopped makes the trial a miss."""
    monkeypatch.setattr(PageHandover, "vet_hits", lambda self, request, hits, **kwargs: len(hits))
    monkeypatch.setattr(ContentCalls, "vet_promised", lambda *args, **kwargs: True)
    monkeypatch.setattr(ContentCalls, "_problem_with_content", lambda *args: None)
    result = trial("truncated-hash", "content_key")
    assert result.outcome == MISSED and result.affected and not result.proven


def test_a_small_campaign_proves_what_it_tries(tmp_path: Path) -> None:
    """The command line: plan, run folder, replay; bf16 bystanders are compared with runs of the same hits."""
    few = ("--fault", "keys", "--runner", "v1", "--scheduling", "sync", "--kv-dtype", "bf16", "--trials", "9")
    data = campaign(*few, "--clean-runs", "2", cwd=tmp_path)
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["detected"] == data["trials"] == data["refused"] == 9 and data["potent"] >= 7
    assert {cell["fault"] for cell in data["cells"]} == set(VLLM_KEY_FAULTS)
    assert {cell["level"] for cell in data["cells"]} == {KEYS}
    assert data["clean_runs_contained"]["weight_updates"] == 2
    again = campaign("--replay", "2", cwd=tmp_path)
    assert again["outcome"] == "detected"


@pytest.mark.slow
def test_a_campaign_over_all_set_ups_proves_everything(tmp_path: Path) -> None:
    """Every fault, and every set-up of vLLM: it is refused and harms nobody, and nothing healthy is flagged."""
    data = campaign("--fault", "keys", "--trials", "36", "--clean-runs", "10", cwd=tmp_path)
    assert data["trials"] >= 36 and data["clean_runs"] >= 10
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["detected"] == data["trials"] and data["potent"] >= 0.75 * data["trials"]
    assert all(count > 0 for count in data["clean_runs_contained"].values())
