"""Every fault kind at every level, measured: what each level sees, and what it does not.

    .venv/bin/python -m bench.fault_levels --engine embedded [--trials 3] [--json FILE]
    .venv-vllm/bin/python -m bench.fault_levels --engine vllm
    .venv-sglang/bin/python -m bench.fault_levels --engine sglang
    .venv/bin/python -m bench.fault_levels --table        # what docs/levels.md shows of bench/results/fault_levels.json

Each trial is one of the campaign's: the same traffic without the fault, with it and no guard, and with it and a guard
at the level. *off* is the run without a guard, which finds nothing by nature: what is counted there is whether somebody
got other tokens than without the fault. A trial counts as found if it is proven as the campaign understands it: found
in time, nobody else harmed. What has a reason why it cannot be made in an engine is left out there, as in its campaign.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from kvguard.fault_injection.faults.keys import KEY_FAULTS
from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
from kvguard.fault_injection.faults.writes import WRITE_FAULTS
from kvguard.fault_injection.plan import Cell, TrialPlan
from kvguard.fault_injection.results import NOT_INJECTED, TrialResult
from kvguard.fault_injection.sglang_plan import SGLANG_FAULTS, SGLANG_WRITE_FAULTS
from kvguard.fault_injection.targets.sglang_keys import SGLANG_KEY_FAULTS
from kvguard.fault_injection.targets.vllm_keys import VLLM_KEY_FAULTS
from kvguard.fault_injection.targets.vllm_writes import VLLM_WRITE_FAULTS
from kvguard.fault_injection.trial import run_trial

RESULTS = Path(__file__).with_name("results") / "fault_levels.json"
LEVELS = ("tags", "keys")
"""Beside `off`; names of `fault_injection.runs.PROOFS` as well."""
PAGES, TRANSFERS, WRITES, KEYS = "pages", "hand-over", "writes", "keys"
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {
    "embedded": {
        PAGES: tuple(PAGE_FAULTS),
        TRANSFERS: tuple(TRANSFER_FAULTS),
        WRITES: tuple(WRITE_FAULTS),
        KEYS: tuple(KEY_FAULTS),
    },
    "vllm": {PAGES: tuple(PAGE_FAULTS), WRITES: tuple(VLLM_WRITE_FAULTS), KEYS: tuple(VLLM_KEY_FAULTS)},
    "sglang": {PAGES: tuple(SGLANG_FAULTS), WRITES: tuple(SGLANG_WRITE_FAULTS), KEYS: tuple(SGLANG_KEY_FAULTS)},
}
"""engine -> group -> fault kinds that are made there."""
STORAGE = {
    "embedded": (("fp32", "fp32"), ("fp8_e4m3", "int4"), ("fp8_e4m3", "fp32"), ("fp32", "int4")),
    "vllm": (("fp32", "fp32"),),
    "sglang": (("fp32", "fp32"), ("fp8_e4m3", "bf16")),
}
"""KV dtype and weights, taken in turns; in vLLM one engine serves all trials, as its campaigns have the others."""
PAGE_SIZE = {"embedded": 16, "vllm": 32, "sglang": 16}
SCHEDULING = {"embedded": ("",), "vllm": ("async",), "sglang": ("normal", "overlap")}
MODEL = {"embedded": "recall", "vllm": "tiny", "sglang": "tiny"}
TITLES = {"embedded": "Embedded engine", "vllm": "vLLM 0.32.0, runner V1", "sglang": "SGLang 0.5.23"}
ATTEMPTS = 4
"""Seeds per wanted trial: a draw that finds no victim is no trial, and the next one is taken."""


def plans(engine: str, group: str, fault: str, level: str) -> Iterator[TrialPlan]:
    """Trials of one fault kind at one level, the same ones at each: cells in turns, and a seed each."""
    storage, scheduling = STORAGE[engine], SCHEDULING[engine]
    for index in range(1000):
        kv_dtype, weights = storage[index % len(storage)]
        if group == TRANSFERS and kv_dtype == "fp32":
            weights = "fp32"
        cell = Cell(
            engine=engine,
            fault=fault,
            kv_dtype=kv_dtype,
            weights=weights,
            page_size=PAGE_SIZE[engine],
            proofs=level,
            level="keys" if group == KEYS else "tags",
            runner="v1" if engine == "vllm" else "",
            scheduling=scheduling[index // len(storage) % len(scheduling)],
            phases="pd" if group == TRANSFERS else "single",
        )
        # The campaigns' traffics of seed 1.
        yield TrialPlan(index=index, cell=cell, traffic_seed=1000 + index % 4, fault_seed=100 + index)


def measure(engine: str, group: str, fault: str, trials: int) -> dict[str, Any]:
    """One row: trials at each level, how many were found, and in how many the fault changed tokens without a guard."""
    row: dict[str, Any] = {"group": group, "fault": fault}
    for level in LEVELS:
        made: list[TrialResult] = []
        for plan in islice(plans(engine, group, fault, level), ATTEMPTS * trials):
            result = run_trial(plan, model=MODEL[engine], backend="torch")
            if result.outcome != NOT_INJECTED:
                made.append(result)
            if len(made) == trials:
                break
        row["trials"], row["potent"] = len(made), sum(result.potent for result in made)
        row[level] = sum(result.proven for result in made)
        row[f"{level}_by"] = sorted({proof for result in made if result.proven for proof in result.detected_by})
        row[f"{level}_false_alarms"] = sum(len(result.false_positives) for result in made)
    return row


def cell_of(row: dict[str, Any], level: str) -> str:
    """What a level made of a fault kind, in the words of the table."""
    found, trials, alarms = row[level], row["trials"], row[f"{level}_false_alarms"]
    said = f"found {found} of {trials}: {', '.join(name.replace('_', ' ') for name in row[level + '_by'])}"
    return (said if found else "**missed**") + (f", {alarms} reports about others later" if alarms else "")


def table(results: dict[str, Any]) -> str:
    """The tables of docs/levels.md."""
    lines = []
    for engine, measured in results.items():
        lines += [f"### {TITLES[engine]}", ""]
        lines += ["| group | fault kind | off: tokens changed | `tags` | `keys` |", "|---|---|---|---|---|"]
        for row in measured["rows"]:
            cells = " | ".join(cell_of(row, level) for level in LEVELS)
            lines.append(f"| {row['group']} | `{row['fault']}` | {row['potent']} of {row['trials']} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure one engine, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(FAULTS), default="embedded")
    parser.add_argument("--trials", type=int, default=3, help="per fault kind and level")
    parser.add_argument("--fault", help="only this one")
    parser.add_argument("--json", type=Path, help="measured engines are put into this file, the others stay")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(RESULTS.read_text())))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    started, rows = time.time(), []
    for group, faults in FAULTS[arguments.engine].items():
        for fault in faults:
            if arguments.fault in (None, fault):
                rows.append(measure(arguments.engine, group, fault, arguments.trials))
                print(json.dumps(rows[-1]), flush=True)
    print(f"{time.time() - started:.0f} s")
    if arguments.json:
        known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        known[arguments.engine] = {"trials": arguments.trials, "rows": rows}
        ordered = {engine: known[engine] for engine in FAULTS if engine in known}
        arguments.json.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
