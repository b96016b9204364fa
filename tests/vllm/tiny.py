"""Tiny random checkpoints whose greedy tokens vary, traffic for them, and how to run vLLM without the guard."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import ATTACHED

ARCHITECTURES = ("llama", "mistral", "gemma3")
"""Full attention; a sliding window of 64 tokens in every layer; both kinds of layers in turn (a hybrid model)."""


def write_checkpoint(folder: Path, seed: int = 0, architecture: str = "llama") -> Path:
    """4 layers, hidden 128, large random weights: with small ones every prompt would give the same token."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 258,
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": False,
    }
    model: Any
    if architecture == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    elif architecture == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=64, **shape))
    else:
        shape |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(query_pre_attn_scalar=32, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
        model.lm_head.weight.normal_(0, 0.3)
        model.model.embed_tokens.weight.normal_(0, 1.0)
    model.save_pretrained(folder)
    return folder


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
