"""One vLLM engine for serving_matrix.py, which starts this in .venv-vllm; guarded or not, as the environment says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_process import answer_commands, own_channel  # noqa: E402


class Worker:
    """SmolLM2 in vLLM, its KV cache of a given number of blocks."""

    def __init__(self, *, kv_dtype: str, weights: str, **options: Any) -> None:
        from kvguard.fault_injection.models import smollm2_folder
        from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions

        self._engine = VllmEngine(
            VllmOptions(
                model=smollm2_folder("int4" if weights == "int4" else "bf16"),
                dtype="bfloat16",
                kv_cache_dtype="fp8" if kv_dtype == "fp8" else "auto",
                max_model_len=256,
                **options,
            )
        )

    def facts(self) -> dict[str, Any]:
        """What the engine allocated, and what its guard counted; page_bytes and tokens_fit leave no page out but one,
        the null block."""
        caches, pages = self._engine.runner.kv_caches, self._engine.pool.num_gpu_blocks
        side = self._engine.guard_side
        counters = {} if side is None else side.guard.health().counters
        return {
            "guarded": side is not None,
            "tokens_fit": (pages - 1) * self._engine.options.block_size,
            "page_bytes": sum(cache.nbytes for cache in caches) // pages,
            **{name: counters.get(name, 0) for name in ("steps_seen", "steps_verified", "violations")},
        }

    def serve(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """All prompts at once, greedily: answers, when each token left, seconds in all, most requests at once."""
        from vllm import SamplingParams

        engine = self._engine.llm_engine
        parameters = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        answers: list[list[int]] = [[] for _ in prompts]
        stamps: list[list[float]] = [[] for _ in prompts]
        running = 0
        started = time.perf_counter()
        for place, prompt in enumerate(prompts):
            engine.add_request(str(place), {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            running = max(running, len(self._engine.scheduler.running))
            for output in outputs:
                place = int(output.request_id)
                answers[place] = list(output.outputs[0].token_ids)
                stamps[place].append(now)
        return {"answers": answers, "stamps": stamps, "seconds": time.perf_counter() - started, "running": running}


def main() -> None:
    """See `engine_process`; the first answer may also be why this machine cannot run the cell."""
    channel = own_channel()
    try:
        worker = Worker(**json.loads(sys.argv[1]))
        worker.serve([[100, 200, 300]], 2)
    except (NotImplementedError, AttributeError) as error:
        # Not every CPU runs every dtype: without AVX-512 FP8 KV is refused, and the INT4 kernel is not there.
        if isinstance(error, AttributeError) and "_OpNamespace" not in str(error):
            raise
        print(json.dumps({"not_run": str(error)}), file=channel)
        return
    answer_commands(channel, worker.serve, worker.facts)


if __name__ == "__main__":
    main()
