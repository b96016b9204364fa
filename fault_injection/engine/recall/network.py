"""The recall model as it is trained: the same Llama arithmetic as `engine.model`, but dense and differentiable.

Training sees the numbers it will meet in a campaign: under a `Rounding` the linear layers compute with weights that
went through INT4 and back, and attention with keys and values that went through FP8 and back. Gradients pass straight
through both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvguard.fault_injection.engine.model import ModelConfig

_INT4_GROUP = 32
Parameters = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What is rounded in one training step."""

    int4_weights: bool
    """Linear layers (not embeddings, not norms) compute with INT4-rounded weights, groups of 32 inputs."""
    kv_dtype: torch.dtype | None
    """Storage dtype that keys and values pass through; None keeps them as computed."""


EXACT = Rounding(int4_weights=False, kv_dtype=None)


def initial_parameters(config: ModelConfig, generator: torch.Generator) -> Parameters:
    """Return float32 leaf parameters under their Hugging Face names; [out, in] for the linear layers."""
    query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (config.hidden_size,)
        shapes[prefix + "post_attention_layernorm.weight"] = (config.hidden_size,)
        shapes[prefix + "self_attn.q_proj.weight"] = (query_size, config.hidden_size)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, config.hidden_size)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, config.hidden_size)
        shapes[prefix + "self_attn.o_proj.weight"] = (config.hidden_size, query_size)
        shapes[prefix + "mlp.gate_proj.weight"] = (config.intermediate_size, config.hidden_size)
        shapes[prefix + "mlp.up_proj.weight"] = (config.intermediate_size, config.hidden_size)
        shapes[prefix + "mlp.down_proj.weight"] = (config.hidden_size, config.intermediate_size)
    shapes["model.norm.weight"] = (config.hidden_size,)
    parameters: Parameters = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weight = torch.ones(shape)
        else:
            deviation = 0.1 if "embed" in name else shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= (2 * config.layers) ** 0.5
            weight = torch.randn(shape, generator=generator) * deviation
        parameters[name] = weight.requires_grad_()
    return parameters


def _round_int4(weight: Tensor) -> Tensor:
    grouped = weight.detach().reshape(weight.shape[0], -1, _INT4_GROUP)
    scale = grouped.abs().amax(dim=2, keepdim=True).clamp_min(1e-8) / 7
    rounded = ((grouped / scale).round().clamp(-7, 7) * scale).flatten(1)
    return weight + (rounded - weight.detach())


def _round_kv(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return values
    exact = values.detach()
    limit = torch.finfo(dtype).max
    scale = exact.abs().amax() * 1.25 / 448
    rounded = (exact / scale).clamp(-limit, limit).to(dtype).float() * scale
    return values + (rounded - exact)


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


@dataclass(frozen=True, kw_only=True)
class KVMaxima:
    """The largest magnitude met so far in each layer; lists that `hidden_states` raises as it goes."""

    keys: list[float]
    values: list[float]


def hidden_states(
    parameters: Parameters,
    config: ModelConfig,
    token_ids: Tensor,
    rounding: Rounding,
    maxima: KVMaxima | None = None,
) -> Tensor:
    """Return the normed float32 states before the (tied) head: [rows, length, hidden].

    `token_ids` is int64 [rows, length]. `maxima`, when given, is raised to what rotated keys and values reach.
    """
    rows, length = token_ids.shape
    half = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = angles.cos(), angles.sin()

    def norm(states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states, (config.hidden_size,), parameters[name], config.norm_eps)

    def linear(states: Tensor, *names: str) -> Tensor:
        weight = torch.cat([parameters[prefix + name + "_proj.weight"] for name in names])
        return functional.linear(states, _round_int4(weight) if rounding.int4_weights else weight)

    states = functional.embedding(token_ids, parameters["model.embed_tokens.weight"])
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        normed = norm(states, prefix + "input_layernorm.weight")
        fused = linear(normed, "self_attn.q", "self_attn.k", "self_attn.v")
        fused = fused.view(rows, length, -1, config.head_dim).transpose(1, 2)
        query, key, value = torch.split(fused, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        if maxima is not None:
            maxima.keys[layer] = max(maxima.keys[layer], key.abs().max().item())
            maxima.values[layer] = max(maxima.values[layer], value.abs().max().item())
        key, value = _round_kv(key, rounding.kv_dtype), _round_kv(value, rounding.kv_dtype)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        states = states + linear(attended.transpose(1, 2).flatten(2), "self_attn.o")
        normed = norm(states, prefix + "post_attention_layernorm.weight")
        gate, up = linear(normed, "mlp.gate", "mlp.up").chunk(2, dim=-1)
        states = states + linear(functional.silu(gate) * up, "mlp.down")
    return norm(states, "model.norm.weight")
