"""Throughput and inter-token latency of SGLang on the CPU with the guard off and on, in alternating pairs of rounds.

    .venv-sglang/bin/python bench/sglang_overhead.py [--batches 4 16] [--pairs 7] [--tokens 128] [--page-size 1]
                                                     [--overlap] [--json FILE]
                                                     [--null | --writes]

SmolLM2-135M with INT4 weights (`make models`; packed by the platform of tools/sglang_cpu when it is loaded), FP8 KV,
prompts of 128 random tokens, SGLang's own scheduler loop. Two engines, one guarded, each in a process of its own; only
one works at a time, and which of a pair goes first alternates. Both get the same prompts and must give the same tokens;
every step of the guarded one must have been verified, without a violation; otherwise there are no figures. `--null`
compares two unguarded engines: what it shows is noise.
"""

from __future__ import annotations

import argparse
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
    """In the worker process: one SGLang scheduler, guarded or not as the environment says."""

    def __init__(self, page_size: int, overlap: bool, guarded: bool) -> None:
        from kvguard.fault_injection.models import smollm2_folder
        from kvguard.fault_injection.targets.sglang_engine import SglangEngine, SglangOptions

        self._engine = SglangEngine(
            SglangOptions(
                model=smollm2_folder("bf16"),
                dtype="bfloat16",
                int4=True,
                kv_cache_dtype="fp8_e4m3",
                page_size=page_size,
                overlap=overlap,
                pool_tokens=16 * 1024,
                chunk_tokens=2048,
                max_running=16,
                context_tokens=1024,
            ),
            guarded=guarded,
        )

    def round(self, batch: int, tokens: int, seed: int) -> dict[str, Any]:
        """`batch` requests of `tokens` tokens each, all at once."""
        from kvguard.fault_injection.targets.sglang_engine import Done, generate_request

        rng = random.Random(seed)
        waiting = [
            generate_request(
                f"{seed}-{place}", tuple(rng.randrange(*TOKEN_RANGE) for _ in range(PROMPT_TOKENS)), tokens
            )
            for place in range(batch)
        ]
        answers: dict[str, list[int]] = {request.rid: [] for request in waiting}
        ends: list[tuple[float, int]] = []
        finished: set[str] = set()

        def receive() -> list[Any]:
            if len(finished) == batch:
                raise Done
            given, waiting[:] = list(waiting), []
            return given

        def send(output: Any) -> None:
            names = getattr(output, "rids", None) or []
            if not names or getattr(output, "output_ids", None) is None:
                return
            ends.append((time.perf_counter(), len(names)))
            for name, ids, reason in zip(names, output.output_ids, output.finished_reasons, strict=True):
                answers[name].extend(ids)
                if reason is not None:
                    finished.add(name)

        started = time.perf_counter()
        self._engine.serve(receive, send)
        self._engine.scheduler.flush_cache()
        return {
            "tokens": [answers[f"{seed}-{place}"] for place in range(batch)],
            "tokens_per_s": batch * tokens / (ends[-1][0] - started),
        } | latencies(ends, batch)

    def guard(self) -> dict[str, Any]:
        """What the guard counted; empty where there is none."""
        guard = self._engine.guard
        return {} if guard is None else dict(guard.health().counters)


def worker(arguments: argparse.Namespace, *, guarded: bool, **settings: str) -> EngineProcess:
    """In the parent: one worker process; its facts are the guard's counters."""
    command = [sys.executable, __file__, "--worker", "--page-size", str(arguments.page_size)]
    command += ["--overlap"] if arguments.overlap else []
    command += ["--guarded"] if guarded else []
    started = EngineProcess(command, guarded=guarded, environment=settings)
    require_guard(bool(started.facts), guarded)
    return started


def main() -> None:
    """Print three lines per batch size; write everything as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128, help="per request and round")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="SGLang's overlapping loop")
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--null", action="store_true", help="two unguarded engines")
    compared.add_argument("--writes", action="store_true", help="two guarded engines: write_check off / on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--guarded", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        channel = own_channel()
        engine = Engine(arguments.page_size, arguments.overlap, arguments.guarded)
        answer_commands(channel, engine.round, engine.guard)
        return
    if arguments.writes:
        plain = worker(arguments, guarded=True, KVGUARD_WRITE_CHECK="false")
    else:
        plain = worker(arguments, guarded=False)
    guarded = worker(arguments, guarded=not arguments.null)
    facts = {name: getattr(arguments, name) for name in ("page_size", "overlap", "null", "writes")}
    what = "write_check off / on" if arguments.writes else f"guard off / {'off' if arguments.null else 'on'}"
    print(f"SmolLM2-135M int4, FP8 KV, pages of {arguments.page_size}; {what}")
    compare(
        plain, guarded, batches=arguments.batches, pairs=arguments.pairs, tokens=arguments.tokens, file=arguments.json,
        facts=facts,
    )  # fmt: skip


if __name__ == "__main__":
    main()
