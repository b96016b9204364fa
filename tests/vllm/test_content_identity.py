"""What vLLM's requests are made of, as content keys see it: told apart just where vLLM's own sound hash does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.adapters.vllm.contents import RequestContents, base_domain, changes_weights
from kvguard.config import GuardConfig
from kvguard.guard import Guard
from kvguard.pools import PoolSpec


def hasher() -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    return get_request_block_hasher(4, function)


def vllm_request(name: str, tokens: list[int], **made_of: Any) -> Any:
    """A Request as vLLM's scheduler has it, hashed in blocks of 4 tokens."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=hasher(),
        **made_of,
    )


def contents_at_level_keys() -> tuple[Guard, RequestContents]:
    guard = Guard([PoolSpec(num_pages=8, page_size=4)], GuardConfig.default(seed=1, level="keys"))
    return guard, RequestContents(guard, None, [], 4)


def keys_in(guard: Guard, request: Any) -> list[Any]:
    content = guard._books.state(request.request_id).content
    assert content is not None and content.tokens == request.num_tokens
    return [content.key(end) for end in range(4, request.num_tokens + 1, 4)]


def keys_of(*requests: Any) -> list[list[Any]]:
    """The content keys at the end of every block of 4 tokens, under one secret."""
    guard, contents = contents_at_level_keys()
    for request in requests:
        guard.start(request.request_id)
        contents.identify(request)
        contents.learn(request, request.num_tokens)
    return [keys_in(guard, request) for request in requests]


def image(identity: str, offset: int, length: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identity, mm_position=place)


def adapter(name: str, path: str, number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


@st.composite
def made_of(draw: st.DrawFn) -> dict[str, Any]:
    """What vLLM's hashes take notice of, drawn from so few values that two requests often agree in some."""
    found: dict[str, Any] = {
        "tokens": [*draw(st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 5)])), 6, 7, 8, 9, 10, 11, 12, 13],
        "cache_salt": draw(st.sampled_from([None, "", "red", "blue"])),
    }
    name = draw(st.sampled_from([None, "one", "two"]))
    if name is not None:
        # vLLM gives an adapter that is loaded again another number: the same weights all the same.
        path = draw(st.sampled_from(["/nowhere/a", "/nowhere/b"]))
        found["lora_request"] = adapter(name, path, draw(st.integers(1, 3)))
    pictures = draw(st.lists(st.sampled_from(["cat", "dog"]), max_size=2))
    start = draw(st.integers(0, 2))
    found["mm_features"] = [image(picture, start + 5 * place, 3) for place, picture in enumerate(pictures)]
    return found


@st.composite
def two_alike(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two that often differ in one thing only: drawn apart, they would differ in several nearly always."""
    one, other = draw(made_of()), draw(made_of())
    fields = sorted({*one, *other})
    changed = draw(st.one_of(st.sampled_from(fields).map(lambda field: [field]), st.just(fields)))
    return one, {field: (other if field in changed else one).get(field) for field in fields}


@settings(max_examples=100, deadline=None)
@given(two_alike())
def test_content_keys_tell_apart_what_vllm_does_and_nothing_that_it_does_not(
    pair: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """At every block the two agree in the content key just where they agree in vLLM's sound hash."""
    one, other = pair
    requests = [vllm_request("a", **one), vllm_request("b", **other)]
    hashes = [request.block_hashes for request in requests]
    keys = keys_of(*requests)
    assert len(hashes[0]) == len(keys[0]) == len(one["tokens"]) // 4
    assert [a == b for a, b in zip(*keys, strict=True)] == [a == b for a, b in zip(*hashes, strict=True)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("one", "/nowhere/a", 1), ("two", "/nowhere/a", 1)),
        (("one", "/nowhere/a", 1), ("one", "/nowhere/b", 1)),
        (("one", "/nowhere/a", 1), None),
    ],
    ids=["name", "path", "none"],
)
def test_adapters_are_told_apart_by_name_and_by_path(one: tuple[Any, ...], other: tuple[Any, ...] | None) -> None:
    """Each by itself is enough, and an empty salt beside them is none."""
    prompt = [1, 2, 3, 4]
    requests = [
        vllm_request("a", prompt, lora_request=adapter(*one)),
        vllm_request("b", prompt, lora_request=None if other is None else adapter(*other)),
        vllm_request("c", prompt, lora_request=adapter(*one), cache_salt=""),
    ]
    first, second, salted = keys_of(*requests)
    assert first != second and first == salted


def test_a_prompt_of_embeddings_shares_its_common_beginning() -> None:
    """Its bytes count block by block, as in vLLM's hash; which positions are tokens counts besides."""
    rows = torch.arange(48, dtype=torch.float32).view(12, 4)
    changed = rows.clone()
    changed[6, 1] += 1
    requests = [
        vllm_request(name, None, prompt_embeds=given)  # type: ignore[arg-type]
        for name, given in (("a", rows), ("b", rows.clone()), ("c", changed), ("d", rows.bfloat16()))
    ]
    same, again, other, narrow = keys_of(*requests)
    assert same == again and same[0] == other[0] and same[1] != other[1] and same[2] != other[2]
    assert [a == b for a, b in zip(same, narrow, strict=True)] == [False] * 3
    hashes = [request.block_hashes for request in requests]
    assert hashes[0][0] == hashes[2][0] and hashes[0][1] != hashes[2][1]


def test_an_adapter_that_was_written_again_is_another_one(tmp_path: Path) -> None:
    """Its name and path are the same, so that vLLM's hash is; time or size of what vLLM reads there is not."""
    import os

    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"first")

    def key(name: str) -> tuple[Any, Any]:
        request = vllm_request(name, [1, 2, 3, 4], lora_request=adapter("one", str(tmp_path), 1))
        return keys_of(request)[0][0], request.block_hashes[0]

    settings = tmp_path / "adapter_config.json"
    settings.write_text('{"lora_alpha": 8}')
    before = key("a")
    assert key("b") == before
    (tmp_path / "README.md").write_text("a new file in the folder is nothing to the weights")
    os.utime(tmp_path, ns=(1, 1))
    assert key("c") == before
    seen = [before[0]]
    time = weights.stat().st_mtime_ns
    # vLLM scales the weights by what stands there.
    for file, text, later in ((weights, "other", 1), (settings, '{"lora_alpha": 9}', 1), (weights, "longer", 1)):
        file.write_text(text)
        os.utime(file, ns=(1, time + later * 1_000_000_000))
        after = key(f"after {len(seen)}")
        assert after[0] not in seen and after[1] == before[1]
        seen.append(after[0])


def test_a_session_is_what_its_next_input_makes_of_it() -> None:
    """vLLM's own update of a session, after the guard was told of a token that it takes back, and with an image."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import StreamingUpdate

    scheduler = SimpleNamespace(hash_block_size=4, num_waiting_for_streaming_input=1, log_stats=False)
    session = vllm_request("talk", [1, 2, 3, 4, 5, 6], resumable=True)
    guard, contents = contents_at_level_keys()
    guard.start("talk")
    contents.identify(session)
    session.append_output_token_ids([7, 8])
    session.num_computed_tokens = 7
    contents.learn(session, 8)
    update = StreamingUpdate(
        mm_features=[image("cat", 1, 2)], prompt_token_ids=[9, 10, 11, 12, 13], max_tokens=4, arrival_time=0.0,
        sampling_params=session.sampling_params,
    )  # fmt: skip
    contents.follow_session(partial(Scheduler._update_request_as_session, scheduler))(session, update)
    tokens = list(session.all_token_ids)
    assert tokens == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
    contents.learn(session, 12)
    (plain,) = keys_of(vllm_request("plain", tokens, mm_features=[image("cat", 8, 2)]))
    assert keys_in(guard, session) == plain


def test_calls_that_change_weights_are_known_by_their_names() -> None:
    """Those of vLLM and what training frameworks bring; not those that only read."""
    from vllm.v1.worker.gpu_worker import Worker

    changing = ("reload_weights", "update_weights", "start_weight_update", "finish_weight_update")
    assert all(changes_weights(name) and hasattr(Worker, name) for name in changing)
    assert changes_weights("update_weight") and changes_weights("load_weights_from_ipc")
    reading = ("compute_weight_checksums", "shutdown_weight_transfer_engine")
    assert all(hasattr(Worker, name) for name in reading)
    brought = ("init_weight_update_group", "check_weights_changed", "get_weights_by_name", "save_weights")
    assert not any(map(changes_weights, (*reading, *brought, "add_lora", "sleep", "profile", "")))


def test_whatever_two_engines_must_agree_on_is_in_the_domain() -> None:
    """Model, revision, quantization, dtype, KV dtype, and the layout of every group: each by itself."""
    one: dict[str, dict[str, Any]] = {
        "model": {"model": "a/b", "revision": None, "quantization": None, "dtype": "bf16"},
        "cache": {"cache_dtype": "auto"},
        "group": {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bf16", "sliding_window": None},
    }

    def domain(changed: dict[str, dict[str, Any]], groups: int = 1) -> Any:
        made = {name: SimpleNamespace(**fields) for name, fields in changed.items()}
        config = SimpleNamespace(model_config=made["model"], cache_config=made["cache"])
        return base_domain(config, [SimpleNamespace(kv_cache_spec=made["group"])] * groups)

    found = [domain(one), domain(one, groups=2)]
    for part, fields in one.items():
        for name in fields:
            found.append(domain(one | {part: fields | {name: 7}}))
    assert len(set(found)) == len(found) == 12
    assert domain(one) == found[0]
