"""What level `keys` costs over level `tags` in vLLM on the CPU, as a share of a step: pairs of steps, not of rounds.

    .venv-vllm/bin/python bench/vllm_keys_overhead.py [--batches 4 16] [--pairs 6] [--tokens 160] [--json FILE]

SmolLM2-135M (`make models`), INT4 weights, FP8 KV, one thread. Two engines at level `keys`, each in a process of its
own. In each round one of them leaves contents alone, which is level `tags`, and the other does not; both get the same
prompts and make their steps in turns, one step here, the same step there, so that a machine whose speed drifts within
seconds slows both alike. The next round has the roles the other way round: what two processes of one engine differ by,
some per cent, cancels in the mean of the two. Who goes first alternates from step to step. Prompts differ in length, so
that pages are published in every other step or so, as they are in service, and not all in one.

Printed: the ratio of step times keys / tags, as the geometric mean of the medians of the two roles, with the range
that 90 % of 2,000 resamplings of the pairs of rounds give. Tokens must be equal, every step verified, nothing flagged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine_process import EngineProcess, answer_commands, own_channel  # noqa: E402
from bench.vllm_overhead import PROMPT_TOKENS, TOKEN_RANGE, Engine, worker  # noqa: E402

RESAMPLINGS = 2000
SEED = 20261201


class SteppedEngine(Engine):
    """In the worker process: an engine that makes one step per command, at level `tags` or `keys`."""

    def __init__(self) -> None:
        super().__init__("int4")
        self._contents: Any = None if self._side is None else self._side._contents
        if self._contents is None:
            raise SystemExit("this engine does not run at level keys")
        self._answers: dict[str, list[int]] = {}
        self._keys = True

    def _use(self, keys: bool) -> None:
        """Contents are looked at from here on, or not. No request is alive, and nothing is cached."""
        from kvguard.violation import Proof

        side: Any = self._side
        guard = side.guard
        books = guard._books
        assert not books.requests
        assert self._engine.reset_prefix_cache()
        side._contents = self._contents if keys else None
        guard._contents = keys
        books.proofs = books.proofs | {Proof.CONTENT_KEY} if keys else books.proofs - {Proof.CONTENT_KEY}
        self._keys = keys

    def command(self, **given: Any) -> dict[str, Any]:
        """`batch`, `tokens`, `seed` and `keys` begin a round; `step` makes a step and answers its time in ms."""
        from vllm import SamplingParams

        if "step" not in given:
            self._use(given["keys"])
            rng = random.Random(f"{SEED}-{given['seed']}")
            parameters = SamplingParams(max_tokens=given["tokens"], temperature=0, ignore_eos=True, detokenize=False)
            for place in range(given["batch"]):
                prompt = [rng.randrange(*TOKEN_RANGE) for _ in range(PROMPT_TOKENS + 2 * place)]
                self._engine.add_request(f"{given['seed']}-{place}", {"prompt_token_ids": prompt}, parameters)
            self._answers = {}
            return {}
        started = time.perf_counter()
        outputs = self._engine.step()
        spent = (time.perf_counter() - started) * 1e3
        self._answers |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        side: Any = self._side
        looked = [state.content is not None for state in side.guard._books.requests.values()]
        assert looked.count(self._keys) == len(looked), "a request at the other level"
        if self._engine.has_unfinished_requests():
            return {"ms": spent}
        return {"ms": spent, "answers": self._answers}


def work() -> None:
    """The worker process."""
    channel = own_channel()
    engine = SteppedEngine()
    answer_commands(channel, engine.command, engine.guard)


def start() -> EngineProcess:
    """In the parent: one worker process."""
    return worker(
        guarded=True, weights="int4", script=__file__, KVGUARD_LEVEL="keys", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
    )


def round_of(engines: tuple[EngineProcess, EngineProcess], *, keyed: int, batch: int, tokens: int, seed: int) -> float:
    """Median over a round's steps of time at `keys` / time at `tags`. keyed: which of the two looks at contents."""
    for place, engine in enumerate(engines):
        engine.ask(batch=batch, tokens=tokens, seed=seed, keys=place == keyed)
    ratios: list[float] = []
    for step in range(10 * (tokens + batch)):
        found: dict[int, dict[str, Any]] = {}
        for place in (0, 1) if step % 2 else (1, 0):
            found[place] = engines[place].ask(step=step)
        ratios.append(found[keyed]["ms"] / found[1 - keyed]["ms"])
        if "answers" in found[0]:
            if found[0]["answers"] != found[1].get("answers"):
                raise SystemExit(f"round {seed}: the two levels gave different tokens")
            return statistics.median(ratios)
    raise SystemExit(f"round {seed} did not end")


def share_of(pairs: list[tuple[float, float]]) -> float:
    """Geometric mean of the two roles' medians over pairs of rounds, less 1."""
    logs = [statistics.median(math.log(pair[role]) for pair in pairs) for role in (0, 1)]
    return math.exp(statistics.mean(logs)) - 1


def measure(engines: tuple[EngineProcess, EngineProcess], *, batch: int, pairs: int, tokens: int) -> dict[str, Any]:
    """The pairs of rounds of one batch size."""
    round_of(engines, keyed=0, batch=batch, tokens=8, seed=0)
    found = []
    for pair in range(pairs):
        seeds = (1000 * batch + 2 * pair, 1000 * batch + 2 * pair + 1)
        first, second = (
            round_of(engines, keyed=role, batch=batch, tokens=tokens, seed=seeds[role]) for role in (0, 1)
        )
        found.append((first, second))
    rng = random.Random(SEED)
    resampled = sorted(share_of(rng.choices(found, k=len(found))) for _ in range(RESAMPLINGS))
    return {
        "batch": batch,
        "pairs": pairs,
        "tokens": tokens,
        "share": share_of(found),
        "range": [resampled[RESAMPLINGS // 20], resampled[-RESAMPLINGS // 20]],
        "rounds": found,
    }


def main() -> None:
    """Print a line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--pairs", type=int, default=6, help="of rounds, the roles exchanged in the second")
    parser.add_argument("--tokens", type=int, default=160, help="per request and round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--weights", default="int4", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    load = os.getloadavg()[0]
    engines = start(), start()
    print(f"level keys over tags, share of a step; load {load:.1f} at the start")
    reports = []
    for batch in arguments.batches:
        report = measure(engines, batch=batch, pairs=arguments.pairs, tokens=arguments.tokens)
        low, high = report["range"]
        print(f"batch {batch:>2}: {report['share']:+.3%} (90 % of resamplings: {low:+.3%} .. {high:+.3%})", flush=True)
        reports.append(report)
    counters = [engine.ask() for engine in engines]
    for engine in engines:
        engine.stop()
    for counted in counters:
        if counted["steps_verified"] != counted["steps_seen"] or counted["violations"]:
            raise SystemExit(f"not every step was verified, or something was flagged: {counted}")
    if arguments.json:
        content = {"load_at_start": load, "guard": counters, "reports": reports}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
