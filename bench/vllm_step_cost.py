"""What kvguard adds to a step of a real vLLM engine on the host, in microseconds, the kernels themselves excluded.

    .venv-vllm/bin/python bench/vllm_step_cost.py [--json] [--steps 400] [--block-size 32] [--forward] [--level tags]

An engine runs in this process with 32 decode requests. Around each of vLLM's own functions that kvguard wraps stands
one clock, around kvguard's wrapper another; the difference is what kvguard added, the clocks' own calls included (some
0.2 us for each wrapped call). The worker's part excludes the kernels, or the call of C that stands for them in host
memory, which are the column `kernels`.

The forward and the sampling are left out unless `--forward` is given: on a GPU they run elsewhere, while here they run
on the very core that keeps the books and leave it with cold caches. All else of the step is vLLM's own: scheduling,
the update of the worker's batch, the preparation of its inputs, the update from the output.

steady    no request takes a page in the step
natural   two of the requests do, what a page of 16 tokens gives on average
all       all 32 do in the same step
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BATCH = 32
CONTEXTS = (64, 1024)
clock = time.perf_counter_ns


class Clocks:
    """Nanoseconds per part since the last step; a finished step goes to `steps` with its page crossings."""

    def __init__(self, *, forward: bool) -> None:
        self.forward = forward
        self.spent: defaultdict[str, int] = defaultdict(int)
        self.steps: list[tuple[int, dict[str, int]]] = []
        self.crossings = 0
        self.decodes = False

    def around(self, call: Callable[..., Any], part: str, sign: int) -> Callable[..., Any]:
        """The call with a clock around it that counts for the part, or against it."""
        spent = self.spent

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent[part] += sign * (clock() - started)

        return timed

    def attach(self, owner: Any, part: str, names: tuple[str, ...], build: Callable[[], None]) -> None:
        """Clocks inside and outside of what `build` wraps around these methods of `owner`."""
        for name in names:
            setattr(owner, name, self.around(getattr(owner, name), part, -1))
        build()
        for name in names:
            setattr(owner, name, self.around(getattr(owner, name), part, +1))


def instrument(clocks: Clocks) -> None:
    """Clocks around everything that kvguard wraps in the engine that is built next."""
    import kvguard.step_arrays as step_arrays
    import kvguard.verifier as verifier
    from kvguard.adapters.vllm import plugin, scheduler_side, worker_side

    plugin.register()

    def kernel(original: Callable[..., Any]) -> Callable[..., Any]:
        """Its time counts for the kernels and against the worker."""
        return clocks.around(clocks.around(original, "kernels", +1), "worker", -1)

    for name in ("verify_pages", "verify_slots", "scatter_tags"):
        setattr(verifier, name, kernel(getattr(verifier, name)))
    arrays: Any = step_arrays
    bind = arrays.bind

    def bound(reads: Any, writes: Any) -> Any:
        check = bind(reads, writes)
        return None if check is None else kernel(check)

    arrays.bind = bound

    build_scheduler_side = scheduler_side.SchedulerSide.__init__

    def scheduler_built(side: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        pool = scheduler.kv_cache_manager.block_pool
        manager = scheduler.kv_cache_manager
        pool_names = ("get_new_blocks", "free_blocks", "cache_full_blocks", "_maybe_evict_cached_block")

        def build() -> None:
            build_scheduler_side(side, scheduler, *args, **kwargs)

        def build_pool() -> None:
            clocks.attach(manager, "pool", ("get_computed_blocks",), build)

        def build_update() -> None:
            clocks.attach(scheduler, "update", ("update_from_output",), build_pool)

        def build_schedule() -> None:
            clocks.attach(scheduler, "schedule", ("schedule",), build_update)

        clocks.attach(pool, "pool", pool_names, build_schedule)
        get_new_blocks, schedule, update = pool.get_new_blocks, scheduler.schedule, scheduler.update_from_output

        def counted(number: int, *rest: Any, **options: Any) -> Any:
            clocks.crossings += number
            return get_new_blocks(number, *rest, **options)

        def noted(*rest: Any, **options: Any) -> Any:
            clocks.crossings = 0
            output = schedule(*rest, **options)
            scheduled = output.num_scheduled_tokens
            clocks.decodes = len(scheduled) == BATCH and set(scheduled.values()) == {1}
            return output

        def finished(*rest: Any, **options: Any) -> Any:
            result = update(*rest, **options)
            if clocks.decodes:
                clocks.steps.append((clocks.crossings, dict(clocks.spent)))
            clocks.spent.clear()
            return result

        pool.get_new_blocks, scheduler.schedule, scheduler.update_from_output = counted, noted, finished

    scheduler_side.SchedulerSide.__init__ = scheduler_built  # type: ignore[method-assign, assignment]

    prepares = ("_get_slot_mappings", "prepare_attn")
    for owner, prepare in zip((worker_side.WorkerSideV1, worker_side.WorkerSideV2), prepares, strict=True):
        _instrument_worker(clocks, owner, ("execute_model", "sample_tokens", prepare))


def _instrument_worker(clocks: Clocks, owner: Any, names: tuple[str, ...]) -> None:
    build_worker_side = owner.__init__

    def worker_built(side: Any, runner: Any) -> None:
        if not clocks.forward:
            without_forward(runner)
        clocks.attach(runner, "worker", names, lambda: build_worker_side(side, runner))

    owner.__init__ = worker_built


def summary(samples: list[dict[str, int]]) -> dict[str, Any]:
    """Medians of each part, and median and 95th percentile of what kvguard added in all."""
    parts = ("schedule", "pool", "update", "worker", "kernels")
    totals = sorted(sum(sample.get(part, 0) for part in parts[:-1]) / 1e3 for sample in samples)
    row: dict[str, Any] = {
        f"{part}_us": round(statistics.median(sample.get(part, 0) / 1e3 for sample in samples), 1) for part in parts
    }
    row |= {
        "steps": len(samples),
        "median_us": round(statistics.median(totals), 1),
        "p95_us": round(totals[int(0.95 * len(totals))], 1),
        "min_us": round(totals[0], 1),
    }
    return row


def without_forward(runner: Any) -> None:
    """The runner prepares a step as ever, and answers one token for every request."""
    import numpy as np
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    names: list[str] = []

    def execute_model(output: Any, *rest: Any, **options: Any) -> Any:
        runner._update_states(output)
        if not output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        names[:] = runner.input_batch.req_ids
        scheduled = np.array([output.num_scheduled_tokens[name] for name in names], np.int32)
        runner._prepare_inputs(output, scheduled)
        tokens, requests = output.total_num_scheduled_tokens, len(names)
        runner._get_slot_mappings(tokens, requests, tokens)
        return None

    def sample_tokens(*rest: Any, **options: Any) -> Any:
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=[*names], req_id_to_index=places, sampled_token_ids=[[5] for _ in names])

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens


def measure(engine: Any, clocks: Clocks, context: int, steps: int, block_size: int) -> list[dict[str, Any]]:
    """One row each for steady, natural and all-crossing steps at a context length in tokens."""
    rng = random.Random(context)
    samples: dict[str, list[dict[str, int]]] = defaultdict(list)
    for staggered in (True, False):
        spread = block_size // 16
        lengths = [context + (index % 16 * spread if staggered else 0) for index in range(BATCH)]
        prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
        clocks.steps.clear()
        engine.generate(prompts, [steps] * BATCH)
        for crossings, spent in clocks.steps:
            kind = {0: "steady", 2: "natural", BATCH: "all"}.get(crossings)
            if kind is not None:
                samples[kind].append(spent)
    return [{"case": kind, "context_tokens": context, **summary(samples[kind])} for kind in samples]


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--forward", action="store_true", help="run the model too, on the same cores")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--level", choices=("tags", "keys"), default="tags")
    arguments = parser.parse_args()
    os.environ["KVGUARD_LEVEL"] = arguments.level
    import structlog
    import structlog.testing

    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
    from tests.vllm.tiny import write_checkpoint

    clocks = Clocks(forward=arguments.forward)
    longest = max(CONTEXTS) + arguments.steps + 64
    with tempfile.TemporaryDirectory(prefix="kvguard-bench-") as folder:
        os.environ["VLLM_PLUGINS"] = ""
        instrument(clocks)
        engine = VllmEngine(
            VllmOptions(
                model=write_checkpoint(Path(folder) / "model"),
                max_model_len=longest,
                max_num_seqs=BATCH,
                max_num_batched_tokens=4096,
                block_size=arguments.block_size,
                num_blocks=BATCH * (longest // arguments.block_size + 2) + 1,
            )
        )
        results = [
            row
            for context in CONTEXTS
            for row in measure(engine, clocks, context, arguments.steps, arguments.block_size)
        ]
    if arguments.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "results": results}, indent=2))
        return
    print("case     context  steps  schedule   pool  update  worker  kernels  median us  p95 us  min us")
    for row in results:
        print(
            f"{row['case']:<8} {row['context_tokens']:>7}  {row['steps']:>5}  {row['schedule_us']:>8}  "
            f"{row['pool_us']:>5}  {row['update_us']:>6}  {row['worker_us']:>6}  {row['kernels_us']:>7}  "
            f"{row['median_us']:>9}  {row['p95_us']:>6}  {row['min_us']:>6}"
        )


if __name__ == "__main__":
    main()
