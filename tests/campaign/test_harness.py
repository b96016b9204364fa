"""The harness itself: a guard that is broken on purpose must not look proven."""

from __future__ import annotations

from typing import Any

import pytest

from kvguard.bookkeeping import BookKeeping, Retired
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED
from kvguard.fault_injection.trial import run_clean, run_trial
from kvguard.guard import Guard
from kvguard.judge import Judgement
from kvguard.verifier import Verifier
from kvguard.violation import Kind

CLEAN = CleanPlan(index=0, kv_dtype="fp32", weights="fp32", page_size=16, traffic_seed=4)


def trial(fault: str, proofs: str = "all") -> Any:
    cell = Cell(engine="embedded", fault=fault, kv_dtype="fp32", weights="fp32", page_size=16, proofs=proofs)
    return run_trial(TrialPlan(index=0, cell=cell, traffic_seed=3, fault_seed=3), model="recall", backend="torch")


def explode(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


BROKEN = [(Guard, "step"), (Guard, "judge"), (BookKeeping, "finish"), (Verifier, "check")]


@pytest.mark.parametrize("owner,name", BROKEN)
def test_a_guard_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """A guard that raises disarms and lets everything through: neither a clean run nor a trial counts as proven."""
    monkeypatch.setattr(owner, name, explode)
    assert not run_clean(CLEAN, model="recall", backend="torch").clean
    result = trial("stale-row")
    assert result.outcome == MISSED and not result.proven


def test_a_guard_that_skips_steps_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a verdict are counted, and a run that has any is not clean."""
    monkeypatch.setattr(Guard, "judge", lambda self, verdicts: Judgement(step=verdicts.step))
    assert not run_clean(CLEAN, model="recall", backend="torch").clean


def test_a_refusal_about_another_page_is_no_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that keeps the broken page by luck and complains about another one has found nothing."""
    original = BookKeeping.retire

    def misfiled(self: BookKeeping, pages: Any, **kwargs: Any) -> Retired:
        books = self._books
        held = [page for page in pages if books.tables[0].record(page).holders]
        if not held:
            return original(self, pages, **kwargs)
        books.control_violation(Kind.DOUBLE_FREE, 0, (held[0] + 1) % books.tables[0].spec.num_pages, None)
        return Retired(reusable=[], refused=list(pages), quarantined=[])

    assert trial("freed-not-reused").outcome == DETECTED
    monkeypatch.setattr(BookKeeping, "retire", misfiled)
    result = trial("freed-not-reused")
    assert result.outcome != DETECTED and not result.proven and result.false_positives


def test_an_abort_of_somebody_else_is_a_false_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard that aborts the whole batch detects the victim too; the others are counted against it."""
    original = Guard.step

    def unrecorded(self: Guard, requests: Any, table_rows: Any, tokens_end: Any, tokens_start: Any = None) -> Any:
        if any(v.kind is Kind.FOREIGN_ROW for v in self.violations) or self._books.step >= 8:
            tokens_end = [end + 4096 for end in tokens_end]
        return original(self, requests, table_rows, tokens_end, tokens_start)

    monkeypatch.setattr(Guard, "step", unrecorded)
    result = trial("stale-row")
    assert result.false_positives and not result.proven
