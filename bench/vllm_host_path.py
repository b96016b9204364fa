"""The host path that kvguard adds to a step of vLLM, on vLLM's own objects, in a tight loop; microseconds a step.

    .venv-vllm/bin/python bench/vllm_host_path.py [--json]

A real engine brings 32 requests into decode. Then one step is repeated: the pass over the scheduled requests, the
worker's preparation of the check, the verdicts' way back, and judging them, each exactly as the wrappers call it, on
the engine's scheduler, block pool and block tables. vLLM's own work is left out (what it takes to draw the blocks is
measured on the unwrapped pool, in between, and subtracted), and so are the kernels: an empty one that finds every row
clean stands in, in the way that such a step takes here: the C extension's where it was built, else the kernels'. What
a step costs on a core that runs vLLM's own work and the forward in between, with cold caches, is what
bench/vllm_step_cost.py measures.

Every request goes on by a token in each step, as in decode, and vLLM's habits are kept: a block is published in the
step that fills it, and the next one is drawn in the step after.

steady    no request fills a block or takes one
natural   two requests fill their blocks of 32 and two others take one: as often as with blocks of 16 on average
publish   all 32 requests fill their blocks in the same step
draw      all 32 take another one in the same step
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WARM_UP = 20
BATCH = 32
BLOCK = 32
CONTEXTS = (64, 1024)
STEPS = 640


class GuardedStep:
    """An engine in decode, and one guarded step of it that can be repeated."""

    def __init__(self, engine: Any, context: int, *, staggered: bool) -> None:
        """`staggered`: two requests stand at each place in a block; otherwise all stand at the same."""
        from vllm import SamplingParams

        self._engine = engine
        parameters = SamplingParams(max_tokens=STEPS + 400, temperature=0, ignore_eos=True, detokenize=False)
        for row in range(BATCH):
            length = context + (row // 2 if staggered else 0)
            prompt = [(row * 7 + token) % 251 for token in range(length)]
            engine.llm_engine.add_request(f"{context}-{row}", {"prompt_token_ids": prompt}, parameters)
        while sum(request.num_output_tokens > 0 for request in engine.scheduler.running) < BATCH:
            engine.llm_engine.step()
        self._side, self._worker = engine.guard_side, engine.runner._kvguard_attached
        self._output = engine.scheduler.schedule()
        # This one is never run: the steps below take its place.
        step = self._output._kvguard.delta.step
        self._side.guard.abandon(step)
        self._worker._verifier._step = step
        self._blocks_of = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self._names = list(self._output.num_scheduled_tokens)
        self._filled: list[str] = []
        self._growing: list[str] = []
        self._publishing: list[Any] = []
        self._answer: Any = None
        self._key = 0
        # What the runner says of a step without padding lanes.
        tables = engine.runner.input_batch.block_table.block_tables
        self._slots = {group: table.slot_mapping.gpu[:BATCH] for group, table in enumerate(tables)}

    def forget_launches(self) -> None:
        """The next step's kernels are those that stand in its module now."""
        self._worker._verifier._launches, self._worker._verifier._checked = None, False

    def draw_unguarded(self, pages: int) -> int:
        """What vLLM itself takes to draw so many blocks one by one, in ns; they become the last of the free ones."""
        pool = self._engine.pool
        wrappers = {name: vars(pool).pop(name) for name in ("get_new_blocks", "_maybe_evict_cached_block")}
        started = time.perf_counter_ns()
        drawn = [pool.get_new_blocks(1) for _ in range(pages)]
        spent = time.perf_counter_ns() - started
        for (block,) in drawn:
            block.ref_cnt = 0
            pool.free_block_queue.append(block)
        vars(pool).update(wrappers)
        return spent

    def advance(self) -> str:
        """One token more for every request, as vLLM counts it; answers which case the step is."""
        requests, names = self._engine.scheduler.requests, self._names
        for name in names:
            requests[name].num_computed_tokens += 1
        self._filled = [name for name in names if requests[name].num_computed_tokens % BLOCK == 0]
        self._growing = [name for name in names if requests[name].num_computed_tokens % BLOCK == 1]
        self._publishing, self._answer = self._blocks_filled(), SimpleNamespace()
        if len(self._filled) == len(self._growing) == 2:
            return "natural"
        return "publish" if self._filled else "draw" if self._growing else "steady"

    def _blocks_filled(self) -> list[Any]:
        """A request, its column and its block for each that vLLM is about to publish."""
        filled = []
        for name in self._filled:
            blocks = self._blocks_of[name]
            self._key += 1
            filled.append((name, len(blocks) - 1, SimpleNamespace(block_hash=self._key, block_id=blocks[-1].block_id)))
        return filled

    def to_draw(self) -> int:
        """Blocks that the step takes."""
        return len(self._growing)

    def run(self) -> None:
        """Everything that the wrappers add to the step."""
        for name in self._growing:
            self._blocks_of[name] += self._engine.pool.get_new_blocks(1)
        for name, column, block in self._publishing:
            self._side._note_publication(name, 0, column, block, False)
        payload = self._side._payload(self._output)
        self._worker._payload = payload
        self._worker._verify(self._slots)
        self._side._verdicts.act(payload.delta, self._worker._deliver(self._answer))


def fill_cache(engine: Any) -> None:
    """Leave every block of the pool in the cache, as in a service: whoever draws one evicts what it holds."""
    from vllm import SamplingParams

    blocks, of_prompt = engine.pool.get_num_free_blocks(), 16
    parameters = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for number in range(blocks // of_prompt):
        prompt = [(number * 31 + token * 3 + 1) % 251 for token in range(of_prompt * BLOCK)]
        prompt[:2] = 250 - number % 250, number // 250
        engine.llm_engine.add_request(f"fill-{number}", {"prompt_token_ids": prompt}, parameters)
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
    cached = sum(block.block_hash is not None for block in engine.pool.blocks)
    assert cached >= 0.9 * blocks, f"{cached} of {blocks} blocks are cached"


def measure(step: GuardedStep, context: int) -> list[dict[str, Any]]:
    """Median, 95th percentile and minimum of each case that STEPS steps have."""
    samples: dict[str, list[float]] = {}
    own: dict[str, list[float]] = {}
    for repeat in range(STEPS + WARM_UP):
        case = step.advance()
        vllm_us = step.draw_unguarded(step.to_draw()) / 1e3
        started = time.perf_counter_ns()
        step.run()
        spent = time.perf_counter_ns() - started
        if repeat >= WARM_UP:
            samples.setdefault(case, []).append(spent / 1e3)
            own.setdefault(case, []).append(vllm_us)
    return [_row(case, context, samples[case], own[case]) for case in samples]


def _row(case: str, context: int, samples: list[float], own: list[float]) -> dict[str, Any]:
    vllm_us = statistics.median(own) if case in ("natural", "draw") else 0.0
    samples = sorted(sample - vllm_us for sample in samples)
    return {
        "case": case,
        "context_tokens": context,
        "steps": len(samples),
        "median_us": round(statistics.median(samples), 1),
        "p95_us": round(samples[int(0.95 * len(samples))], 1),
        "min_us": round(samples[0], 1),
        "vllm_us": round(vllm_us, 1),
    }


def results() -> list[dict[str, Any]]:
    """Every case at every context length, each context in an engine of its own."""
    import torch

    from kvguard import step_arrays
    from kvguard import verifier as verifier_module
    from kvguard.adapters.vllm.plugin import register
    from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
    from kvguard.kernels.host_check import bind, is_built
    from tests.vllm.tiny import write_checkpoint

    register()
    verifier: Any = verifier_module
    arrays: Any = step_arrays
    found = []
    kernels = verifier.verify_pages, verifier.verify_slots, verifier.scatter_tags
    with tempfile.TemporaryDirectory(prefix="kvguard-bench-") as folder:
        model = write_checkpoint(Path(folder))
        for context, staggered in itertools.product(CONTEXTS, (False, True)):
            engine = VllmEngine(
                VllmOptions(
                    model=model,
                    max_model_len=4096,
                    max_num_seqs=BATCH,
                    # Prompts run in one step, so that their requests stand where they are meant to.
                    max_num_batched_tokens=BATCH * (context + BATCH),
                    block_size=BLOCK,
                    num_blocks=2 * BATCH * ((context + STEPS) // BLOCK + 8),
                )
            )
            fill_cache(engine)
            step = GuardedStep(engine, context, staggered=staggered)
            verifier.verify_pages = verifier.verify_slots = lambda **given: given["record"].zero_()
            verifier.scatter_tags = lambda **given: None
            if is_built():
                arrays.bind = lambda reads, writes: lambda record, pool: True
            step.forget_launches()
            with torch.inference_mode():
                found += measure(step, context)
            assert engine.guard_side.guard.health().ok and not engine.guard_side.guard.violations
            verifier.verify_pages, verifier.verify_slots, verifier.scatter_tags = kernels
            arrays.bind = bind
    return found


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"KVGUARD_LEVEL": "tags", "VLLM_PLUGINS": ""}
    import structlog
    import structlog.testing

    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    rows = results()
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("case     context  steps  median us  p95 us  min us  (vLLM's own, subtracted)")
    for row in rows:
        print(
            f"{row['case']:<8} {row['context_tokens']:>7}  {row['steps']:>5}  {row['median_us']:>9}  "
            f"{row['p95_us']:>6}  {row['min_us']:>6}  {row['vllm_us']:>6}"
        )


if __name__ == "__main__":
    main()
