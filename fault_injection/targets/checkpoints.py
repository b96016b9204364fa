"""Models of a campaign inside a real engine: a tiny random Llama drawn on the spot, SmolLM2, or any checkpoint."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kvguard.fault_injection.models import SMOLLM2, cache_folder, smollm2_folder, write_adapter, write_checkpoint
from kvguard.fault_injection.traffic import Prompts, smollm2_prompts, token_prompts

TINY = "tiny"
TINY_VERSION = ADAPTER_VERSION = 1
"""Part of the folder's name: another drawing must not be taken for this one."""
OTHER_SEED = 1
"""Of the weights that take the place of the tiny model's."""


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
    return _drawn(f"tiny-llama-{TINY_VERSION}", "config.json", write_checkpoint)


def other_weights() -> Path:
    """A checkpoint of the tiny model's shape, drawn with another seed: what takes its place in a weight update."""
    return _drawn(f"tiny-llama-other-{OTHER_SEED}", "config.json", lambda at: write_checkpoint(at, seed=OTHER_SEED))


def tiny_adapter(name: str) -> Path:
    """A LoRA adapter of the tiny model; each name has weights of its own."""
    seed = int.from_bytes(name.encode(), "big") % (1 << 31)
    return _drawn(f"tiny-adapter-{ADAPTER_VERSION}-{name}", "adapter_config.json", lambda at: write_adapter(at, seed))


def _drawn(name: str, last: str, draw: Callable[[Path], Path]) -> Path:
    """The folder of a model in the cache; `last`: a file without which it is drawn anew."""
    folder = cache_folder() / "models" / name
    if not (folder / last).is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        drawn = Path(tempfile.mkdtemp(dir=folder.parent, prefix="tiny-"))
        try:
            draw(drawn)
            # Several workers may draw at once, all the same: whoever comes second leaves the first one's.
            drawn.rename(folder)
        except OSError:
            if not (folder / last).is_file():
                raise
        finally:
            shutil.rmtree(drawn, ignore_errors=True)
    return folder
