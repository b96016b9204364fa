"""One trial: the same traffic without a fault, with it and no guard, with it and the guard, and with client aborts.

The runs are the engine's (`targets/*_runs.py`), the judgement is everybody's (`judging.py`).
"""

from __future__ import annotations

from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.judging import judge_clean, judge_trial, unsupported
from kvguard.fault_injection.key_plan import KEYS
from kvguard.fault_injection.phases_plan import TRANSFER_UNSUPPORTED
from kvguard.fault_injection.plan import SCENARIO_LEVEL, UNSUPPORTED, CleanPlan, TrialPlan
from kvguard.fault_injection.results import CleanResult, TrialResult
from kvguard.fault_injection.runs import TrialRuns
from kvguard.fault_injection.sglang_plan import SGLANG_UNSUPPORTED
from kvguard.fault_injection.write_plan import NO_SUCH_CELL, WRITES


def run_trial(plan: TrialPlan, *, model: str, backend: str, proofs: str | None = None) -> TrialResult:
    """Run one trial; `proofs` overrides the cell's, which tests use to switch off both."""
    cell = plan.cell
    if cell.level == SCENARIO_LEVEL:
        from kvguard.fault_injection.scenarios.judging import run_scenario

        return run_scenario(plan, backend=backend, proofs=proofs)
    left_out = SGLANG_UNSUPPORTED if cell.engine == "sglang" else UNSUPPORTED | TRANSFER_UNSUPPORTED
    if (cell.fault, cell.proofs) in left_out:
        return unsupported(plan, left_out[cell.fault, cell.proofs])
    if (cell.fault, cell.page_size) in NO_SUCH_CELL:
        return unsupported(plan, NO_SUCH_CELL[cell.fault, cell.page_size])
    chosen = proofs or cell.proofs
    runs: TrialRuns
    # Engines are imported where they are asked for: none needs another one's packages.
    if cell.engine == "vllm" and cell.level == KEYS:
        from kvguard.fault_injection.targets.vllm_key_runs import VllmKeyRuns

        runs = VllmKeyRuns(plan, proofs=chosen)
    elif cell.engine == "vllm":
        from kvguard.fault_injection.targets.vllm_runs import VllmRuns

        runs = VllmRuns(plan, model=model, proofs=chosen)
    elif cell.engine == "sglang" and cell.level == KEYS:
        from kvguard.fault_injection.targets.sglang_key_runs import SglangKeyRuns

        runs = SglangKeyRuns(plan, proofs=chosen)
    elif cell.engine == "sglang":
        from kvguard.fault_injection.targets.sglang_runs import SglangRuns

        runs = SglangRuns(plan, model=model, proofs=chosen)
    elif cell.phases == "pd":
        from kvguard.fault_injection.targets.pd_runs import PhasesRuns

        runs = PhasesRuns(plan, model=model, backend=backend, proofs=chosen)
    elif cell.fault in KEY_FAULTS:
        from kvguard.fault_injection.targets.key_runs import KeyRuns

        runs = KeyRuns(plan, backend=backend, proofs=chosen)
    elif cell.fault in WRITE_FAULTS:
        from kvguard.fault_injection.targets.write_runs import WriteRuns

        runs = WriteRuns(plan, backend=backend, proofs=chosen)
    else:
        from kvguard.fault_injection.targets.embedded_runs import EmbeddedRuns

        runs = EmbeddedRuns(plan, model=model, backend=backend, proofs=chosen)
    return judge_trial(plan, runs)


def run_clean(plan: CleanPlan, *, model: str, backend: str) -> CleanResult:
    """Healthy traffic in a tight pool, guard on, against the same with the guard off."""
    if plan.scenario:
        from kvguard.fault_injection.scenarios.judging import run_control

        return run_control(plan, backend=backend)
    if plan.engine == "vllm" and plan.traffic == KEYS:
        from kvguard.fault_injection.targets import vllm_key_runs

        return judge_clean(plan, *vllm_key_runs.clean_runs(plan))
    if plan.engine == "vllm":
        from kvguard.fault_injection.targets import vllm_runs

        return judge_clean(plan, *vllm_runs.clean_runs(plan, model=model))
    if plan.engine == "sglang" and plan.traffic == KEYS:
        from kvguard.fault_injection.targets import sglang_key_runs

        return judge_clean(plan, *sglang_key_runs.clean_runs(plan))
    if plan.engine == "sglang":
        from kvguard.fault_injection.targets import sglang_runs

        return judge_clean(plan, *sglang_runs.clean_runs(plan, model=model))
    if plan.phases == "pd":
        from kvguard.fault_injection.targets import pd_runs

        return judge_clean(plan, *pd_runs.clean_runs(plan, model=model, backend=backend))
    if plan.traffic == KEYS:
        from kvguard.fault_injection.targets import key_runs

        return judge_clean(plan, *key_runs.clean_runs(plan, backend=backend))
    if plan.traffic == WRITES:
        from kvguard.fault_injection.targets import write_runs

        return judge_clean(plan, *write_runs.clean_runs(plan, backend=backend))
    from kvguard.fault_injection.targets import embedded_runs

    return judge_clean(plan, *embedded_runs.clean_runs(plan, model=model, backend=backend))
