"""Let the recall model recite through the paged engine, and measure how well it does in every precision.

`python -m kvguard.fault_injection.engine.recall.recitation` prints the table that `README.md` holds.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import get_args

import torch

from kvguard.fault_injection.engine.kv_cache import KVDtype, PagedKV
from kvguard.fault_injection.engine.model import ForwardBatch, LlamaModel, WeightFormat
from kvguard.fault_injection.engine.recall import corpus, tokenizer

RECALL_FOLDER = Path(__file__).resolve().parent
"""The committed checkpoint: `config.json` and `model.safetensors`."""


@dataclass(frozen=True, kw_only=True)
class RecitationScore:
    """How well a list of texts was recited."""

    exact_share: float
    """Texts recited without a wrong character, the closing newline included, over all texts."""
    character_share: float
    """Places where the answer has the text's character, over all characters; what follows a slip rarely fits."""


def _step(
    model: LlamaModel,
    kv: PagedKV,
    table: torch.Tensor,
    rows: Sequence[int],
    chunks: list[list[int]],
    starts: list[int],
) -> list[int]:
    """Feed one chunk of tokens a row, at the positions from `starts` on, and return each row's greedy next token."""
    lengths = torch.tensor([len(chunk) for chunk in chunks])
    ends = [start + len(chunk) for start, chunk in zip(starts, chunks, strict=True)]
    owner = torch.tensor(rows).repeat_interleave(lengths)
    positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    batch = ForwardBatch(
        token_ids=torch.tensor([token for chunk in chunks for token in chunk]),
        positions=positions,
        query_start=(0, *lengths.cumsum(0).tolist()),
        seq_lens=tuple(ends),
        block_table=table[list(rows)],
        slot_mapping=table[owner, positions // kv.page_size].to(torch.int64) * kv.page_size + positions % kv.page_size,
    )
    return [int(token) for token in model.forward(batch, kv).argmax(dim=1)]


def recite(model: LlamaModel, texts: Sequence[str], *, kv_dtype: KVDtype, page_size: int = 16) -> list[str]:
    """Return the greedy answer to each text + newline, all texts in one batch.

    An answer ends with its newline, or after as many characters as the text and a newline have.
    """
    prompts = [tokenizer.encode(text + "\n") for text in texts]
    goals = [2 * len(prompt) - 1 for prompt in prompts]
    columns = -(-max(goals) // page_size)
    table = torch.arange(1, 1 + len(texts) * columns, dtype=torch.int32).view(len(texts), columns)
    kv = model.new_kv(num_pages=1 + len(texts) * columns, page_size=page_size, dtype=kv_dtype)
    known = [list(prompt) for prompt in prompts]
    rows, chunks, starts = list(range(len(texts))), prompts, [0] * len(texts)
    while rows:
        for row, token in zip(rows, _step(model, kv, table, rows, chunks, starts), strict=True):
            known[row].append(token)
        rows = [row for row in rows if known[row][-1] != tokenizer.SEP_ID and len(known[row]) < goals[row]]
        chunks, starts = [known[row][-1:] for row in rows], [len(known[row]) - 1 for row in rows]
    return [tokenizer.decode(tokens[len(prompt) :]) for tokens, prompt in zip(known, prompts, strict=True)]


def score(texts: Sequence[str], answers: Sequence[str]) -> RecitationScore:
    """Compare answers with texts place by place."""
    exact = right = 0
    for text, answer in zip(texts, answers, strict=True):
        exact += answer == text + "\n"
        right += sum(told == said for told, said in zip(text, answer, strict=False))
    return RecitationScore(exact_share=exact / len(texts), character_share=right / sum(map(len, texts)))


def main() -> None:
    """Print exact and per-character shares for every weight format and KV dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=RECALL_FOLDER)
    parser.add_argument("--secrets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repetitive", action="store_true", help="measure the hard kind of secret")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = Random(arguments.seed)
    secret = corpus.repetitive_secret if arguments.repetitive else corpus.readable_secret
    texts = [secret(rng) for _ in range(arguments.secrets)]
    print(f"seed {arguments.seed}, {len(texts)} secrets of 30 to 200 characters; exactly recited / characters right")
    print("| weights | " + " | ".join(get_args(KVDtype)) + " |")
    print("|---" * (1 + len(get_args(KVDtype))) + "|")
    for weights in get_args(WeightFormat):
        model = LlamaModel.from_pretrained(arguments.checkpoint, weights)
        cells = []
        for kv_dtype in get_args(KVDtype):
            result = score(texts, recite(model, texts, kv_dtype=kv_dtype))
            cells.append(f"{result.exact_share:.1%} / {result.character_share:.1%}")
        print(f"| {weights} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
