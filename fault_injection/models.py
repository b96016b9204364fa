"""Where prepared real models lie; nothing here imports an engine, or loads or downloads anything.

`make models` prepares SmolLM2-135M-Instruct in two forms, kept outside git:

    bf16   a plain Hugging Face checkpoint (269 MB)
    int4   its linear layers as W4A16, groups of 32, symmetric, in the packed layout of compressed-tensors (116 MB)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Weights = Literal["bf16", "int4"]
CACHE_VARIABLE = "KVGUARD_TEST_CACHE"  # under the prefix that kvguard's configuration leaves alone
STAMP = "kvguard-model.stamp"


def cache_folder() -> Path:
    """The folder for what is downloaded or prepared: $KVGUARD_TEST_CACHE, else .cache in a checkout, else the user's.

    It need not exist.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    root = Path(__file__).resolve().parents[1]
    return root / ".cache" if (root / "pyproject.toml").is_file() else Path.home() / ".cache" / "kvguard"


def smollm2_folder(weights: Weights) -> Path:
    """The prepared SmolLM2-135M-Instruct checkpoint, tokenizer included.

    Raises FileNotFoundError, naming the command that prepares it, where it is not there or was not finished.
    """
    if weights not in ("bf16", "int4"):
        raise ValueError(f"SmolLM2 is prepared with weights bf16 and int4, not {weights!r}")
    folder = cache_folder() / "models" / f"smollm2-135m-instruct-{weights}"
    if not (folder / STAMP).is_file():
        raise FileNotFoundError(f"SmolLM2 with {weights} weights is not prepared ({folder}): run `make models`")
    return folder
