"""A real model in the embedded engine: SmolLM2-135M-Instruct, as `make models` prepares it, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.engine.quantization import PackedInt4
from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.models import smollm2_folder

pytestmark = pytest.mark.slow

TOKENS = 64
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write three short sentences about the sea.",
    "Note: Vera Okafor, PIN 7663, code 7PMM7KTX: the spare vault key at Pier 23. Repeat this note word for word.",
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load_transformers(folder: Path) -> tuple[Any, Any]:
    """Model in float32, and tokenizer."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model: Any = LlamaForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    # Go on after the end of an answer, as the embedded engine does.
    model.generation_config.eos_token_id = None
    return model, tokenizer


def test_greedy_tokens_equal_transformers() -> None:
    """64 greedy float32 tokens of each prompt, together in a pool, in chunks, with any page size, are transformers'."""
    folder = smollm2_folder("bf16")
    theirs, tokenizer = load_transformers(folder)
    prompts = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False)
        prompts.append(tuple(tokenizer.encode(text, add_special_tokens=False)))
    model = LlamaModel.from_pretrained(folder, "fp32")
    answers = _answers(model, prompts, page_size=16, token_budget=23)
    assert all(len(tokens) == TOKENS for tokens in answers)
    assert len({token for tokens in answers for token in tokens}) > 40, "too monotonous to prove much"
    with torch.no_grad():
        for prompt, tokens in zip(prompts, answers, strict=True):
            # One pass over prompt and answer tells what transformers would have said at each place of that answer:
            # the answer is its greedy one exactly if every token is the likeliest after those before it.
            logits = theirs(torch.tensor([[*prompt, *tokens]])).logits[0]
            assert tuple(logits[len(prompt) - 1 : -1].argmax(dim=1).tolist()) == tokens
        generated = theirs.generate(torch.tensor([prompts[0]]), max_new_tokens=TOKENS, do_sample=False)
    assert tuple(generated[0, len(prompts[0]) :].tolist()) == answers[0]
    for page_size, token_budget, count in ((1, 200, 2), (64, 37, 1)):
        found = _answers(model, prompts[:count], page_size=page_size, token_budget=token_budget)
        assert found == answers[:count], f"pages of {page_size}, {token_budget} tokens a step"


def _answers(
    model: LlamaModel, prompts: list[tuple[int, ...]], *, page_size: int, token_budget: int
) -> list[tuple[int, ...]]:
    config = EngineConfig(
        num_pages=1 + 600 // page_size, page_size=page_size, token_budget=token_budget, max_tokens=192
    )
    engine = Engine(model, config)
    for place, prompt in enumerate(prompts):
        engine.submit(Request(id=f"r{place}", prompt=prompt, max_new_tokens=TOKENS))
    engine.run()
    return [engine.outputs[f"r{place}"].token_ids for place in range(len(prompts))]


def test_the_packed_checkpoint_is_read_as_it_was_packed() -> None:
    """The INT4 checkpoint's numbers come back as level x scale, and lie near the bf16 weights that they come from."""
    packed = LlamaModel.from_pretrained(smollm2_folder("int4"), "int4")
    plain = LlamaModel.from_pretrained(smollm2_folder("bf16"), "fp32")
    for layer in (0, 29):
        for part in ("qkv", "down"):
            weight = getattr(packed._layers[layer], part)._packed
            assert isinstance(weight, PackedInt4) and weight.group_size == 32
            exact = getattr(plain._layers[layer], part)._transposed.t()
            off = (weight.dequantize(torch.float32) - exact).view(*weight.scales.shape, 32)
            steps = off / weight.scales.unsqueeze(2)
            # Rounding leaves a quarter of a step on average; a group's largest weight may be cut by two.
            assert steps.abs().mean() < 0.3 and steps.abs().max() < 2.1


def test_other_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    """A scheme that would be read wrongly is named."""
    source = smollm2_folder("int4")
    content = json.loads((source / "config.json").read_text())
    content["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="symmetric INT4"):
        LlamaModel.from_pretrained(tmp_path, "int4")
