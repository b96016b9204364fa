"""A Llama-architecture model over paged keys and values: one `forward` for prefill chunks and decode steps alike."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvguard.fault_injection.engine.attention import AttentionPlan
from kvguard.fault_injection.engine.checkpoint import ModelConfig, read_config, read_tensors
from kvguard.fault_injection.engine.kv_cache import KVDtype, KVScales, PagedKV
from kvguard.fault_injection.engine.lora import LoraAdapter, add_deltas, random_adapter
from kvguard.fault_injection.engine.quantization import PackedInt4, int4_linear, pack_int4, quantize_int4
from kvguard.fault_injection.engine.rotary import RotaryTable, rotate

__all__ = ["ForwardBatch", "LlamaModel", "ModelConfig", "WeightFormat", "WindowBatch"]

WeightFormat = Literal["fp32", "bf16", "int4"]

_INT4_GROUP_SIZE = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowBatch:
    """What the windowed layers have of their own; see ForwardBatch for what is not said here."""

    kv: PagedKV
    block_table: Tensor
    """int32 [rows, columns]: entries of pages that every query's window has left are not read."""
    slot_mapping: Tensor
    """int64 [tokens]."""


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
    window: WindowBatch | None = None
    """For a model with windowed layers."""
    adapters: tuple[tuple[int, int, LoraAdapter], ...] = ()
    """(start, stop, adapter): of the tokens [start, stop); several of one token add up."""
    logits_of: Tensor | None = None
    """int64 [wanted]: tokens after which logits are wanted; None: the last of each row."""

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
        window = self.window
        if window is not None and (window.slot_mapping.shape[0], window.block_table.shape[0]) != (tokens, rows):
            raise ValueError(f"the windowed layers' slots and rows do not fit {tokens} tokens of {rows} rows")


def _multiplier(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """An [out, in] weight, rounded to `dtype`, as `_multiply` takes it: float32 [in, out].

    [in, out] in memory takes half the time of the checkpoint's order for a handful of tokens. float32 numbers that
    bfloat16 holds exactly: without instructions for bfloat16 a CPU multiplies them up to a hundred times as fast.
    """
    return weight.to(dtype).float().t().contiguous()


def _multiply(x: Tensor, multiplier: Tensor) -> Tensor:
    """x @ multiplier in the dtype of `x`, summed up in float32."""
    return x.float().mm(multiplier).to(x.dtype)


class _Linear:
    """x @ weight.T (+ bias), several checkpoint matrices with the same input stacked into one."""

    def __init__(
        self, weight: Tensor | PackedInt4, bias: Tensor | None, weights: WeightFormat, dtype: torch.dtype
    ) -> None:
        self._packed: PackedInt4 | None = None
        self._transposed: Tensor | None = None
        if weights == "int4":
            self._packed = weight if isinstance(weight, PackedInt4) else quantize_int4(weight, _INT4_GROUP_SIZE)
        else:
            plain = weight.dequantize(dtype) if isinstance(weight, PackedInt4) else weight
            self._transposed = _multiplier(plain, dtype)
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._transposed is not None:
            product = _multiply(x, self._transposed)
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

    def stacked(self, outputs: Mapping[str, int], inputs: int) -> Tensor:
        """Matrices with the same `inputs`, one below the other; `outputs`: name -> rows."""
        return torch.cat([self.get(f"{name}.weight", size, inputs) for name, size in outputs.items()])

    def stacked_int4(self, outputs: Mapping[str, int], inputs: int, group_size: int) -> PackedInt4:
        """The same of a packed checkpoint: int32 words [rows, inputs / 8] with eight nibbles, the first in the lowest
        bits, and scales [rows, inputs / group_size]."""
        if inputs % group_size or inputs % 8:
            raise ValueError(f"{self._source}: {inputs} inputs cannot be packed in groups of {group_size}")
        words = [self.get(f"{name}.weight_packed", size, inputs // 8) for name, size in outputs.items()]
        scales = [self.get(f"{name}.weight_scale", size, inputs // group_size) for name, size in outputs.items()]
        # A word's bytes, lowest first, are the bytes of PackedInt4.
        return pack_int4(torch.cat(words).contiguous().view(torch.uint8), torch.cat(scales))


class LlamaModel:
    """Weights and the arithmetic over them; keeps no state between steps but the rotary table.

    Attributes:
        config: what the checkpoint says of itself.
        weights: "fp32" computes in float32; "bf16" and "int4" in bfloat16. "int4" packs the layers' matrices (or
            takes them as they are, where the checkpoint is packed); the embedding, the head and the norms stay as in
            "bf16". Attention is computed in float32 always.
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
        self._head = _multiplier(self._head, self._dtype)
        self._final_norm = named.get("model.norm.weight", config.hidden_size).float()
        self._layers = [self._layer(named, f"model.layers.{index}.") for index in range(config.layers)]
        self._rotary = RotaryTable(head_dim=config.head_dim, theta=config.rope_theta, scaling=config.rope_scaling)

    @classmethod
    def from_pretrained(cls, path: str | Path, weights: WeightFormat, *, window: int | None = None) -> "LlamaModel":
        """Load a Hugging Face Llama folder: config.json and model.safetensors, or shards with their index.

        `window`: tokens that every second layer is to see, whatever it was trained with; None: all.

        Raises:
            FileNotFoundError: the folder, config.json, or a safetensors file is missing; the message names it.
            ValueError: another architecture, a rope scaling other than "llama3", quantised weights other than
                symmetric INT4 in the layout of compressed-tensors, a missing or misshapen tensor, or (for "int4") a
                matrix whose inputs are no multiple of 32.
        """
        folder = Path(path)
        return cls(replace(read_config(folder), window=window), read_tensors(folder), weights, folder)

    def new_kv(self, *, num_pages: int, page_size: int, dtype: KVDtype, windowed: bool = False) -> PagedKV:
        """Return empty pages that fit this model, with the checkpoint's FP8 scales where it brings them.

        `windowed`: for its windowed layers, else for those that see everything. ValueError if it has none of them.
        """
        layers = self._layers_of(windowed)
        scales = self.config.kv_scales
        if scales is not None:
            scales = KVScales(
                keys=tuple(scales.keys[layer] for layer in layers),
                values=tuple(scales.values[layer] for layer in layers),
            )
        return PagedKV(
            layers=len(layers),
            num_pages=num_pages,
            page_size=page_size,
            kv_heads=self.config.kv_heads,
            head_dim=self.config.head_dim,
            dtype=dtype,
            scales=scales,
        )

    def adapter(self, name: str) -> LoraAdapter:
        """The adapter of this name for this model."""
        config = self.config
        outputs = (config.heads + 2 * config.kv_heads) * config.head_dim
        return random_adapter(name, layers=config.layers, hidden=config.hidden_size, outputs=outputs)

    def _layers_of(self, windowed: bool) -> range:
        if self.config.window is None:
            return range(0 if windowed else self.config.layers)
        return range(int(windowed), self.config.layers, 2)

    def _layer(self, named: _Tensors, prefix: str) -> _Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(part: str, outputs: dict[str, int], inputs: int, has_bias: bool) -> _Linear:
            names = {f"{prefix}{part}.{name}_proj": size for name, size in outputs.items()}
            group_size = config.int4_group_size
            weight = named.stacked_int4(names, inputs, group_size) if group_size else named.stacked(names, inputs)
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

        The result is float32 [rows, vocab_size], for the last token of each row, or [wanted, vocab_size]. In each layer
        all writes come before all reads, as the kernels of a GPU engine run one after the other.

        Raises:
            ValueError: a sequence is longer than the model's positions or than its row of the block table, or windowed
                layers are on one side only.
        """
        config = self.config
        longest = max(batch.seq_lens)
        if longest > config.max_positions:
            raise ValueError(f"a sequence of {longest} tokens exceeds the model's {config.max_positions} positions")
        if longest > batch.block_table.shape[1] * kv.page_size:
            raise ValueError(f"{batch.block_table.shape[1]} pages of {kv.page_size} cannot hold {longest} tokens")
        if (batch.window is None) != (config.window is None):
            raise ValueError("the model and the batch do not agree on whether there are windowed layers")
        full = (kv, batch.slot_mapping, self._plan(batch, kv, batch.block_table))
        windowed = full
        if batch.window is not None:
            own = batch.window
            windowed = (own.kv, own.slot_mapping, self._plan(batch, own.kv, own.block_table, config.window))
        cosine, sine = self._rotary.rows(batch.positions, longest)
        tokens, turned_heads = batch.token_ids.shape[0], config.heads + config.kv_heads
        hidden = self._embedding.index_select(0, batch.token_ids)
        for number, layer in enumerate(self._layers):
            # Layers of each kind take turns, and count within their own pages.
            index = number if config.window is None else number // 2
            pages, slots, plan = windowed if number % 2 else full
            states = self._norm(hidden, layer.attention_norm)
            qkv = add_deltas(layer.qkv(states), states, number, batch.adapters)
            qkv = qkv.float().view(tokens, -1, config.head_dim)
            turned = rotate(qkv[:, :turned_heads], cosine, sine)
            pages.write(index, turned[:, config.heads :], qkv[:, turned_heads:], slots)
            attended = plan.attend(index, turned[:, : config.heads])
            hidden = hidden + layer.output(attended.to(self._dtype))
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        wanted = torch.tensor(batch.query_start[1:]) - 1 if batch.logits_of is None else batch.logits_of
        last = self._norm(hidden.index_select(0, wanted), self._final_norm)
        return _multiply(last, self._head).float()

    def _plan(self, batch: ForwardBatch, kv: PagedKV, block_table: Tensor, window: int | None = None) -> AttentionPlan:
        return AttentionPlan(
            kv=kv,
            heads=self.config.heads,
            positions=batch.positions,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_table=block_table,
            window=window,
        )
