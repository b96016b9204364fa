"""What a trial showed, and the sums that a campaign reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvguard.fault_injection.plan import Cell

CLEAN_RUNS_THAT_MUST_CONTAIN_ALL = 20
DETECTED, MISSED, NOT_INJECTED, UNSUPPORTED = "detected", "missed", "not_injected", "unsupported"


@dataclass(frozen=True, kw_only=True)
class Leak:
    """What the victim's client would have seen without the guard, beside what it sees with it. Text of the campaign."""

    victim: str
    prompt: str
    golden: str
    guard_off: str
    guard_on: str
    error: str


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One trial.

    outcome               detected | missed | not_injected | unsupported (the reason is in `reason`)
    detected_by           proofs that found it, as named in a violation
    potent                with the guard off, some request's output differs from golden
    injected_step, live_step, detected_step  engine steps; -1: never
    detection_steps       steps from live to detection; 0: in the very forward, or before it became live
    affected, aborted     requests that had to be aborted, and that were
    tokens_after_fault    tokens of affected requests computed at or after the live step that left the engine
    bystanders_changed    other requests whose output differs from what it had to be
    false_positives       requests aborted that had not to be
    """

    index: int
    cell: Cell
    traffic_seed: int
    fault_seed: int
    outcome: str
    reason: str = ""
    detected_by: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    potent: bool = False
    description: str = ""
    injected_step: int = -1
    live_step: int = -1
    detected_step: int = -1
    detection_steps: int = 0
    affected: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()
    tokens_after_fault: int = 0
    bystanders_changed: tuple[str, ...] = ()
    false_positives: tuple[str, ...] = ()
    leak: Leak | None = None
    report: str = ""

    @property
    def proven(self) -> bool:
        """The trial shows what it was run for."""
        return self.outcome == DETECTED and not (
            self.tokens_after_fault or self.bystanders_changed or self.false_positives
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, one line of history.jsonl."""
        return {"type": "trial", **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class CleanResult:
    """One clean run: violations (every one is a false positive) and what the run contained."""

    index: int
    kv_dtype: str
    weights: str
    page_size: int
    traffic_seed: int
    violations: tuple[str, ...]
    requests_changed: tuple[str, ...]
    guard_trouble: str = ""
    preemptions: int
    evictions: int
    prefix_hits: int
    promised_hits: int
    client_aborts: int
    steps: int
    engine: str = "embedded"
    runner: str = ""
    scheduling: str = ""
    phases: str = "single"
    hand_overs: int = 0
    writers: dict[str, int] = field(default_factory=dict)
    """What a run of mixed traffic contained besides: see `judging.WRITER_COUNTS`."""

    @property
    def clean(self) -> bool:
        return not (self.violations or self.requests_changed or self.guard_trouble)

    def to_json(self) -> dict[str, Any]:
        """Plain data, one line of history.jsonl."""
        return {"type": "clean", **asdict(self)}


def miss_rate_upper_95(trials: int, missed: int) -> float:
    """The 95 % upper bound of the miss rate after `trials` trials: 3/n without a miss (the rule of three).

    With misses: the exact bound of Clopper and Pearson, found by bisection of the binomial distribution.
    """
    if trials == 0:
        return 1.0
    if missed == 0:
        return min(1.0, 3.0 / trials)
    if missed >= trials:
        return 1.0
    low, high = missed / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        term = (1 - middle) ** trials
        total = term
        for k in range(missed):
            term *= (trials - k) / (k + 1) * middle / (1 - middle)
            total += term
        low, high = (middle, high) if total > 0.05 else (low, middle)
    return high


@dataclass
class Tally:
    """The counts that stand at top level and in each cell of results.json."""

    trials: int = 0
    detected: int = 0
    missed: int = 0
    not_injected: int = 0
    unsupported: int = 0
    potent: int = 0
    clean_runs: int = 0
    false_positives: int = 0
    tokens_after_fault: int = 0
    bystanders_changed: int = 0
    aborted: int = 0
    refused: int = 0
    detection_steps_max: int = 0

    def add(self, result: TrialResult) -> None:
        """Count one trial."""
        self.trials += 1
        setattr(self, result.outcome, getattr(self, result.outcome) + 1)
        self.potent += result.potent
        self.false_positives += len(result.false_positives)
        self.tokens_after_fault += result.tokens_after_fault
        self.bystanders_changed += len(result.bystanders_changed)
        self.aborted += len(result.aborted)
        self.refused += result.outcome == DETECTED and not result.aborted
        self.detection_steps_max = max(self.detection_steps_max, result.detection_steps)

    def add_clean(self, result: CleanResult) -> None:
        """Count one clean run; each of its violations, and each changed output, is a false positive."""
        self.clean_runs += 1
        self.false_positives += len(result.violations)
        self.bystanders_changed += len(result.requests_changed)

    def to_json(self) -> dict[str, Any]:
        """The counts and the bound that they give."""
        judged = self.detected + self.missed
        return {**asdict(self), "miss_rate_upper_95": miss_rate_upper_95(judged, self.missed)}


@dataclass
class CampaignResults:
    """All results of a campaign, in any order of arrival."""

    trials: list[TrialResult] = field(default_factory=list)
    clean: list[CleanResult] = field(default_factory=list)

    def total(self) -> Tally:
        """Everything together."""
        tally = Tally()
        for trial in self.trials:
            tally.add(trial)
        for run in self.clean:
            tally.add_clean(run)
        return tally

    def cells(self) -> list[tuple[Cell, Tally]]:
        """Counts per cell, in a fixed order. Clean runs have no fault and stand in no cell."""
        tallies: dict[Cell, Tally] = {}
        for trial in self.trials:
            tallies.setdefault(trial.cell, Tally()).add(trial)
        return sorted(tallies.items(), key=lambda item: cell_order(item[0]))

    def by_fault(self) -> list[tuple[str, str, Tally]]:
        """Counts per fault and set of proofs: the table that is printed."""
        tallies: dict[tuple[str, str], Tally] = {}
        for trial in sorted(self.trials, key=lambda trial: cell_order(trial.cell)):
            tallies.setdefault((trial.cell.fault_label, trial.cell.proofs), Tally()).add(trial)
        return [(fault, proofs, tally) for (fault, proofs), tally in tallies.items()]

    def clean_counts(self) -> dict[str, int]:
        """What the clean runs contained, summed; a zero means that they prove less than they seem to."""
        names: tuple[str, ...] = (
            "preemptions",
            "evictions",
            "prefix_hits",
            "promised_hits",
            "client_aborts",
            "steps",
        )
        if any(run.phases == "pd" for run in self.clean):
            names += ("hand_overs",)
        counts = {name: sum(getattr(run, name) for run in self.clean) for name in names}
        for run in self.clean:
            for name, count in run.writers.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def empty_clean_counts(self) -> list[str]:
        """Names of the counts above that must not be zero and are; a handful of runs need not contain everything."""
        if len(self.clean) < CLEAN_RUNS_THAT_MUST_CONTAIN_ALL:
            return []
        return [name for name, count in self.clean_counts().items() if count == 0]

    @property
    def all_proven(self) -> bool:
        """Every trial proven, every clean run clean, and the clean runs contained what they must."""
        trials = all(trial.proven or trial.outcome == UNSUPPORTED for trial in self.trials)
        return trials and all(run.clean for run in self.clean) and not self.empty_clean_counts()


def cell_order(cell: Cell) -> tuple[Any, ...]:
    """Sorting key: fault in the order of the report, then proofs, storage, page size."""
    from kvguard.fault_injection.faults.keys import KEY_FAULTS
    from kvguard.fault_injection.faults.pages import PAGE_FAULTS
    from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
    from kvguard.fault_injection.faults.trees import TREE_FAULTS
    from kvguard.fault_injection.faults.writes import WRITE_FAULTS
    from kvguard.fault_injection.phases_plan import PHASE_PROOF_SETS
    from kvguard.fault_injection.plan import KV_DTYPES, PHASES, SCENARIO_LEVEL, SCHEDULINGS, WEIGHTS
    from kvguard.fault_injection.targets.vllm_writes import VLLM_WRITE_FAULTS

    def place(names: Iterable[str], name: str) -> int:
        names = list(names)
        return names.index(name) if name in names else len(names)

    return (
        cell.engine,
        place(PHASES, cell.phases),
        place(
            (*PAGE_FAULTS, *TREE_FAULTS, *WRITE_FAULTS, *VLLM_WRITE_FAULTS, *KEY_FAULTS, *TRANSFER_FAULTS), cell.fault
        ),
        # Scenarios by name: they are in no list that could be had without their engine.
        cell.fault if cell.level == SCENARIO_LEVEL else "",
        place((*PHASE_PROOF_SETS, "write_slot", "content_key"), cell.proofs),
        place(KV_DTYPES, cell.kv_dtype),
        place(WEIGHTS, cell.weights),
        cell.page_size,
        cell.runner,
        place(SCHEDULINGS, cell.scheduling),
    )


def results_json(results: CampaignResults, meta: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json: totals at top level, what the clean runs contained, one object per cell."""
    cells: Sequence[tuple[Cell, Tally]] = results.cells()
    return {
        **results.total().to_json(),
        "all_proven": results.all_proven,
        **meta,
        "clean_runs_contained": results.clean_counts(),
        "by_proofs": _by_proofs(results),
        "by_phases": _by_phases(results),
        "cells": [{**asdict(cell), **tally.to_json()} for cell, tally in cells],
    }


def _by_phases(results: CampaignResults) -> dict[str, Any]:
    """`single`, `pd_after`: page faults in a decode worker after a hand-over, `pd_during`: faults of the hand-over."""
    from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS

    tallies: dict[str, Tally] = {}
    for trial in results.trials:
        kind = "pd_during" if trial.cell.fault in TRANSFER_FAULTS else "pd_after"
        tallies.setdefault("single" if trial.cell.phases == "single" else kind, Tally()).add(trial)
    return {kind: tally.to_json() for kind, tally in tallies.items()}


def _by_proofs(results: CampaignResults) -> dict[str, Any]:
    tallies: dict[str, Tally] = {}
    for trial in results.trials:
        tallies.setdefault(trial.cell.proofs, Tally()).add(trial)
    return {proofs: tally.to_json() for proofs, tally in tallies.items()}
