"""A guarded vLLM in decode, and how many steps went the short way: `python -m tests.vllm.steady RUNNER ASYNC MODEL`.

Prints one line of JSON. A process of its own, for one process can run one of vLLM's model runners.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[(7 * row + token) % 251 for token in range(20 + 9 * row)] for row in range(3)]
TOKENS = [60, 60, 60]
FAULT = 20
"""The short check before which a block table is broken."""


def main(runner: Any, asynchronous: bool, model: Path) -> dict[str, Any]:
    """Tokens and counts of a healthy run, then of one with a fault in a short step."""
    os.environ |= {"KVGUARD_LEVEL": "tags", "VLLM_PLUGINS": ""}
    from kvguard.adapters.vllm.plugin import register
    from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions

    register()
    engine = VllmEngine(VllmOptions(model=model, runner=runner, asynchronous=asynchronous))
    guard: Any = engine.guard_side.guard
    step_onward, crossed = guard.step_onward, 0

    def counted_onward(grown: Any, published: Any) -> Any:
        nonlocal crossed
        delta = step_onward(grown, published)
        crossed += delta is not None and bool(grown)
        return delta

    guard.step_onward = counted_onward
    healthy = engine.generate(PROMPTS, TOKENS)
    steps = guard.health().counters["steps_verified"]
    worker = engine.runner._kvguard_attached
    verifier, short = worker._verifier, 0
    check_again = verifier.check_again

    def counted(delta: Any) -> Any:
        nonlocal short
        short += 1
        if short == FAULT:
            launch = verifier._launches[2][0]
            table, rows = launch.of_reads["table"], launch.of_reads["row_index"]
            table[int(rows[1]), 0] = 0
        return check_again(delta)

    verifier.check_again = counted
    assert engine.scheduler.reset_prefix_cache()
    broken = engine.generate(PROMPTS, TOKENS)
    return {
        "steps": steps,
        "short": short,
        "crossed": crossed,
        "health": guard.health().ok,
        "healthy": [answer.finish_reason for answer in healthy],
        "broken": [answer.finish_reason for answer in broken],
        "same": [one == other for one, other in zip(healthy, broken, strict=True)],
        "tokens": len(broken[1].token_ids),
        "kinds": [str(violation.kind) for violation in guard.violations],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2] == "async", Path(sys.argv[3]))))
