"""The paged model against transformers, and the paths by which one row could reach another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvguard.fault_injection.engine.kv_cache import PagedKV
from kvguard.fault_injection.engine.model import ForwardBatch, LlamaModel

NEW_TOKENS = 40
CHUNK_TOKENS = 13
POOL_TOKENS = 1024
PROMPT_TOKENS = (29, 7, 52)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _save_random_llama(folder: Path, **changes: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        # Large weights make varied greedy tokens; small ones repeat a single token and would prove nothing.
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def _transformers_tokens(folder: Path, prompt: list[int]) -> list[int]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(token) for token in answer[0, len(prompt) :]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    _save_random_llama(folder, eos_token_id=None)
    return folder


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaModel:
    return LlamaModel.from_pretrained(checkpoint, "fp32")


def _prompt(seed: int, tokens: int) -> list[int]:
    return torch.randint(0, 61, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def _kv(model: LlamaModel, page_size: int) -> PagedKV:
    return model.new_kv(num_pages=POOL_TOKENS // page_size, page_size=page_size, dtype="fp32")


def _tables(rows: int, page_size: int, tokens: int = 128) -> Tensor:
    """Scattered pages, page 0 left out: int32 [rows, columns]."""
    columns = -(-tokens // page_size)
    pages = torch.randperm(POOL_TOKENS // page_size - 1, generator=torch.Generator().manual_seed(rows)) + 1
    return pages[: rows * columns].view(rows, columns).to(torch.int32)


def _batch(chunks: list[list[int]], starts: list[int], tables: Tensor, page_size: int) -> ForwardBatch:
    """One row a chunk; `starts` are the positions of the chunks' first tokens."""
    positions = [torch.arange(start, start + len(chunk)) for chunk, start in zip(chunks, starts, strict=True)]
    slots = [
        tables[row, place // page_size].long() * page_size + place % page_size for row, place in enumerate(positions)
    ]
    query_start = [0]
    for chunk in chunks:
        query_start.append(query_start[-1] + len(chunk))
    return ForwardBatch(
        token_ids=torch.tensor([token for chunk in chunks for token in chunk]),
        positions=torch.cat(positions),
        query_start=tuple(query_start),
        seq_lens=tuple(start + len(chunk) for chunk, start in zip(chunks, starts, strict=True)),
        block_table=tables,
        slot_mapping=torch.cat(slots),
    )


def _prefill(model: LlamaModel, kv: PagedKV, prompts: list[list[int]], tables: Tensor) -> Tensor:
    return model.forward(_batch(prompts, [0] * len(prompts), tables, kv.page_size), kv)


def _greedy(model: LlamaModel, kv: PagedKV, prompts: list[list[int]], tables: Tensor) -> list[list[int]]:
    """Prefill in chunks, all rows in one batch (rows that are done with prefill decode beside the others)."""
    known = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    goal = [len(prompt) + NEW_TOKENS for prompt in prompts]
    while any(len(tokens) < end for tokens, end in zip(known, goal, strict=True)):
        rows = [row for row in range(len(known)) if len(known[row]) < goal[row]]
        chunks = [known[row][done[row] : done[row] + CHUNK_TOKENS] for row in rows]
        batch = _batch(chunks, [done[row] for row in rows], tables[rows], kv.page_size)
        logits = model.forward(batch, kv)
        for index, row in enumerate(rows):
            done[row] += len(chunks[index])
            if done[row] == len(known[row]):
                known[row].append(int(logits[index].argmax()))
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return [_transformers_tokens(checkpoint, _prompt(seed, tokens)) for seed, tokens in enumerate(PROMPT_TOKENS)]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunked_prefill_and_decode_equal_transformers(
    model: LlamaModel, expected: list[list[int]], page_size: int
) -> None:
    """Rows of different lengths, prefilled in chunks beside decoding rows, give transformers' tokens each."""
    prompts = [_prompt(seed, tokens) for seed, tokens in enumerate(PROMPT_TOKENS)]
    answers = _greedy(model, _kv(model, page_size), prompts, _tables(len(prompts), page_size))
    assert answers == expected
    assert len({token for answer in answers for token in answer}) > 10, "the tokens are too monotonous to prove much"


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["biases", "tied-no-gqa", "llama3-rope"],
)
def test_variants_equal_transformers(tmp_path: Path, changes: dict[str, object]) -> None:
    """Biases, tied embeddings without grouped heads, and Llama 3 rope scaling are computed as transformers does."""
    _save_random_llama(tmp_path, eos_token_id=None, **changes)
    prompt = _prompt(3, 33)
    model = LlamaModel.from_pretrained(tmp_path, "fp32")
    assert _greedy(model, _kv(model, 16), [prompt], _tables(1, 16)) == [_transformers_tokens(tmp_path, prompt)]


def test_batch_of_rows_equals_rows_one_by_one(model: LlamaModel) -> None:
    """Logits of a batch with rows of different lengths equal those of each row computed alone."""
    prompts, tables = [_prompt(seed, tokens) for seed, tokens in enumerate(PROMPT_TOKENS)], _tables(3, 16)
    together = _prefill(model, _kv(model, 16), prompts, tables)
    for row, prompt in enumerate(prompts):
        alone = _prefill(model, _kv(model, 16), [prompt], tables[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_wrong_table_entry_reads_the_wrong_page(model: LlamaModel) -> None:
    """A table entry that points to another row's page changes that row's output and no other's."""
    kv, tables = _kv(model, 16), _tables(2, 16)
    prompts = [_prompt(0, 40), _prompt(1, 40)]
    _prefill(model, kv, prompts, tables)
    next_tokens = [[5], [6]]
    right = model.forward(_batch(next_tokens, [40, 40], tables, 16), kv)
    wrong_tables = tables.clone()
    wrong_tables[0, 1] = tables[1, 1]
    wrong = model.forward(_batch(next_tokens, [40, 40], wrong_tables, 16), kv)
    assert (right[0] - wrong[0]).abs().max() > 0.1
    assert torch.equal(right[1], wrong[1])


def test_out_of_range_page_id_reads_some_page(model: LlamaModel) -> None:
    """Page ids outside the pool wrap round: finite output, as unchecked pointers on a GPU give."""
    kv, tables = _kv(model, 16), _tables(1, 16)
    _prefill(model, kv, [_prompt(0, 40)], tables)
    wild = tables.clone()
    wild[0, 0], wild[0, 1] = 1_000_003, -7
    assert torch.isfinite(model.forward(_batch([[5]], [40], wild, 16), kv)).all()


def test_nan_outside_a_row_does_not_reach_it(model: LlamaModel) -> None:
    """NaN in unrelated pages, in the tail of a row's last page and in another row leaves the row's logits alone."""
    kv, tables = _kv(model, 16), _tables(2, 16)
    prompts = [_prompt(0, 40), _prompt(1, 21)]
    _prefill(model, kv, prompts, tables)
    next_tokens = _batch([[5], [6]], [40, 21], tables, 16)
    clean = model.forward(next_tokens, kv)
    own_slots = kv.slots(tables[:1], 3)[0, :41]
    for storage in (*kv.keys, *kv.values):
        slots = storage.view(-1, kv.kv_heads, kv.head_dim)
        kept = slots[own_slots].clone()
        slots.fill_(float("nan"))
        slots[own_slots] = kept
    poisoned = model.forward(next_tokens, kv)
    assert torch.equal(clean[0], poisoned[0])
    assert torch.isnan(poisoned[1]).all()


def test_negative_slot_skips_the_write(model: LlamaModel) -> None:
    """A token with a negative slot leaves every page but the null page as it was."""
    kv, tables = _kv(model, 16), _tables(1, 16)
    batch = _batch([_prompt(0, 5)], [0], tables, 16)
    skipped = ForwardBatch(**{**vars(batch), "slot_mapping": torch.full((5,), -1)})
    model.forward(skipped, kv)
    assert all(not bool(storage[1:].any()) for storage in (*kv.keys, *kv.values))


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_low_precision_stays_near_fp32(checkpoint: Path, model: LlamaModel, weights: str) -> None:
    """bf16 and INT4 logits correlate with the fp32 ones, over a bf16 cache."""
    low = LlamaModel.from_pretrained(checkpoint, weights)  # type: ignore[arg-type]
    tables, prompts = _tables(2, 16), [_prompt(0, 40), _prompt(1, 21)]
    exact = _prefill(model, _kv(model, 16), prompts, tables)
    kv = low.new_kv(num_pages=64, page_size=16, dtype="bf16")
    near = _prefill(low, kv, prompts, tables)
    assert near.dtype == torch.float32
    agreement = torch.corrcoef(torch.stack((exact.flatten(), near.flatten())))[0, 1]
    assert agreement > (0.99 if weights == "bf16" else 0.6)


def test_too_long_sequences_are_refused(model: LlamaModel) -> None:
    """A sequence past the model's positions or past its table row is a ValueError, not a wrong read."""
    kv, tables = _kv(model, 16), _tables(1, 16, tokens=32)
    with pytest.raises(ValueError, match="cannot hold 33"):
        model.forward(ForwardBatch(**{**vars(_batch([[5]], [31], tables, 16)), "seq_lens": (33,)}), kv)
    with pytest.raises(ValueError, match="exceeds the model's 256"):
        model.forward(ForwardBatch(**{**vars(_batch([[5]], [31], tables, 16)), "seq_lens": (257,)}), kv)


def test_loading_errors_name_the_cause(tmp_path: Path, checkpoint: Path) -> None:
    """A missing folder, a foreign architecture, an unsupported rope kind and a missing tensor are named."""
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LlamaModel.from_pretrained(tmp_path / "nowhere", "fp32")
    content = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")

    def write(**changes: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(content | changes))

    write(model_type="mamba")
    with pytest.raises(ValueError, match="mamba"):
        LlamaModel.from_pretrained(tmp_path, "fp32")
    write(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    with pytest.raises(ValueError, match="yarn"):
        LlamaModel.from_pretrained(tmp_path, "fp32")
    write(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"model\.layers\.3"):
        LlamaModel.from_pretrained(tmp_path, "fp32")


def test_sharded_checkpoint_loads(tmp_path: Path, checkpoint: Path, model: LlamaModel) -> None:
    """A checkpoint split into shards with an index gives the same logits as the single file."""
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(tmp_path, max_shard_size="100KB")
    assert not (tmp_path / "model.safetensors").exists()
    sharded = LlamaModel.from_pretrained(tmp_path, "fp32")
    tables, prompts = _tables(1, 16), [_prompt(0, 20)]
    whole = _prefill(model, _kv(model, 16), prompts, tables)
    assert torch.equal(whole, _prefill(sharded, _kv(sharded, 16), prompts, tables))


@pytest.mark.parametrize("query_start", [(0, 2), (0, 0, 1), (1, 2), (0, 1, 2)])
def test_malformed_batches_are_refused(query_start: tuple[int, ...]) -> None:
    """Host-side lengths that do not fit one row of one token raise ValueError."""
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="query"):
        ForwardBatch(
            token_ids=one,
            positions=one,
            query_start=query_start,
            seq_lens=(2,) * max(1, len(query_start) - 1),
            block_table=torch.zeros(len(query_start) - 1, 1, dtype=torch.int32),
            slot_mapping=one,
        )
