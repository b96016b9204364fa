"""`kvguard plan` for other model families: what their makers published comes out, and what is filled in is said."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from kvguard import model_families, model_shape
from kvguard.known_models import KNOWN_MODELS
from kvguard.model_shape import read_shape
from kvguard.plan import PlanInputs, make_plan
from tests.core.test_plan import LLAMA, run, shape_of

FALCON = {"model_type": "falcon", "vocab_size": 65024}
PUBLISHED: dict[str, tuple[dict[str, Any], float, list[tuple[int, int, int, int | None]]]] = {
    # name: keys as published, billions of parameters as published, (layers, KV heads, numbers of a token, window)
    "opt-125m": (
        {"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
         "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768},
        0.125, [(12, 12, 128, None)],
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        0.124, [(12, 12, 128, None)],
    ),
    "falcon-7b": (
        FALCON | {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
                  "num_kv_heads": 71},
        6.92, [(32, 1, 128, None)],
    ),
    "falcon-40b": (
        FALCON | {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
                  "new_decoder_architecture": True},
        41.3, [(60, 8, 128, None)],
    ),
    "glm-4-9b": (
        {"model_type": "chatglm", "hidden_size": 4096, "num_layers": 40, "num_attention_heads": 32, "kv_channels": 128,
         "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 151552,
         "ffn_hidden_size": 13696, "tie_word_embeddings": False},
        9.40, [(40, 2, 256, None)],
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
         "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 4096, "vocab_size": 49152},
        3.03, [(30, 2, 256, 4096)],
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "hidden_size": 2304, "head_dim": 256, "intermediate_size": 9216,
         "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "sliding_window": 4096,
         "vocab_size": 256000},
        2.61, [(13, 4, 512, None), (13, 4, 512, 4096)],
    ),
    "llama-4-maverick": (
        {"text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
            "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [],
            "attention_chunk_size": 8192, "vocab_size": 202048}},
        400, [(12, 8, 256, None), (36, 8, 256, 8192)],
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
         "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
         "vocab_size": 201088, "sliding_window": 128},
        20.9, [(12, 8, 128, None), (12, 8, 128, 128)],
    ),
    "qwen3-30b-a3b": (
        {"model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128, "intermediate_size": 6144,
         "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
         "mlp_only_layers": [], "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4,
         "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48, "vocab_size": 151936,
         "tie_word_embeddings": False},
        30.5, [(48, 4, 256, None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_other_families_have_the_parameters_and_kv_that_are_published(name: str) -> None:
    """Other names of keys, MLPs without a gate, shared KV heads, ties that are left out: each model to its digits."""
    keys, billions, groups = PUBLISHED[name]
    shape = read_shape(keys, name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=4e-3)
    assert [(group.layers, group.heads, group.elements, group.window) for group in shape.kv] == groups


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": None}, "no tie_word_embeddings: false is taken (llama)"),
        ({"tie_word_embeddings": None, "model_type": "starcoder2"}, "no tie_word_embeddings: true is taken"),
        ({"tie_word_embeddings": None, "model_type": "new"}, "not known for this model type"),
        ({"num_key_value_heads": None}, "no num_key_value_heads: 32"),
        ({"model_type": "new"}, "'new' is not known here: three matrices an MLP"),
        ({"model_type": None}, "no head_dim: 128"),
        ({"model_type": "falcon"}, "no multi_query: true (falcon)"),
        ({"intermediate_size": None, "model_type": "gpt2"}, "no intermediate_size: 4 x hidden_size"),
        ({"num_experts": 8}, "no moe_intermediate_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (awq) is not read"),
        ({"sliding_window": 64}, "no layer_types: every layer is taken to have the sliding window"),
        ({"sliding_window": 64, "model_type": "qwen2"}, "no use_sliding_window"),
        ({"mtp_num_hidden_layers": 1}, "mtp_num_hidden_layers"),
        ({"attn_output_gate": True}, "gates of attention's output"),
        ({"use_bias": True}, "biases are not counted"),
    ],
)
def test_what_is_filled_in_is_said(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """In the notes, and so in the command's JSON."""
    keys = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    assert any(words in note for note in read_shape(keys, "changed").notes)
    (tmp_path / "config.json").write_text(json.dumps(keys))
    status, out, _ = run(str(tmp_path), "--json", "--gpu-memory", "10TB")
    assert status == 0 and any(words in note for note in json.loads(out)["notes"])


def test_keys_outside_of_the_text_part_count_where_it_leaves_them_out() -> None:
    """One tie is written there and another here; what both say differently is said."""
    text = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    tied = read_shape({"tie_word_embeddings": True, "n_embd": 5, "text_config": text}, "vlm")
    assert tied.parameters == shape_of(tie_word_embeddings=True).parameters
    assert "taken from outside of it: tie_word_embeddings" in tied.notes[-1]
    differ = read_shape({"tie_word_embeddings": True, "llm_config": LLAMA}, "vlm")
    assert differ.parameters == shape_of().parameters
    assert "tie_word_embeddings is False in llm_config and True outside" in differ.notes[-1]


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, 32),
        ({"first_k_dense_replace": 3}, 29),
        ({"first_k_dense_replace": 40}, 0),
        ({"num_dense_layers": 2}, 30),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 15),
        ({"moe_layer_freq": [0, 1] * 16}, 16),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 15),
        ({"interleave_moe_layer_step": 4}, 8),
        ({"moe_layers": [3, 7]}, 2),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 31}, 31),
    ],
)
def test_layers_that_are_a_mixture_of_experts_are_counted(changes: dict[str, Any], sparse: int) -> None:
    """The others have one MLP of the usual width."""
    shape = shape_of(num_experts=8, moe_intermediate_size=64, **changes)
    found = {part.name: part.parameters for part in shape.weights}
    assert found.get("routed experts", 0) == sparse * 8 * 3 * 4096 * 64
    assert found.get("dense MLP", 0) == (32 - sparse) * 3 * 4096 * 14336


def test_no_value_of_any_key_is_more_than_a_clear_error() -> None:
    """Wrong kinds, negative and huge numbers under every key that is read: a plan, or a ValueError with the name."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (model_families, model_shape))
    names = sorted({*re.findall(r"\b[a-z][a-z_]+[a-z]\b", source)} | set(LLAMA))
    values = [None, 0, 1, -1, 5, 3.5, "3", "", True, False, [], [1], ["a"], [[1]], {}, {"a": 1}, 10**30, [1] * 32]
    bases = [*KNOWN_MODELS.values(), *(keys for keys, _, _ in PUBLISHED.values())]
    rng, planned, refused = random.Random(1), 0, 0
    for _ in range(4000):
        keys = dict(rng.choice(bases)) | {rng.choice(names): rng.choice(values) for _ in range(rng.choice((1, 2, 8)))}
        try:
            make_plan(read_shape(keys, "odd"), PlanInputs(gpu_bytes=10**14))
            planned += 1
        except ValueError as error:
            assert str(error).startswith(("odd: ", "weights take "))
            refused += 1
    assert min(planned, refused) > 400
