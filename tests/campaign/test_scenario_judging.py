"""What a replay of a public bug is worth: who judges it, how harm is measured, what the table of the docs says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.key_traffic import TOKENS_MAX, key_traffic
from kvguard.fault_injection.mixed_traffic import mixed_traffic
from kvguard.fault_injection.plan import SCENARIO_LEVEL, Cell, TrialPlan
from kvguard.fault_injection.results import MISSED, NOT_INJECTED, TrialResult
from kvguard.fault_injection.scenarios.embedded import EmbeddedReplay
from kvguard.fault_injection.scenarios.judging import judge_replay, run_scenario
from kvguard.fault_injection.scenarios.provenance import Provenance
from kvguard.fault_injection.scenarios.registry import SCENARIOS, scenarios_of
from kvguard.fault_injection.scenarios.scenario import ALL, EMBEDDED, ReplayRun
from kvguard.fault_injection.scenarios.table import FAMILIES
from kvguard.fault_injection.scenarios.write_docs import with_table
from kvguard.fault_injection.targets.embedded_runs import RECALL_FOLDER, load_model
from kvguard.fault_injection.targets.write_runs import mixed_config
from kvguard.fault_injection.traffic import drive, trial_traffic
from kvguard.violation import Proof

DOCS = Path(__file__).resolve().parents[2] / "docs" / "scenarios.md"
ONE_OF_EACH = ("revived-page-still-listed", "row-index-wraps", "padding-slot-as-index", "rolling-hash-collides")
NAMES = [scenario.name for scenario in scenarios_of(EMBEDDED)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def planned(name: str, proofs: str = ALL, seed: int = 11) -> TrialPlan:
    scenario = SCENARIOS[name]
    cell = Cell(
        engine=scenario.engine,
        fault=name,
        kv_dtype="fp32",
        weights="fp32",
        page_size=scenario.page_size,
        proofs=proofs,
        level=SCENARIO_LEVEL,
    )
    return TrialPlan(index=0, cell=cell, traffic_seed=seed, fault_seed=seed)


def trial(name: str, proofs: str = ALL, *, in_its_place: str | None = None) -> TrialResult:
    return run_scenario(planned(name, proofs), backend="torch", proofs=in_its_place)


# -- all of them together ---------------------------------------------------------------------------------------------


def test_there_are_enough_of_them() -> None:
    """25 bugs at least, at least 4 on unmodified releases, every proof that the embedded engine has among them."""
    assert len(NAMES) >= 25
    assert sum(bool(scenario.release) for scenario in SCENARIOS.values()) >= 4
    first = {scenario.proof for scenario in SCENARIOS.values()}
    assert first == {Proof.TAG, Proof.WRITE_SLOT, Proof.CONTROL_PLANE, Proof.CONTENT_KEY}
    assert sum(scenario.proof is not Proof.TAG and Proof.TAG in scenario.alone for scenario in SCENARIOS.values()) >= 8
    assert {scenario.family for scenario in SCENARIOS.values()} == set(FAMILIES)


def test_each_scenario_is_another_bug_with_another_mechanism() -> None:
    """No report and no piece of buggy code stands in for two scenarios of one engine."""
    links = Counter((scenario.engine, scenario.link) for scenario in SCENARIOS.values())
    assert set(links.values()) == {1}
    for scenario in SCENARIOS.values():
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", scenario.link), scenario.name
        assert scenario.story.endswith(".") and re.fullmatch(r"[a-z0-9-]+", scenario.name)
    embedded = [scenario.replay for scenario in scenarios_of(EMBEDDED)]
    assert all(isinstance(replay, EmbeddedReplay) for replay in embedded)
    pairs = Counter((id(replay.bug), id(replay.arrivals)) for replay in embedded if isinstance(replay, EmbeddedReplay))
    assert set(pairs.values()) == {1}


def test_the_page_of_the_docs_has_every_scenario() -> None:
    """docs/scenarios.md is what `python -m kvguard.fault_injection.scenarios.write_docs` makes of it."""
    page = DOCS.read_text(encoding="utf-8")
    assert page == with_table(page)
    assert all(f"[{name}]({scenario.link})" in page for name, scenario in SCENARIOS.items())


# -- the judgement ----------------------------------------------------------------------------------------------------


def judged(name: str, **runs: ReplayRun) -> TrialResult:
    return judge_replay(planned(name), SCENARIOS[name], **runs)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_bug_of_each_kind_is_found(name: str) -> None:
    """By the control plane, tags, write slots and content keys, each of which a mutation takes out."""
    result = trial(name)
    assert result.proven and str(SCENARIOS[name].proof) in result.detected_by, result.reason


def test_a_bug_that_does_no_harm_proves_nothing() -> None:
    """Without tokens from foreign KV there is nothing to find; an input that misreads without the bug is no good."""
    name = "rolling-hash-collides"
    replay = SCENARIOS[name].replay
    golden = replay(bug=False, proofs=None, backend="torch", seed=3)
    off = replay(bug=True, proofs=None, backend="torch", seed=3)
    on = replay(bug=True, proofs=ALL, backend="torch", seed=3)
    assert off.harm == {"b": 14} and not golden.harm and not on.harm
    assert judged(name, golden=golden, off=off, on=on).proven
    assert judged(name, golden=golden, off=golden, on=on).outcome == NOT_INJECTED
    assert judged(name, golden=off, off=off, on=on).outcome == NOT_INJECTED


def test_the_judgement_counts_who_pays() -> None:
    """A request that is ended without need, one that is not ended, a token that slips out, a bystander that changes."""
    name = "row-index-wraps"
    replay = SCENARIOS[name].replay
    golden = replay(bug=False, proofs=None, backend="torch", seed=3)
    off = replay(bug=True, proofs=None, backend="torch", seed=3)
    on = replay(bug=True, proofs=ALL, backend="torch", seed=3)
    right = judged(name, golden=golden, off=off, on=on)
    assert right.proven and right.aborted == ("joins",)
    scenario = replace(SCENARIOS[name], ended={})
    needless = judge_replay(planned(name), scenario, golden=golden, off=off, on=on)
    assert needless.false_positives == ("joins",) and not needless.proven
    both = replace(scenario, ended={ALL: ("joins", "first")})
    kept = judge_replay(planned(name), both, golden=golden, off=off, on=on)
    assert kept.outcome == MISSED and kept.reason == "not aborted: first"
    changed = replace(on, outputs={**on.outputs, "first": ((1, 2), None)})
    assert judged(name, golden=golden, off=off, on=changed).bystanders_changed == ("first",)
    slipped = replace(on, misread={"first": [2]})
    assert judged(name, golden=golden, off=off, on=slipped).tokens_after_fault == 15
    broken = replace(on, guard_trouble="the guard failed")
    assert judged(name, golden=golden, off=off, on=broken).outcome == MISSED


# -- the measure of harm ----------------------------------------------------------------------------------------------


def windowed() -> LlamaModel:
    return LlamaModel.from_pretrained(RECALL_FOLDER, "fp32", window=24)


@pytest.mark.parametrize("traffic", ["mixed", "keys"])
def test_healthy_traffic_reads_its_own_history(traffic: str) -> None:
    """Chunks, prefix hits, preemption, drafts, padding, dummies, windows; tenants, adapters, new weights, a store."""
    if traffic == "mixed":
        engine = Engine(windowed(), mixed_config(kv_dtype="fp32", page_size=8, tight=True))
        arrivals = mixed_traffic(5)
    else:
        config = EngineConfig(
            num_pages=41, page_size=16, max_rows=6, token_budget=160, max_tokens=TOKENS_MAX, external_store=True
        )
        engine = Engine(load_model("recall", "fp32"), config)
        engine.at_schedule.append(lambda running: running.update_weights() if running.step_index == 14 else None)
        arrivals = key_traffic(5)
    provenance = Provenance(engine)
    assert drive(engine, arrivals, max_steps=400)
    counts = engine.scheduler.counts
    assert counts.prefix_hits and counts.preemptions and counts.evictions
    if traffic == "mixed":
        assert counts.rejected_drafts and counts.padding_lanes and counts.dummy_batches and counts.window_pages_passed
    else:
        assert counts.store_hits and counts.weight_updates
    assert not provenance.misread


@pytest.mark.parametrize("pool", ["main", "window"])
def test_a_read_of_another_slot_is_seen(pool: str) -> None:
    """In one step, for one request; and in all later ones, for what it computed from what it read is wrong as well."""
    engine = Engine(windowed(), EngineConfig(num_pages=200, page_size=8, max_rows=8, token_budget=300))
    provenance = Provenance(engine)

    def swap(running: Engine) -> None:
        if running.step_index not in (6, 7):
            return
        one, other = running.scheduler.running[0], running.scheduler.running[-1]
        window = running.window
        assert window is not None
        table = running.block_table if pool == "main" else window.block_table
        own, foreign = (one.pages, other.pages) if pool == "main" else (one.window_pages, other.window_pages)
        column = 1 if pool == "main" else len(own) - 2
        assert one.id == "r0" and one is not other
        if running.step_index == 6:
            assert foreign[-1] not in (0, own[column])
            table[one.row, column] = foreign[-1]
        else:
            table[one.row] = 0
            table[one.row, : len(own)] = torch.tensor(own, dtype=torch.int32)

    engine.at_schedule.append(swap)
    arrivals = trial_traffic(4)
    assert drive(engine, arrivals, max_steps=200)
    ended = engine.outputs["r0"].ended_step
    assert ended > 8 and provenance.misread == {"r0": list(range(6, ended + 1))}
