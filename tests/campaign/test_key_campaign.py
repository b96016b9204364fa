"""The campaign of wrong cache keys: what it deals, its traffic, and that each fault is refused and costs nobody."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.key_plan import KEY_PROOF_SETS, KEYS, build_key_plan
from kvguard.fault_injection.key_traffic import COMMON_CHARACTERS, TOKENS_MAX, key_traffic
from kvguard.fault_injection.options import UsageError, make_plan
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED, TrialResult
from kvguard.fault_injection.run_folder import PLAN, plan_toml, read_plan
from kvguard.fault_injection.targets.key_runs import KeyRuns, clean_runs
from kvguard.fault_injection.trial import run_clean, run_trial
from kvguard.violation import Kind
from tests.campaign.test_write_campaign import options


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def planned(
    fault: str, *, kv_dtype: str = "fp32", weights: str = "fp32", page_size: int = 16, seed: int = 1001
) -> TrialPlan:
    cell = Cell(engine="embedded", fault=fault, kv_dtype=kv_dtype, weights=weights, page_size=page_size, level=KEYS)
    return TrialPlan(index=0, cell=cell, traffic_seed=seed, fault_seed=7)


def trial(fault: str, proofs: str, **where: Any) -> TrialResult:
    plan = planned(fault, **where)
    return run_trial(plan, model="recall", backend="torch", proofs=proofs)


# -- what is dealt ----------------------------------------------------------------------------------------------------


def test_every_fault_meets_every_storage_three_times() -> None:
    """At least 300 trials over fault x KV dtype x weights x page size, all proofs and one alone; a seed is a plan."""
    plan = make_plan(options(fault=KEYS))
    cells = Counter((t.cell.fault, t.cell.kv_dtype, t.cell.weights, t.cell.page_size) for t in plan.trials)
    assert len(plan.trials) >= 300 and len(cells) == len(KEY_FAULTS) * 12 and set(cells.values()) == {3}
    proofs = Counter((t.cell.fault, t.cell.proofs) for t in plan.trials)
    assert all(proofs[fault, one] == 18 for fault in KEY_FAULTS for one in KEY_PROOF_SETS)
    assert {t.cell.level for t in plan.trials} == {KEYS}
    assert len(plan.clean_runs) >= 20 and all(run.traffic == KEYS for run in plan.clean_runs)
    assert make_plan(options(fault=KEYS)) == plan != make_plan(options(fault=KEYS, seed=2))
    assert {t.cell.fault for t in make_plan(options(fault="wrong-salt,wrong-lora", trials=9)).trials} == {
        "wrong-salt",
        "wrong-lora",
    }
    assert not {t.cell.fault for t in make_plan(options(fault="all")).trials} & set(KEY_FAULTS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fault": "wrong-salt,stale-row"}, "'stale-row' does not go with 'wrong-salt'"),
        ({"fault": "keys,slots-swapped"}, "'slots-swapped' does not go with"),
        ({"model": "smollm2"}, "recall model"),
        ({"phases": "pd"}, "one engine"),
        ({"page_size": "0"}, "1 to 64 tokens"),
    ],
)
def test_what_does_not_go_together_is_said(given: dict[str, str], words: str) -> None:
    """One line, before anything runs."""
    with pytest.raises(UsageError, match=words):
        make_plan(options(**{"fault": KEYS, **given}))


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """A trial can be replayed; one at a level, or with proofs, that it cannot have is refused."""
    plan = build_key_plan(seed=5, trials=24, clean_runs=3)
    (tmp_path / PLAN).write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    changes: list[dict[str, Any]] = [{"level": "tags"}, {"proofs": "tag"}]
    for wrong in changes:
        broken = replace(plan, trials=(replace(plan.trials[0], cell=replace(plan.trials[0].cell, **wrong)),))
        (tmp_path / PLAN).write_text(plan_toml(broken))
        with pytest.raises(Exception, match=f"{next(iter(wrong))} 'tag"):
            read_plan(tmp_path)


def test_traffic_has_what_a_wrong_key_confuses() -> None:
    """One text under several salts and adapters, crossed prefixes, a cut prompt, a salt that is another's adapter."""
    for seed in range(6):
        requests = [arrival.request for arrival in key_traffic(seed)]
        by_text: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            assert len(request.prompt) + request.max_new_tokens <= TOKENS_MAX
            by_text.setdefault(request.prompt, []).append(request)
        most = max(by_text.values(), key=len)
        assert len({request.tenant for request in most}) >= 3 and len({request.lora for request in most}) >= 2
        assert any(request.keep_last for request in most)
        assert {r.tenant for r in most if not r.lora} & {r.lora for r in most if not r.tenant}
        heads = {prompt[: COMMON_CHARACTERS + 1] for prompt in by_text}
        tails = Counter(prompt[COMMON_CHARACTERS + 1 :] for prompt in by_text)
        assert len(heads) < len(by_text) and max(tails.values()) == 2
    assert key_traffic(1) == key_traffic(1) != key_traffic(2)


# -- what the guard does ----------------------------------------------------------------------------------------------

STORAGE = (("fp32", "fp32", 16), ("fp8_e4m3", "int4", 64), ("fp8_e4m3", "fp32", 1))


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGE, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}")
@pytest.mark.parametrize("fault", KEY_FAULTS)
def test_content_keys_alone_refuse_every_fault(fault: str, storage: tuple[str, str, int]) -> None:
    """With all other proofs off, the hit is refused, nobody is aborted, and everybody gets the golden output."""
    kv_dtype, weights, page_size = storage
    result = trial(fault, "content_key", kv_dtype=kv_dtype, weights=weights, page_size=page_size)
    assert result.outcome == DETECTED, result
    assert result.detected_by == ("content_key",)
    assert result.aborted == result.affected == result.bystanders_changed == result.false_positives == ()


ONLY_KEYS = {
    "truncated-hash": Kind.CONTENT_RANGE,
    "colliding-hash": Kind.CONTENT_TOKENS,
    "prefix-ignored": Kind.CONTENT_TOKENS,
    "wrong-lora": Kind.CONTENT_DOMAIN,
    "wrong-salt": Kind.CONTENT_DOMAIN,
    "fields-confused": Kind.CONTENT_DOMAIN,
    "block-range-shifted": Kind.CONTENT_RANGE,
    "tokens-truncated": Kind.CONTENT_TOKENS,
    "cache-kept-over-update": Kind.CONTENT_DOMAIN,
    "hit-not-loaded": Kind.CONTENT_NOT_LOADED,
}
"""Faults that no other proof sees, and what is found of them, among other things."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", KEY_FAULTS)
def test_level_tags_misses_what_only_content_keys_see(fault: str) -> None:
    """At level tags a page that is alive and current is taken, whatever it holds; only a stale entry is refused."""
    below, level = trial(fault, "tags"), trial(fault, "all")
    assert level.outcome == DETECTED and level.proven
    if fault in ONLY_KEYS:
        assert below.outcome == MISSED and below.detected_by == ()
        assert level.detected_by == ("content_key",) and ONLY_KEYS[fault] in level.kinds
    else:
        assert below.outcome == DETECTED and below.detected_by == level.detected_by == ("control_plane",)


@pytest.mark.slow
@pytest.mark.parametrize("fault", KEY_FAULTS)
def test_with_all_proofs_off_somebody_is_led_astray(fault: str) -> None:
    """The faults are real: without a guard somebody takes a page that is not what it is made of."""
    run = KeyRuns(planned(fault), backend="torch", proofs="all").off()
    assert run.injection is not None and (run.affected or run.crash)
    assert trial(fault, "none").outcome == MISSED


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "weights", "page_size"), STORAGE)
def test_healthy_traffic_is_not_flagged(kv_dtype: str, weights: str, page_size: int) -> None:
    """Tenants, adapters, a weight update, evictions to the store and back: tokens and hits are those of no guard."""
    plan = CleanPlan(
        index=0, kv_dtype=kv_dtype, weights=weights, page_size=page_size, traffic_seed=page_size, traffic=KEYS
    )
    result = run_clean(plan, model="recall", backend="torch")
    assert result.clean, result
    assert result.prefix_hits and result.evictions and result.preemptions and result.client_aborts
    assert result.writers["store_hits"] and result.writers["weight_updates"] == 1
    golden, guarded = clean_runs(plan, backend="torch")
    assert guarded.counts == golden.counts
