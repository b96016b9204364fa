"""Throughput of the embedded engine with the guard off and on, in alternating pairs.

    python bench/embedded_overhead.py [--pairs 9]

The recall model's step takes about a millisecond: the guard's fixed price per step weighs here as it never will in a
real deployment. The ratio of each pair is what counts on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import time

import structlog
import structlog.testing
import torch

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.targets.embedded_runs import engine_config, load_model, make_guard
from kvguard.fault_injection.traffic import endless_traffic

STEPS = 400


def run_once(guarded: bool, *, kv_dtype: str, weights: str) -> tuple[float, float]:
    """(tokens per second, milliseconds per step) over STEPS steps of seeded traffic."""
    config = engine_config(kv_dtype=kv_dtype, page_size=16, tight=False)
    guard = make_guard(config, proofs="all", backend="torch", seed=1) if guarded else None
    engine = Engine(load_model("recall", weights), config, guard)
    traffic = endless_traffic(5)
    started = time.perf_counter()
    for _ in range(STEPS):
        for _, request in next(traffic) if len(engine.scheduler.waiting) < 8 else []:
            if request is not None:
                engine.submit(request)
        engine.step()
    seconds = time.perf_counter() - started
    tokens = sum(len(output.tokens) for output in engine.outputs.values())
    return tokens / seconds, seconds / STEPS * 1e3


def main() -> None:
    """Print one line per configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    print("kv        weights  off ms/step  on ms/step  median throughput ratio on/off (min..max)")
    for kv_dtype, weights in (("fp32", "fp32"), ("fp8_e4m3", "int4")):
        run_once(True, kv_dtype=kv_dtype, weights=weights)
        off, on, ratios = [], [], []
        for _ in range(arguments.pairs):
            plain, plain_ms = run_once(False, kv_dtype=kv_dtype, weights=weights)
            guarded, guarded_ms = run_once(True, kv_dtype=kv_dtype, weights=weights)
            off.append(plain_ms)
            on.append(guarded_ms)
            ratios.append(guarded / plain)
        print(
            f"{kv_dtype:<9} {weights:<8} {statistics.median(off):>11.2f} {statistics.median(on):>11.2f}  "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
