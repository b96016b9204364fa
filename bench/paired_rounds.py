"""Two engines in processes of their own, one guarded, in alternating pairs of rounds; the same for every engine."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine_process import EngineProcess

FIGURES = {
    "tokens_per_s": "tokens/s",
    "cpu_ms": "CPU ms per token",
    "p50_ms": "inter-token p50, ms",
    "p95_ms": "p95, ms",
}
"""Of a round, and what they are called; an engine's rounds need not have all."""
SETTLE_S = 0.3  # between rounds, for the idle engine's threads to stop spinning


def latencies(ends: Sequence[tuple[float, int]], batch: int) -> dict[str, float]:
    """Inter-token p50 and p95 in ms. ends: of each step, when, and how many requests got a token in it."""
    pairs = zip(ends, ends[1:], strict=False)
    gaps = [later - earlier for (earlier, _), (later, got) in pairs if got == batch]
    return {"p50_ms": statistics.median(gaps) * 1e3, "p95_ms": statistics.quantiles(gaps, n=20)[-1] * 1e3}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(plain: EngineProcess, guarded: EngineProcess, *, batch: int, pairs: int, tokens: int) -> dict[str, Any]:
    """The pairs of one batch size."""
    for side in (plain, guarded):
        side.ask(batch=batch, tokens=16, seed=1)
    rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for pair in range(pairs):
        found: dict[bool, dict[str, Any]] = {}
        for second in (False, True):
            on = second != bool(pair % 2)
            time.sleep(SETTLE_S)
            found[on] = (guarded if on else plain).ask(batch=batch, tokens=tokens, seed=1000 * batch + pair)
        if found[False]["tokens"] != found[True]["tokens"]:
            raise SystemExit(f"batch {batch}, pair {pair}: the two engines gave different tokens")
        rounds.append((found[False], found[True]))
    report: dict[str, Any] = {"batch": batch, "pairs": pairs, "tokens": tokens}
    for name in FIGURES.keys() & rounds[0][0].keys():
        report[name] = {
            "off": statistics.median(off[name] for off, _ in rounds),
            "on": statistics.median(on[name] for _, on in rounds),
            "ratio": spread([on[name] / off[name] for off, on in rounds]),
        }
    return report


def print_report(report: dict[str, Any]) -> None:
    """A line per figure."""
    for name, label in FIGURES.items():
        if name not in report:
            continue
        figure, ratio = report[name], report[name]["ratio"]
        print(
            f"{report['batch']:>5}  {label:<20} {figure['off']:>8.2f} {figure['on']:>8.2f}  "
            f"{ratio['median']:.4f} ({ratio['min']:.4f}..{ratio['max']:.4f})",
            flush=True,
        )


def compare(
    plain: EngineProcess,
    guarded: EngineProcess,
    *,
    batches: Sequence[int],
    pairs: int,
    tokens: int,
    file: Path | None,
    facts: dict[str, Any],
) -> None:
    """Print a line per figure and batch size, stop both, and write everything to `file` if there is one."""
    load = os.getloadavg()[0]
    if load > 2:
        print(f"WARNING: the load of this machine is {load:.1f}: the figures are not to be quoted")
    print("batch  figure                    off       on  median of pair ratios on/off (min..max)")
    reports = []
    for batch in batches:
        report = measure(plain, guarded, batch=batch, pairs=pairs, tokens=tokens)
        print_report(report)
        reports.append(report)
    counters = guarded.ask()
    for side in (plain, guarded):
        side.stop()
    if counters and (counters["steps_verified"] != counters["steps_seen"] or counters["violations"]):
        raise SystemExit(f"not every step was verified, or something was flagged: {counters}")
    if file is not None:
        content = facts | {"load_at_start": load, "guard": counters}
        file.write_text(json.dumps(content | {"reports": reports}, indent=1) + "\n")
