"""Reading a Hugging Face Llama checkpoint folder: its configuration and its tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from kvguard.fault_injection.engine.kv_cache import KVScales
from kvguard.fault_injection.engine.rotary import Llama3Scaling

__all__ = ["ModelConfig", "read_config", "read_tensors"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a Llama-architecture model is made of."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    """Divides `heads`."""
    head_dim: int
    """Even; need not be hidden_size / heads."""
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Empty where the checkpoint names none."""
    max_positions: int
    """Longest sequence in tokens."""
    kv_scales: KVScales | None = None
    """Calibrated FP8 factors, where the checkpoint brings them (key "kv_scales")."""
    int4_group_size: int | None = None
    """Inputs that share a scale where the layers' matrices come packed in 4 bits (compressed-tensors), else None."""
    window: int | None = None
    """Tokens that every second layer (1, 3, ...) sees, the token itself included; None: every layer sees all."""


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint file {path} does not exist")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def _rope(content: dict[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Return theta and scaling from either spelling: "rope_theta" and "rope_scaling", or "rope_parameters"."""
    parameters = content.get("rope_parameters") or content.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or content.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope scaling of kind {kind!r} is not supported (only 'default' and 'llama3')")
    return theta, Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_positions=int(parameters["original_max_position_embeddings"]),
    )


def _eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _int4_group_size(content: dict[str, Any], path: Path) -> int | None:
    """The group size of a checkpoint with W4A16 weights as compressed-tensors packs them; None: it is not packed."""
    quantization = content.get("quantization_config")
    if quantization is None:
        return None
    groups = list((quantization.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if len(groups) == 1 else {}
    kind = (quantization.get("quant_method"), quantization.get("format"), weights.get("num_bits"), weights.get("type"))
    if kind != ("compressed-tensors", "pack-quantized", 4, "int") or not weights.get("symmetric"):
        raise ValueError(f"{path}: these quantised weights are not supported (only symmetric INT4, compressed-tensors)")
    if weights.get("strategy") != "group" or not weights.get("group_size"):
        raise ValueError(f"{path}: INT4 weights need a scale for each group of inputs")
    return int(weights["group_size"])


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration in `folder`.

    Raises:
        FileNotFoundError: the folder or its `config.json` is missing.
        ValueError: the architecture, activation or rope scaling is not one this engine computes, or a key is missing.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist")
    path = folder / "config.json"
    content = _load_json(path)
    if content.get("model_type") != "llama":
        raise ValueError(f"{path}: model_type {content.get('model_type')!r} is not supported (only 'llama')")
    if content.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: hidden_act {content['hidden_act']!r} is not supported (only 'silu')")
    try:
        heads, hidden_size = int(content["num_attention_heads"]), int(content["hidden_size"])
        theta, scaling = _rope(content)
        scales = content.get("kv_scales")
        config = ModelConfig(
            vocab_size=int(content["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(content["intermediate_size"]),
            layers=int(content["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(content.get("num_key_value_heads") or heads),
            head_dim=int(content.get("head_dim") or hidden_size // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(content.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(content.get("tie_word_embeddings", False)),
            attention_bias=bool(content.get("attention_bias", False)),
            mlp_bias=bool(content.get("mlp_bias", False)),
            bos_token_id=content.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(content.get("eos_token_id")),
            max_positions=int(content.get("max_position_embeddings", 2048)),
            kv_scales=scales and KVScales(keys=tuple(scales["keys"]), values=tuple(scales["values"])),
            int4_group_size=_int4_group_size(content, path),
        )
    except KeyError as error:
        raise ValueError(f"{path}: key {error} is missing") from error
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise ValueError(f"{path}: {config.heads} heads, {config.kv_heads} KV heads of {config.head_dim} do not fit")
    return config


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_load_json(index)["weight_map"].values()))]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise FileNotFoundError(f"neither {single} nor {index} exists")
    return [single]


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint by their Hugging Face names, in the dtypes they are stored in.

    Raises:
        FileNotFoundError: there is no safetensors file, or a shard that the index names is missing.
    """
    tensors: dict[str, Tensor] = {}
    for path in _tensor_files(folder):
        if not path.is_file():
            raise FileNotFoundError(f"checkpoint shard {path} does not exist")
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                tensors[name] = file.get_tensor(name)
    return tensors
