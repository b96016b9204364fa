"""Throughput and inter-token latency of vLLM on the CPU with the guard off and on, in alternating pairs of rounds.

    .venv-vllm/bin/python bench/vllm_overhead.py [--weights int4] [--batches 4 16] [--pairs 9] [--tokens 256]
                                                 [--json FILE] [--null]

SmolLM2-135M (`make models`), FP8 KV, prompts of 128 random tokens. Two engines, one guarded, each in a process of its
own that stays alive; only one works at a time, and which of a pair goes first alternates, so that drift of the machine
cancels. Both get the same prompts and must give the same tokens; every step of the guarded one must have been verified,
without a violation; otherwise there are no figures. `--null` compares two unguarded engines: what it shows is noise.

Throughput is tokens over the wall time of a round, prefill included. Inter-token latency is the time from one step to
the next while all requests decode. Run it on a machine that does nothing else: vLLM binds its threads to the cores, and
with another busy process there a step takes up to fifty times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 128
SETTLE_S = 0.3  # between rounds, for the idle engine's threads to stop spinning
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
        started = time.perf_counter()
        for place, prompt in enumerate(prompts):
            self._engine.add_request(f"{seed}-{place}", {"prompt_token_ids": prompt}, parameters)
        answers: dict[str, list[int]] = {}
        ends: list[tuple[float, int]] = []  # of each step: when, and how many requests got a token in it
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            ends.append((time.perf_counter(), len(outputs)))
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        pairs = zip(ends, ends[1:], strict=False)
        gaps = [later - earlier for (earlier, _), (later, got) in pairs if got == batch]
        return {
            "tokens": [answers[f"{seed}-{place}"] for place in range(batch)],
            "tokens_per_s": batch * tokens / (ends[-1][0] - started),
            "p50_ms": statistics.median(gaps) * 1e3,
            "p95_ms": statistics.quantiles(gaps, n=20)[-1] * 1e3,
        }

    def guard(self) -> dict[str, Any]:
        """What the guard counted; empty where there is none."""
        return {} if self._side is None else dict(self._side.guard.health().counters)


def work(weights: str) -> None:
    """The worker process: one JSON command a line on standard input, one JSON answer a line on standard output."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes elsewhere
    engine = Engine(weights)
    print(json.dumps(engine.guard()), file=channel)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(engine.round(**command) if command else engine.guard()), file=channel)


class Worker:
    """In the parent: one worker process."""

    def __init__(self, *, guarded: bool, weights: str) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("KVGUARD_")}
        environment |= {name: os.environ[name] for name in ("KVGUARD_TEST_CACHE",) if name in os.environ}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if guarded:
            environment["KVGUARD_LEVEL"] = "tags"
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--weights", weights],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        if bool(self._answer()) != guarded:
            raise SystemExit("the engine that should be guarded is not, or the other way round")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine has ended; VERBOSE=1 shows what it printed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        """A round, or the guard's counters."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(plain: Worker, guarded: Worker, *, batch: int, pairs: int, tokens: int) -> dict[str, Any]:
    """The pairs of one batch size."""
    for worker in (plain, guarded):
        worker.ask(batch=batch, tokens=16, seed=1)
    rounds: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for pair in range(pairs):
        found: dict[bool, dict[str, Any]] = {}
        for second in (False, True):
            on = second != bool(pair % 2)
            time.sleep(SETTLE_S)
            found[on] = (guarded if on else plain).ask(batch=batch, tokens=tokens, seed=1000 * batch + pair)
        if found[False]["tokens"] != found[True]["tokens"]:
            raise SystemExit(f"batch {batch}, pair {pair}: the two engines gave different tokens")
        rounds.append((found[False], found[True]))
    report: dict[str, Any] = {"batch": batch, "pairs": pairs, "tokens": tokens}
    for name in ("tokens_per_s", "p50_ms", "p95_ms"):
        report[name] = {
            "off": statistics.median(off[name] for off, _ in rounds),
            "on": statistics.median(on[name] for _, on in rounds),
            "ratio": spread([on[name] / off[name] for off, on in rounds]),
        }
    return report


def print_report(report: dict[str, Any]) -> None:
    """A line per figure."""
    for name, label in (("tokens_per_s", "tokens/s"), ("p50_ms", "inter-token p50, ms"), ("p95_ms", "p95, ms")):
        figure, ratio = report[name], report[name]["ratio"]
        print(
            f"{report['batch']:>5}  {label:<20} {figure['off']:>8.2f} {figure['on']:>8.2f}  "
            f"{ratio['median']:.4f} ({ratio['min']:.4f}..{ratio['max']:.4f})",
            flush=True,
        )


def main() -> None:
    """Print three lines per batch size; write everything as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=("int4", "bf16"), default="int4")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=256, help="per request and round")
    parser.add_argument("--null", action="store_true", help="two unguarded engines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.weights)
        return
    load = os.getloadavg()[0]
    if load > 0.3:
        print(f"WARNING: the load of this machine was {load:.1f} before the start: the figures are not to be quoted")
    plain = Worker(guarded=False, weights=arguments.weights)
    guarded = Worker(guarded=not arguments.null, weights=arguments.weights)
    print(f"SmolLM2-135M {arguments.weights}, FP8 KV; {'off against off' if arguments.null else 'guard off / on'}")
    print("batch  figure                    off       on  median of pair ratios on/off (min..max)")
    reports = []
    for batch in arguments.batches:
        report = measure(plain, guarded, batch=batch, pairs=arguments.pairs, tokens=arguments.tokens)
        print_report(report)
        reports.append(report)
    counters = guarded.ask()
    for worker in (plain, guarded):
        worker.stop()
    if counters and (counters["steps_verified"] != counters["steps_seen"] or counters["violations"]):
        raise SystemExit(f"not every step was verified, or something was flagged: {counters}")
    if arguments.json is not None:
        content = {"weights": arguments.weights, "null": arguments.null, "load_before": load, "guard": counters}
        arguments.json.write_text(json.dumps(content | {"reports": reports}, indent=1) + "\n")


if __name__ == "__main__":
    main()
