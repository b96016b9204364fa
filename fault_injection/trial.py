"""One trial: the same traffic without a fault, with it and no guard, with it and the guard, and with client aborts.

The runs are the engine's (`targets/*_runs.py`), the judgement is everybody's (`judging.py`).
"""

from __future__ import annotations

from kvguard.fault_injection.judging import judge_clean, judge_trial, unsupported
from kvguard.fault_injection.plan import UNSUPPORTED, CleanPlan, TrialPlan
from kvguard.fault_injection.results import CleanResult, TrialResult
from kvguard.fault_injection.runs import TrialRuns


def run_trial(plan: TrialPlan, *, model: str, backend: str, proofs: str | None = None) -> TrialResult:
    """Run one trial; `proofs` overrides the cell's, which tests use to switch off both."""
    cell = plan.cell
    if (cell.fault, cell.proofs) in UNSUPPORTED:
        return unsupported(plan, UNSUPPORTED[cell.fault, cell.proofs])
    chosen = proofs or cell.proofs
    runs: TrialRuns
    # Engines are imported where they are asked for: none needs another one's packages.
    if cell.engine == "vllm":
        from kvguard.fault_injection.targets.vllm_runs import VllmRuns

        runs = VllmRuns(plan, model=model, proofs=chosen)
    else:
        from kvguard.fault_injection.targets.embedded_runs import EmbeddedRuns

        runs = EmbeddedRuns(plan, model=model, backend=backend, proofs=chosen)
    return judge_trial(plan, runs)


def run_clean(plan: CleanPlan, *, model: str, backend: str) -> CleanResult:
    """Healthy traffic in a tight pool, guard on, against the same with the guard off."""
    if plan.engine == "vllm":
        from kvguard.fault_injection.targets import vllm_runs

        return judge_clean(plan, *vllm_runs.clean_runs(plan, model=model))
    from kvguard.fault_injection.targets import embedded_runs

    return judge_clean(plan, *embedded_runs.clean_runs(plan, model=model, backend=backend))
