"""The host path that kvguard adds to a step of vLLM, on vLLM's own objects, in a tight loop; microseconds a step.

    .venv-vllm/bin/python bench/vllm_host_path.py [--json]

A real engine brings 32 requests into decode. Then one step is repeated: the pass over the scheduled requests, the
worker's preparation of the check, the verdicts' way back, and judging them, each exactly as the wrappers call it, on
the engine's scheduler, block pool and block tables. vLLM's own work is left out (what it takes to draw the blocks is
measured on the unwrapped pool, in between, and subtracted), and so are the kernels: an empty one that finds every row
clean stands in. What a step costs on a core that runs vLLM's own work and the forward in between,
with cold caches, is what bench/vllm_step_cost.py measures.

steady    no request takes a page in the step; every request goes on by one token, as in decode
natural   two requests do (a page of 16 tokens gives two on average); vLLM publishes the pages that they have filled
all       all 32 do
"""

from __future__ import annotations

import argparse
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
REPEATS = {"steady": 2000, "natural": 400, "all": 24}
CROSSING = {"steady": 0, "natural": 2, "all": BATCH}


class GuardedStep:
    """An engine in decode, and one guarded step of it that can be repeated."""

    def __init__(self, engine: Any, context: int) -> None:
        from vllm import SamplingParams

        self._engine = engine
        parameters = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, detokenize=False)
        for row in range(BATCH):
            prompt = [(row * 7 + token) % 251 for token in range(context)]
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
        self._turn = 0
        # What the runner says of a step without padding lanes.
        tables = engine.runner.input_batch.block_table.block_tables
        self._slots = {group: table.slot_mapping.gpu[:BATCH] for group, table in enumerate(tables)}

    def draw_unguarded(self, pages: int) -> int:
        """What vLLM itself takes to draw so many blocks one by one, in ns; they go back to where they came from."""
        pool = self._engine.pool
        wrappers = {name: vars(pool).pop(name) for name in ("get_new_blocks", "_maybe_evict_cached_block")}
        started = time.perf_counter_ns()
        drawn = [pool.get_new_blocks(1) for _ in range(pages)]
        spent = time.perf_counter_ns() - started
        for (block,) in reversed(drawn):
            block.ref_cnt = 0
            pool.free_block_queue.prepend_n([block])
        vars(pool).update(wrappers)
        return spent

    def cross(self, pages: int) -> None:
        """A new block for each of the next requests, and the one that it has filled published."""
        for _ in range(pages):
            name = self._names[self._turn % BATCH]
            self._fill(name)
            self._engine.scheduler.requests[name].num_computed_tokens += BLOCK

    def _fill(self, name: str) -> None:
        blocks = self._blocks_of[name]
        filled = SimpleNamespace(block_hash=self._turn, block_id=blocks[-1].block_id)
        self._side._note_publication(name, 0, len(blocks) - 1, filled, False)
        blocks += self._engine.pool.get_new_blocks(1)
        self._turn += 1

    def advance(self) -> None:
        """One token more for every request, as vLLM counts it; first a block for each that has filled its last."""
        requests = self._engine.scheduler.requests
        full = [
            name for name in self._names if requests[name].num_computed_tokens >= len(self._blocks_of[name]) * BLOCK
        ]
        for name in full:
            self._fill(name)
        if full:
            self.run()
        for name in self._names:
            requests[name].num_computed_tokens += 1

    def run(self) -> None:
        """Everything that the wrappers add to a step."""
        payload = self._side._payload(self._output)
        self._worker._payload = payload
        self._worker._verify(self._slots)
        answer = self._worker._deliver(SimpleNamespace())
        self._side._verdicts.act(payload.delta, answer)


def measure(step: GuardedStep, case: str, context: int) -> dict[str, Any]:
    """Median, 95th percentile and minimum of a case."""
    samples, own = [], []
    for repeat in range(REPEATS[case] + WARM_UP):
        if CROSSING[case]:
            own.append(step.draw_unguarded(CROSSING[case]) / 1e3)
        else:
            step.advance()
        started = time.perf_counter_ns()
        if CROSSING[case]:
            step.cross(CROSSING[case])
        step.run()
        spent = time.perf_counter_ns() - started
        if repeat >= WARM_UP:
            samples.append(spent / 1e3)
    vllm_us = statistics.median(own) if own else 0.0
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

    from kvguard import verifier as verifier_module
    from kvguard.adapters.vllm.plugin import register
    from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
    from tests.vllm.tiny import write_checkpoint

    register()
    verifier: Any = verifier_module
    found = []
    kernels = verifier.verify_pages, verifier.verify_slots, verifier.scatter_tags
    with tempfile.TemporaryDirectory(prefix="kvguard-bench-") as folder:
        model = write_checkpoint(Path(folder))
        for context in CONTEXTS:
            crossings = sum(max(CROSSING[case], BATCH / BLOCK) * (REPEATS[case] + WARM_UP) for case in REPEATS)
            engine = VllmEngine(
                VllmOptions(
                    model=model,
                    max_model_len=4096,
                    max_num_seqs=BATCH,
                    max_num_batched_tokens=4096,
                    num_blocks=BATCH * (context // BLOCK + 3) + int(crossings) + BATCH,
                )
            )
            step = GuardedStep(engine, context)
            verifier.verify_pages = verifier.verify_slots = lambda **given: given["record"].zero_()
            verifier.scatter_tags = lambda **given: None
            with torch.inference_mode():
                found += [measure(step, case, context) for case in REPEATS]
            assert engine.guard_side.guard.health().ok and not engine.guard_side.guard.violations
            verifier.verify_pages, verifier.verify_slots, verifier.scatter_tags = kernels
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
