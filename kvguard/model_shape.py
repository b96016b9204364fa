"""What a Hugging Face `config.json` says about a model's KV cache and weights; no engine and no torch is imported.

It reads multi-head and grouped-query attention, multi-head latent attention (MLA, DeepSeek-V2 and later), sliding
windows, layers of both kinds in turn, and mixtures of experts. What it cannot work out, and what a model type's default
fills in, it says in `notes`; where it would have to guess it refuses (kvguard/model_families.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvguard.model_families import Keys, read_keys

__all__ = ["KvGroup", "ModelShape", "WeightPart", "read_shape"]

LAYERS_MAX = 10_000
Role = Literal["experts", "linear", "other"]


@dataclass(frozen=True, kw_only=True)
class KvGroup:
    """Layers whose KV is laid out and kept alike.

    heads     KV heads in all; 1 for latent attention, whose one vector serves all query heads
    elements  numbers that one token takes per KV head and layer: key and value, or latent and rotary part
    window    tokens that a query sees, itself included; None: all
    """

    layers: int
    heads: int
    elements: int
    window: int | None = None

    def elements_per_rank(self, ranks: int) -> int:
        """Numbers that one token takes on one of `ranks` tensor-parallel ranks, all layers of the group together.

        KV heads are divided among the ranks; where there are fewer heads than ranks each rank keeps one, a copy (as
        vLLM and SGLang do). So every rank keeps the whole of a latent vector.
        """
        return self.layers * -(-self.heads // ranks) * self.elements


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Parameters that are stored and divided alike.

    role    experts: routed experts; linear: other matrices of the layers; other: embedding, head, norms, router
    copies  of how many equal parts a rank must hold at least one, if there are more ranks than parts; 0: the part is
            divided evenly; 1: every rank holds the whole of it
    """

    name: str
    parameters: int
    role: Role
    copies: int = 0

    def per_rank(self, ranks: int) -> float:
        """Parameters on one of `ranks` tensor-parallel ranks."""
        return self.parameters / (min(ranks, self.copies) if self.copies else ranks)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """KV groups, weights, and what could not be worked out.

    draft   weights of layers that only predict further tokens (DeepSeek's multi-token prediction)
    shared  parameters that a published checkpoint of the draft layers stores a second time: embedding and head
    """

    name: str
    kv: tuple[KvGroup, ...]
    weights: tuple[WeightPart, ...]
    draft: tuple[WeightPart, ...] = ()
    shared: int = 0
    max_positions: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Of the model, draft layers left out."""
        return sum(part.parameters for part in self.weights)

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any(part.role == "experts" for part in self.weights)


def read_shape(content: Mapping[str, Any], name: str) -> ModelShape:
    """Read the content of a config.json; `name` stands in errors and reports.

    Raises ValueError, naming the key, where something that is needed is missing or makes no sense, and for models
    without attention over a token-wise KV cache.
    """
    notes: list[str] = []
    config = read_keys(content, name, notes)
    layers = config.integer("num_hidden_layers")
    if layers > LAYERS_MAX:
        raise config.error(f"{layers} is no number of layers: num_hidden_layers is at most {LAYERS_MAX}")
    is_latent = config.given("kv_lora_rank")
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    if is_latent:
        latent = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
        base = KvGroup(layers=0, heads=1, elements=latent)
        attention = _latent_attention(config, heads, hidden)
    else:
        head_dim, kv_heads = config.head_dim(hidden, heads), config.kv_heads(heads)
        value_dim = config.integer("v_head_dim", head_dim)
        base = KvGroup(layers=0, heads=kv_heads, elements=head_dim + value_dim)
        attention = _grouped_attention(hidden, heads, kv_heads, head_dim + value_dim)
    if config.given("index_topk"):
        notes.append("the sparse-attention index keeps keys of its own, which are not counted")
    kv = _groups(config, layers, base, notes)
    weights, draft, shared = _weights(config, layers, hidden, attention, notes)
    return ModelShape(
        name=name,
        kv=kv,
        weights=weights,
        draft=draft,
        shared=shared,
        max_positions=config.optional("max_position_embeddings") or None,
        notes=tuple(notes),
    )


_FULL, _SLIDING = ("full_attention", "attention", "global"), ("sliding_attention", "local")
_CHUNKED = "chunked_attention"
_WHICH_LAYERS = (
    "attn_layer_period", "hybrid_override_pattern", "full_attention_interval", "layer_group_size", "linear_attn_config",
    "attn_layer_indices", "attention_types", "attention_layers", "block_types", "hybrid_layer_pattern",
    "full_attn_idxs", "hybrid_layer_ids", "sliding_window_layers",
)  # fmt: skip
"""Keys that say that layers differ, in ways that are not read."""


def _groups(config: Keys, layers: int, base: KvGroup, notes: list[str]) -> tuple[KvGroup, ...]:
    """Layers that see everything, and layers that see a window or chunk, as far as there are such."""
    window = config.window()
    kinds = next(
        (found for key in ("layer_types", "layers_block_type") if (found := config.list_of(key, str, layers))), None
    ) or _kinds(config, layers, window)
    full, sliding = (sum(kind in names for kind in kinds) for names in (_FULL, _SLIDING))
    chunked = kinds.count(_CHUNKED)
    if sliding and not window:
        raise config.error("layers with a sliding window, but no sliding_window")
    others = sorted(set(kinds) - {*_FULL, *_SLIDING, _CHUNKED})
    if others:
        notes.append(
            f"{layers - full - sliding - chunked} layers are {', '.join(others)}: their state (a fixed size per "
            "request) and their weights are not counted as such; the weights are taken for attention's"
        )
    chunk = config.integer("attention_chunk_size") if chunked else None
    groups = [
        KvGroup(layers=count, heads=base.heads, elements=base.elements, window=seen)
        for count, seen in ((full, None), (sliding, window), (chunked, chunk))
        if count
    ]
    if not groups:
        raise config.error("no layer keeps keys and values token by token, so there are no pages to plan")
    return tuple(groups)


def _kinds(config: Keys, layers: int, window: int) -> list[str]:
    """The kinds of layers where no list names them."""
    for key in _WHICH_LAYERS:
        if config.given(key):
            raise config.error(
                f"{key} says that not every layer is attention over all tokens, but not by layer_types; this program "
                "does not know which are"
            )
    kinds = config.list_of("attn_type_list", int, layers)
    if kinds is not None and set(kinds) != {1}:
        raise config.error("attn_type_list names layers that are not softmax attention: those are not read")
    if config.family == "llama4":
        # Layers with rotary positions see their chunk, those without see everything: every 4th where no list says so.
        if "attention_chunk_size" not in config.content:
            raise config.error("config.json has no 'attention_chunk_size', from which the sizes follow")
        every = config.integer("no_rope_layer_interval", 4)
        rotary = config.list_of("no_rope_layers", int) or [int((layer + 1) % every != 0) for layer in range(layers)]
        if len(rotary) != layers:
            raise config.error(f"{len(rotary)} no_rope_layers for {layers} layers")
        has_chunks = config.optional("attention_chunk_size") > 0
        return [_CHUNKED if has_chunks and is_rotary else _FULL[0] for is_rotary in rotary]
    if config.given("attention_chunk_size"):
        raise config.error("attention_chunk_size says that layers see chunks, but no layer_types which")
    if not window:
        return [_FULL[0]] * layers
    if config.content.get("max_window_layers") is not None:
        first = min(layers, config.optional("max_window_layers"))
        return [_FULL[0]] * first + [_SLIDING[0]] * (layers - first)
    every = config.pattern()
    return [_FULL[0] if every and (layer + 1) % every == 0 else _SLIDING[0] for layer in range(layers)]


def _grouped_attention(hidden: int, heads: int, kv_heads: int, elements: int) -> list[WeightPart]:
    """One layer: queries and output are divided by heads, keys and values by KV heads; `elements` of key and value."""
    return [
        WeightPart(name="attention", parameters=hidden * heads * elements, role="linear"),
        WeightPart(name="keys, values", parameters=hidden * kv_heads * elements, role="linear", copies=kv_heads),
    ]


def _latent_attention(config: Keys, heads: int, hidden: int) -> list[WeightPart]:
    """One layer of MLA: the projections down to the latents are small, and whole on every rank."""
    latent, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
    query = config.optional("q_lora_rank")
    down = hidden * (latent + rope) + (hidden * query if query else 0)
    up = (query or hidden) * heads * (nope + rope) + latent * heads * (nope + value) + heads * value * hidden
    return [
        WeightPart(name="attention", parameters=up, role="linear"),
        WeightPart(name="latents", parameters=down, role="linear", copies=1),
        WeightPart(name="norms", parameters=latent + (query or 0), role="other", copies=1),
    ]


def _sparse_layers(config: Keys, layers: int) -> int:
    """How many layers are a mixture of experts, of a model that has experts."""
    kinds = config.list_of("mlp_layer_types", str, layers)
    if kinds is not None:
        return layers - kinds.count("dense")
    named = config.list_of("moe_layers", int)
    if named is not None:
        return len({layer for layer in named if 0 <= layer < layers})
    dense, first = set(config.list_of("mlp_only_layers", int) or ()), config.optional("first_k_dense_replace")
    step = config.integer("decoder_sparse_step", config.integer("interleave_moe_layer_step", 1))
    frequency = config.content.get("moe_layer_freq")
    if isinstance(frequency, list):
        chosen = config.list_of("moe_layer_freq", int, layers) or []
        return sum(bool(is_sparse) for is_sparse in chosen[first:])
    every = config.integer("moe_layer_freq", 1)
    return sum(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    )


def _weights(
    config: Keys, layers: int, hidden: int, attention: list[WeightPart], notes: list[str]
) -> tuple[tuple[WeightPart, ...], tuple[WeightPart, ...], int]:
    """Weights, draft weights, and what a checkpoint of the draft layers holds twice. Three matrices a gated MLP."""
    vocab = config.integer("vocab_size")
    experts, matrices = config.optional("n_routed_experts"), config.mlp_matrices()
    parts = [WeightPart(name="embedding", parameters=vocab * hidden, role="other")]
    if not config.ties():
        parts.append(WeightPart(name="head", parameters=vocab * hidden, role="other"))
    positions = config.learned_positions()
    if positions:
        parts.append(WeightPart(name="positions", parameters=positions * hidden, role="other", copies=1))
    parts += [_times(part, layers) for part in attention]
    parts.append(WeightPart(name="norms", parameters=(2 * layers + 1) * hidden, role="other", copies=1))
    moe: list[WeightPart] = []
    if experts:
        width = config.expert_width()
        size = matrices * hidden * width
        moe = [
            WeightPart(name="routed experts", parameters=experts * size, role="experts"),
            WeightPart(name="router", parameters=experts * hidden, role="other", copies=1),
        ]
        shared = config.shared_width(width)
        if shared:
            moe.append(WeightPart(name="shared experts", parameters=matrices * hidden * shared, role="linear"))
    else:
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_intermediate_size", "moe_topk", "moe_k"):
            if config.given(key):
                raise config.error(f"{key} says that there are experts, but no n_routed_experts how many")
    sparse = _sparse_layers(config, layers) if experts else 0
    mlp: list[WeightPart] = []
    if sparse < layers:
        width = config.mlp_width(hidden)
        mlp = [WeightPart(name="dense MLP", parameters=matrices * hidden * width, role="linear")]
    parts += [_times(part, layers - sparse) for part in mlp]
    parts += [_times(part, sparse) for part in moe if sparse]
    if any(config.given(key) for key in ("attention_bias", "mlp_bias", "use_bias", "bias", "add_qkv_bias")):
        notes.append("biases are not counted")
    if config.given("attn_output_gate"):
        notes.append("the gates of attention's output are not counted")
    for key in ("mtp_num_hidden_layers", "num_mtp_modules", "mtp_num_layers"):
        if config.given(key):
            notes.append(f"the layers of {key}, which only predict further tokens, are not counted")
    predicted = config.optional("num_nextn_predict_layers")
    draft = [_times(part, predicted) for part in (*attention, *(moe or mlp)) if predicted]
    if predicted:
        # The last hidden state and the next token's embedding, side by side, down to one hidden state; four norms.
        draft.append(WeightPart(name="merge", parameters=2 * hidden * hidden * predicted, role="other", copies=1))
        draft.append(WeightPart(name="norms", parameters=5 * hidden * predicted, role="other", copies=1))
    return tuple(parts), tuple(draft), 2 * vocab * hidden * bool(predicted)


def _times(part: WeightPart, layers: int) -> WeightPart:
    return WeightPart(name=part.name, parameters=layers * part.parameters, role=part.role, copies=part.copies)
