"""What test_versions.py runs in a process with one release of vLLM: attach, a clean run, one abort.

`python -m tests.vllm.version_smoke CHECKPOINT`; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvguard.adapters.vllm import frontend
from kvguard.adapters.vllm.plugin import ATTACHED, register, when_imported
from kvguard.fault_injection.targets.vllm_engine import ENVIRONMENT, Answer, VllmEngine, VllmOptions
from tests.vllm.tiny import traffic

FAULT_STEP = 25
VICTIM, OTHER = 2, 4  # places in the traffic


def break_row(engine: VllmEngine) -> None:
    """Before step FAULT_STEP the victim's table row names another request's first two blocks."""
    schedule, steps = engine.scheduler.schedule, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == FAULT_STEP:
            batch = engine.runner.input_batch
            table = batch.block_table.block_tables[0].block_table.np
            rows = [batch.req_id_to_index[request.request_id] for request in engine.scheduler.running]
            table[rows[VICTIM], :2] = table[rows[OTHER], :2]
        return schedule(*args, **kwargs)

    engine.scheduler.schedule = counted


def patched_front_end() -> list[str]:
    """The front end's functions that the guard has wrapped, once vLLM's server modules are imported."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.output_processor import RequestState

    functions = (
        RequestState._new_completion_output,
        GenerateBaseServing._raise_if_error,
        OpenAIServingCompletion.create_completion,
        OpenAIServingChat.create_chat_completion,
    )
    return [function.__name__ for function in functions if hasattr(function, frontend.PATCHED)]


def main() -> None:
    """Print the version, the answers of an unguarded engine and of a guarded one, and what the guard counted."""
    os.environ.update(ENVIRONMENT)
    for name in ("KVGUARD_LEVEL", "KVGUARD_CONFIG"):
        os.environ.pop(name, None)
    import vllm

    checkpoint = Path(sys.argv[1])
    plain_engine = VllmEngine(VllmOptions(model=checkpoint))
    assert getattr(plain_engine.scheduler, ATTACHED, None) is None
    plain = [plain_engine.generate(*traffic(seed)) for seed in (1, 2)]
    os.environ["KVGUARD_LEVEL"] = "tags"
    register()
    engine = VllmEngine(VllmOptions(model=checkpoint))
    guard = engine.scheduler._kvguard_attached.guard
    clean = [engine.generate(*traffic(seed)) for seed in (1, 2)]
    clean_counts = guard.health().counters
    assert engine.scheduler.reset_prefix_cache()
    break_row(engine)
    faulty = engine.generate(*traffic(1))
    after = engine.generate(*traffic(2))
    frontend.attach(when_imported)

    def plainly(answers: list[Answer]) -> list[Any]:
        return [[answer.finish_reason, answer.stop_reason, answer.token_ids] for answer in answers]

    found = {
        "version": vllm.__version__,
        "file": vllm.__file__,
        "plain": [plainly(answers) for answers in plain],
        "clean": [plainly(answers) for answers in clean],
        "clean_counts": clean_counts,
        "faulty": plainly(faulty),
        "after": plainly(after),
        "violations": len(guard.violations),
        "reset": engine.scheduler.reset_prefix_cache(),
        "front_end": patched_front_end(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
