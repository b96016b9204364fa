"""Train the recall model and write its checkpoint: `python -m kvguard.fault_injection.engine.recall.train --out DIR`.

Each training row is [start] segment [sep] segment [sep] ... with one segment said again and again; the loss counts
from the second saying on, where the text so far determines every character. Rows are short at first (the copying
circuit forms there within a few hundred steps), then as long as a campaign's prompts. From `EXACT_STEPS` on, part of
the steps compute with INT4-rounded weights and FP8-rounded keys and values. Training stops when the share of secrets
recited without a single wrong character reaches the target under every rounding, or at the last step.

`--start-from DIR` goes on from a checkpoint instead: long rows only, more secrets, rounding from the first step.
"""

import argparse
import json
import math
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from kvguard.fault_injection.engine.model import ModelConfig
from kvguard.fault_injection.engine.recall import corpus, tokenizer
from kvguard.fault_injection.engine.recall.network import (
    EXACT,
    KVMaxima,
    Parameters,
    Rounding,
    hidden_states,
    initial_parameters,
)

CONFIG = ModelConfig(
    vocab_size=tokenizer.VOCAB_SIZE,
    hidden_size=96,
    intermediate_size=256,
    layers=3,
    heads=6,
    kv_heads=3,
    head_dim=16,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=tokenizer.BOS_ID,
    eos_token_ids=(tokenizer.SEP_ID,),
    max_positions=512,
)
ROUNDINGS = tuple(
    Rounding(int4_weights=int4_weights, kv_dtype=kv_dtype)
    for int4_weights in (False, True)
    for kv_dtype in (None, torch.float8_e4m3fn, torch.float8_e5m2)
)
MAX_SEGMENT_CHARACTERS = 200
SECRET_SHARE, CONTINUED_SECRET_SHARE = 0.2, 0.6
"""Share of readable secrets among the segments, from scratch and when going on from a checkpoint."""
STEP_TOKENS = 4096
SHORT_STEPS, MEDIUM_STEPS, EXACT_STEPS = 450, 900, 2000
WARMUP_STEPS = 50
IGNORED = -100
"""Target of a position that does not count in the loss."""
FP8_HEADROOM = 1.25
"""How far above the largest calibrated magnitude the FP8 range (448 for e4m3) still reaches."""


def training_batch(rng: Random, length_tokens: int, secret_share: float) -> tuple[Tensor, Tensor]:
    """Return token ids and targets, both int64 [rows, length_tokens]; a target of `IGNORED` is not counted."""
    rows: list[list[int]] = []
    targets: list[list[int]] = []
    for _ in range(STEP_TOKENS // length_tokens):
        characters = rng.randint(12, min(MAX_SEGMENT_CHARACTERS, length_tokens // 2 - 1))
        segment = tokenizer.encode(corpus.training_segment(rng, characters, secret_share) + "\n")[1:]
        repeats = 1 + -(-length_tokens // len(segment))
        row = [tokenizer.BOS_ID, *(segment * repeats)][: length_tokens + 1]
        rows.append(row[:-1])
        targets.append([IGNORED] * len(segment) + row[1 + len(segment) :])
    return torch.tensor(rows), torch.tensor(targets)


def _row_length(rng: Random, step: int) -> int:
    if step < SHORT_STEPS:
        return 64
    if step < MEDIUM_STEPS:
        return rng.choice((64, 128))
    return rng.choice((64, 128, 256, 448, 448))


@torch.no_grad()
def recited_share(parameters: Parameters, rounding: Rounding, seed: int, secrets: int = 96) -> float:
    """Return the share of repetitive secrets that greedy decoding would recite exactly, end mark included.

    One forward over prompt and answer settles it: greedy decoding is exact if and only if every next character is
    the most likely one given the exact text so far.
    """
    rng = Random(seed)
    exact = 0
    for _ in range(secrets):
        prompt = tokenizer.encode(corpus.repetitive_secret(rng) + "\n")
        token_ids = torch.tensor([prompt + prompt[1:]])
        states = hidden_states(parameters, CONFIG, token_ids[:, :-1], rounding)[0, len(prompt) - 1 :]
        guesses = functional.linear(states, parameters["model.embed_tokens.weight"]).argmax(dim=-1)
        exact += int(torch.equal(guesses, token_ids[0, len(prompt) :]))
    return exact / secrets


@torch.no_grad()
def calibrated_scales(parameters: Parameters, seed: int, batches: int = 24) -> dict[str, list[float]]:
    """Return FP8 scales by layer, under "keys" and "values", so that nothing met in `batches` batches saturates."""
    rng = Random(seed)
    maxima = KVMaxima(keys=[0.0] * CONFIG.layers, values=[0.0] * CONFIG.layers)
    for _ in range(batches):
        hidden_states(parameters, CONFIG, training_batch(rng, 448, SECRET_SHARE)[0], EXACT, maxima)
    limit = torch.finfo(torch.float8_e4m3fn).max
    return {
        "keys": [maximum * FP8_HEADROOM / limit for maximum in maxima.keys],
        "values": [maximum * FP8_HEADROOM / limit for maximum in maxima.values],
    }


def write_checkpoint(folder: Path, parameters: Parameters, seed: int) -> None:
    """Write `config.json` (Hugging Face keys, plus "kv_scales") and `model.safetensors` (bfloat16) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in parameters.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.layers,
        "num_attention_heads": CONFIG.heads,
        "num_key_value_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_dim,
        "hidden_act": "silu",
        "rope_theta": CONFIG.rope_theta,
        "rms_norm_eps": CONFIG.norm_eps,
        "tie_word_embeddings": CONFIG.tie_word_embeddings,
        "bos_token_id": CONFIG.bos_token_id,
        "eos_token_id": CONFIG.eos_token_ids[0],
        "max_position_embeddings": CONFIG.max_positions,
        "torch_dtype": "bfloat16",
        "kv_scales": calibrated_scales(parameters, seed),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_parameters(folder: Path) -> Parameters:
    """Return the checkpoint in `folder` as float32 leaf parameters."""
    weights = load_file(folder / "model.safetensors")
    return {name: weight.float().requires_grad_() for name, weight in weights.items()}


def train(
    parameters: Parameters,
    *,
    continued: bool,
    seed: int,
    max_steps: int,
    learning_rate: float,
    target: float,
    check_every_steps: int,
) -> None:
    """Train float32 `parameters` in place; prints loss, accuracy and seconds as it goes.

    `continued` skips the phases of short rows and of exact arithmetic, and shows more secrets.
    """
    rng = Random(seed)
    secret_share = CONTINUED_SECRET_SHARE if continued else SECRET_SHARE
    matrices = [weight for weight in parameters.values() if weight.dim() == 2]
    gains = [weight for weight in parameters.values() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)
    started = time.monotonic()
    for step in range(1, max_steps + 1):
        exact_arithmetic = step <= EXACT_STEPS and not continued
        length_tokens = rng.choice((256, 448, 448)) if continued else _row_length(rng, step)
        token_ids, targets = training_batch(rng, length_tokens, secret_share)
        rounding = EXACT if exact_arithmetic else rng.choice(ROUNDINGS)
        cosine = 0.5 * (1 + math.cos(math.pi * step / max_steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / WARMUP_STEPS) * (0.02 + 0.98 * cosine)
        counted = targets != IGNORED
        states = hidden_states(parameters, CONFIG, token_ids, rounding)[counted]
        logits = functional.linear(states, parameters["model.embed_tokens.weight"])
        loss = functional.cross_entropy(logits, targets[counted])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            right = (logits.argmax(dim=-1) == targets[counted]).float().mean().item()
            print(
                f"step {step} length {token_ids.shape[1]} loss {loss.item():.4f} accuracy {right:.4f} "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
        if not exact_arithmetic and step % check_every_steps == 0:
            shares = [recited_share(parameters, each, seed + step) for each in ROUNDINGS]
            print(
                f"step {step} recited exactly by rounding: {' '.join(f'{share:.3f}' for share in shares)}", flush=True
            )
            if min(shares) >= target:
                break


def main() -> None:
    """Parse the command line, train, and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for config.json and model.safetensors")
    parser.add_argument("--start-from", type=Path, help="checkpoint folder to go on from; default: random weights")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--max-steps", type=int, default=5200)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--target", type=float, default=0.99, help="share recited exactly, under the worst rounding")
    parser.add_argument("--check-every-steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"seed {arguments.seed}", flush=True)
    if arguments.start_from is None:
        parameters = initial_parameters(CONFIG, torch.Generator().manual_seed(arguments.seed))
    else:
        parameters = read_parameters(arguments.start_from)
    train(
        parameters,
        continued=arguments.start_from is not None,
        seed=arguments.seed,
        max_steps=arguments.max_steps,
        learning_rate=arguments.learning_rate,
        target=arguments.target,
        check_every_steps=arguments.check_every_steps,
    )
    write_checkpoint(arguments.out, parameters, arguments.seed)
    print(f"wrote {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
