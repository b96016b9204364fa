"""Throughput and inter-token latency of vLLM on the CPU with the guard off and on, in alternating pairs of rounds.

    .venv-vllm/bin/python bench/vllm_overhead.py [--weights int4] [--batches 4 16] [--pairs 9] [--tokens 256]
                                                 [--json FILE] [--null | --writes | --keys]

SmolLM2-135M (`make models`), FP8 KV, prompts of 128 random tokens. Two engines, one guarded, each in a process of its
own that stays alive; only one works at a time, and which of a pair goes first alternates, so that drift of the machine
cancels. Both get the same prompts and must give the same tokens; every step of the guarded one must have been verified,
without a violation; otherwise there are no figures. `--null` compares two unguarded engines: what it shows is noise.

Throughput is tokens over the wall time of a round, prefill included; CPU time per token is that of all threads, which
what else runs on the machine disturbs less (with OMP_NUM_THREADS=1, so that none of them waits in a loop). Inter-token
latency is the time from one step to the next while all requests decode. Run it on a machine that does nothing else:
vLLM binds its threads to the cores, and with another busy process there a step takes up to fifty times as long.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_process import EngineProcess, answer_commands, own_channel, require_guard  # noqa: E402
from bench.paired_rounds import compare, latencies  # noqa: E402

PROMPT_TOKENS = 128
TOKEN_RANGE = (100, 40000)  # prompt token ids: neither control tokens nor the rarest


class Engine:
    """In the worker process: one vLLM engine, guarded or not as the environment says."""

    def __init__(self, weights: str) -> None:
        from vllm import LLM

        from kvguard.fault_injection.models import smollm2_folder

        self._engine = LLM(
            str(smollm2_folder("int4" if weights == "int4" else "bf16")),
            kv_cache_dtype="fp8",
            enforce_eager=True,
            block_size=32,
            max_model_len=2048,
            max_num_seqs=16,
            seed=0,
        ).llm_engine
        scheduler = self._engine.engine_core.engine_core.scheduler
        self._side = getattr(scheduler, "_kvguard_attached", None)

    def round(self, batch: int, tokens: int, seed: int) -> dict[str, Any]:
        """`batch` requests of `tokens` tokens each, all at once."""
        from vllm import SamplingParams

        rng = random.Random(seed)
        parameters = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [[rng.randrange(*TOKEN_RANGE) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        started, before = time.perf_counter(), time.process_time()
        for place, prompt in enumerate(prompts):
            self._engine.add_request(f"{seed}-{place}", {"prompt_token_ids": prompt}, parameters)
        answers: dict[str, list[int]] = {}
        ends: list[tuple[float, int]] = []  # of each step: when, and how many requests got a token in it
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            ends.append((time.perf_counter(), len(outputs)))
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        return {
            "tokens": [answers[f"{seed}-{place}"] for place in range(batch)],
            "tokens_per_s": batch * tokens / (ends[-1][0] - started),
            "cpu_ms": (time.process_time() - before) / (batch * tokens) * 1e3,
        } | latencies(ends, batch)

    def guard(self) -> dict[str, Any]:
        """What the guard counted; empty where there is none."""
        return {} if self._side is None else dict(self._side.guard.health().counters)


def work(weights: str) -> None:
    """The worker process."""
    channel = own_channel()
    engine = Engine(weights)
    answer_commands(channel, engine.round, engine.guard)


def worker(*, guarded: bool, weights: str, script: str = __file__, **settings: str) -> EngineProcess:
    """In the parent: one worker process, which `script` runs; its facts are the guard's counters."""
    started = EngineProcess(
        [sys.executable, script, "--worker", "--weights", weights],
        guarded=guarded,
        environment=settings | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
    )
    require_guard(bool(started.facts), guarded)
    return started


def main() -> None:
    """Print the figures of each batch size; write everything as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=("int4", "bf16"), default="int4")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256, help="per request and round")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--null", action="store_true", help="two unguarded engines")
    compared.add_argument("--writes", action="store_true", help="two guarded engines: write_check off / on")
    compared.add_argument("--keys", action="store_true", help="two guarded engines: level tags / keys")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.weights)
        return
    named: dict[str, str] = {}
    if arguments.writes:
        plain = worker(guarded=True, weights=arguments.weights, KVGUARD_WRITE_CHECK="false")
        what = "write_check off / on"
    elif arguments.keys:
        plain, named = worker(guarded=True, weights=arguments.weights), {"KVGUARD_LEVEL": "keys"}
        what = "level tags / keys"
    else:
        plain = worker(guarded=False, weights=arguments.weights)
        what = "off against off" if arguments.null else "guard off / on"
    guarded = worker(guarded=not arguments.null, weights=arguments.weights, **named)
    print(f"SmolLM2-135M {arguments.weights}, FP8 KV; {what}")
    compare(
        plain, guarded, batches=arguments.batches, pairs=arguments.pairs, tokens=arguments.tokens, file=arguments.json,
        facts={name: getattr(arguments, name) for name in ("weights", "null", "writes", "keys")},
    )  # fmt: skip


if __name__ == "__main__":
    main()
