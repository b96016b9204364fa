"""A Llama-architecture model over paged keys and values: one `forward` for prefill chunks and decode steps alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvguard.fault_injection.engine.attention import AttentionPlan
from kvguard.fault_injection.engine.checkpoint import ModelConfig, read_config, read_tensors
from kvguard.fault_injection.engine.kv_cache import KVDtype, PagedKV
from kvguard.fault_injection.engine.quantization import PackedInt4, int4_linear, quantize_int4
from kvguard.fault_injection.engine.rotary import RotaryTable, rotate

__all__ = ["ForwardBatch", "LlamaModel", "ModelConfig", "WeightFormat"]

WeightFormat = Literal["fp32", "bf16", "int4"]

_INT4_GROUP_SIZE = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardBatch:
    """One step's work: the tokens of all rows, concatenated."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]: place of each token in its sequence, from 0."""
    query_start: tuple[int, ...]
    """[rows + 1], host: row r has the tokens query_start[r] to query_start[r + 1] - 1; at least one each."""
    seq_lens: tuple[int, ...]
    """[rows], host: tokens with keys and values after this step's writes; at least 1."""
    block_table: Tensor
    """int32 [rows, columns]: physical page of each logical page; entries past a row's length are not read."""
    slot_mapping: Tensor
    """int64 [tokens]: slot (page * page_size + offset) that each token's key and value go to; negative: nowhere."""

    def __post_init__(self) -> None:
        """Check the host-side shape of the batch, never the ids: a wrong id is what a fault is made of.

        Raises:
            ValueError: lengths disagree, a row is empty, or there is no row.
        """
        tokens, rows = self.token_ids.shape[0], len(self.seq_lens)
        starts = self.query_start
        if rows == 0 or len(starts) != rows + 1 or starts[0] != 0 or starts[-1] != tokens:
            raise ValueError(f"query_start {starts} does not divide {tokens} tokens among {rows} rows")
        if any(start >= end for start, end in zip(starts, starts[1:], strict=False)) or min(self.seq_lens) < 1:
            raise ValueError(f"every row needs a query and a key: query_start {starts}, seq_lens {self.seq_lens}")
        if self.positions.shape[0] != tokens or self.slot_mapping.shape[0] != tokens:
            raise ValueError("positions and slot_mapping must have one entry a token")
        if self.block_table.shape[0] != rows:
            raise ValueError(f"block_table has {self.block_table.shape[0]} rows, the batch {rows}")


class _Linear:
    """x @ weight.T (+ bias), several checkpoint matrices with the same input stacked into one."""

    def __init__(self, weight: Tensor, bias: Tensor | None, weights: WeightFormat, dtype: torch.dtype) -> None:
        self._packed: PackedInt4 | None = None
        self._transposed: Tensor | None = None
        if weights == "int4":
            self._packed = quantize_int4(weight, _INT4_GROUP_SIZE)
        else:
            # [in, out] in memory: half the time of the checkpoint's order for a handful of tokens.
            self._transposed = weight.to(dtype).t().contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._transposed is not None:
            product = x.mm(self._transposed)
        else:
            assert self._packed is not None
            product = int4_linear(x, self._packed)
        return product if self._bias is None else product.add_(self._bias)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    attention_norm: Tensor
    qkv: _Linear
    output: _Linear
    mlp_norm: Tensor
    gate_up: _Linear
    down: _Linear


class _Tensors:
    """Checkpoint tensors by name, with one clear error for what is missing or misshapen."""

    def __init__(self, tensors: Mapping[str, Tensor], source: Path) -> None:
        self._tensors = tensors
        self._source = source

    def get(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"checkpoint {self._source} has no tensor {name!r}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{self._source}: {name} has shape {tuple(tensor.shape)}, config.json says {shape}")
        return tensor


class LlamaModel:
    """Weights and the arithmetic over them; keeps no state between steps but the rotary table.

    Attributes:
        config: what the checkpoint says of itself.
        weights: "fp32" computes in float32; "bf16" and "int4" in bfloat16. "int4" packs the layers' matrices; the
            embedding, the head and the norms stay as in "bf16". Attention is computed in float32 always.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], weights: WeightFormat, source: Path) -> None:
        """Build from Hugging Face tensors; `source` is only named in errors. See `from_pretrained` for those."""
        if weights not in ("fp32", "bf16", "int4"):
            raise ValueError(f"weights {weights!r} is not one of fp32, bf16, int4")
        self.config = config
        self.weights: WeightFormat = weights
        self._dtype = torch.float32 if weights == "fp32" else torch.bfloat16
        named = _Tensors(tensors, source)
        embedding_shape = (config.vocab_size, config.hidden_size)
        self._embedding = named.get("model.embed_tokens.weight", *embedding_shape).to(self._dtype)
        head_is_embedding = config.tie_word_embeddings
        self._head = self._embedding if head_is_embedding else named.get("lm_head.weight", *embedding_shape)
        self._head = self._head.to(self._dtype).t().contiguous()
        self._final_norm = named.get("model.norm.weight", config.hidden_size).float()
        self._layers = [self._layer(named, f"model.layers.{index}.") for index in range(config.layers)]
        self._rotary = RotaryTable(head_dim=config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)

    @classmethod
    def from_pretrained(cls, path: str | Path, weights: WeightFormat) -> "LlamaModel":
        """Load a Hugging Face Llama folder: config.json and model.safetensors, or shards with their index.

        Raises:
            FileNotFoundError: the folder, config.json, or a safetensors file is missing; the message names it.
            ValueError: another architecture, a rope scaling other than "llama3", a missing or misshapen tensor, or
                (for "int4") a matrix whose inputs are no multiple of 32.
        """
        folder = Path(path)
        return cls(read_config(folder), read_tensors(folder), weights, folder)

    def new_kv(self, *, num_pages: int, page_size: int, dtype: KVDtype) -> PagedKV:
        """Return empty pages that fit this model, with the checkpoint's FP8 scales where it brings them."""
        return PagedKV(
            layers=self.config.layers,
            num_pages=num_pages,
            page_size=page_size,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            scales=self.config.kv_scales,
        )

    def _layer(self, named: _Tensors, prefix: str) -> _Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(part: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> _Linear:
            names = {f"{prefix}{part}.{name}_proj": size for name, size in outputs.items()}
            weight = torch.cat([named.get(f"{name}.weight", size, inputs) for name, size in names.items()])
            biases = [named.get(f"{name}.bias", size) for name, size in names.items()] if has_bias else None
            return _Linear(weight, None if biases is None else torch.cat(biases), self.weights, self._dtype)

        sizes = {"q": query_size, "k": kv_size, "v": kv_size}
        return _Layer(
            attention_norm=named.get(prefix + "input_layernorm.weight", hidden).float(),
            qkv=linear("self_attn", sizes, hidden, config.attention_bias),
            output=linear("self_attn", {"o": hidden}, query_size, config.attention_bias),
            mlp_norm=named.get(prefix + "post_attention_layernorm.weight", hidden).float(),
            gate_up=linear("mlp", {"gate": inner, "up": inner}, hidden, config.mlp_bias),
            down=linear("mlp", {"down": hidden}, inner, config.mlp_bias),
        )

    def _norm(self, states: Tensor, gain: Tensor) -> Tensor:
        normed = functional.rms_norm(states.float(), (self.config.hidden_size,), gain, self.config.norm_eps)
        return normed.to(self._dtype)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: PagedKV) -> Tensor:
        """Write this step's keys and values, attend through the block table, return next-token logits.

        The result is float32 [rows, vocab_size], for the last token of each row. In each layer all writes come
        before all reads, as the kernels of a GPU engine run one after the other.

        Raises:
            ValueError: a sequence is longer than the model's positions or than its row of the block table.
        """
        config = self.config
        longest = max(batch.seq_lens)
        if longest > config.max_positions:
            raise ValueError(f"a sequence of {longest} tokens exceeds the model's {config.max_positions} positions")
        if longest > batch.block_table.shape[1] * kv.page_size:
            raise ValueError(f"{batch.block_table.shape[1]} pages of {kv.page_size} cannot hold {longest} tokens")
        plan = AttentionPlan(
            kv=kv,
            heads=config.heads,
            positions=batch.positions,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
        )
        cosine, sine = self._rotary.rows(batch.positions, longest)
        tokens, turned_heads = batch.token_ids.shape[0], config.heads + config.kv_heads
        hidden = self._embedding.index_select(0, batch.token_ids)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(hidden, layer.attention_norm)).float().view(tokens, -1, config.head_dim)
            turned = rotate(qkv[:, :turned_heads], cosine, sine)
            kv.write(index, turned[:, config.heads :], qkv[:, turned_heads:], batch.slot_mapping)
            attended = plan.attend(index, turned[:, : config.heads])
            hidden = hidden + layer.output(attended.to(self._dtype))
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        ends = torch.tensor(batch.query_start[1:]) - 1
        last = self._norm(hidden.index_select(0, ends), self._final_norm)
        return last.mm(self._head).float()
