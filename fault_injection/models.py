"""Where prepared models lie, and tiny ones drawn at random; importing this imports no engine and no torch.

`make models` prepares SmolLM2-135M-Instruct in two forms, kept outside git:

    bf16   a plain Hugging Face checkpoint (269 MB)
    int4   its linear layers as W4A16, groups of 32, symmetric, in the packed layout of compressed-tensors (116 MB)
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any, Literal

Weights = Literal["bf16", "int4"]
CACHE_VARIABLE = "KVGUARD_TEST_CACHE"  # under the prefix that kvguard's configuration leaves alone
STAMP = "kvguard-model.stamp"
SMOLLM2 = "smollm2"
"""How campaigns name it."""


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


def write_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of rank 4 for `write_checkpoint`'s Llama, on queries and values; large, so that tokens change."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer, (name, width) in itertools.product(range(4), (("q_proj", 128), ("v_proj", 64))):
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{place}.lora_A.weight"] = torch.randn(4, 128, generator=generator) * 0.2
        weights[f"{place}.lora_B.weight"] = torch.randn(width, 4, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    config |= {"base_model_name_or_path": "tiny", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
