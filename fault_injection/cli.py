"""`kvguard campaign`: fault injection, with a table that says what was proven."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvguard.fault_injection.plan import CampaignPlan
    from kvguard.fault_injection.results import CampaignResults, TrialResult

ENGINES = ("embedded",)
DEFAULT_SEED = 1
TABLE_COLUMNS = 132
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
    proven; 1: a miss, a false positive or a fault that was not injected; 2: usage.
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
        model=model,
        backend=backend,
        faults=_choose("fault", fault, tuple(PAGE_FAULTS)),
        kv_dtypes=_choose("KV dtype", kv_dtype, KV_DTYPES),
        weights=chosen_weights,
        page_sizes=_page_sizes(page_size),
    )


def _check_model(model: str, weights: str) -> None:
    """Load the model once up front: a worker's traceback is no way to learn of a wrong path."""
    from kvguard.fault_injection.trial import load_model

    try:
        load_model(model, weights)
    except (FileNotFoundError, NotADirectoryError) as error:
        _refuse(f"no model {model!r}: {error}; give recall or a folder with a Hugging Face Llama checkpoint")
    except ValueError as error:
        _refuse(f"cannot use model {model!r}: {error}")


def _campaign(plan: CampaignPlan, runs_dir: Path, workers: int, as_json: bool) -> int:
    import time

    from kvguard.fault_injection.campaign import Result, default_workers, run_campaign
    from kvguard.fault_injection.html_report import report_html
    from kvguard.fault_injection.junit import junit_xml
    from kvguard.fault_injection.results import results_json
    from kvguard.fault_injection.run_folder import JUNIT, PLAN, REPORT, RESULTS, RunFolder, plan_toml

    folder = RunFolder(runs_dir, plan.seed)
    started = time.monotonic()
    try:
        folder.write(PLAN, plan_toml(plan))
        total = len(plan.trials) + len(plan.clean_runs)
        with _progress(total) as advance:

            def on_result(result: Result) -> None:
                folder.append(result.to_json())
                advance()

            results = run_campaign(plan, workers=workers or default_workers(), on_result=on_result)
        meta = _meta(plan, time.monotonic() - started)
        data = results_json(results, meta)
        folder.write(RESULTS, json.dumps(data, indent=2) + "\n")
        folder.write(JUNIT, junit_xml(results))
        folder.write(REPORT, report_html(results, data))
        final = folder.complete()
    finally:
        folder.close()
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        _show(results, data, final)
    return 0 if results.all_proven else 1


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


class _progress:
    """A progress bar on standard error, where there is a terminal; a line now and then where there is none."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Callable[[], None]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("trials and clean runs", total=self._total)
        return self._advance

    def _advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif self._done % max(1, self._total // 10) == 0 or self._done == self._total:
            print(f"kvguard campaign: {self._done} of {self._total}", file=sys.stderr, flush=True)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _show(results: CampaignResults, data: dict[str, Any], folder: Path) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        # A log or a pipe has no width of its own; 80 columns would cut the table.
        console = Console(width=TABLE_COLUMNS)
    console.print(_table(results))
    contained = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in data["clean_runs_contained"].items())
    console.print(f"{data['clean_runs']} clean runs ({contained}): {data['false_positives']} false positives.")
    for name in results.empty_clean_counts():
        console.print(f"The clean runs contained no {name.replace('_', ' ')}: they prove less than they should.")
    console.print(
        f"{data['detected']} of {data['trials']} trials detected, {data['potent']} changed output with the guard off; "
        f"miss rate below {data['miss_rate_upper_95']:.2%} (95 %)."
    )
    for trial in results.trials:
        if not trial.proven and trial.outcome != "unsupported":
            console.print(f"[red]not proven[/red]: {_line(trial)}", highlight=False)
    _show_leak(console, results)
    console.print(f"\nseed {data['seed']}, {data['wall_s']} s. Report: {folder / 'report.html'}", highlight=False)
    console.print("[green]All proven.[/green]" if results.all_proven else "[red]Not all proven.[/red]")


def _show_leak(console: Console, results: CampaignResults) -> None:
    """The most telling trial that ended in an abort: what the client sees without the guard and with it."""
    from kvguard.fault_injection.html_report import telling_leaks

    shown = telling_leaks([trial for trial in results.trials if trial.aborted])
    if not shown:
        return
    trial, leak = shown[0].trial, shown[0].leak
    lines = [
        ("its prompt", repr(leak.prompt)),
        ("no fault", repr(leak.golden)),
        ("guard off", repr(leak.guard_off)),
        ("leaked from", repr(shown[0].source) if shown[0].source else ""),
        ("guard on", repr(leak.guard_on)),
        ("", leak.error),
    ]
    cell = trial.cell
    storage = f"{cell.kv_dtype} KV, {cell.weights} weights, pages of {cell.page_size}"
    console.print(f"\nTrial {trial.index}, {cell.fault}, {storage}: what request {leak.victim}'s client sees")
    for label, text in lines:
        if text:
            console.print(f"  {label:<11} {text}", markup=False, highlight=False, soft_wrap=True)


def _line(trial: TrialResult) -> str:
    from kvguard.fault_injection.junit import shortcomings

    cell = trial.cell
    return (
        f"trial {trial.index} {cell.fault} kv={cell.kv_dtype} weights={cell.weights} page_size={cell.page_size} "
        f"proofs={cell.proofs}: {'; '.join(shortcomings(trial)) or trial.outcome}"
    )


def _table(results: CampaignResults) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="Faults injected, and what the guard did about them",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("fault", no_wrap=True)
    table.add_column("proofs on", no_wrap=True)
    names = ("trials", "found", "missed", "not injected", "potent", "refused", "aborted")
    late = ("steps to detect", "tokens after", "others changed", "false alarms")
    for name in names + late:
        # Two-word headings stand on two lines, so that the table fits 110 columns.
        table.add_column("\n".join(name.rsplit(" ", 1)), justify="right", no_wrap=True)
    for fault, proofs, tally in [*results.by_fault(), ("all", "", results.total())]:
        if fault == "all":
            table.add_section()
        counts = (
            tally.trials,
            tally.detected,
            tally.missed,
            tally.not_injected,
            tally.potent,
            tally.refused,
            tally.aborted,
            tally.detection_steps_max,
            tally.tokens_after_fault,
            tally.bystanders_changed,
            tally.false_positives,
        )
        table.add_row(fault, proofs, *(str(count) for count in counts))
    return table


def _replay(index: int, folder: Path, as_json: bool) -> int:
    """Run trial `index` of an earlier run again; exit 1 if it is not proven."""
    from kvguard.fault_injection.campaign import _prepare_worker
    from kvguard.fault_injection.run_folder import read_plan

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
        typer.echo(_line(result))
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
