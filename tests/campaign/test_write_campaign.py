"""The campaign of misled writes: what it deals, its traffic, and what counts where nobody is to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvguard.fault_injection.faults.pages import Injection
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.judging import WRITER_COUNTS, judge_trial
from kvguard.fault_injection.mixed_traffic import LONG, SHORT, TENANTS, mixed_traffic
from kvguard.fault_injection.options import Options, UsageError, make_plan
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED, UNSUPPORTED, CampaignResults
from kvguard.fault_injection.run_folder import PLAN, plan_toml, read_plan
from kvguard.fault_injection.runs import Run
from kvguard.fault_injection.targets.write_runs import mixed_config
from kvguard.fault_injection.trial import run_clean, run_trial
from kvguard.fault_injection.write_plan import NO_SUCH_CELL, WRITES, build_write_plan
from kvguard.violation import Action, Kind, Proof, Violation


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def options(**given: Any) -> Options:
    fields: dict[str, Any] = {
        "seed": 1,
        "trials": None,
        "clean_runs": None,
        "fault": WRITES,
        "engine": "embedded",
        "model": None,
        "backend": "torch",
        "kv_dtype": "all",
        "weights": "all",
        "page_size": "all",
        "runner": "all",
        "scheduling": "all",
    }
    return Options(**(fields | given))


# -- what is dealt ----------------------------------------------------------------------------------------------------


def test_every_fault_meets_every_storage_three_times() -> None:
    """400 trials and more over fault x KV dtype x weights x page size, all proofs and one alone; a seed is a plan."""
    plan = make_plan(options())
    made = [trial for trial in plan.trials if (trial.cell.fault, trial.cell.page_size) not in NO_SUCH_CELL]
    assert len(made) >= 400
    cells = Counter((t.cell.fault, t.cell.kv_dtype, t.cell.weights, t.cell.page_size) for t in made)
    absent = {(*cell, kv) for cell in NO_SUCH_CELL for kv in ("fp32", "fp8_e4m3")}
    assert len(cells) == len(WRITE_FAULTS) * 2 * 2 * 3 - 2 * len(absent) and set(cells.values()) == {3}
    proofs = Counter((t.cell.fault, t.cell.proofs) for t in made)
    assert {name for name, _ in proofs} == set(WRITE_FAULTS)
    assert all(abs(proofs[fault, "all"] - proofs[fault, "write_slot"]) <= 1 for fault in WRITE_FAULTS)
    assert len(plan.clean_runs) >= 20 and all(run.traffic == WRITES for run in plan.clean_runs)
    assert make_plan(options()) == plan != make_plan(options(seed=2))


def test_the_default_campaign_has_none_of_them() -> None:
    """They are asked for by name."""
    plan = make_plan(options(fault="all"))
    assert not {trial.cell.fault for trial in plan.trials} & set(WRITE_FAULTS)
    assert all(run.traffic == "" for run in plan.clean_runs)


def test_what_cannot_be_made_is_listed_with_its_reason() -> None:
    """A page of one token has no other offset: one trial says so."""
    plan = make_plan(options(page_size="1", trials=30))
    (trial,) = [trial for trial in plan.trials if trial.cell.fault == "offset-shifted"]
    result = run_trial(trial, model="recall", backend="torch")
    assert result.outcome == UNSUPPORTED and "one offset" in result.reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fault": "slots-swapped,stale-row"}, "'stale-row' does not go with 'slots-swapped'"),
        ({"fault": "writes,nonsense"}, "'nonsense' does not go with"),
        ({"model": "smollm2"}, "recall model"),
        ({"phases": "pd"}, "one engine"),
        ({"fault": "offset-shifted", "page_size": "1"}, "one offset"),
        ({"page_size": "0"}, "1 to 64 tokens"),
    ],
)
def test_what_does_not_go_together_is_said(given: dict[str, str], words: str) -> None:
    """One line, before anything runs."""
    with pytest.raises(UsageError, match=words):
        make_plan(options(**given))


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """A trial of an earlier run can be replayed; a plan with values of no release is refused."""
    plan = build_write_plan(seed=5, trials=24, clean_runs=3)
    (tmp_path / PLAN).write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    broken = replace(plan, trials=(replace(plan.trials[0], cell=replace(plan.trials[0].cell, proofs="tag")),))
    (tmp_path / PLAN).write_text(plan_toml(broken))
    with pytest.raises(Exception, match="proofs 'tag'"):
        read_plan(tmp_path)


# -- traffic ----------------------------------------------------------------------------------------------------------


def test_traffic_has_what_a_misled_write_needs() -> None:
    """Tenants, one prompt for several of a tenant and for another, common prefixes, pairs, long and short answers."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        arrivals = mixed_traffic(seed)
        assert arrivals == mixed_traffic(seed) != mixed_traffic(seed + 1)
        requests = [arrival.request for arrival in arrivals]
        config = mixed_config(kv_dtype="fp32", page_size=1, tight=True)
        assert all(len(r.prompt) + r.max_new_tokens <= config.max_tokens for r in requests)
        assert all(arrival.abort_step is None for arrival in arrivals)
        assert any(arrival.abort_step is not None for arrival in mixed_traffic(seed, client_aborts=True))
        pairs = [(a, b) for index, a in enumerate(requests) for b in requests[index + 1 :]]
        seen["tenants"] += len({r.tenant for r in requests}) == len(TENANTS)
        seen["same tenant"] += any(a.prompt == b.prompt and a.tenant == b.tenant for a, b in pairs[1:])
        seen["another tenant"] += any(a.prompt == b.prompt and a.tenant != b.tenant for a, b in pairs)
        seen["prefix"] += any(a.prompt[:36] == b.prompt[:36] and a.prompt != b.prompt for a, b in pairs)
        seen["long"] += sum(r.max_new_tokens >= LONG.start - 10 for r in requests) > 2
        seen["short"] += any(r.max_new_tokens < SHORT.stop for r in requests)
        seen["at once"] += len({arrival.step for arrival in arrivals}) < len(arrivals) - 1
    assert min(seen.values()) >= 3 and len(seen) == 7, seen


@pytest.mark.parametrize("storage", [("fp32", "fp32"), ("fp8_e4m3", "int4")], ids=lambda pair: "-".join(pair))
def test_healthy_habits_are_never_flagged(storage: tuple[str, str]) -> None:
    """Rejected drafts, resumed requests, pages written after their publication, same-step sharing, padding, dummies."""
    results = CampaignResults()
    for page_size in (1, 16, 64):
        for seed in (3, 4):
            plan = CleanPlan(
                index=seed,
                kv_dtype=storage[0],
                weights=storage[1],
                page_size=page_size,
                traffic_seed=seed,
                traffic=WRITES,
            )
            result = run_clean(plan, model="recall", backend="torch")
            assert result.clean, (page_size, seed, result)
            results.clean.append(result)
    counts = results.clean_counts()
    assert set(WRITER_COUNTS) < set(counts) and min(counts.values()) > 0, counts


# -- judgement --------------------------------------------------------------------------------------------------------


class Told:
    """Runs that are made up: what the guard said in the guarded one is up to the test."""

    exact = True
    text: Callable[[tuple[int, ...]], str] | None = None
    prompts: dict[str, tuple[int, ...]] = {}

    def __init__(
        self, violations: tuple[Violation, ...], outputs: dict[str, tuple[tuple[int, ...], str | None]]
    ) -> None:
        self._violations, self._outputs = violations, outputs

    def golden(self) -> Run:
        return Run(outputs={"r0": ((1, 2, 3), None), "r1": ((4, 5), None)})

    def off(self) -> Run:
        return Run(outputs={"r0": ((1, 9, 9), None), "r1": ((4, 5), None)})

    def on(self) -> Run:
        run = Run(outputs=self._outputs, violations=self._violations, injected_step=5, live_step=5, detected_step=5)
        run.emitted = {name: tuple(range(3, 3 + len(tokens))) for name, (tokens, _) in self._outputs.items()}
        run.injection = Injection(
            victims=("r0",),
            page=7,
            column=0,
            live_when=lambda scheduled: True,
            affected=frozenset,
            description="padding lane",
            slots={3: (-1, 112), 4: (-1, 130)},
            pages=frozenset({7, 8}),
        )
        return run

    def control(self, aborts: dict[str, int]) -> Run:
        return self.golden()


def told(page: int, **changes: Any) -> Violation:
    """The report of a padding lane's write into a page."""
    fields: dict[str, Any] = {
        "id": "kvg-1",
        "proof": Proof.WRITE_SLOT,
        "kind": Kind.WRITE_OF_PADDING,
        "action": Action.REFUSED,
        "pool": "main",
        "request": None,
        "step": 5,
        "page": page,
    }
    return Violation(**(fields | changes))


GOLDEN = {"r0": ((1, 2, 3), None), "r1": ((4, 5), None)}
ENDED = {"r0": ((1, 2, 3), None), "r1": ((4, 5), "aborted")}
HARMED = {"r0": ((1, 9, 3), None), "r1": ((4, 5), None)}


@pytest.mark.parametrize(
    ("violations", "outputs", "outcome", "proven"),
    [
        ((told(7),), GOLDEN, DETECTED, True),
        ((told(8),), GOLDEN, DETECTED, True),
        ((told(8),), HARMED, DETECTED, False),
        ((), GOLDEN, MISSED, False),
        ((told(9),), GOLDEN, MISSED, False),
        ((told(7), told(9)), GOLDEN, DETECTED, False),
        ((told(7), told(7, action=Action.ABORTED, request="r1")), ENDED, DETECTED, False),
    ],
    ids=["reported", "its second page", "victim harmed", "silent", "another page", "one too many", "somebody aborted"],
)
def test_a_write_of_nobody_must_be_reported_and_nobody_aborted(
    violations: tuple[Violation, ...],
    outputs: dict[str, tuple[tuple[int, ...], str | None]],
    outcome: str,
    proven: bool,
) -> None:
    """A report about one of its pages is the detection; a harmed victim, a stray report or an abort is no proof."""
    cell = Cell(engine="embedded", fault="padding-into-live-page", kv_dtype="fp32", weights="fp32", page_size=16)
    plan = TrialPlan(index=0, cell=cell, traffic_seed=1, fault_seed=1)
    result = judge_trial(plan, Told(violations, outputs))
    assert (result.outcome, result.proven) == (outcome, proven), result
    assert result.potent
