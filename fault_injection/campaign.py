"""Runs a plan over worker processes and collects its results as they come."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

import structlog
import structlog.testing

from kvguard.fault_injection.plan import CampaignPlan, CleanPlan, TrialPlan
from kvguard.fault_injection.results import CampaignResults, CleanResult, TrialResult

CHUNK = 6
"""Trials handed to a worker at a time: enough to hide the hand-over, few enough for a smooth progress bar."""

VLLM_CHUNK = 9
"""The same for vLLM: a set-up's share of the default campaign, so that its golden runs are made once."""
SGLANG_CHUNK = 12
"""The same for SGLang: a set-up's share and its clean runs, so that its templates are made once."""
JOB_SECONDS_MAX = 900
Result = TrialResult | CleanResult


def default_workers() -> int:
    """One process per core that this process may use, eight at most."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def prepare_backend(plan: CampaignPlan) -> str:
    """Make the kernel backend of a plan run in this process and its workers; a line for the user, or nothing.

    The embedded engine keeps its tensors on the CPU, where Triton's kernels run in Triton's interpreter.
    """
    if plan.backend != "triton" or plan.engine != "embedded":
        return ""
    # Triton reads it when it is imported, which nothing has done yet.
    os.environ["TRITON_INTERPRET"] = "1"
    return "the embedded engine runs on the CPU: Triton's interpreter runs the kernels (TRITON_INTERPRET=1)"


def run_campaign(
    plan: CampaignPlan,
    *,
    workers: int,
    on_result: Callable[[Result], None] = lambda result: None,
    engine_log: Path | None = None,
) -> CampaignResults:
    """Run every trial and clean run; `on_result` sees each in this process as it arrives, in no fixed order.

    Results do not depend on the number of workers: each is a function of its own plan alone. `engine_log`: where what
    vLLM or SGLang prints goes, None for nowhere.
    """
    prepare_backend(plan)
    results = CampaignResults()
    if plan.engine == "vllm":
        found = _vllm_results(plan, workers, engine_log)
    elif plan.engine == "sglang":
        found = _sglang_results(plan, workers, engine_log)
    else:
        found = _results(plan, workers)
    for result in found:
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
        plan.trials,
        key=lambda t: (t.cell.phases, t.cell.weights, t.cell.kv_dtype, t.cell.page_size, t.traffic_seed, t.index),
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
    yield from _collect(plan, executor, chunks)


def _vllm_results(plan: CampaignPlan, workers: int, engine_log: Path | None) -> Iterator[Result]:
    """Work on one set-up shares a live engine, and a process runs one of vLLM's model runners only.

    vLLM never runs in this process: it prints on standard output, which is the campaign's.
    """
    setups = _by_setup(plan)
    context = multiprocessing.get_context("spawn")
    for runner in sorted({name[0] for name in setups}):
        chunks = [
            jobs[start : start + VLLM_CHUNK]
            for name, jobs in setups.items()
            if name[0] == runner
            for start in range(0, len(jobs), VLLM_CHUNK)
        ]
        executor = ProcessPoolExecutor(
            max_workers=min(workers, len(chunks)),
            mp_context=context,
            initializer=_prepare_engine_worker,
            initargs=(engine_log,),
        )
        yield from _collect(plan, executor, chunks)


def _sglang_results(plan: CampaignPlan, workers: int, engine_log: Path | None) -> Iterator[Result]:
    """Work on one set-up shares live engines, which are forks of the worker: see `targets/sglang_templates.py`."""
    chunks = [
        jobs[start : start + SGLANG_CHUNK]
        for jobs in _by_setup(plan).values()
        for start in range(0, len(jobs), SGLANG_CHUNK)
    ]
    executor = ProcessPoolExecutor(
        max_workers=max(1, min(workers, len(chunks))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare_engine_worker,
        initargs=(engine_log,),
    )
    yield from _collect(plan, executor, chunks)


def _by_setup(plan: CampaignPlan) -> dict[tuple[str, ...], list[TrialPlan | CleanPlan]]:
    """All work, by the set-up of a real engine that it goes to: (runner, scheduling, KV dtype, weights, page size)."""
    setups: dict[tuple[str, ...], list[TrialPlan | CleanPlan]] = {}
    everything: list[TrialPlan | CleanPlan] = [*plan.trials, *plan.clean_runs]
    for job in everything:
        setup = job.cell if isinstance(job, TrialPlan) else job
        name = (setup.runner, setup.scheduling, setup.kv_dtype, setup.weights, str(setup.page_size))
        setups.setdefault(name, []).append(job)
    return setups


def _collect(
    plan: CampaignPlan, executor: ProcessPoolExecutor, chunks: list[list[TrialPlan | CleanPlan]]
) -> Iterator[Result]:
    """Hand out the chunks and pass results on as they come; ends the executor, whatever happens."""
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


def _prepare_engine_worker(engine_log: Path | None) -> None:
    """As above, and what the real engine prints goes to the log."""
    target = os.open(engine_log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())
    _prepare_worker()


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
        if multiprocessing.parent_process() is not None:
            # A real engine may hang: better a dead worker, with its stacks in the log, than a campaign without an end.
            faulthandler.dump_traceback_later(JOB_SECONDS_MAX, exit=True)
        if isinstance(job, TrialPlan):
            results.append(run_trial(job, model=model, backend=backend))
        else:
            results.append(run_clean(job, model=model, backend=backend))
    faulthandler.cancel_dump_traceback_later()
    return results
