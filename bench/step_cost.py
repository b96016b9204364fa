"""Host cost of a guarded step, in microseconds: Guard.step + Guard.judge, the device check excluded.

    python bench/step_cost.py [--json]

Steady decode means that no page is crossed in the step; `crossing` gives every request of the batch one new page.
The context length does not enter: the ledger keeps its digest, so a longer one costs nothing more per step.
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


def measure(batch: int, context_pages: int, *, crossing: bool) -> dict[str, Any]:
    """Median and 95th percentile over REPEATS steps, in microseconds, for one KV group."""
    pages = batch * (context_pages + REPEATS + 2) + 2
    guard = Guard([PoolSpec(num_pages=pages, page_size=16)], GuardConfig(seed=1))
    names = [f"request-{index}" for index in range(batch)]
    rows = list(range(batch))
    free = iter(range(1, pages))
    for name in names:
        guard.start(name)
        guard.allocate(name, [next(free) for _ in range(context_pages + 1)])
    clean = np.zeros((1, batch, layout.RECORD_WORDS), np.int64)
    tokens = context_pages * 16
    samples = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        if crossing:
            for name in names:
                guard.allocate(name, [next(free)])
        delta = guard.step(names, rows, [tokens] * batch)
        guard.judge(Verdicts(step=delta.step, records=clean))
        samples.append((time.perf_counter() - started) * 1e6)
    samples.sort()
    return {
        "batch": batch,
        "context_pages": context_pages,
        "crossing": crossing,
        "median_us": round(statistics.median(samples), 1),
        "p95_us": round(samples[int(0.95 * len(samples))], 1),
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    results = [
        measure(batch, context, crossing=crossing)
        for crossing in (False, True)
        for batch in (1, 8, 32, 256)
        for context in (16, 1024)
        if batch * context <= 65536
    ]
    if arguments.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "results": results}, indent=2))
        return
    print("batch  context  crossing  median us  p95 us")
    for row in results:
        print(
            f"{row['batch']:>5}  {row['context_pages']:>7}  {row['crossing']!s:>8}  {row['median_us']:>9}  "
            f"{row['p95_us']:>6}"
        )


if __name__ == "__main__":
    main()
