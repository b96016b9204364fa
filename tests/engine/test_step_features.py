"""Padded and dummy batches, speculation, windowed layers, early publication: none of them changes a token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.drafts import accepted, draft
from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.engine.pool import NULL_PAGE
from kvguard.fault_injection.engine.scheduler import Request, Sequence
from kvguard.fault_injection.engine.step import MAIN_POOL, SKIP_SLOT
from kvguard.fault_injection.engine.window import WINDOW_POOL
from kvguard.fault_injection.targets.embedded_runs import RECALL_FOLDER
from kvguard.fault_injection.traffic import drive, trial_traffic
from kvguard.pools import PoolSpec

PLAIN = EngineConfig(num_pages=400, page_size=8, max_rows=8, token_budget=512, max_tokens=192)
FEATURES = replace(
    PLAIN,
    num_pages=55,
    max_rows=6,
    token_budget=70,
    padded_batches=(1, 2, 4, 8),
    dummy_every=3,
    draft_tokens=3,
    publish_ahead=True,
)
Answers = dict[str, tuple[tuple[int, ...], str | None]]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[None, 16, 40], ids=lambda window: f"window-{window}")
def model(request: pytest.FixtureRequest) -> LlamaModel:
    return LlamaModel.from_pretrained(RECALL_FOLDER, "fp32", window=request.param)


def guard_for(model: LlamaModel, config: EngineConfig) -> PagedGuard:
    pools = [PoolSpec(num_pages=config.num_pages, page_size=config.page_size)]
    if model.config.window is not None:
        pools.append(PoolSpec(name=WINDOW_POOL, num_pages=config.num_pages, page_size=config.page_size))
    return PagedGuard(pools, config=GuardConfig.default(seed=1), backend="torch")


def served(engine: Engine, seed: int) -> Answers:
    assert drive(engine, trial_traffic(seed), max_steps=400)
    return {name: (output.token_ids, output.error) for name, output in engine.outputs.items()}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_all_of_them_together_change_no_token(model: LlamaModel, page_size: int, seed: int) -> None:
    """In a tight pool, guarded or not, clients get what a plain engine with room gives them; every page comes back."""
    plain = served(Engine(model, replace(PLAIN, page_size=page_size, num_pages=3200 // page_size)), seed)
    config = replace(FEATURES, page_size=page_size, num_pages=1 + -(-432 // page_size))
    guard = guard_for(model, config)
    guarded, unguarded = Engine(model, config, guard), Engine(model, config)
    assert served(guarded, seed) == plain == served(unguarded, seed)
    assert guard.violations == () and guard.health().ok and guard.health().counters["adapter_errors"] == 0
    counts = guarded.scheduler.counts
    assert counts == unguarded.scheduler.counts
    assert min(counts.accepted_drafts, counts.padding_lanes, counts.dummy_batches, counts.prefix_hits) > 0
    assert counts.partly_written > 0 or page_size == 1
    assert (counts.window_pages_passed > 0) == (model.config.window is not None)
    pools = [guarded.pool] + ([] if guarded.window is None else [guarded.window.pool])
    assert all(len(pool.free) + len(pool.idle) == config.num_pages - 1 for pool in pools)
    assert guarded.scheduler.unwritten == set()


def test_the_traffic_preempts_and_rejects_drafts() -> None:
    """Otherwise the test above would hold for an engine that never rewrites a draft or resumes a request."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32", window=16)
    engine = Engine(model, FEATURES)
    served(engine, 2)
    counts = engine.scheduler.counts
    assert min(counts.preemptions, counts.rejected_drafts, counts.promised_hits, counts.evictions) > 0


# -- padding and dummy batches ----------------------------------------------------------------------------------------


def test_padding_writes_to_the_skip_slot_and_fills_the_next_size() -> None:
    """Generating batches have one of the listed sizes; what stands behind the requests belongs to nobody."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    engine = Engine(model, replace(PLAIN, padded_batches=(2, 4)))
    seen = []

    def look(running: Engine, batch: list[Sequence]) -> None:
        tensors = running.tensors
        assert tensors is not None and tensors.requests == [sequence.id for sequence in batch]
        places, tokens = len(tensors.lengths), len(tensors.token_ids)
        assert len(tensors.query_start) == places + 1 and int(tensors.query_start[-1]) == tokens
        if any(sequence.scheduled > 1 for sequence in batch):
            assert places == len(batch)
            return
        seen.append((len(batch), places))
        slots = tensors.slots[MAIN_POOL].tolist()
        assert all(slot == SKIP_SLOT for slot in slots[len(batch) :])
        for sequence, slot in zip(batch, slots, strict=False):
            assert slot == sequence.pages[sequence.computed // 8] * 8 + sequence.computed % 8

    engine.at_launch.append(look)
    served(engine, 1)
    assert {size for size in seen if size[0] != size[1]} >= {(1, 2), (3, 4)} and (5, 5) in seen


@pytest.mark.parametrize("sizes", [(), (4,)])
def test_a_dummy_batch_writes_nothing_but_the_null_page(sizes: tuple[int, ...]) -> None:
    """An idle engine with dummy batches runs the model, and no page that a request could get is touched."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32", window=16)
    engine = Engine(model, replace(PLAIN, padded_batches=sizes, dummy_every=2))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.counts.dummy_batches == 3
    storages = [*engine.kv.keys, *engine.kv.values, *engine.window_kv.keys, *engine.window_kv.values]
    assert all(not storage[1:].any() for storage in storages) and engine.kv.keys[0][NULL_PAGE].any()


# -- speculation ------------------------------------------------------------------------------------------------------


def test_drafts_are_what_followed_the_tail_before() -> None:
    """The longest tail is looked up first, the latest occurrence counts, and nothing is made up."""
    assert draft([1, 2, 3, 4, 9, 2, 3], 2) == [4, 9]
    assert draft([7, 2, 3, 5, 1, 2, 3, 6, 8, 1, 2, 3], 3) == [6, 8, 1], "three tokens beat two, late beats early"
    assert draft([1, 2, 3], 2) == [] and draft([1], 2) == []
    assert draft([5, 5, 5], 4) == [5]


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    """What stands behind a wrong draft was computed from it, and is worth nothing."""
    assert accepted([4, 5, 6], [4, 5, 6, 7]) == 3
    assert accepted([4, 5, 6], [4, 9, 6, 7]) == 1
    assert accepted([4], [3, 4]) == 0 and accepted([], [3]) == 0


def test_speculation_saves_steps_and_rewrites_what_was_rejected() -> None:
    """The same tokens in fewer forwards; behind a rejected draft the right token goes to the very same slot."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    plain, guessing = Engine(model, PLAIN), Engine(model, replace(PLAIN, draft_tokens=4))
    written: dict[tuple[str, int], int] = {}
    again = []

    def look(running: Engine, batch: list[Sequence]) -> None:
        tensors = running.tensors
        assert tensors is not None
        starts = tensors.query_start.tolist()
        for place, sequence in enumerate(batch):
            for token in range(starts[place], starts[place + 1]):
                key, slot = (sequence.id, int(tensors.positions[token])), int(tensors.slots[MAIN_POOL][token])
                if key in written:
                    assert written[key] == slot
                    again.append(key)
                written[key] = slot

    guessing.at_launch.append(look)
    assert served(guessing, 2) == served(plain, 2)
    counts = guessing.scheduler.counts
    assert counts.steps < plain.scheduler.counts.steps and counts.rejected_drafts > 0
    assert len(again) > 0


# -- windowed layers --------------------------------------------------------------------------------------------------


def random_pair(folder: Path, window: int) -> tuple[LlamaModel, Engine, list[list[int]]]:
    """A random model whose every second layer is windowed, an engine for it, and what transformers says to prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(11)
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "eos_token_id": None,
    }
    llama = LlamaForCausalLM(LlamaConfig(**shape))
    llama.save_pretrained(folder)
    kinds = ["full_attention", "sliding_attention"] * 2
    # The same arithmetic, but for biases, which are zero here; and it knows windows.
    oracle = Qwen2ForCausalLM(
        Qwen2Config(**shape, use_sliding_window=True, sliding_window=window, layer_types=kinds, rms_norm_eps=1e-6)
    )
    missing, unexpected = oracle.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected and all(name.endswith("bias") for name in missing)
    for name, parameter in oracle.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    prompts = [
        torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(length)) for length in (50, 21, 9)
    ]
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            ones = torch.ones(1, len(prompt))
            answer = oracle.generate(prompt[None], attention_mask=ones, max_new_tokens=30, do_sample=False)
        answers.append(answer[0, len(prompt) :].tolist())
    model = LlamaModel.from_pretrained(folder, "fp32", window=window)
    # Room for the windows of three requests, and for nothing that they have passed.
    config = EngineConfig(num_pages=120, page_size=4, max_rows=3, token_budget=24, max_tokens=96, window_pages=28)
    engine = Engine(model, config)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(id=f"r{index}", prompt=tuple(prompt.tolist()), max_new_tokens=30))
    return model, engine, answers


def test_windowed_layers_equal_transformers(tmp_path: Path) -> None:
    """Chunked, batched, in a pool whose pages are handed out again and again: every token is transformers'."""
    model, engine, answers = random_pair(tmp_path, window=13)
    engine.run()
    assert engine.window is not None and engine.window.passed > 28, "no page was handed out twice"
    assert [list(engine.outputs[f"r{index}"].token_ids) for index in range(3)] == answers
    everything = LlamaModel.from_pretrained(tmp_path, "fp32")
    plain = Engine(everything, replace(engine.config, num_pages=200))
    for output in engine.outputs.values():
        plain.submit(output.request)
    plain.run()
    assert [list(plain.outputs[f"r{index}"].token_ids) for index in range(3)] != answers, "the window changes nothing"


def test_pages_that_the_window_has_passed_become_the_null_page(tmp_path: Path) -> None:
    """In every forward the windowed block table holds pages of the window and of what is being written, no others."""
    _, engine, _ = random_pair(tmp_path, window=13)

    def look(running: Engine, batch: list[Sequence]) -> None:
        window = running.window
        assert window is not None
        for sequence in batch:
            row = window.block_table[sequence.row].tolist()
            first = max(0, sequence.computed - 13 + 1) // 4
            last = -(-(sequence.computed + sequence.scheduled) // 4)
            assert row[:first] == [NULL_PAGE] * first
            assert NULL_PAGE not in row[first:last] and len(set(row[first:last])) == last - first
            assert all(window.pool.references[page] == 1 for page in row[first:last])

    engine.at_launch.append(look)
    engine.run()


def test_a_model_and_a_batch_agree_on_windows(tmp_path: Path) -> None:
    """Pages for windowed layers are given to a model that has some, and to no other; a request must fit the window."""
    model, engine, _ = random_pair(tmp_path, window=13)
    engine.scheduler.schedule(1)
    assert engine.window is not None and engine.window_kv.layers == engine.kv.layers == 2
    small = Engine(model, replace(engine.config, window_pages=8))
    with pytest.raises(ValueError, match="at once for its windowed layers"):
        small.submit(Request(id="r", prompt=(1,) * 60, max_new_tokens=5))


# -- what is published, and to whom -----------------------------------------------------------------------------------


def test_a_page_whose_writer_left_before_it_was_full_is_forgotten() -> None:
    """Published ahead, half written, and its writer's client goes: who asks for the same prompt computes it."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    prompt = trial_traffic(3)[0].request.prompt
    config = replace(PLAIN, publish_ahead=True, token_budget=20, page_size=16)
    engine, fresh = Engine(model, config), Engine(model, config)
    engine.submit(Request(id="first", prompt=prompt, max_new_tokens=8))
    engine.step()
    assert len(engine.scheduler.unwritten) == 1 and len(engine.pool.cached) == 2
    engine.submit(Request(id="second", prompt=prompt, max_new_tokens=8))
    engine.abort("first")
    assert len(engine.pool.cached) == 1 and engine.scheduler.unwritten == set()
    engine.run()
    fresh.submit(Request(id="second", prompt=prompt, max_new_tokens=8))
    fresh.run()
    assert engine.outputs["second"].token_ids == fresh.outputs["second"].token_ids
    assert engine.scheduler.counts.prefix_hits == 1


def test_a_page_is_shared_once_a_step_writes_all_of_it() -> None:
    """Who asks while the writer is half way gets the pages that are written, not the one that is published only."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    prompt = trial_traffic(3)[0].request.prompt
    engine = Engine(model, replace(PLAIN, publish_ahead=True, token_budget=24, page_size=16, max_rows=2))
    engine.submit(Request(id="first", prompt=prompt[:40], max_new_tokens=4))
    engine.step()
    assert len(engine.scheduler.unwritten) == 1
    engine.submit(Request(id="second", prompt=prompt[:34], max_new_tokens=4))
    engine.step()
    first, second = engine.sequences["first"], engine.sequences["second"]
    assert second.pages[:2] == first.pages[:2], "the second chunk writes the rest in this very step"
    assert engine.scheduler.counts.promised_hits == 1
    assert engine.scheduler.unwritten == set()


def test_tenants_share_no_pages() -> None:
    """The same prompt of another tenant is computed again; of the same tenant it is a hit."""
    model = LlamaModel.from_pretrained(RECALL_FOLDER, "fp32")
    engine = Engine(model, PLAIN)
    prompt = trial_traffic(3)[0].request.prompt
    for name, tenant in (("a", "north"), ("b", "south"), ("c", "north"), ("d", "")):
        engine.submit(Request(id=name, prompt=prompt, max_new_tokens=4, tenant=tenant))
        engine.step()
    pages = {name: set(engine.sequences[name].pages) for name in "abcd" if name in engine.sequences}
    assert engine.scheduler.counts.prefix_hits == 1 and len(pages) >= 3
    engine.run()
    assert len({output.token_ids for output in engine.outputs.values()}) == 1
