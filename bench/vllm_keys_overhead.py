"""What level `keys` costs over level `tags` in vLLM on the CPU, as a share of a step: pairs of steps, not of rounds.

    .venv-vllm/bin/python bench/vllm_keys_overhead.py [--batches 4 16] [--pairs 6] [--tokens 160] [--json FILE]
    .venv-vllm/bin/python bench/vllm_keys_overhead.py --guard        # what level `tags` costs over no guard

SmolLM2-135M (`make models`), INT4 weights, FP8 KV, one thread. Two engines, each in a process of its own. In each round
one of them runs at the higher level and the other at the lower one: at `keys`, contents are left alone for that; with
`--guard` a guard is put on the live engine, and taken off again. Both get the same prompts and make their steps in
turns, one step here, the same step there, so that a machine whose speed drifts within seconds slows both alike. The
next round has the roles the other way round: what two processes of one engine differ by, some per cent, cancels in the
mean of the two. Who goes first alternates from step to step. Prompts differ in length, so that pages are published in
every other step or so, as they are in service, and not all in one.

Printed: the ratio of step times, higher level over lower, as the geometric mean of the medians of the two roles, with
the range that 90 % of 2,000 resamplings of the pairs of rounds give. Tokens must be equal, every step verified, nothing
flagged.
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
MODE = "BENCH_MODE"
SEED = 20261201


class SteppedEngine:
    """In the worker process: a live vLLM engine that makes one step per command, at the lower or the higher level."""

    def __init__(self, engine: Any) -> None:
        """`engine`: the LLMEngine."""
        self._engine = engine
        self._answers: dict[str, list[int]] = {}

    def _use(self, higher: bool) -> None:
        """Run at this level from here on. No request is alive; afterwards nothing is cached."""
        raise NotImplementedError

    def guard(self) -> dict[str, Any]:
        """What the guard counted."""
        raise NotImplementedError

    def command(self, **given: Any) -> dict[str, Any]:
        """`batch`, `tokens`, `seed` and `higher` begin a round; `step` makes a step and answers its time in ms."""
        from vllm import SamplingParams

        if "step" not in given:
            self._use(given["higher"])
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
        if self._engine.has_unfinished_requests():
            return {"ms": spent}
        return {"ms": spent, "answers": self._answers}


class KeysOrTags(SteppedEngine):
    """An engine at level `keys` that leaves contents alone in some rounds, which is level `tags`."""

    def __init__(self) -> None:
        self._made = Engine("int4")
        super().__init__(self._made._engine)
        self._side: Any = self._made._side
        self._contents = None if self._side is None else self._side._contents
        if self._contents is None:
            raise SystemExit("this engine does not run at level keys")
        self._keys = True

    def _use(self, higher: bool) -> None:
        guard = self._side.guard
        books = guard._books
        assert not books.requests
        assert self._engine.reset_prefix_cache()
        self._side._contents = self._contents if higher else None
        guard._contents = books.checks_contents = self._keys = higher

    def guard(self) -> dict[str, Any]:
        return self._made.guard()

    def command(self, **given: Any) -> dict[str, Any]:
        answer = super().command(**given)
        looked = [state.content is not None for state in self._side.guard._books.requests.values()]
        assert "step" not in given or looked.count(self._keys) == len(looked), "a request at the other level"
        return answer


class GuardedOrNot(SteppedEngine):
    """An engine that was started without a guard, and gets one for some rounds."""

    def __init__(self) -> None:
        from kvguard.fault_injection.models import smollm2_folder
        from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
        from kvguard.fault_injection.targets.vllm_slate import OwnFunctions

        options = VllmOptions(
            model=smollm2_folder("int4"),
            dtype="bfloat16",
            kv_cache_dtype="fp8",
            num_blocks=16 * 2048 // 32,
            max_num_seqs=16,
            max_model_len=2048,
        )
        self._live = VllmEngine(options)
        super().__init__(self._live.llm_engine)
        self._own = OwnFunctions(self._live)
        self._guard: Any = None
        self._counted = {"steps_verified": 0, "steps_seen": 0, "violations": 0}

    def _use(self, higher: bool) -> None:
        from kvguard.fault_injection.targets.vllm_runs import attach
        from kvguard.fault_injection.targets.vllm_slate import flush

        flush(self._live)
        self._take_off()
        assert self._engine.reset_prefix_cache()
        if higher:
            self._guard = attach(self._live, proofs="tags", seed=SEED)

    def _take_off(self) -> None:
        """Without a guard from here on; what it counted stays known."""
        if self._guard is not None:
            for name in self._counted:
                self._counted[name] += self._guard.health().counters[name]
        self._own.restore()
        self._guard = None

    def guard(self) -> dict[str, Any]:
        self._take_off()
        return dict(self._counted)


def work(*, guard: bool) -> None:
    """The worker process."""
    channel = own_channel()
    engine = GuardedOrNot() if guard else KeysOrTags()
    answer_commands(channel, engine.command, engine.guard)


def start(*, guard: bool) -> EngineProcess:
    """In the parent: one worker process."""
    # An engine that gets its guard later starts as vLLM's own.
    level, mode = ("off", "guard") if guard else ("keys", "keys")
    named = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KVGUARD_LEVEL": level, MODE: mode}
    return worker(guarded=True, weights="int4", script=__file__, **named)


def round_of(engines: tuple[EngineProcess, EngineProcess], *, higher: int, batch: int, tokens: int, seed: int) -> float:
    """Median over a round's steps of time at the higher level / at the lower. higher: which of the two runs at it."""
    for place, engine in enumerate(engines):
        engine.ask(batch=batch, tokens=tokens, seed=seed, higher=place == higher)
    ratios: list[float] = []
    for step in range(10 * (tokens + batch)):
        found: dict[int, dict[str, Any]] = {}
        for place in (0, 1) if step % 2 else (1, 0):
            found[place] = engines[place].ask(step=step)
        ratios.append(found[higher]["ms"] / found[1 - higher]["ms"])
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
    round_of(engines, higher=0, batch=batch, tokens=8, seed=0)
    found = []
    for pair in range(pairs):
        seeds = (1000 * batch + 2 * pair, 1000 * batch + 2 * pair + 1)
        first, second = (
            round_of(engines, higher=role, batch=batch, tokens=tokens, seed=seeds[role]) for role in (0, 1)
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
    parser.add_argument("--guard", action="store_true", help="level tags over no guard, in place of keys over tags")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--weights", default="int4", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(guard=os.environ[MODE] == "guard")
        return
    load = os.getloadavg()[0]
    engines = start(guard=arguments.guard), start(guard=arguments.guard)
    what = "level tags over no guard" if arguments.guard else "level keys over tags"
    print(f"{what}, share of a step; load {load:.1f} at the start")
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
        if not counted["steps_verified"] or counted["steps_verified"] != counted["steps_seen"] or counted["violations"]:
            raise SystemExit(f"not every step was verified, or something was flagged: {counted}")
    if arguments.json:
        content = {"load_at_start": load, "guard": counters, "reports": reports}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
