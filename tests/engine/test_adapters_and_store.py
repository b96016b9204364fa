"""What the embedded engine has for faults of cache keys: adapters, weight updates, cut prompts, a store of pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.pool import NULL_PAGE, chain_keys
from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.targets.embedded_runs import load_model
from kvguard.fault_injection.traffic import recall_prompt
from kvguard.pools import PoolSpec

TEXT = "Mia Castellan, PIN 4711, code K7Q2ZX9A: the spare vault key at Pier 23, 9 July; ask twice."


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def request(name: str, text: str = TEXT, **fields: Any) -> Request:
    return Request(id=name, prompt=recall_prompt(None, text), max_new_tokens=12, **fields)  # type: ignore[arg-type]


def engine(*, level: str = "", **fields: Any) -> Engine:
    """An engine of the recall model, with a guard if a level is given."""
    config = EngineConfig(**{"num_pages": 40, "page_size": 16, "token_budget": 160, "max_tokens": 192, **fields})
    guard = None
    if level:
        pool = PoolSpec(num_pages=config.num_pages, page_size=config.page_size, null_page=NULL_PAGE)
        guard = PagedGuard([pool], config=GuardConfig.default(seed=1, level=level), backend="torch")
    return Engine(load_model("recall", "fp32"), config, guard)


def served(made: Engine, *requests: Request) -> list[tuple[int, ...]]:
    """What each of them gets, one after the other."""
    for one in requests:
        made.submit(one)
        made.run()
    return [made.outputs[one.id].token_ids for one in requests]


def keys_and_values(made: Engine, page: int) -> torch.Tensor:
    return torch.stack([rows[page].float() for rows in (*made.kv.keys, *made.kv.values)])


def test_an_adapter_changes_keys_and_values_of_its_request_alone() -> None:
    """Rows of one batch run with different adapters or none, as they would run alone."""
    together = engine(prefix_cache=False, token_budget=400)
    for name, lora in (("a", ""), ("b", "red"), ("c", "blue")):
        together.submit(request(name, lora=lora))
    together.step()
    pages = {sequence.id: list(sequence.pages) for sequence in together.scheduler.running}
    for name, lora in (("a", ""), ("b", "red"), ("c", "blue")):
        alone = engine(prefix_cache=False)
        alone.submit(request(name, lora=lora))
        alone.step()
        mine = alone.scheduler.running[0].pages
        for one, other in zip(pages[name], mine, strict=True):
            torch.testing.assert_close(
                keys_and_values(together, one), keys_and_values(alone, other), rtol=1e-4, atol=1e-4
            )
    first = [keys_and_values(together, pages[name][0]) for name in "abc"]
    assert all((first[i] - first[j]).abs().max() > 0.05 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_tenants_and_adapters_share_no_pages() -> None:
    """The healthy cache key has both, each in its place."""
    tokens = list(range(32))
    keys = {
        tuple(chain_keys(tokens, 16, *fields)) for fields in ((), ("x",), ("", "x"), ("x", "x"), ("xx",), ("", "xx"))
    }
    assert len(keys) == 6
    made = engine()
    served(made, request("a"), request("b", tenant="x"), request("c", lora="x"), request("d", tenant="x", lora="x"))
    assert made.scheduler.counts.prefix_hits == 0
    served(made, request("e", tenant="x"), request("f", lora="x"))
    assert made.scheduler.counts.prefix_hits == 2


def test_a_prompt_is_cut_to_its_last_tokens_before_it_is_hashed() -> None:
    """What is cut off is neither computed nor in any key."""
    made = engine()
    cut, whole = served(made, request("a", keep_last=50), request("b"))
    assert len(made.outputs["a"].request.prompt) == 50 and made.outputs["a"].request.untruncated == request("b").prompt
    assert made.outputs["b"].request.untruncated == () and made.scheduler.counts.prefix_hits == 0
    assert cut != whole


@pytest.mark.parametrize("level", ["", "tags", "keys"])
def test_a_weight_update_starts_everybody_over_and_empties_the_cache(level: str) -> None:
    """Who runs computes again with the new weights; nothing of before is found; the guard has nothing to say."""
    made = engine(level=level, external_store=True)
    served(made, request("a"))
    made.submit(request("b"))
    made.step()
    before = made.scheduler.counts.prefix_hits
    assert before == 1 and made.pool.cached
    made.update_weights()
    assert not made.pool.cached and made.weights_epoch == 1
    made.run()
    assert made.scheduler.counts.prefix_hits == before and made.outputs["b"].error is None
    fresh = engine()
    fresh.weights_epoch = 1
    assert served(fresh, request("b")) == [made.outputs["b"].token_ids]
    if made.guard is not None:
        assert made.guard.violations == () and made.guard.health().counters["adapter_errors"] == 0


@pytest.mark.parametrize("level", ["", "tags", "keys"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_evicted_pages_come_back_from_the_store(page_size: int, level: str) -> None:
    """A prompt that comes again after its pages were evicted is loaded, not computed, with the same tokens."""
    made = engine(level=level, external_store=True, page_size=page_size, num_pages=1 + -(-112 // page_size))
    others = [request(f"o{n}", f"{n}{TEXT[::-1]}"[:90]) for n in range(3)]
    first, *_, again = served(made, request("a"), *others, request("b"))
    assert first == again and made.scheduler.counts.store_hits >= 64 // page_size
    plain = engine(page_size=page_size, num_pages=120)
    assert served(plain, request("a")) == [first]
    if made.guard is not None:
        assert made.guard.violations == () and made.guard.health().counters["adapter_errors"] == 0


def test_the_store_drops_its_oldest_pages() -> None:
    """It keeps so many and no more, and the guard forgets what it held with it."""
    made = engine(level="keys", external_store=True, num_pages=8)
    store = made.pool.store
    assert store is not None and made.guard is not None and made.guard._guard is not None
    store._capacity = 3
    served(made, *[request(f"o{n}", f"{n}{TEXT[::-1]}"[:90]) for n in range(4)])
    assert len(store._pages) == 3 == len(made.guard._guard._books.stored)
    store.clear()
    assert not store._pages and not made.guard._guard._books.stored
