"""The check of a repeated step on the CPU, in C and in torch, in turn; microseconds, medians.

    .venv/bin/python -m bench.host_check

32 decode rows in pages of 32 tokens, level `tags`. `check` is `Verifier.check_again`, `verdicts` is
`PendingVerdicts.resolve`.
cold: before each call 48 MiB are read, as a forward on the same core would leave the caches.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import structlog
import structlog.testing
import torch

from kvguard.config import GuardConfig
from kvguard.guard import Guard
from kvguard.kernels.host_check import is_built
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs, Verifier

ROWS = 32
PAGE = 32
CONTEXTS = (64, 1024)
CALLS = {"hot": 6000, "cold": 400}
CACHES = np.ones(48 << 17)


def decoding(tokens: int, *, in_c: bool) -> tuple[Guard, Verifier]:
    """Both halves, after a first step of rows of so many tokens."""
    held = tokens // PAGE
    guard = Guard([PoolSpec(num_pages=ROWS * held + 1, page_size=PAGE)], GuardConfig.load(seed=3))
    verifier = Verifier(guard.setup, backend="torch")
    if not in_c:
        vars(verifier._arrays)["bind"] = lambda reads, writes: None
    table = torch.arange(1, ROWS * held + 1, dtype=torch.int32).view(ROWS, held)
    names = [f"r{row}" for row in range(ROWS)]
    for name, pages in zip(names, table.tolist(), strict=True):
        guard.start(name)
        guard.allocate(name, pages)
    inputs = PoolInputs(
        table=table,
        slot_mapping=table[:, -1].to(torch.int64) * PAGE + PAGE - 1,
        query_start=torch.arange(ROWS + 1, dtype=torch.int32),
        lengths=torch.full((ROWS,), tokens, dtype=torch.int32),
        place_is_row=True,
    )
    delta = guard.step(names, list(range(ROWS)), [tokens] * ROWS, [tokens - 1] * ROWS)
    assert guard.judge(verifier.check(delta, {"main": inputs}, table_rows=list(range(ROWS))).resolve()).clean
    return guard, verifier


def repeat(guard: Guard, verifier: Verifier, *, cold: bool) -> tuple[float, float]:
    """One step more: what its check took, and its verdicts, in us."""
    delta: Any = guard.step_again(0)
    if cold:
        CACHES.sum()
    times = [time.perf_counter_ns()]
    pending: Any = verifier.check_again(delta)
    times.append(time.perf_counter_ns())
    verdicts = pending.resolve()
    times.append(time.perf_counter_ns())
    assert verdicts.clean and guard.judge(verdicts).clean
    return (times[1] - times[0]) / 1e3, (times[2] - times[1]) / 1e3


def main() -> None:
    """Print a table."""
    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    torch.set_num_threads(1)
    if not is_built():
        raise SystemExit("the C extension is not built: install kvguard where there is a C compiler")
    print("context  caches  way    check  p95    verdicts")
    for tokens in CONTEXTS:
        ways = {way: decoding(tokens, in_c=way == "C") for way in ("torch", "C")}
        for caches, calls in CALLS.items():
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for call in range(calls):
                for way in list(ways)[:: -1 if call % 2 else 1]:
                    found[way].append(repeat(*ways[way], cold=caches == "cold"))
            for way, samples in found.items():
                checks, verdicts = (sorted(column) for column in zip(*samples, strict=True))
                p95 = checks[int(0.95 * calls)]
                print(
                    f"{tokens:>7}  {caches:<6}  {way:<5}  {statistics.median(checks):5.1f}  {p95:5.1f}  "
                    f"{statistics.median(verdicts):5.1f}"
                )


if __name__ == "__main__":
    main()
