"""Models of a vLLM campaign: a tiny random Llama that is drawn on the spot, SmolLM2, or any checkpoint in a folder."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvguard.fault_injection.models import cache_folder, smollm2_folder
from kvguard.fault_injection.traffic import PromptMaker, token_prompts

TINY, SMOLLM2 = "tiny", "smollm2"
TINY_VERSION = 1
"""Part of the folder's name: another drawing must not be taken for this one."""


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How traffic becomes token ids, and back where that can be read. `recites` as in PageTarget."""

    make: PromptMaker
    text: Callable[[tuple[int, ...]], str] | None = None
    recites: bool = False


def model_folder(model: str, weights: str) -> Path:
    """The checkpoint of a campaign's model. FileNotFoundError, with what to do, if it is not there."""
    if model == TINY:
        return tiny_folder()
    if model == SMOLLM2:
        return smollm2_folder(weights)  # type: ignore[arg-type]
    return Path(model)


@lru_cache(maxsize=4)
def prompts_of(model: str, folder: Path) -> Prompts:
    """Random tokens for a random model; SmolLM2 is made to recite a secret, so that a leak can be read."""
    if model == SMOLLM2:
        return _smollm2_prompts(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Prompts(make=token_prompts(int(config["vocab_size"])))


def _smollm2_prompts(folder: Path) -> Prompts:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def make(rng: random.Random, text: str) -> tuple[int, ...]:
        del rng
        # What stands there twice, even a model of this size says a third time, with INT4 weights too.
        return tuple(tokenizer.encode(f"Note: {text}\nNote: {text}\nNote:", add_special_tokens=False))

    return Prompts(make=make, text=lambda tokens: str(tokenizer.decode(list(tokens))))


def tiny_folder() -> Path:
    """Four layers, hidden size 128, drawn with large weights: with small ones every prompt gives the same token."""
    folder = cache_folder() / "models" / f"tiny-llama-{TINY_VERSION}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        drawn = Path(tempfile.mkdtemp(dir=folder.parent, prefix="tiny-llama-"))
        try:
            _draw_tiny(drawn)
            # Several workers may draw at once, all the same: whoever comes second leaves the first one's.
            drawn.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
        finally:
            shutil.rmtree(drawn, ignore_errors=True)
    return folder


def _draw_tiny(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=258,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
        model.lm_head.weight.normal_(0, 0.3)
        model.model.embed_tokens.weight.normal_(0, 1.0)
    model.save_pretrained(folder)
