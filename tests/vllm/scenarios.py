"""One engine in a process of its own: `python -m tests.vllm.scenarios SPEC OUT`, both JSON.

Runner V2, tensor parallel and engine-core processes cannot share a process with the tests, so their tests hand a spec
to this module and assert on what it writes. See `Spec` for what can be asked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.tiny import traffic

ROOT = Path(__file__).parents[2]


@dataclass(kw_only=True)
class Spec:
    """What to run.

    guard       level `tags`, or no kvguard variable at all
    options     of VllmOptions, without `model`
    environment further variables
    seeds       traffic, one `generate` call each
    fault_step  step of the engine in the last `generate` call before which a row is broken in the worker; 0: never
    fault_rank  the tensor parallel rank whose row is broken
    """

    model: str
    guard: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [1])
    fault_step: int = 0
    fault_rank: int = 0


@dataclass(kw_only=True)
class Outcome:
    """What happened.

    answers   per generate call, (finish reason, stop reason, tokens) per request
    rejected  how often drafted tokens were rejected
    ahead     how often the books then took more for computed than vLLM itself
    """

    answers: list[list[list[Any]]]
    armed: bool
    ok: bool
    counters: dict[str, int]
    kinds: list[str]
    workers: list[Any]
    free_blocks: int
    blocks: int
    rejected: int
    ahead: int


def run_apart(spec: Spec, folder: Path, timeout: float = 300) -> Outcome:
    """Run a spec in a fresh process. Raises AssertionError with the end of its log if it fails."""
    given, taken = folder / "spec.json", folder / "outcome.json"
    given.write_text(json.dumps(dataclasses.asdict(spec)), encoding="utf-8")
    taken.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGUARD_")}
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    environment.update(spec.environment)
    if spec.guard:
        environment["KVGUARD_LEVEL"] = "tags"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.scenarios", str(given), str(taken)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0 and taken.exists(), f"{spec}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return Outcome(**json.loads(taken.read_text(encoding="utf-8")))


def break_row(worker: Any, step: int, rank: int) -> None:
    """From now on: before the `step`-th forward of this worker, the third row's second entry names the null block."""
    if worker.rank != rank:
        return
    runner, execute, count = worker.model_runner, worker.model_runner.execute_model, 0

    def breaking(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += bool(scheduler_output.num_scheduled_tokens)
        if count == step:
            count += 1
            name = sorted(scheduler_output.num_scheduled_tokens)[2]
            if hasattr(runner, "input_batch"):
                table = runner.input_batch.block_table.block_tables[0].block_table
                table.np[runner.input_batch.req_id_to_index[name], 1] = 0
            else:
                runner.block_tables.block_tables[0].gpu[runner.req_states.req_id_to_index[name], 1] = 0
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = breaking


def describe_worker(worker: Any) -> list[Any]:
    """Whether the worker is guarded, what troubles it, and how many ranks agree on its verdicts."""
    side = getattr(worker.model_runner, "_kvguard_attached", None)
    if side is None:
        return [False, "", 0]
    return [True, side._trouble, side._ranks._world if side._ranks is not None else 0]


def watch_drafts(engine: Any) -> dict[str, int]:
    """Compare, after every step, what the books take for computed with what vLLM has accepted; see Outcome."""
    counts = {"rejected": 0, "ahead": 0}
    if engine.guard_side is None:
        return counts
    scheduler, books, update = engine.scheduler, engine.guard_side.guard._books, engine.scheduler.update_from_output

    def comparing(output: Any, *args: Any, **kwargs: Any) -> Any:
        before = {request.request_id: request.num_computed_tokens for request in scheduler.running}
        result = update(output, *args, **kwargs)
        for request in scheduler.running:
            counts["rejected"] += request.num_computed_tokens < before.get(request.request_id, 0)
            state = books.requests.get(request.request_id)
            counts["ahead"] += state is not None and state.computed > request.num_computed_tokens
        return result

    scheduler.update_from_output = comparing
    return counts


def execute(spec: Spec) -> Outcome:
    """Run a spec in this process."""
    from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions

    engine = VllmEngine(VllmOptions(model=Path(spec.model), **spec.options))
    counts = watch_drafts(engine)
    answers: list[list[list[Any]]] = []
    for place, seed in enumerate(spec.seeds):
        if spec.fault_step and place == len(spec.seeds) - 1:
            engine.llm.collective_rpc(break_row, args=(spec.fault_step, spec.fault_rank))
        answers.append([[a.finish_reason, a.stop_reason, list(a.token_ids)] for a in engine.generate(*traffic(seed))])
    side = engine.guard_side
    health = side.guard.health() if side is not None else None
    return Outcome(
        answers=answers,
        armed=health is not None and health.armed,
        ok=health is not None and health.ok,
        counters=dict(health.counters) if health is not None else {},
        kinds=[str(violation.kind) for violation in side.guard.violations] if side is not None else [],
        workers=[list(worker) for worker in engine.llm.collective_rpc(describe_worker)],
        free_blocks=engine.pool.get_num_free_blocks() if engine.pool is not None else -1,
        blocks=engine.pool.num_gpu_blocks if engine.pool is not None else -1,
        **counts,
    )


def main() -> None:
    """Run the spec of the first argument, write the outcome to the second."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(dataclasses.asdict(execute(spec))), encoding="utf-8")


if __name__ == "__main__":
    main()
