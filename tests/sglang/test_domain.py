"""What all requests of one SGLang scheduler have in common, as content keys see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvguard.adapters.sglang.contents import base_domain


def scheduler(server: dict[str, Any], pool: dict[str, Any], page_size: int) -> Any:
    made = SimpleNamespace(**pool)
    allocator = SimpleNamespace(page_size=page_size, get_kvcache=lambda: made)
    return SimpleNamespace(server_args=SimpleNamespace(**server), token_to_kv_pool_allocator=allocator)


def test_whatever_two_engines_must_agree_on_is_in_the_domain() -> None:
    """Model, revision, quantization, dtype, KV dtype, page size and the pool's shape: each by itself."""
    server = {"model_path": "a/b", "revision": None, "quantization": None, "dtype": "bf16", "kv_cache_dtype": "auto"}
    pool = {"layer_num": 4, "head_num": 2, "head_dim": 64, "dtype": "bf16", "kv_lora_rank": 1, "qk_rope_head_dim": 1}
    made = [scheduler(server, pool, 16), scheduler(server, pool, 1)]
    made += [scheduler(server | {name: 7}, pool, 16) for name in server]
    made += [scheduler(server, pool | {name: 7}, 16) for name in pool]
    found = [base_domain(one) for one in made]
    assert len(set(found)) == len(found) == 13
    assert base_domain(scheduler(server, pool, 16)) == found[0]
