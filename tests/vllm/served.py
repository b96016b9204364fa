"""One engine in a process of its own serves a soak: `python -m tests.vllm.served ORDER OUT`, both JSON.

With Numba in it, which ngram drafts need, vLLM 0.32 cannot start a second engine in a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvguard.fault_injection.served_traffic import Arrives, ServedTraffic
from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
from tests.soaking import assert_found_nothing

ROOT = Path(__file__).parents[2]
PROMPT_MAX = 190


def serve_apart(folder: Path, *, guarded: bool, timeout_s: float = 600, **order: Any) -> dict[str, Any]:
    """What `main` writes. order: model, options, steps, seed. AssertionError with the end of the log if it fails."""
    given, taken = folder / "order.json", folder / "served.json"
    given.write_text(json.dumps(order), encoding="utf-8")
    taken.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGUARD_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    if guarded:
        environment["KVGUARD_LEVEL"] = "keys"
    command = [sys.executable, "-m", "tests.vllm.served", str(given), str(taken)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0 and taken.exists(), f"{order}\n{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads(taken.read_text(encoding="utf-8"))
    return found


def watch(engine: VllmEngine, counts: Counter[str], tenant_of: dict[str, str]) -> None:
    """Count what vLLM makes of the traffic; a look-up counts for requests that had nothing to lose yet."""
    scheduler, manager, pool = engine.scheduler, engine.scheduler.kv_cache_manager, engine.pool
    preempt, evict = scheduler._preempt_request, pool._maybe_evict_cached_block
    lookup, note_drafts, looked_up = manager.get_computed_blocks, scheduler.make_spec_decoding_stats, set[str]()

    def watched_preempt(*args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    def watched_evict(*args: Any, **kwargs: Any) -> Any:
        evicted = evict(*args, **kwargs)
        counts["evictions"] += bool(evicted)
        return evicted

    def watched_lookup(request: Any, *args: Any, **kwargs: Any) -> Any:
        result = lookup(request, *args, **kwargs)
        name = request.request_id.rsplit("-", 1)[0]
        if name not in looked_up:
            looked_up.add(name)
            counts["cached tokens"] += int(result[1])
            kind = name.rstrip("0123456789")
            if result[1]:
                counts.update((f"hit {kind}", f"hit of {tenant_of[name]}"))
            elif kind == "return" and request.num_prompt_tokens > engine.options.block_size:
                counts["returned after eviction"] += 1
        return result

    def watched_drafts(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any) -> Any:
        counts["drafts"] += num_draft_tokens
        counts["accepted drafts"] += num_accepted_tokens
        counts["rejected drafts"] += num_draft_tokens - num_accepted_tokens
        return note_drafts(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    scheduler._preempt_request, pool._maybe_evict_cached_block = watched_preempt, watched_evict
    manager.get_computed_blocks, scheduler.make_spec_decoding_stats = watched_lookup, watched_drafts


def soak(engine: VllmEngine, steps: int, seed: int) -> tuple[dict[str, Any], Counter[str]]:
    """(finish reason, tokens) of what finished, and what it contained."""
    from vllm import SamplingParams

    llm, traffic = engine.llm_engine, ServedTraffic(seed, live_max=10, prompt_max=PROMPT_MAX)
    tenant_of: dict[str, str] = {}
    watch(engine, traffic.counts, tenant_of)
    answers: dict[str, Any] = {}
    for _ in range(steps):
        for event in traffic.turn(answers):
            if not isinstance(event, Arrives):
                llm.abort_request([event.name])
                continue
            tenant_of[event.name] = event.tenant
            prompt: Any = {"prompt_token_ids": list(event.prompt)}
            if event.tenant:
                prompt["cache_salt"] = event.tenant
            parameters = SamplingParams(max_tokens=event.tokens, temperature=0, ignore_eos=True, detokenize=False)
            llm.add_request(event.name, prompt, parameters)
        for output in llm.step():
            if output.finished:
                completion = output.outputs[0]
                answers[output.request_id] = [completion.finish_reason, list(completion.token_ids)]
    return answers, traffic.counts


def main(given: Path, taken: Path) -> None:
    """Serve what the order says, guarded if the environment says so."""
    from kvguard.adapters.vllm.plugin import register

    order = json.loads(given.read_text(encoding="utf-8"))
    register()
    engine = VllmEngine(VllmOptions(model=Path(order["model"]), **order["options"]))
    answers, counts = soak(engine, order["steps"], order["seed"])
    found: dict[str, Any] = {"answers": answers, "counts": counts, "guard": None}
    if engine.guard_side is not None:
        guard = engine.guard_side.guard
        health = guard.health()
        assert_found_nothing(guard, "keys")
        found["guard"] = {
            "violations": [violation.message for violation in guard.violations],
            "ok": health.ok,
            "in_flight": health.in_flight,
            "counters": health.counters,
        }
    taken.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
