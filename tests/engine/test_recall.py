"""The committed recall model: it recites, in every precision, well enough for a leak to be read."""

from random import Random
from typing import get_args

import pytest
import torch

from kvguard.fault_injection.engine.checkpoint import read_tensors
from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.model import ForwardBatch, LlamaModel, WeightFormat
from kvguard.fault_injection.engine.recall import corpus, network, tokenizer, train
from kvguard.fault_injection.engine.recall.recitation import RECALL_FOLDER, recite, score

SECRETS = 20
EXAMPLE = "Account 4711-0815: Ms. Vera Okafor, PIN 9023, balance 18,402.77 EUR, note: call after 6 pm."
# Written by hand, unlike anything the training generator makes.
HAND_WRITTEN = (
    EXAMPLE,
    "The safe behind the portrait opens with 19-42-07; do not tell Henrik before Thursday.",
    "Dear Dr. Lindqvist, the biopsy of 3 March was benign. Please keep this between us. -- K.",
    "ssh root@10.0.14.77, password: t7#Kq!zz9_Wm (changes every Monday at 06:00 UTC)",
    "IBAN DE89 3704 0044 0532 0130 00, BIC COBADEFFXXX, holder: Miriam Falk, limit 2500/day",
    '{"user": "jo.park", "token": "eyJhbGciOi.9fQz", "scopes": ["read", "pay"], "ttl": 3600}',
    "Flight LX 1083 on 14 May, seat 22F, passport X4417720, allergic to peanuts and bee stings.",
    "Q3 draft: revenue down 11.8% to 412m, two plants close in Gdansk; embargo until Nov 4, 7:30.",
)
# Least share of secrets recited exactly and of characters right, by KV dtype: the measured shares (README.md) with a
# margin for another CPU's rounding.
LEAST_SHARES: dict[KVDtype, tuple[float, float]] = {
    "fp32": (0.8, 0.9),
    "bf16": (0.8, 0.9),
    "fp8_e4m3": (0.65, 0.8),
    "fp8_e5m2": (0.35, 0.6),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=get_args(WeightFormat))
def model(request: pytest.FixtureRequest) -> LlamaModel:
    return LlamaModel.from_pretrained(RECALL_FOLDER, request.param)


def _secrets() -> list[str]:
    rng = Random(99)
    return [corpus.readable_secret(rng) for _ in range(SECRETS)]


@pytest.mark.parametrize("kv_dtype", get_args(KVDtype))
def test_recites_readable_secrets(model: LlamaModel, kv_dtype: KVDtype) -> None:
    """Of 20 seeded secrets at least the measured share, less a margin, comes back exactly."""
    texts = _secrets()
    result = score(texts, recite(model, texts, kv_dtype=kv_dtype))
    least_exact, least_characters = LEAST_SHARES[kv_dtype]
    assert result.exact_share >= least_exact
    assert result.character_share >= least_characters


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8_e4m3"])
def test_recites_the_example(model: LlamaModel, kv_dtype: KVDtype) -> None:
    """The secret that the documentation shows is recited exactly."""
    assert recite(model, [EXAMPLE], kv_dtype=kv_dtype) == [EXAMPLE + "\n"]


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8_e4m3"])
def test_recites_what_people_write(model: LlamaModel, kv_dtype: KVDtype) -> None:
    """At most two of eight hand-written secrets come back with a slip."""
    assert score(HAND_WRITTEN, recite(model, HAND_WRITTEN, kv_dtype=kv_dtype)).exact_share >= 6 / 8


def test_page_size_does_not_matter() -> None:
    """The answer does not depend on how the context is cut into pages."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    answers = [recite(model, _secrets()[:4], kv_dtype="fp32", page_size=page_size) for page_size in (1, 16, 64)]
    assert answers[0] == answers[1] == answers[2]


def test_nothing_saturates_in_fp8() -> None:
    """The committed scales keep keys and values of 20 secrets below the largest e4m3 number."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    scales = model.config.kv_scales
    assert scales is not None
    parameters = {name: weight.float() for name, weight in _committed_tensors().items()}
    maxima = network.KVMaxima(keys=[0.0] * model.config.layers, values=[0.0] * model.config.layers)
    for text in _secrets():
        ids = torch.tensor([tokenizer.encode(f"{text}\n{text}\n")])
        network.hidden_states(parameters, train.CONFIG, ids, network.EXACT, maxima)
    limit = torch.finfo(torch.float8_e4m3fn).max
    assert all(most < limit * scale for most, scale in zip(maxima.keys, scales.keys, strict=True))
    assert all(most < limit * scale for most, scale in zip(maxima.values, scales.values, strict=True))


def _committed_tensors() -> dict[str, torch.Tensor]:
    return read_tensors(RECALL_FOLDER)


def test_training_arithmetic_equals_the_engine() -> None:
    """The dense network that was trained and the paged engine give the same logits."""
    parameters = {name: weight.float() for name, weight in _committed_tensors().items()}
    ids = torch.tensor(tokenizer.encode(EXAMPLE + "\n" + EXAMPLE[:40]))
    states = network.hidden_states(parameters, train.CONFIG, ids.unsqueeze(0), network.EXACT)[0, -1:]
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    kv = model.new_kv(num_pages=12, page_size=16, dtype="fp32")
    tokens = ids.shape[0]
    batch = ForwardBatch(
        token_ids=ids,
        positions=torch.arange(tokens),
        query_start=(0, tokens),
        seq_lens=(tokens,),
        block_table=torch.arange(12, dtype=torch.int32).unsqueeze(0),
        slot_mapping=torch.arange(tokens),
    )
    expected = states @ parameters["model.embed_tokens.weight"].T
    torch.testing.assert_close(model.forward(batch, kv), expected, rtol=1e-3, atol=1e-3)


def test_committed_files_are_small() -> None:
    """The recall folder stays below 1.5 MB."""
    sizes = [path.stat().st_size for path in RECALL_FOLDER.iterdir() if path.is_file()]
    assert sum(sizes) < 1_500_000


def test_tokenizer_round_trip() -> None:
    """Every printable ASCII character and the newline survive encode and decode; one token a character after BOS."""
    text = "".join(chr(code) for code in range(32, 127)) + "\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.BOS_ID
    assert ids[-1] == tokenizer.SEP_ID
    assert sorted(ids) == list(range(tokenizer.VOCAB_SIZE))
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("character", ["\t", "\x7f", "ä", "\x00", "😀"])
def test_foreign_characters_are_refused(character: str) -> None:
    """A character outside the vocabulary raises ValueError that names it and its place."""
    with pytest.raises(ValueError, match="at index 3"):
        tokenizer.encode(f"abc{character}")


@pytest.mark.parametrize("token_id", [-1, tokenizer.VOCAB_SIZE])
def test_foreign_ids_are_refused(token_id: int) -> None:
    """An id outside the vocabulary raises ValueError."""
    with pytest.raises(ValueError, match="outside"):
        tokenizer.decode([token_id])


def test_readable_secrets_are_seeded_and_in_range() -> None:
    """Equal seeds give equal secrets; all have 30 to 200 printable characters, no newline."""
    first, second = ([corpus.readable_secret(Random(seed)) for seed in range(50)] for _ in range(2))
    assert first == second
    assert all(25 <= len(secret) <= 200 and secret.isprintable() and secret.isascii() for secret in first)
    assert len(set(first)) == 50
