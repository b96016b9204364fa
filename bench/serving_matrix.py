"""KV dtype x weights x guard on SmolLM2, in the embedded engine and in vLLM: what fits, how fast, how like bf16.

    .venv/bin/python bench/serving_matrix.py [--quick] [--engines embedded,vllm] [--pairs 3] [--json [FILE]]

Needs `make models`, and for vLLM `make env-vllm`. Every cell has the same KV memory, so that a smaller dtype holds more
tokens and runs more requests at once. Of each cell:

    tokens           that fit into the KV memory, from the size of the tensors that the engine allocated
    requests         that run at once at most while REQUESTS wait to be served, and how many fit from start to end
    throughput, p95  tokens per second over a whole round, prefill included; time from one token of a request to the
                     next
    agreement        greedy answers against those of the same engine in bf16 with a bf16 cache: the share of equal
                     tokens at equal places, and the place of the first that differs

Guard off and on take turns, on live engines, with the same prompts; which goes first alternates. Both must give the
same tokens, every guarded step must have been verified, and nothing may be flagged; otherwise there are no figures.
What counts is the ratio of each pair: on a shared machine the speeds themselves drift.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_process import EngineProcess, require_guard  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
KV_DTYPES, WEIGHTS, ENGINES = ("bf16", "fp8"), ("bf16", "int4"), ("embedded", "vllm")
PAGE_SIZE = 32  # vLLM on a CPU takes multiples of 32
STEP_TOKENS = 128
ROWS_MAX = 16
TOKEN_RANGE = (100, 40000)  # prompt token ids: neither control tokens nor the rarest
QUESTIONS = (
    "What is the capital of France?",
    "Write three short sentences about the sea.",
    "Explain why the sky is blue.",
    "List four animals that live in Africa.",
    "How do I boil an egg?",
    "Give me a recipe for pancakes.",
    "What does a librarian do all day?",
    "Tell me a story about a lost key.",
)
NOTE = "Note: Vera Okafor, PIN 7663, code 7PMM7KTX: the spare vault key at Pier 23, 23 May"
Prompts = list[list[int]]


class NotRun(Exception):
    """The engine says that this machine cannot run a cell; the message is its own."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is run. requests: of a round; tokens: prompt and answer of each; answers: tokens of an agreement answer."""

    kv_bytes: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    answers: int
    questions: int
    pairs: int
    threads: int
    seed: int

    def prompts(self, pair: int) -> Prompts:
        """The prompts of a pair of rounds."""
        rng = random.Random(f"serving-matrix-{self.seed}-{pair}")
        return [[rng.randrange(*TOKEN_RANGE) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


class Side(Protocol):
    """One engine, guarded or not."""

    def serve(self, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        """answers; tokens_per_s; p50_ms, p95_ms; running: the most requests that ran at once."""

    def facts(self) -> dict[str, Any]:
        """tokens_fit, page_bytes; steps_seen, steps_verified, violations: all 0 without a guard."""

    def stop(self) -> None:
        """Give the memory back."""


def timed(answers: Prompts, stamps: list[list[float]], seconds: float, running: int) -> dict[str, Any]:
    """What `Side.serve` returns; `stamps`: when each token of each request left."""
    gaps = [late - early for times in stamps for early, late in zip(times, times[1:], strict=False)]
    return {
        "answers": answers,
        "tokens_per_s": sum(map(len, answers)) / seconds,
        "p50_ms": statistics.median(gaps) * 1e3,
        "p95_ms": statistics.quantiles(gaps, n=20)[-1] * 1e3,
        "running": running,
    }


class EmbeddedSide:
    """The embedded engine, in this process; off and on share the weights."""

    def __init__(self, load: Load, *, kv_dtype: str, weights: Any, guarded: bool) -> None:
        import torch

        from kvguard.fault_injection.engine.engine import EngineConfig
        from kvguard.fault_injection.targets.embedded_runs import load_model

        torch.set_num_threads(load.threads)
        self._model = load_model("smollm2", weights)
        self._guarded, self._seed = guarded, load.seed
        kind: Any = "fp8_e4m3" if kv_dtype == "fp8" else kv_dtype
        page = self._model.new_kv(num_pages=1, page_size=PAGE_SIZE, dtype=kind)
        self._page_bytes = sum(tensor.nbytes for tensor in (*page.keys, *page.values))
        self._config = EngineConfig(
            num_pages=1 + load.kv_bytes // self._page_bytes,
            page_size=PAGE_SIZE,
            kv_dtype=kind,
            max_rows=ROWS_MAX,
            token_budget=STEP_TOKENS,
            max_tokens=256,
        )
        self._counters = {"steps_seen": 0, "steps_verified": 0, "violations": 0}

    def serve(self, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        from kvguard.fault_injection.engine.engine import Engine
        from kvguard.fault_injection.engine.scheduler import Request
        from kvguard.fault_injection.targets.embedded_runs import make_guard

        guard = make_guard(self._config, proofs="all", backend="torch", seed=self._seed) if self._guarded else None
        engine = Engine(self._model, self._config, guard)
        stamps: list[list[float]] = [[] for _ in prompts]
        running = 0
        started = time.perf_counter()
        for place, prompt in enumerate(prompts):
            engine.submit(Request(id=str(place), prompt=tuple(prompt), max_new_tokens=new_tokens))
        while engine.busy:
            engine.step()
            now = time.perf_counter()
            running = max(running, len(engine.scheduler.running))
            for name, output in engine.outputs.items():
                if output.tokens and output.tokens[-1].step == engine.step_index:
                    stamps[int(name)].append(now)
        seconds = time.perf_counter() - started
        if guard is not None:
            for name in self._counters:
                self._counters[name] += guard.health().counters[name]
        answers = [list(engine.outputs[str(place)].token_ids) for place in range(len(prompts))]
        return timed(answers, stamps, seconds, running)

    def facts(self) -> dict[str, Any]:
        usable = self._config.num_pages - 1
        return {"tokens_fit": usable * PAGE_SIZE, "page_bytes": self._page_bytes, **self._counters}

    def stop(self) -> None:
        pass


class VllmSide:
    """vLLM in a process of its own (serving_worker.py), which stays alive. Only one works at a time."""

    def __init__(
        self, load: Load, *, kv_dtype: str, weights: str, guarded: bool, python: Path, page_bytes: int
    ) -> None:
        options = {
            "kv_dtype": kv_dtype,
            "weights": weights,
            "num_blocks": 1 + load.kv_bytes // page_bytes,
            "block_size": PAGE_SIZE,
            "max_num_seqs": ROWS_MAX,
            "max_num_batched_tokens": STEP_TOKENS,
        }
        command = [str(python), str(Path(__file__).with_name("serving_worker.py")), json.dumps(options)]
        self._process = EngineProcess(command, guarded=guarded, environment={"OMP_NUM_THREADS": str(load.threads)})
        facts = self._process.facts
        if "not_run" in facts:
            self.stop()
            raise NotRun(facts["not_run"])
        require_guard(facts["guarded"], guarded)

    def serve(self, prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        return timed(**self._process.ask(prompts=prompts, new_tokens=new_tokens))

    def facts(self) -> dict[str, Any]:
        return self._process.ask()

    def stop(self) -> None:
        self._process.stop()


def agreement(answers: Prompts, reference: Prompts) -> dict[str, Any]:
    """How like the reference. `first_divergence` counts equal tokens from the start, all of them if none differs."""
    pairs = list(zip(answers, reference, strict=True))
    equal = [[told == said for told, said in zip(answer, goal, strict=True)] for answer, goal in pairs]
    leading = [row.index(False) if False in row else len(row) for row in equal]
    return {
        "answers": len(equal),
        "tokens_each": len(equal[0]),
        "equal_share": sum(map(sum, equal)) / sum(map(len, equal)),
        "identical_answers": sum(all(row) for row in equal),
        "first_divergence_median": statistics.median(leading),
        "first_divergence_min": min(leading),
    }


def measure(off: Side, on: Side, load: Load, questions: Prompts) -> tuple[dict[str, Any], Prompts]:
    """The figures of one cell, and its answers to the questions."""
    answers = off.serve(questions, load.answers)["answers"]
    if on.serve(questions, load.answers)["answers"] != answers:
        raise SystemExit("guard off and on answer differently")
    rounds: list[dict[bool, dict[str, Any]]] = []
    for pair in range(load.pairs):
        found: dict[bool, dict[str, Any]] = {}
        for second in (False, True):
            guarded = second != bool(pair % 2)
            found[guarded] = (on if guarded else off).serve(load.prompts(pair), load.new_tokens)
        if found[False]["answers"] != found[True]["answers"]:
            raise SystemExit(f"pair {pair}: guard off and on give different tokens")
        rounds.append(found)
    facts = off.facts()
    guard = {name: on.facts()[name] for name in ("steps_seen", "steps_verified", "violations")}
    if not 0 < guard["steps_seen"] == guard["steps_verified"] or guard["violations"] or facts["steps_seen"]:
        raise SystemExit(f"not every step was verified, or something was flagged: {guard}")
    pages_each = -(-(load.prompt_tokens + load.new_tokens) // PAGE_SIZE)
    figures = {}
    for name in ("tokens_per_s", "p50_ms", "p95_ms"):
        ratios = [found[True][name] / found[False][name] for found in rounds]
        figures[name] = {
            "off": statistics.median(found[False][name] for found in rounds),
            "tags": statistics.median(found[True][name] for found in rounds),
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
    cell = {
        "tokens_fit": facts["tokens_fit"],
        "page_bytes": facts["page_bytes"],
        "requests_whole": facts["tokens_fit"] // PAGE_SIZE // pages_each,
        "requests_running_max": max(found[False]["running"] for found in rounds),
        **figures,
        "guard": guard,
    }
    return cell, answers


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    name = platform.processor() or platform.machine()
    flags = ""
    if Path("/proc/cpuinfo").is_file():
        text = Path("/proc/cpuinfo").read_text()
        name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), name)
        flags = "avx512" if "avx512f" in text else "avx2" if "avx2" in text else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": name, "vectors": flags, "cores": cores, "python": platform.python_version()}


def print_table(report: dict[str, Any]) -> None:
    """The table of docs/performance.md, in Markdown."""
    print(
        "| engine | KV | weights | tokens | requests at once (whole) | tokens/s off | p95 off, ms | throughput on/off "
        "| p95 on/off | equal to bf16 | first difference at |"
    )
    print("|---" * 11 + "|")
    for cell in report["cells"]:
        if "not_run" in cell:
            print(f"| {cell['engine']} | {cell['kv_dtype']} | {cell['weights']} | not run here: {cell['not_run']} |")
            continue
        speed, late, like = cell["tokens_per_s"], cell["p95_ms"], cell["agreement"]
        ratios = [
            f"{figure['median']:.3f} ({figure['min']:.3f}..{figure['max']:.3f})"
            for figure in (speed["ratio"], late["ratio"])
        ]
        print(
            f"| {cell['engine']} | {cell['kv_dtype']} | {cell['weights']} | {cell['tokens_fit']} "
            f"| {cell['requests_running_max']} ({cell['requests_whole']}) | {speed['off']:.1f} | {late['off']:.0f} "
            f"| {ratios[0]} | {ratios[1]} | {like['equal_share']:.1%} "
            f"| {like['first_divergence_median']:g} of {like['tokens_each']} |"
        )


def questions_as_tokens(count: int) -> Prompts:
    """Chat questions, and a note to be said a third time, as the model's tokens."""
    from tokenizers import Tokenizer

    from kvguard.fault_injection.models import smollm2_folder

    tokenizer = Tokenizer.from_file(str(smollm2_folder("bf16") / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = [f"{NOTE}\n{NOTE}\nNote:", *(chat.format(question) for question in QUESTIONS)][:count]
    return [[int(token) for token in tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]


def run(load: Load, engines: list[str], cells: list[tuple[str, str]], python: Path) -> dict[str, Any]:
    """All cells. The first of each engine is bf16 with bf16, which the others are compared with."""
    questions = questions_as_tokens(load.questions)
    started, before = time.perf_counter(), os.getloadavg()[0]
    found: list[dict[str, Any]] = []
    for engine in engines:
        reference: Prompts | None = None
        for kv_dtype, weights in cells:
            print(f"serving_matrix: {engine}, {kv_dtype} KV, {weights} weights", file=sys.stderr, flush=True)
            name = {"engine": engine, "kv_dtype": kv_dtype, "weights": weights}
            sides: list[Side] = []
            try:
                for guarded in (False, True):
                    sides.append(side_of(engine, load, kv_dtype, weights, guarded, python))
                figures, answers = measure(sides[0], sides[1], load, questions)
            except NotRun as reason:
                found.append({**name, "not_run": str(reason)})
                continue
            finally:
                for side in sides:
                    side.stop()
            reference = reference or answers
            found.append({**name, **figures, "agreement": agreement(answers, reference)})
    return {
        "machine": machine(),
        "load_before": round(before, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "wall_s": round(time.perf_counter() - started, 1),
        "load": vars(load),
        "page_size": PAGE_SIZE,
        "cells": found,
    }


def side_of(engine: str, load: Load, kv_dtype: str, weights: str, guarded: bool, python: Path) -> Side:
    """A live engine."""
    if engine == "embedded":
        return EmbeddedSide(load, kv_dtype=kv_dtype, weights=weights, guarded=guarded)
    # 30 layers x 3 KV heads x 64 x (key and value), as the engine allocates them; `facts` says what it really did.
    page_bytes = PAGE_SIZE * 30 * 3 * 64 * 2 * (1 if kv_dtype == "fp8" else 2)
    return VllmSide(load, kv_dtype=kv_dtype, weights=weights, guarded=guarded, python=python, page_bytes=page_bytes)


def main() -> None:
    """Print the table, or JSON and nothing else; progress goes to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute: the embedded engine, two cells, one short pair")
    parser.add_argument("--engines", default=None, help="embedded,vllm")
    parser.add_argument("--cells", default=None, help="KV/WEIGHTS[,KV/WEIGHTS], for example bf16/bf16,fp8/int4")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-memory", type=int, default=8, help="MiB")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON, to standard output without FILE")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    arguments = parser.parse_args()
    engines = (arguments.engines or ("embedded" if arguments.quick else "embedded,vllm")).split(",")
    if not engines or any(engine not in ENGINES for engine in engines):
        parser.error(f"--engines: choose from {', '.join(ENGINES)}")
    if "vllm" in engines and not arguments.vllm_python.exists():
        parser.error(f"no vLLM at {arguments.vllm_python}: run `make env-vllm`, or give --engines embedded")
    silence()
    size = (2, 24, 6, 8, 2) if arguments.quick else (10, 64, 24, 32, 7)
    load = Load(
        kv_bytes=arguments.kv_memory * 2**20,
        requests=size[0],
        prompt_tokens=size[1],
        new_tokens=size[2],
        answers=size[3],
        questions=size[4],
        pairs=1 if arguments.quick else arguments.pairs,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    every = [(kv_dtype, weights) for kv_dtype in KV_DTYPES for weights in WEIGHTS]
    cells = [every[0], every[-1]] if arguments.quick else every
    if arguments.cells is not None:
        cells = [cell for cell in every if "/".join(cell) in arguments.cells.split(",")]
        if len(cells) != len(arguments.cells.split(",")) or cells[0] != every[0]:
            parser.error(f"--cells: choose from {', '.join(map('/'.join, every))}; the first is what others are like")
    report = run(load, engines, cells, arguments.vllm_python)
    if arguments.json is None:
        print_table(report)
    elif arguments.json == "-":
        print(json.dumps(report, indent=1))
    else:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
        print_table(report)


def silence() -> None:
    """The guard logs that it is armed, once a round; that is no part of the report."""
    import structlog
    import structlog.testing

    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())


if __name__ == "__main__":
    main()
