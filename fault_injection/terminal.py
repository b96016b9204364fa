"""What a campaign prints: progress on standard error, the table and one leak on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.progress
from rich import box
from rich.console import Console
from rich.table import Table

from kvguard.fault_injection.html_report import telling_leaks
from kvguard.fault_injection.junit import shortcomings
from kvguard.fault_injection.results import CampaignResults, TrialResult

TABLE_COLUMNS = 133
COMPACT_COLUMNS = 80
POTENT_SHARE = 0.6


class ResultConsole(Console):
    """A console that leaves a closed pipe to its caller; rich would end the process with a status of its own."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Progress:
    """A progress bar on standard error, where there is a terminal; a line now and then where there is none."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Callable[[], None]:
        console = Console(stderr=True)
        if console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = rich.progress.Progress(*columns, console=console, transient=True)
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


def show_results(results: CampaignResults, data: dict[str, Any], folder: Path) -> None:
    """Print the table, the clean runs, what is not proven, and one telling leak."""
    console: Console = ResultConsole()
    if not console.is_terminal:
        # A log or a pipe has no width of its own; 80 columns would cut the table.
        console = ResultConsole(width=TABLE_COLUMNS)
    wide = console.width >= TABLE_COLUMNS
    # No figure may be cut away: a narrow terminal gets fewer columns, a very narrow one wraps.
    if data.get("scenarios"):
        from kvguard.fault_injection.scenarios.table import results_table

        table = results_table(results)
    else:
        table = _table(results, wide=wide)
    ResultConsole(width=max(console.width, COMPACT_COLUMNS)).print(table)
    contained = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in data["clean_runs_contained"].items())
    console.print(f"{data['clean_runs']} clean runs ({contained}): {data['false_positives']} false positives.")
    for name in results.empty_clean_counts():
        console.print(f"The clean runs contained no {name.replace('_', ' ')}: they prove less than they should.")
    console.print(
        f"{data['detected']} of {data['trials']} trials detected, {data['potent']} changed output with the guard off; "
        f"miss rate below {data['miss_rate_upper_95']:.2%} (95 %)."
    )
    for reason in data.get("left_out", ()):
        console.print(f"[yellow]Not run on this machine[/yellow]: {reason}.", highlight=False)
    if data["trials"] and data["potent"] < POTENT_SHARE * data["trials"]:
        console.print("[yellow]Few faults changed any output with the guard off: this model shows little.[/yellow]")
    for trial in results.trials:
        if not trial.proven and trial.outcome != "unsupported":
            console.print(f"[red]not proven[/red]: {trial_line(trial)}", highlight=False)
    _show_leak(console, results)
    console.print(f"\nseed {data['seed']}, {data['wall_s']} s. Report: {folder / 'report.html'}", highlight=False)
    console.print("[green]All proven.[/green]" if results.all_proven else "[red]Not all proven.[/red]")


def _show_leak(console: Console, results: CampaignResults) -> None:
    """The most telling trial that ended in an abort: what the client sees without the guard and with it."""
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
    if cell.runner:
        storage += f", vLLM runner {cell.runner}, {cell.scheduling}"
    elif cell.scheduling:
        storage += f", SGLang's {cell.scheduling} loop"
    if cell.phases == "pd":
        storage += ", prefill and decode worker"
    console.print(f"\nTrial {trial.index}, {cell.fault}, {storage}: what request {leak.victim}'s client sees")
    for label, text in lines:
        if text:
            console.print(f"  {label:<11} {text}", markup=False, highlight=False, soft_wrap=True)


def trial_line(trial: TrialResult) -> str:
    """One trial in one line: its cell, and what is missing from its proof."""
    cell = trial.cell
    setup = f"runner={cell.runner} " if cell.runner else ""
    setup += f"scheduling={cell.scheduling} " if cell.scheduling else ""
    setup += f"phases={cell.phases} " if cell.phases != "single" else ""
    return (
        f"trial {trial.index} {cell.fault} {setup}kv={cell.kv_dtype} weights={cell.weights} page_size={cell.page_size} "
        f"proofs={cell.proofs}: {'; '.join(shortcomings(trial)) or trial.outcome}"
    )


def _table(results: CampaignResults, *, wide: bool) -> Table:
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
    names: tuple[str, ...] = ("trials", "found", "missed", "refused", "aborted")
    if wide:
        names += ("not injected", "potent", "steps to detect", "tokens after", "others changed", "false alarms")
    for name in names:
        # Two-word headings stand on two lines.
        table.add_column("\n".join(name.rsplit(" ", 1)), justify="right", no_wrap=True)
    for fault, proofs, tally in [*results.by_fault(), ("all", "", results.total())]:
        if fault == "all":
            table.add_section()
        counts = (
            tally.trials,
            tally.detected,
            tally.missed,
            tally.refused,
            tally.aborted,
            tally.not_injected,
            tally.potent,
            tally.detection_steps_max,
            tally.tokens_after_fault,
            tally.bystanders_changed,
            tally.false_positives,
        )
        table.add_row(fault, proofs, *(str(count) for count in counts[: len(names)]))
    return table
