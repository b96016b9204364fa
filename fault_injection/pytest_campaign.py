"""One test item of a campaign against somebody's own engine: plans it, runs it, and says what it showed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import pytest
import structlog
import structlog.testing

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.judging import judge_clean, judge_trial, unsupported
from kvguard.fault_injection.junit import clean_shortcomings, history, shortcomings
from kvguard.fault_injection.plan import PROOF_SETS, UNSUPPORTED, CleanPlan, TrialPlan, build_own_plan
from kvguard.fault_injection.results import NOT_INJECTED, CleanResult, TrialResult
from kvguard.fault_injection.runs import Run
from kvguard.fault_injection.targets.own import why_unsupported
from kvguard.fault_injection.targets.own_runs import EngineFactory, Goldens, HarnessError, OwnRuns, clean_runs

__all__ = ["CampaignTest", "Job", "MarkerError", "plan_jobs"]

CLEAN_RUNS = 3
TRAFFICS_MAX, TRAFFIC_STRIDE = 4, 2
"""Traffics that a trial tries until its fault finds a place; trials start with one of two seeds beside each other."""
GOLDENS_MAX = 8
"""Factories whose golden runs are kept: a factory made anew in each item must not pile up, with all that it holds."""
MARKER_ARGUMENTS = ("trials", "clean_runs", "faults", "proofs")
VIOLATIONS_SHOWN_MAX = 8


class MarkerError(ValueError):
    """An argument of @pytest.mark.kvguard that cannot be; the message says what can."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One test item. `name` is its id between brackets; `seed` the campaign's."""

    name: str
    seed: int
    plan: TrialPlan | CleanPlan


def plan_jobs(marker: Any, seed: int) -> list[Job]:
    """The items of one test function: a function of the marker and the seed alone. Raises MarkerError."""
    given: Mapping[str, Any] = {} if marker is None else marker.kwargs
    if marker is not None and marker.args:
        raise MarkerError(f"its arguments have names: {', '.join(MARKER_ARGUMENTS)}")
    for name in given:
        if name not in MARKER_ARGUMENTS:
            raise MarkerError(f"unknown argument {name!r}: choose from {', '.join(MARKER_ARGUMENTS)}")
    faults = _chosen("fault", given.get("faults"), tuple(PAGE_FAULTS))
    proofs = _chosen("proof set", given.get("proofs"), PROOF_SETS)
    pairs = sum((fault, name) not in UNSUPPORTED for fault in faults for name in proofs)
    trials, clean = given.get("trials", pairs), given.get("clean_runs", CLEAN_RUNS)
    for name, value in (("trials", trials), ("clean_runs", clean)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise MarkerError(f"{name}={value!r} is no number of runs")
    if pairs == 0:
        raise MarkerError("none of these faults passes the control plane: with no other proof on they prove nothing")
    plan = build_own_plan(seed=seed, trials=trials, clean_runs=clean, faults=faults, proof_sets=proofs)
    jobs = [
        Job(name=f"{trial.cell.fault}-{trial.cell.proofs}-{trial.index}", seed=seed, plan=trial)
        for trial in plan.trials
    ]
    return jobs + [Job(name=f"clean-{run.index}", seed=seed, plan=run) for run in plan.clean_runs]


def _chosen(what: str, given: Any, valid: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return valid
    if not isinstance(given, Iterable):
        raise MarkerError(f"{given!r} names no {what}: give one or more of {', '.join(valid)}")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in valid:
            raise MarkerError(f"unknown {what} {name!r}: choose from {', '.join(valid)}")
    if not names:
        raise MarkerError(f"no {what} given: choose from {', '.join(valid)}")
    return tuple(name for name in valid if name in names)


_goldens: dict[Hashable, tuple[EngineFactory, Goldens]] = {}
"""The golden runs of this process by factory and test, last used last. The factory is kept: its id stays its own."""


def _goldens_of(factory: EngineFactory, test: str) -> Goldens:
    """The golden runs of a factory in the items of one test; `test` is the node id without the job.

    Two tests, or two parameters of one, never share: what a factory makes may depend on their fixtures.
    """
    key = (test, *_identity(factory))
    _, goldens = _goldens.pop(key, (factory, Goldens()))
    _goldens[key] = (factory, goldens)
    while len(_goldens) > GOLDENS_MAX:
        del _goldens[next(iter(_goldens))]
    return goldens


def _identity(factory: EngineFactory) -> tuple[int, ...]:
    """What makes it the same factory: the object; of a bound method, its object and function.

    A lambda or a nested function is another object in each item. It is known again by its code where nothing else is in
    it: no closure, no defaults, and the same module's globals. Code that is merely equal may read other globals.
    """
    if isinstance(factory, MethodType):
        return id(factory.__self__), id(factory.__func__)
    if isinstance(factory, FunctionType):
        if not (factory.__closure__ or factory.__defaults__ or factory.__kwdefaults__):
            return id(factory.__code__), id(factory.__globals__)
    return (id(factory),)


class CampaignTest:
    """What the fixture `kvguard_campaign` gives to a test."""

    def __init__(self, job: Job, *, nodeid: str, record: Callable[[str, Any], None]) -> None:
        self.job, self.was_run = job, False
        self._nodeid, self._record = nodeid, record
        self._test = nodeid.replace(job.name, "")
        record("kvguard_job", job.name)
        record("kvguard_seed", job.seed)

    @property
    def fault(self) -> str:
        """The fault of this item, "" for a clean run."""
        return self.job.plan.cell.fault if isinstance(self.job.plan, TrialPlan) else ""

    def run(self, factory: EngineFactory) -> TrialResult | CleanResult:
        """Run this item against the engine that the factory makes; the test fails if it does not prove what it must.

        A fault that the engine has no place for is skipped with the reason.
        """
        self.was_run = True
        try:
            with _quiet():
                if isinstance(self.job.plan, TrialPlan):
                    return self._trial(self.job.plan, factory)
                return self._clean(self.job.plan, factory)
        except HarnessError as error:
            trouble = f"{self._title()}: {error}"
        self._record("kvguard_outcome", "error")
        pytest.fail(trouble, pytrace=False)

    def _title(self) -> str:
        plan = self.job.plan
        if isinstance(plan, CleanPlan):
            return f"kvguard clean run {plan.index} (seed {self.job.seed})"
        return f"kvguard trial {plan.index} (seed {self.job.seed}): {plan.cell.fault}, proofs on: {plan.cell.proofs}"

    def _again(self) -> str:
        return f"again: pytest --kvguard-campaign --kvguard-seed {self.job.seed} '{self._nodeid}'"

    def _trial(self, plan: TrialPlan, factory: EngineFactory) -> TrialResult:
        reason = why_unsupported(factory(None), plan.cell.fault, plan.cell.proofs)
        result = unsupported(plan, reason) if reason else self._judged(plan, factory)
        for name, value in (
            ("outcome", result.outcome),
            ("fault", plan.cell.fault),
            ("proofs", plan.cell.proofs),
            ("reason", result.reason),
            ("detected_by", ", ".join(result.detected_by)),
            ("potent", int(result.potent)),
            ("tokens_after_fault", result.tokens_after_fault),
            ("bystanders_changed", len(result.bystanders_changed)),
            ("false_positives", len(result.false_positives)),
        ):
            self._record(f"kvguard_{name}", value)
        if reason:
            pytest.skip(f"unsupported: {reason}")
        found = shortcomings(result)
        if found:
            lines = [
                f"{self._title()}: {'; '.join(found)}",
                history(result),
                f"affected: {', '.join(result.affected) or 'nobody'}; aborted: {', '.join(result.aborted) or 'nobody'}",
                f"violations reported: {', '.join(result.kinds) or 'none'}",
                *(_leak_lines(result)),
                self._again(),
                *(["", result.report] if result.report else []),
            ]
            pytest.fail("\n".join(lines), pytrace=False)
        return result

    def _judged(self, plan: TrialPlan, factory: EngineFactory) -> TrialResult:
        """The trial, with other traffic if this one offered no place for the fault; what stays so does not pass."""
        goldens = _goldens_of(factory, self._test)
        for attempt in range(TRAFFICS_MAX):
            tried = replace(plan, traffic_seed=plan.traffic_seed + attempt * TRAFFIC_STRIDE)
            result = judge_trial(tried, OwnRuns(tried, factory, goldens))
            if result.outcome != NOT_INJECTED:
                break
        return result

    def _clean(self, plan: CleanPlan, factory: EngineFactory) -> CleanResult:
        golden, run = clean_runs(plan, factory, _goldens_of(factory, self._test))
        result = judge_clean(plan, golden, run)
        self._record("kvguard_outcome", "clean" if result.clean else "not_clean")
        self._record("kvguard_false_positives", len(result.violations))
        self._record("kvguard_bystanders_changed", len(result.requests_changed))
        for name in ("preemptions", "evictions", "prefix_hits", "client_aborts", "steps"):
            self._record(f"kvguard_{name}", getattr(result, name))
        if not result.clean:
            lines = [
                f"{self._title()}: {'; '.join(clean_shortcomings(result))}",
                "no fault was injected: the engine has this fault itself, or does not tell its guard all that it does",
                *_violation_lines(run),
                self._again(),
            ]
            pytest.fail("\n".join(lines), pytrace=False)
        return result


def _violation_lines(run: Run) -> list[str]:
    shown = [f"  {violation.kind}: {violation.message}" for violation in run.violations[:VIOLATIONS_SHOWN_MAX]]
    more = len(run.violations) - len(shown)
    return shown + ([f"  and {more} more"] if more else [])


def _leak_lines(result: TrialResult) -> list[str]:
    leak = result.leak
    if leak is None:
        return []
    return [f"{leak.victim} without a fault: {leak.golden!r}", f"{leak.victim} with it, no guard: {leak.guard_off!r}"]


@contextmanager
def _quiet() -> Iterator[None]:
    """A campaign causes violations on purpose: they are in its report, not in the test's captured log."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("critical"),
        logger_factory=lambda *args: structlog.testing.ReturnLogger(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        if before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**before)
