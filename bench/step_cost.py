"""Host cost of a guarded step, in microseconds: Guard.step + Guard.judge and page calls, the device check excluded.

    python bench/step_cost.py [--json]

steady   no page is crossed in the step
natural  one request in 16 takes a page and publishes the one before it, what a page of 16 tokens gives on average
each     every request of the batch takes a page, in one `allocate_each`
all      the same with one `allocate` per request

Pages have been used before, as in an engine that has run for a while. The context length does not enter: the ledger
keeps its digest, so a longer one costs nothing more per step.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import numpy as np
import structlog
import structlog.testing

from kvguard.config import GuardConfig
from kvguard.guard import Guard
from kvguard.kernels.verify_pages import layout
from kvguard.messages import Verdicts
from kvguard.pools import PoolSpec

REPEATS = 400
CASES = ("steady", "natural", "each", "all")


def measure(batch: int, context_pages: int, case: str) -> dict[str, Any]:
    """Median and 95th percentile over REPEATS steps, in microseconds, for one KV group."""
    per_step = {"steady": 0, "natural": max(1, batch // 16)}.get(case, batch)
    pages = batch * (context_pages + 1) + REPEATS * per_step + 2
    guard = Guard([PoolSpec(num_pages=pages, page_size=16)], GuardConfig(seed=1))
    guard.start("earlier")
    used = list(range(1, pages))
    guard.allocate("earlier", used)
    guard.finish("earlier")
    guard.retire(used)
    names = [f"request-{index}" for index in range(batch)]
    rows = list(range(batch))
    free = iter(used)
    clean = np.zeros((1, batch, layout.RECORD_WORDS), np.int64)
    for name in names:
        guard.start(name)
        guard.allocate(name, [next(free) for _ in range(context_pages + 1)])
    columns = dict.fromkeys(names, context_pages)
    ends = [context_pages * 16] * batch
    delta = guard.step(names, rows, ends)
    guard.judge(Verdicts(step=delta.step, records=clean))
    samples = []
    for step in range(REPEATS):
        crossing = [names[(step * per_step + place) % batch] for place in range(per_step)]
        drawn = [next(free) for _ in crossing]
        if case == "natural":
            # The step writes the last token of the page that it publishes, so that it keeps its own promise.
            ends = [end + 16 if name in crossing else end for name, end in zip(names, ends, strict=True)]
        started = time.perf_counter()
        if case == "natural":
            for name, page in zip(crossing, drawn, strict=True):
                guard.publish(name, columns[name], (name, columns[name]))
                columns[name] += 1
                guard.allocate(name, [page])
        elif case == "each":
            guard.allocate_each(crossing, drawn)
        else:
            for name, page in zip(crossing, drawn, strict=True):
                guard.allocate(name, [page])
        delta = guard.step(names, rows, ends)
        guard.judge(Verdicts(step=delta.step, records=clean))
        samples.append((time.perf_counter() - started) * 1e6)
    samples.sort()
    return {
        "batch": batch,
        "context_pages": context_pages,
        "case": case,
        "median_us": round(statistics.median(samples), 1),
        "p95_us": round(samples[int(0.95 * len(samples))], 1),
        "min_us": round(samples[0], 1),
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    results = [
        measure(batch, context, case)
        for case in CASES
        for batch in (1, 8, 32, 256)
        for context in (16, 1024)
        if batch * context <= 65536
    ]
    if arguments.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "results": results}, indent=2))
        return
    print("case     batch  context  median us  p95 us  min us")
    for row in results:
        print(
            f"{row['case']:<8} {row['batch']:>5}  {row['context_pages']:>7}  {row['median_us']:>9}  {row['p95_us']:>6} "
            f" {row['min_us']:>6}"
        )


if __name__ == "__main__":
    main()
