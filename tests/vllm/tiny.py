"""Tiny random checkpoints whose greedy tokens vary, traffic for them, and how to run vLLM without the guard."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvguard.adapters.vllm.plugin import ATTACHED
from kvguard.fault_injection.models import ARCHITECTURES, write_checkpoint

__all__ = ["ARCHITECTURES", "traffic", "unguarded", "write_checkpoint"]


@contextmanager
def unguarded() -> Iterator[None]:
    """No kvguard variable, and vLLM's own constructors where an earlier test of this process registered the plug-in."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KVGUARD_")]:
            patch.delenv(name)
        for owner in (Scheduler, RunnerV1, RunnerV2):
            original = getattr(owner.__init__, "__wrapped__", None)
            if original is not None and getattr(owner.__init__, ATTACHED, False):
                patch.setattr(owner, "__init__", original)
        yield


def traffic(seed: int, requests: int = 6) -> tuple[list[list[int]], list[int]]:
    """Prompts of 40 to 100 tokens, two of them equal, half of them sharing a prefix; and tokens to generate."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(70)]
    prompts = [
        (shared if index % 2 else []) + [rng.randrange(256) for _ in range(rng.randrange(20, 60))]
        for index in range(requests)
    ]
    prompts[-1] = prompts[0]
    return prompts, [rng.randrange(40, 70) for _ in range(requests)]
