"""`kvguard campaign`: fault injection, with a table that says what was proven."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from kvguard.fault_injection.plan import CampaignPlan

ENGINES = ("embedded",)
DEFAULT_SEED = 1
DEFAULT_TRIALS = 216
DEFAULT_CLEAN_RUNS = 54


def campaign(
    seed: Annotated[
        int, typer.Option(help="Seed of traffic, faults and tags; the same seed gives the same trials.")
    ] = (DEFAULT_SEED),
    trials: Annotated[int, typer.Option(help="Trials in all, dealt evenly over the cells.", min=1)] = DEFAULT_TRIALS,
    clean_runs: Annotated[int, typer.Option(help="Runs without a fault, in which nothing may be flagged.", min=0)] = (
        DEFAULT_CLEAN_RUNS
    ),
    fault: Annotated[str, typer.Option(help="NAME[,NAME] or all.")] = "all",
    engine: Annotated[str, typer.Option(help="Engine that the faults go into.")] = "embedded",
    model: Annotated[str, typer.Option(help="recall, or a folder with a Hugging Face Llama checkpoint.")] = "recall",
    backend: Annotated[str, typer.Option(help="Kernel backend of the guard: torch or numpy.")] = "torch",
    kv_dtype: Annotated[str, typer.Option(help="NAME[,NAME] or all: fp32, bf16, fp8_e4m3, fp8_e5m2.")] = "all",
    weights: Annotated[str, typer.Option(help="NAME[,NAME] or all: fp32, bf16, int4.")] = "all",
    page_size: Annotated[str, typer.Option(help="N[,N] or all: tokens in a page, 1 to 64.")] = "all",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results.json on standard output, nothing else.")
    ] = False,
    replay: Annotated[int | None, typer.Option(help="Run one trial of an earlier run again and show it.")] = None,
    run: Annotated[str, typer.Option(help="The earlier run that --replay takes its plan from.")] = "latest",
    runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    workers: Annotated[int, typer.Option(help="Processes; 0: one per core.", min=0)] = 0,
) -> None:
    """Break a serving engine's page bookkeeping on purpose and show what the guard does about it.

    Each trial runs the same traffic without the fault, with it and no guard, and with it and the guard. Exit 0: all
    proven; 1: a miss, a false positive or a fault that was not injected; 2: usage; 3: the campaign itself failed.
    """
    from kvguard.fault_injection.run_folder import RunFolderError

    try:
        if replay is not None:
            raise typer.Exit(_replay(replay, runs_dir / run, as_json))
        plan = _plan(seed, trials, clean_runs, fault, engine, model, backend, kv_dtype, weights, page_size)
        raise typer.Exit(_campaign(plan, runs_dir, workers, as_json))
    except RunFolderError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    """One clear line, exit 2."""
    typer.echo(f"kvguard campaign: {message}", err=True)
    raise typer.Exit(2)


def _choose(option: str, given: str, valid: Sequence[str]) -> tuple[str, ...]:
    """The values of a NAME[,NAME] | all option, in the order of `valid`."""
    if given == "all":
        return tuple(valid)
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in valid:
            _refuse(f"unknown {option} {name!r}: choose from {', '.join(valid)}, or all")
    if not names:
        _refuse(f"no {option} given: choose from {', '.join(valid)}, or all")
    return tuple(name for name in valid if name in names)


def _page_sizes(given: str) -> tuple[int, ...]:
    from kvguard.fault_injection.plan import PAGE_SIZES

    if given == "all":
        return PAGE_SIZES
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in given.split(",")))
    except ValueError:
        _refuse(f"--page-size {given!r} is not a number or a list of numbers, for example 16 or 1,64")
    if any(not 1 <= size <= 64 for size in sizes):
        _refuse(f"--page-size {given}: the campaign's prompts fill pages of 1 to 64 tokens")
    return sizes


def _plan(
    seed: int,
    trials: int,
    clean_runs: int,
    fault: str,
    engine: str,
    model: str,
    backend: str,
    kv_dtype: str,
    weights: str,
    page_size: str,
) -> CampaignPlan:
    from kvguard.config import GuardConfig
    from kvguard.fault_injection.faults.pages import PAGE_FAULTS
    from kvguard.fault_injection.plan import KV_DTYPES, WEIGHTS, build_plan
    from kvguard.kernels.backend import BACKENDS

    # A configuration that the guard would refuse is refused here too, before anything runs.
    GuardConfig.load()
    if engine not in ENGINES:
        _refuse(f"unknown engine {engine!r}: this release has {', '.join(ENGINES)}")
    if backend not in BACKENDS:
        _refuse(f"unknown backend {backend!r}: this release has {', '.join(BACKENDS)}")
    chosen_weights = _choose("weights", weights, WEIGHTS)
    _check_model(model, chosen_weights[0])
    return build_plan(
        seed=seed,
        trials=trials,
        clean_runs=clean_runs,
        engine=engine,
        # Absolute, so that a replay finds it from any folder.
        model=model if model == "recall" else str(Path(model).resolve()),
        backend=backend,
        faults=_choose("fault", fault, tuple(PAGE_FAULTS)),
        kv_dtypes=_choose("KV dtype", kv_dtype, KV_DTYPES),
        weights=chosen_weights,
        page_sizes=_page_sizes(page_size),
    )


def _check_model(model: str, weights: str) -> None:
    """Load the model once up front: a worker's traceback is no way to learn of a wrong path."""
    from kvguard.fault_injection.targets.embedded_runs import check_model

    try:
        check_model(model, weights)
    except (FileNotFoundError, NotADirectoryError) as error:
        _refuse(f"no model {model!r}: {error}; give recall or a folder with a Hugging Face Llama checkpoint")
    except Exception as error:
        # Whatever a broken checkpoint makes the loader raise, it is the checkpoint that is wrong.
        _refuse(f"cannot use model {model!r}: {type(error).__name__}: {' '.join(str(error).split())}")


def _campaign(plan: CampaignPlan, runs_dir: Path, workers: int, as_json: bool) -> int:
    import signal
    import time
    from concurrent.futures.process import BrokenProcessPool

    import jinja2  # noqa: F401  (the report needs it: better to learn of that now than after the last trial)

    from kvguard.fault_injection.campaign import Result, default_workers, run_campaign
    from kvguard.fault_injection.html_report import report_html
    from kvguard.fault_injection.junit import junit_xml
    from kvguard.fault_injection.results import results_json
    from kvguard.fault_injection.run_folder import JUNIT, PLAN, REPORT, RESULTS, RunFolder, plan_toml
    from kvguard.fault_injection.terminal import Progress, show_results

    folder = RunFolder(runs_dir, plan.seed)
    started, done = time.monotonic(), 0
    total = len(plan.trials) + len(plan.clean_runs)
    # A cancelled CI job or a closed terminal stops like Ctrl-C: workers end, the history stays.
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        folder.write(PLAN, plan_toml(plan))
        with Progress(total) as advance:

            def on_result(result: Result) -> None:
                nonlocal done
                done += 1
                folder.append(result.to_json())
                advance()

            results = run_campaign(plan, workers=workers or default_workers(), on_result=on_result)
        meta = {**_meta(plan, time.monotonic() - started), "run": folder.name}
        data = results_json(results, meta)
        folder.write(RESULTS, json.dumps(data, indent=2) + "\n")
        folder.write(JUNIT, junit_xml(results))
        folder.write(REPORT, report_html(results, data))
        final = folder.complete()
    except KeyboardInterrupt:
        typer.echo(f"kvguard campaign: interrupted after {done} of {total}; history in {folder.path}", err=True)
        return 130
    except BrokenProcessPool:
        typer.echo(
            f"kvguard campaign: a worker died after {done} of {total} (out of memory?); history in {folder.path}",
            err=True,
        )
        return 3
    finally:
        folder.close()
    verdict = 0 if results.all_proven else 1
    try:
        if as_json:
            typer.echo(json.dumps(data, indent=2))
        else:
            show_results(results, data, final)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; the verdict stands.
        _silence_stdout()
    except OSError as error:
        typer.echo(f"kvguard campaign: cannot print the results: {error.strerror}; they are in {final}", err=True)
        _silence_stdout()
        return 3
    return verdict


def _silence_stdout() -> None:
    """Nobody reads standard output any more, or it cannot be written: the flush at exit must not complain again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _meta(plan: CampaignPlan, wall_s: float) -> dict[str, Any]:
    import platform
    import shlex

    from kvguard import __version__

    return {
        "seed": plan.seed,
        "engine": plan.engine,
        "model": plan.model,
        "backend": plan.backend,
        "command": shlex.join(["kvguard", *sys.argv[1:]]),
        "kvguard": __version__,
        "python": platform.python_version(),
        "wall_s": round(wall_s, 1),
    }


def _replay(index: int, folder: Path, as_json: bool) -> int:
    """Run trial `index` of an earlier run again; exit 1 if it is not proven."""
    from kvguard.config import GuardConfig
    from kvguard.fault_injection.campaign import _prepare_worker
    from kvguard.fault_injection.run_folder import read_plan
    from kvguard.fault_injection.terminal import trial_line

    GuardConfig.load()
    plan = read_plan(folder)
    trial = next((trial for trial in plan.trials if trial.index == index), None)
    if trial is None:
        _refuse(f"run {folder} has no trial {index}: it has 0 to {len(plan.trials) - 1}")
    _check_model(plan.model, trial.cell.weights)
    _prepare_worker()
    from kvguard.fault_injection.trial import run_trial

    result = run_trial(trial, model=plan.model, backend=plan.backend)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        typer.echo(trial_line(result))
        typer.echo(f"injected at step {result.injected_step}: {result.description}")
        typer.echo(
            f"live at step {result.live_step}, detected at step {result.detected_step} by "
            f"{', '.join(result.detected_by) or 'nothing'} ({', '.join(result.kinds)})"
        )
        if result.leak is not None:
            typer.echo(f"no fault  {result.leak.golden!r}")
            typer.echo(f"guard off {result.leak.guard_off!r}")
            typer.echo(f"guard on  {result.leak.guard_on!r}")
        typer.echo(result.report)
    return 0 if result.proven or result.outcome == "unsupported" else 1
