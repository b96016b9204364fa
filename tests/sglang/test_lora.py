"""LoRA adapters in a real SGLang at level `keys`: each finds its own pages, and nobody those of another."""

from __future__ import annotations

from typing import Any

import pytest

from kvguard.fault_injection.key_traffic import TENANTS
from kvguard.fault_injection.targets.checkpoints import tiny_adapter
from kvguard.fault_injection.targets.sglang_engine import (
    generate_request,
    lora_arguments,
    lora_ids,
    without_pinning,
)
from kvguard.violation import Kind
from tests.sglang.apart import Child
from tests.sglang.engine import Engine
from tests.sglang.scenarios import assert_clean, assert_whole

PROMPT = tuple((7 * token + 3) % 241 + 3 for token in range(100))
TOKENS = 8


def build(kept: dict[str, Any], overlap: bool) -> None:
    """An engine with an adapter for each name."""
    without_pinning()
    adapters = tuple((name, tiny_adapter(name)) for name in TENANTS)
    kept["engine"] = Engine(overlap=overlap, **lora_arguments(adapters))


def ask(kept: dict[str, Any], name: str, adapter: str, extra: str = "") -> tuple[list[int], int]:
    """Tokens of the prompt's answer with an adapter, and how many tokens of the prompt were cached.

    `extra`: the extra key, or the name of an adapter whose id it is.
    """
    engine: Engine = kept["engine"]
    ids, tree = lora_ids(engine.scheduler), engine.scheduler.tree_cache
    match, cached = tree.match_prefix, list[int]()

    def watched(params: Any) -> Any:
        result = match(params)
        cached.append(int(result.device_prefix_len))
        return result

    tree.match_prefix = watched
    try:
        engine.send(
            generate_request(name, PROMPT, TOKENS, tenant=ids.get(extra, extra), lora_id=ids.get(adapter, ""))
        )
        engine.run()
    finally:
        del tree.match_prefix
    return engine.tokens.get(name, []), cached[0]


def check(kept: dict[str, Any]) -> None:
    """Nothing was flagged."""
    assert_clean(kept["engine"])


def violations(kept: dict[str, Any]) -> list[tuple[str | None, Kind, str]]:
    """What was flagged."""
    assert_whole(kept["engine"])
    return [(found.request, found.kind, found.detail) for found in kept["engine"].guard.violations]


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_adapters_share_no_pages_and_a_key_that_is_an_adapters_id_finds_nothing_of_it(overlap: bool) -> None:
    """SGLang appends the adapter's id to the extra key: a tenant who sends the id as its extra key is led to the
    adapter's pages, in a sound SGLang. It is aborted before it reads them."""
    child = Child({"KVGUARD_LEVEL": "keys"})
    try:
        child.call(build, overlap)
        first = [child.call(ask, f"first-{name}", name) for name in ("", *TENANTS)]
        assert [hit for _, hit in first] == [0] * 4
        assert len({tuple(tokens) for tokens, _ in first}) == 4, "the adapters change nothing: this proves nothing"
        again = [child.call(ask, f"again-{name}", name) for name in ("", *TENANTS)]
        assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
        assert [hit for _, hit in again] == [96] * 4
        child.call(check)
        tokens, hit = child.call(ask, "intruder", "", extra=TENANTS[0])
        assert tokens == [] and hit == 96
        ((request, kind, detail),) = child.call(violations)
        assert (request, kind) == ("intruder", Kind.CONTENT_DOMAIN)
        assert "differing in lora, tenant" in detail
    finally:
        child.stop()
