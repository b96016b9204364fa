"""The tables of scenarios: in docs/scenarios.md, from the registry alone, and on the terminal, from results."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from kvguard.fault_injection.results import CampaignResults, TrialResult
from kvguard.fault_injection.scenarios.registry import SCENARIOS
from kvguard.fault_injection.scenarios.scenario import ALL, Scenario

__all__ = ["docs_table", "results_table"]

FAMILIES = {
    "pages": "who owns a page",
    "rows": "block-table row",
    "writes": "where a step writes",
    "keys": "what a cached page is found by",
    "stores": "external store",
}
"""Scenario.family -> the class of bug, in words."""


def docs_table() -> str:
    """Every scenario as a Markdown table: name and link, class, proof, engine release, who is ended."""
    lines = [
        "| scenario | reported in | class | found by | replayed in | ended |",
        "|---|---|---|---|---|---|",
    ]
    for scenario in SCENARIOS.values():
        proofs = ", ".join(str(proof).replace("_", " ") for proof in (scenario.proof, *scenario.alone))
        lines.append(
            f"| [{scenario.name}]({scenario.link}) | {scenario.reported_in} | {FAMILIES[scenario.family]} | {proofs} "
            f"| {scenario.place} | {_ended(scenario)} |"
        )
    return "\n".join(lines) + "\n"


def _ended(scenario: Scenario) -> str:
    names = scenario.ended.get(ALL, ())
    return ", ".join(f"`{name}`" for name in names) or "nobody"


def results_table(results: CampaignResults) -> Table:
    """What was run: a row for each scenario, its trials together."""
    table = Table(
        title="Public bugs replayed, and what the guard did about them", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("scenario", no_wrap=True)
    table.add_column("reported in", no_wrap=True)
    table.add_column("found by")
    for name in ("trials", "found", "ended", "potent"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in SCENARIOS:
        trials = [trial for trial in results.trials if trial.cell.fault == name]
        if trials:
            table.add_row(name, SCENARIOS[name].reported_in, *_row(trials))
    return table


def _row(trials: Iterable[TrialResult]) -> tuple[str, ...]:
    trials = list(trials)
    found = dict.fromkeys(proof for trial in trials for proof in trial.detected_by)
    ended = dict.fromkeys(name for trial in trials if trial.cell.proofs == ALL for name in trial.aborted)
    return (
        ", ".join(found).replace("_", " ") or "nothing",
        str(len(trials)),
        str(sum(trial.proven for trial in trials)),
        ", ".join(ended) or "nobody",
        "yes" if any(trial.potent for trial in trials) else "no",
    )
