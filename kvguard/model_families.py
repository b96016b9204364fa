"""What a `config.json` means by its model type: other names of its keys, what it leaves out, and what is not read.

A configuration may leave out what its model type's class has as a default. Only defaults that are known here are used,
and each that is used is said in the notes; the rest is refused. From the configuration classes of Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["Keys", "read_keys"]

COUNT_MAX: Final = 10**9

_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "num_query_groups", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("ffn_dim", "ffn_hidden_size", "n_inner"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "seq_length", "max_sequence_length", "max_seq_len"),
    "n_routed_experts": ("num_local_experts", "num_experts", "moe_num_experts"),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "first_k_dense_replace": ("num_dense_layers",),
    "shared_expert_intermediate_size": ("shared_intermediate_size", "moe_shared_expert_intermediate_size"),
}
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")

_PLAIN_MLP: Final = frozenset(
    "apertus arcee biogpt bloom codegen falcon fuyu gpt2 gpt_bigcode gpt_neo gpt_neox gptj jais2 mpt nanochat nemotron "
    "opt persimmon phi starcoder2 xglm".split()
)
"""Two matrices an MLP: up and down, no gate."""
_GATED_MLP: Final = frozenset(
    "afmoe chatglm cohere cohere2 deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone4 "
    "gemma gemma2 gemma3 glm glm4 glm4_moe glm_moe_dsa gpt_oss granite granitemoe granitemoeshared helium "
    "hunyuan_v1_dense hunyuan_v1_moe internlm2 internlm3 kimi_k2 llama llama4 minicpm minicpm3 minimax_m2 ministral "
    "ministral3 mistral mistral4 mixtral olmo olmo2 olmo3 olmoe phi3 phimoe qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 "
    "qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe seed_oss smollm3 solar_open stablelm yi "
    "youtu".split()
)
_TIED: Final = frozenset(
    "biogpt bloom cohere cohere2 ernie4_5 ernie4_5_moe falcon gemma gemma2 gemma3 gpt2 gpt_bigcode gpt_neo minicpm3 "
    "mpt opt qwen3_vl_moe smollm3 starcoder2 xglm youtu".split()
)
"""Whose class ties the embeddings where `tie_word_embeddings` is left out."""
_UNTIED: Final = frozenset(
    "afmoe apertus arcee chatglm codegen deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone4 fuyu glm glm4 glm4_moe "
    "glm_moe_dsa gpt_neox gpt_oss gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe "
    "jais2 llama llama4 minimax_m2 ministral ministral3 mistral mistral4 mixtral nanochat nemotron olmo olmo2 olmo3 "
    "olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_5 "
    "qwen3_5_moe seed_oss solar_open stablelm".split()
)
_FOUR_TIMES: Final = frozenset("bloom codegen falcon gpt2 gpt_bigcode gpt_neo gptj".split())
"""Whose MLP is four times as wide as the hidden state where its width is left out."""
_AS_MANY_KV_HEADS: Final = frozenset(
    "afmoe apertus arcee biogpt bloom codegen cohere cohere2 deepseek_v2 fuyu gpt2 gpt_neo gpt_neox gptj granite "
    "granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jais2 llama nanochat nemotron olmo olmo2 olmo3 olmoe "
    "opt persimmon phi phi3 xglm".split()
)
"""Whose class takes as many KV heads as attention heads where they are left out."""
_OWN_HEAD_DIM: Final = frozenset(
    "afmoe ernie4_5 gemma gemma2 gemma3 glm glm4 gpt_oss helium llama4 minimax_m2 ministral3 qwen3 qwen3_vl qwen3_next "
    "qwen3_5 qwen3_5_moe seed_oss solar_open".split()
)
"""Whose class has a size of a head that is not hidden size / heads."""
_EXPERTS_AS_MLP: Final = frozenset("gpt_oss granitemoe granitemoeshared llama4 minimax_m2 mixtral olmoe phimoe".split())
"""Whose `intermediate_size` is an expert's width."""
_OWN_SHARED_EXPERT: Final = frozenset("qwen2_moe qwen3_next qwen3_5_moe".split())
_POSITIONS: Final[Mapping[str, int]] = {"opt": 2, "biogpt": 2, "gpt2": 0, "gpt_bigcode": 0, "gpt_neo": 0}
"""Learned positions: how many rows more than positions."""
_EVERY_LAYER_SLIDES: Final = frozenset("mistral mixtral phi3 phimoe starcoder2".split())
_PATTERNS: Final[Mapping[str, int]] = {"gemma2": 2, "gemma3": 6, "gpt_oss": 2, "cohere2": 4, "olmo3": 4}
"""Every n-th layer sees everything where nothing says which do."""
_OFF_UNLESS_ASKED: Final = ("qwen2", "qwen3")
"""Whose `sliding_window` counts only with `use_sliding_window`."""

_NOT_READ: Final = frozenset(
    "deepseek_v4 dbrx falcon_h1 falcon_mamba gemma3n jetmoe longcat_flash mamba mamba2 mllama recurrent_gemma rwkv "
    "xlstm zamba zamba2".split()
)
_KEYS_NOT_READ: Final[Mapping[str, str]] = {
    "is_encoder_decoder": "an encoder and a decoder, with KV of both",
    "num_kv_shared_layers": "layers that use the KV of others",
    "use_cla": "layers that use the KV of others",
    "block_configs": "layers that differ from one another",
    "cross_attention_layers": "layers that attend to images",
    "num_global_key_value_heads": "layers with other KV heads",
    "attention_k_eq_v": "layers that keep keys only",
    "compress_ratios": "KV that is compressed",
    "enable_moe_block": "layers with an MLP and experts",
    "ffn_config": "sizes within another object",
    "attn_config": "sizes within another object",
    "moe_layer_interval": "which layers are a mixture of experts in a way that is not read",
    "expert_layer_period": "which layers are a mixture of experts in a way that is not read",
    "moe_every_n_layers": "which layers are a mixture of experts in a way that is not read",
    "moe_layers_enum": "which layers are a mixture of experts in a way that is not read",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "mamba_d_ssm": "a recurrent state beside the KV of each layer",
}
_OTHER_SIZES: Final[Mapping[str, str]] = {
    "global_head_dim": "head_dim",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
    "swa_num_key_value_heads": "num_key_value_heads",
    "swa_num_attention_heads": "num_attention_heads",
}
"""Sizes of some layers: read only where they are those of all."""


class Keys:
    """A configuration's keys under their usual names, with one clear error for what is missing or makes no sense."""

    def __init__(self, content: Mapping[str, Any], name: str, notes: list[str]) -> None:
        self.content, self.name, self.notes = content, name, notes
        kind = content.get("model_type")
        self.family = kind.removesuffix("_text") if isinstance(kind, str) else ""

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.name}: {message}")

    def given(self, key: str) -> bool:
        """Whether it is there and says something: not null, false, 0 or empty."""
        return bool(self.content.get(key))

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to COUNT_MAX; without a default it must be there."""
        value = self.content.get(key)
        if value is None:
            if default is None:
                others = f" (nor {', '.join(_ALIASES[key])})" if key in _ALIASES else ""
                raise self.error(f"config.json has no {key!r}{others}, from which the sizes follow")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= COUNT_MAX:
            shown = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:60]}..."
            above = "above 0" if least else "of 0 or more"
            raise self.error(f"{key} must be a whole number {above} and at most 10^9, not {shown}")
        return value

    def optional(self, key: str) -> int:
        """A whole number, 0 where it is left out."""
        return self.integer(key, 0, least=0)

    def flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def list_of(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """A list of `kind`, None where it is left out."""
        value = self.content.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            what = {int: "whole numbers", str: "names"}[kind]
            raise self.error(f"{key} must be a list of {what}, not {str(value)[:60]!r}")
        if length is not None and len(value) != length:
            raise self.error(f"{len(value)} {key.replace('_', ' ')} for {length} layers")
        return value

    # -- what a model type says ---------------------------------------------------------------------------------------

    def kv_heads(self, heads: int) -> int:
        """KV heads of a layer; some model types say by a switch that there is one, or which key counts."""
        if self.family == "falcon" and not self.flag("new_decoder_architecture", False):
            return 1 if self._said("multi_query", True) else heads
        if self.family == "gpt_bigcode":
            return 1 if self._said("multi_query", True) else heads
        if self.family == "chatglm" and not self.flag("multi_query_attention", False):
            return heads
        if self.family in ("falcon", "chatglm") or self.content.get("num_key_value_heads") is not None:
            found = self.integer("num_key_value_heads", heads if self.family == "falcon" else None)
        elif self.family in _AS_MANY_KV_HEADS and not self.given("multi_query"):
            self.notes.append(f"no num_key_value_heads: {heads}, as many as attention heads ({self.family})")
            found = heads
        else:
            found = self.integer("num_key_value_heads")
        if found > heads or heads % found:
            raise self.error(f"{found} KV heads cannot serve {heads} attention heads alike: see num_key_value_heads")
        return found

    def _said(self, key: str, default: bool) -> bool:
        if self.content.get(key) is None:
            self.notes.append(f"no {key}: {str(default).lower()} ({self.family})")
        return self.flag(key, default)

    def head_dim(self, hidden: int, heads: int) -> int:
        """Numbers of a head."""
        if self.content.get("head_dim") is not None or self.family in _OWN_HEAD_DIM:
            return self.integer("head_dim")
        if hidden % heads:
            raise self.error(f"no head_dim, and hidden_size {hidden} is no multiple of {heads} attention heads")
        if not self.is_known:
            self.notes.append(f"no head_dim: {hidden // heads}, hidden size / attention heads, is taken")
        return hidden // heads

    @property
    def is_known(self) -> bool:
        """Whether it is known how an MLP of this model type is built."""
        return self.family in _PLAIN_MLP or self.family in _GATED_MLP

    def mlp_matrices(self) -> int:
        """Of an MLP or an expert: 3 with a gate, 2 without."""
        if not self.is_known:
            self.notes.append(
                f"model type {self.family or 'not given'!r} is not known here: three matrices an MLP (gated) are taken"
            )
        return 2 if self.family in _PLAIN_MLP else 3

    def ties(self) -> bool:
        """Whether embedding and head are one matrix."""
        if self.content.get("tie_word_embeddings") is not None:
            return self.flag("tie_word_embeddings", False)
        tied = self.family in _TIED
        why = self.family if tied or self.family in _UNTIED else "not known for this model type: it is the larger"
        self.notes.append(f"no tie_word_embeddings: {str(tied).lower()} is taken ({why})")
        return tied

    def mlp_width(self, hidden: int) -> int:
        """Of a layer that is no mixture of experts."""
        if self.family == "llama4" and self.given("n_routed_experts"):
            return self.integer("intermediate_size_mlp")
        if self.content.get("intermediate_size") is None and self.family in _FOUR_TIMES:
            self.notes.append(f"no intermediate_size: 4 x hidden_size ({self.family})")
            return 4 * hidden
        return self.integer("intermediate_size")

    def expert_width(self) -> int:
        """Of one routed expert."""
        if self.content.get("moe_intermediate_size") is not None:
            return self.integer("moe_intermediate_size")
        if self.family not in _EXPERTS_AS_MLP:
            self.notes.append("no moe_intermediate_size: experts are taken to be as wide as intermediate_size")
        return self.integer("intermediate_size")

    def shared_width(self, expert_width: int) -> int:
        """Of all shared experts of a layer together, 0 without."""
        if self.family == "llama4":
            return expert_width
        if self.given("shared_expert_intermediate_size") or self.family in _OWN_SHARED_EXPERT:
            width = self.integer("shared_expert_intermediate_size", least=0)
            return width * max(1, self.optional("n_shared_experts"))
        return self.optional("n_shared_experts") * expert_width

    def learned_positions(self) -> int:
        """Rows of a learned matrix of positions, 0 without."""
        if self.family not in _POSITIONS:
            return 0
        return self.integer("max_position_embeddings") + _POSITIONS[self.family]

    def window(self) -> int:
        """Tokens of the sliding window, 0 without."""
        if self.family.startswith(_OFF_UNLESS_ASKED) or self.content.get("max_window_layers") is not None:
            asked = self.flag("use_sliding_window", False)
            if self.given("sliding_window") and self.content.get("use_sliding_window") is None:
                self.notes.append("no use_sliding_window: sliding_window is taken to be off")
        else:
            asked = self.flag("use_sliding_window", True)
        return self.optional("sliding_window") if asked else 0

    def pattern(self) -> int:
        """Every how many-th layer sees everything, where layers with a window are in turn with such; 0: none does."""
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            if self.content.get(key) is not None:
                return self.integer(key)
        if self.family in _PATTERNS:
            self.notes.append(f"no layer_types: every {_PATTERNS[self.family]}. layer sees everything ({self.family})")
            return _PATTERNS[self.family]
        if self.family not in _EVERY_LAYER_SLIDES:
            self.notes.append("no layer_types: every layer is taken to have the sliding window")
        return 0


def read_keys(content: Mapping[str, Any], name: str, notes: list[str]) -> Keys:
    """The text model's keys under their usual names. ValueError for models that cannot be read."""
    part = next((key for key in _TEXT_PARTS if isinstance(content.get(key), Mapping)), None)
    if part is not None:
        notes.append("a multimodal model: only its text part is counted, no vision or audio tower")
        content = _merged(content, content[part], part, notes)
    quantization = content.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        notes.append(f"quantization_config ({method or 'no method'}) is not read: weights are in what --weights says")
    found = dict(content)
    for key, others in _ALIASES.items():
        if found.get(key) is None:
            found[key] = next((content[other] for other in others if content.get(other) is not None), None)
    keys = Keys(found, name, notes)
    if keys.family in _NOT_READ:
        raise keys.error(f"models of type {keys.family} are not read: their layers are built otherwise")
    for key, why in _KEYS_NOT_READ.items():
        if keys.given(key):
            raise keys.error(f"{key} says {why}; this program would have to guess")
    for key, usual in _OTHER_SIZES.items():
        if keys.given(key) and found[key] != found.get(usual):
            raise keys.error(f"{key} differs from {usual}: layers that differ in size are not read")
    if keys.given("word_embed_proj_dim") and found["word_embed_proj_dim"] != found.get("hidden_size"):
        raise keys.error("word_embed_proj_dim differs from hidden_size: projected embeddings are not read")
    return keys


def _merged(whole: Mapping[str, Any], text: Mapping[str, Any], part: str, notes: list[str]) -> dict[str, Any]:
    """The text part, and of the rest what it leaves out: some configurations keep one key here and one there."""
    own = {key for key, value in text.items() if value is not None}
    for key in sorted(own & set(whole)):
        single = isinstance(whole[key], int | str) and key not in ("model_type", "torch_dtype", "dtype")
        if single and whole[key] != text[key] and not key.endswith("_token_id") and key != "transformers_version":
            notes.append(f"{key} is {text[key]!r} in {part} and {whole[key]!r} outside: the former is taken")
    outside = {key: value for key, value in whole.items() if key != part}
    taken = []
    for names in (("tie_word_embeddings",), ("sliding_window",), *((key, *others) for key, others in _ALIASES.items())):
        if own & set(names):
            # Whatever it is called outside, the text part says it itself.
            outside = {key: value for key, value in outside.items() if key not in names}
        taken += [key for key in names if outside.get(key) is not None]
    if taken:
        notes.append(f"not in {part}, and taken from outside of it: {', '.join(taken)}")
    return {**outside, **{key: text[key] for key in own}}
