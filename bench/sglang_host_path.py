"""What the SGLang guard costs the host in a decode step: `python -m bench.sglang_host_path [--batch 32] [--json]`.

Runs in .venv-sglang or .venv: no model and no engine, but the hooks in the order in which SGLang calls them in a step
(allocation, run_batch, forward, result) on the tensors that they would get. Kernels are counted and not run: on a GPU
they are launches, whose own cost on the host is that of a launch; here the Python around them is what is measured.
SGLang's own functions are empty. Microseconds per step, the median of blocks of steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from kvguard.adapters.sglang import books as books_module
from kvguard.adapters.sglang import pages, steps
from kvguard.adapters.sglang.layout import PoolLayout
from kvguard.adapters.sglang.plugin import ATTACHED
from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard
from kvguard.config import GuardConfig

BLOCK, BLOCKS = 200, 25
KERNELS = ("stamp_rows", "retire_pages", "publish_row", "verify_rows", "verify_slots")


class Mode:
    """A decode batch's forward mode."""

    def is_decode(self) -> bool:
        """Yes."""
        return True

    def is_idle(self) -> bool:
        """No."""
        return False


class Step:
    """One scheduler's worth of stand-ins, and a decode step through the hooks."""

    def __init__(self, batch: int, page_size: int, context: int) -> None:
        tokens = batch * (context + BLOCK * BLOCKS + 64)
        num_pages = tokens // page_size + 2
        rows = batch + 1
        table = torch.zeros((rows, 64), dtype=torch.int32)
        self.scheduler = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            server_args=SimpleNamespace(tp_size=1),
            tree_cache=SimpleNamespace(),
            chunked_req=None,
        )
        layout = PoolLayout(num_pages, page_size, rows, "cpu")
        self.guard = SchedulerGuard(self.scheduler, layout, GuardConfig(level="tags"))
        setattr(self.scheduler, ATTACHED, self.guard)
        setattr(self.scheduler.tree_cache, ATTACHED, self.guard)
        self.runner = SimpleNamespace(**{ATTACHED: self.guard})
        self.processor = SimpleNamespace(tree_cache=self.scheduler.tree_cache)
        self.slots = torch.arange(1, batch + 1)
        self.lengths = torch.full((batch,), context, dtype=torch.int64)
        requests = [SimpleNamespace(rid=f"r{index}") for index in range(batch)]
        mode = Mode()
        self.batch = SimpleNamespace(
            tree_cache=self.scheduler.tree_cache,
            reqs=requests,
            req_pool_indices=torch.arange(1, batch + 1),
            seq_lens=self.lengths,
            forward_mode=mode,
        )
        self.forward = SimpleNamespace(
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.lengths,
            out_cache_loc=self.slots,
            forward_mode=mode,
        )
        self.result = SimpleNamespace()

    def guarded(self) -> None:
        """A decode step as SGLang's scheduler runs it."""
        pages.around_alloc_for_decode(self._allocate, self.batch, 1)
        steps.around_run_batch(self._run, self.scheduler, self.batch)
        steps.before_result(self.processor, self.batch, self.result)

    def plain(self) -> None:
        """The same calls without the hooks."""
        self._allocate(self.batch, 1)
        self._run_plain(self.scheduler, self.batch)

    def _allocate(self, batch: Any, token_per_req: int) -> torch.Tensor:
        return self.slots

    def _run(self, scheduler: Any, batch: Any) -> Any:
        steps.before_forward(self.runner, self.forward)
        return self.result

    def _run_plain(self, scheduler: Any, batch: Any) -> Any:
        return self.result


def measure(batch: int, page_size: int, context: int) -> dict[str, Any]:
    """Median microseconds that a step's hooks take, and kernels launched per step."""
    launched = dict.fromkeys(KERNELS, 0)

    def counted(name: str) -> Any:
        def kernel(**arguments: Any) -> None:
            launched[name] += 1
            if name in ("verify_rows", "verify_slots"):
                arguments["record"][:, 0] = 0

        return kernel

    with mock.patch.multiple(books_module, **{name: counted(name) for name in KERNELS}):
        step = Step(batch, page_size, context)
        times = []
        for _ in range(BLOCKS):
            started = time.thread_time()
            for _ in range(BLOCK):
                step.guarded()
            middle = time.thread_time()
            for _ in range(BLOCK):
                step.plain()
            ended = time.thread_time()
            times.append(((middle - started) - (ended - middle)) / BLOCK * 1e6)
    health = step.guard.health()
    assert health.ok and health.counters["rows_verified"] == BLOCK * BLOCKS * batch, health
    per_step = {name: count / (BLOCK * BLOCKS) for name, count in launched.items() if count}
    return {
        "batch": batch,
        "page_size": page_size,
        "context": context,
        "us_per_step": round(statistics.median(times), 1),
        "us_fastest_block": round(min(times), 1),
        "kernels_per_step": per_step,
    }


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [measure(options.batch, size, context) for size in (1, 16) for context in (64, 8192)]
    report = {"python": platform.python_version(), "torch": torch.__version__, "steps": found}
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for line in found:
        kernels = ", ".join(f"{count:g} {name}" for name, count in line["kernels_per_step"].items())
        print(
            f"batch {line['batch']}, pages of {line['page_size']:>2}, {line['context']:>5} tokens of context: "
            f"{line['us_per_step']:6.1f} us a step (fastest block {line['us_fastest_block']:.1f}); {kernels}"
        )


if __name__ == "__main__":
    main()
