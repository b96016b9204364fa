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

from kvguard.fault_injection.models import cache_folder, smollm2_folder, write_checkpoint
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
            write_checkpoint(drawn)
            # Several workers may draw at once, all the same: whoever comes second leaves the first one's.
            drawn.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
        finally:
            shutil.rmtree(drawn, ignore_errors=True)
    return folder
