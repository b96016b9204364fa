"""What a campaign in pytest adds up to: a table on the terminal, JUnit properties, and the job summary on GitHub.

Items may have run in other processes (pytest-xdist): everything is read from the properties of their reports.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

__all__ = ["CampaignReport"]

SUMMED = ("potent", "tokens_after_fault", "bystanders_changed", "false_positives")
CONTAINED = ("preemptions", "evictions", "prefix_hits", "client_aborts", "steps")
HEADINGS = ("fault", "proofs on", "trials", "detected", "missed", "not injected", "unsupported", "potent")


class CampaignReport:
    """Registered by the plugin when a campaign was asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seed = config.getoption("--kvguard-seed")
        self._is_worker = hasattr(config, "workerinput")
        self.items: list[dict[str, str]] = []

    # -- hooks ----------------------------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect an item: its call, or its setup if that was the end of it."""
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        found = {name.removeprefix("kvguard_"): str(value) for name, value in report.user_properties
                 if str(name).startswith("kvguard_")}  # fmt: skip
        if found:
            found.setdefault("outcome", "error")
            self.items.append({**found, "nodeid": report.nodeid, "test": report.outcome})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: pytest.CallInfo[None]) -> None:
        """A test that was left early has its own reason, and need not hear that it did not run its trial."""
        if call.excinfo is not None:
            item.kvguard_left_early = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """The totals into the JUnit file, before it is written, and the table into the job summary."""
        if self._is_worker or not self.items:
            return
        xml = _junit_of(self._config)
        if xml is not None:
            for name, value in self.totals().items():
                xml.add_global_property(f"kvguard_{name}", str(value))
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            try:
                with open(summary, "a", encoding="utf-8") as file:
                    file.write(self.markdown())
            except OSError as error:
                self._config.issue_config_time_warning(
                    pytest.PytestWarning(f"kvguard: cannot write the job summary: {error}"), stacklevel=2
                )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table, after everything else."""
        if self._is_worker or not self.items:
            return
        terminalreporter.section("kvguard fault campaign")
        rows = [HEADINGS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        for row in rows:
            cells = (cell.ljust(width) if place < 2 else cell.rjust(width)
                     for place, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
            terminalreporter.write_line("  ".join(cells).rstrip())
        for line in self._lines():
            terminalreporter.write_line(line)

    # -- sums -----------------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, int | str]:
        """The counts of the whole campaign, as the JUnit file has them."""
        from kvguard.fault_injection.results import miss_rate_upper_95

        outcomes = Counter(item["outcome"] for item in self.items)
        trials = [item for item in self.items if "fault" in item]
        judged = outcomes["detected"] + outcomes["missed"]
        return {
            "seed": self._seed,
            "trials": len(trials) - outcomes["unsupported"],
            "detected": outcomes["detected"],
            "missed": outcomes["missed"],
            "not_injected": outcomes["not_injected"],
            "unsupported": outcomes["unsupported"],
            "errors": outcomes["error"],
            "clean_runs": outcomes["clean"] + outcomes["not_clean"],
            **{name: sum(int(item.get(name, "0")) for item in self.items) for name in SUMMED},
            "miss_rate_upper_95": f"{miss_rate_upper_95(judged, outcomes['missed']):.4f}",
        }

    def _rows(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, str], list[dict[str, str]]] = {}
        for item in self.items:
            if "fault" in item:
                groups.setdefault((item["fault"], item["proofs"]), []).append(item)
        rows = []
        for (fault, proofs), items in sorted(groups.items()):
            counts = Counter(item["outcome"] for item in items)
            potent = sum(int(item["potent"]) for item in items)
            names = ("detected", "missed", "not_injected", "unsupported")
            trials = len(items) - counts["unsupported"]
            rows.append((fault, proofs, str(trials), *(str(counts[name]) for name in names), str(potent)))
        return rows

    def _lines(self) -> list[str]:
        totals = self.totals()
        contained = ", ".join(
            f"{sum(int(item.get(name, '0')) for item in self.items)} {name.replace('_', ' ')}" for name in CONTAINED
        )
        lines = [
            f"seed {totals['seed']}: {totals['detected']} of {totals['trials']} trials detected, {totals['missed']} "
            f"missed, {totals['not_injected']} not injected; tokens after the fault {totals['tokens_after_fault']}, "
            f"others changed {totals['bystanders_changed']}, false positives {totals['false_positives']}; miss rate "
            f"below {100 * float(totals['miss_rate_upper_95']):.1f} % (95 %)",
            f"{totals['clean_runs']} clean runs ({contained})",
        ]
        if totals["errors"]:
            lines.append(f"{totals['errors']} items ended with an error and prove nothing")
        reasons = Counter((item["fault"], item["reason"]) for item in self.items if item["outcome"] == "unsupported")
        lines += [f"unsupported: {fault}: {reason}" for fault, reason in sorted(reasons)]
        return lines

    def markdown(self) -> str:
        """The table and the totals for a job summary."""
        bad = [item for item in self.items if item["test"] == "failed"]
        lines = [
            "## kvguard fault campaign",
            "",
            f"{'All proven' if not bad else f'{len(bad)} items failed'}.",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|" + "---|" * len(HEADINGS),
            *("| " + " | ".join(row) + " |" for row in self._rows()),
            "",
            *(f"- {_escaped(line)}" for line in self._lines()),
            *(f"- failed: `{item['nodeid']}`" for item in bad),
            "",
        ]
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _junit_of(config: pytest.Config) -> Any:
    """pytest's JUnit writer, which `record_testsuite_property` uses too; None if no file was asked for."""
    try:
        from _pytest.junitxml import xml_key
    except ImportError:
        return None
    return config.stash.get(xml_key, None)
