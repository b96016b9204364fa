"""Runs a plan over worker processes and collects its results as they come."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import structlog
import structlog.testing

from kvguard.fault_injection.plan import CampaignPlan, CleanPlan, TrialPlan
from kvguard.fault_injection.results import CampaignResults, CleanResult, TrialResult

CHUNK = 6
"""Trials handed to a worker at a time: enough to hide the hand-over, few enough for a smooth progress bar."""

Result = TrialResult | CleanResult


def default_workers() -> int:
    """One process per core that this process may use, eight at most."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def run_campaign(
    plan: CampaignPlan, *, workers: int, on_result: Callable[[Result], None] = lambda result: None
) -> CampaignResults:
    """Run every trial and clean run; `on_result` sees each in this process as it arrives, in no fixed order.

    Results do not depend on the number of workers: each is a function of its own plan alone.
    """
    results = CampaignResults()
    for result in _results(plan, workers):
        if isinstance(result, TrialResult):
            results.trials.append(result)
        else:
            results.clean.append(result)
        on_result(result)
    results.trials.sort(key=lambda trial: trial.index)
    results.clean.sort(key=lambda run: run.index)
    return results


def _results(plan: CampaignPlan, workers: int) -> Iterator[Result]:
    # Work on the same storage cell goes to the same worker in one go, so that golden runs are shared.
    trials = sorted(
        plan.trials, key=lambda t: (t.cell.weights, t.cell.kv_dtype, t.cell.page_size, t.traffic_seed, t.index)
    )
    jobs: list[TrialPlan | CleanPlan] = [*trials, *plan.clean_runs]
    chunks = [jobs[start : start + CHUNK] for start in range(0, len(jobs), CHUNK)]
    if workers == 1 or len(chunks) == 1:
        _prepare_worker()
        for chunk in chunks:
            yield from _run_chunk(chunk, plan.model, plan.backend)
        return
    # Fork is off the table: PyTorch's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_prepare_worker)
    try:
        open_futures: set[Future[list[Result]]] = {
            executor.submit(_run_chunk, chunk, plan.model, plan.backend) for chunk in chunks
        }
        while open_futures:
            done, open_futures = wait(open_futures, return_when=FIRST_COMPLETED)
            for future in done:
                yield from future.result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _prepare_worker() -> None:
    """One thread per process: tiny matrices lose more to hand-overs between threads than they gain."""
    import torch

    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(1)
    # A campaign causes violations on purpose; they are in its report, not on the terminal.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"), logger_factory=_silent)


def _die_with(sentinel: int) -> None:
    """A worker holds both ends of its queue and would wait for ever for a parent that was killed."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _silent(*args: object) -> structlog.testing.ReturnLogger:
    return structlog.testing.ReturnLogger()


def _run_chunk(chunk: list[TrialPlan | CleanPlan], model: str, backend: str) -> list[Result]:
    from kvguard.fault_injection.trial import run_clean, run_trial

    results: list[Result] = []
    for job in chunk:
        if isinstance(job, TrialPlan):
            results.append(run_trial(job, model=model, backend=backend))
        else:
            results.append(run_clean(job, model=model, backend=backend))
    return results
