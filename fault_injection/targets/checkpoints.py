"""Models of a campaign inside a real engine: a tiny random Llama drawn on the spot, SmolLM2, or any checkpoint."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from kvguard.fault_injection.models import SMOLLM2, cache_folder, smollm2_folder, write_checkpoint
from kvguard.fault_injection.traffic import Prompts, smollm2_prompts, token_prompts

TINY = "tiny"
TINY_VERSION = 1
"""Part of the folder's name: another drawing must not be taken for this one."""


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
        return smollm2_prompts(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Prompts(make=token_prompts(int(config["vocab_size"])))


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
