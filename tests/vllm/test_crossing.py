"""Decode where blocks are crossed, as the books of a vLLM scheduler learn it: in one call, or else in full.

The scheduler is a stand-in here, so that each thing can be out of the ordinary alone; `test_steady.py` runs real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvguard.adapters.vllm.block_books import REPEATS_MAX, BlockBooks
from kvguard.config import GuardConfig
from kvguard.content_key import ContentDomain
from kvguard.guard import Guard
from kvguard.messages import Verdicts
from kvguard.pools import PoolSpec

BLOCK = 4


def block(page: int) -> Any:
    return SimpleNamespace(block_id=page, is_null=False, block_hash=None)


class Decode:
    """Requests a and b in decode: a has filled its last block, b fills its own with the next token."""

    def __init__(self, level: str = "tags") -> None:
        spec = PoolSpec(name="group0", num_pages=40, page_size=BLOCK)
        guard: Any = Guard((spec,), GuardConfig.load(seed=1, level=level))
        self.guard = guard
        self.blocks = {"a": [block(1), block(2)], "b": [block(3), block(4)], "waiting": []}
        self.requests = {
            name: SimpleNamespace(request_id=name, num_computed_tokens=computed, num_tokens=20, block_hashes=[])
            for name, computed in (("a", 7), ("b", 6), ("waiting", 0))
        }
        single = SimpleNamespace(req_to_blocks=self.blocks, block_size=BLOCK)
        pool = SimpleNamespace(hash_block_size=BLOCK, cached_block_hash_to_block=SimpleNamespace(pop=lambda *_: None))
        manager = SimpleNamespace(
            block_pool=pool, enable_caching=False, coordinator=SimpleNamespace(single_type_managers=[single]))
        scheduler = SimpleNamespace(kv_cache_manager=manager, requests=self.requests, vllm_config=None)
        self.books = BlockBooks(self.guard, scheduler, self.guard.setup.pools)
        if level == "keys":
            self.books._contents = self.contents()
        self.in_full = 0
        step = guard.step

        def counted(*args: Any) -> Any:
            self.in_full += 1
            return step(*args)

        guard.step = counted
        self.books._fresh.update((1, 2, 3, 4))
        self.run(chunks={"a": 7, "b": 6})
        self.go_on()
        self.run()

    def contents(self) -> Any:
        """In the place of RequestContents: each request is made of zeros, as many as are told."""
        told: dict[str, int] = {}

        def learn(request: Any, tokens: int) -> None:
            name = request.request_id
            if name not in told:
                self.guard.identify(name, ContentDomain(model="m"), [])
            self.guard.add_tokens(name, [0] * max(0, tokens - told.get(name, 0)))
            told[name] = max(tokens, told.get(name, 0))

        return SimpleNamespace(
            learn=learn, current=lambda name: True, identify=lambda request: learn(request, 0), forget=lambda name: None
        )

    def go_on(self) -> None:
        """A token more for each."""
        for name in ("a", "b"):
            self.requests[name].num_computed_tokens += 1

    def take(self, name: str, page: int) -> None:
        """The next block of a request."""
        self.books._taken([block(page)], lambda _: [])
        self.blocks[name].append(block(page))

    def publish(self, name: str, column: int, key: Any, *, now: Any = None) -> None:
        """The cache holds the block under `key`; by the time that the books look, under `now`."""
        filled = self.blocks[name][column]
        filled.block_hash = key
        self.books._note_publication(name, 0, column, filled, False)
        filled.block_hash = now if now is not None else key

    def run(self, chunks: dict[str, int] | None = None) -> Any:
        """The message of a step, whose rows are found clean."""
        scheduled = chunks or {"a": 1, "b": 1}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        delta = self.books._payload(output).delta
        records = np.zeros((1, len(scheduled), 4), np.int64)
        assert self.guard.judge(Verdicts(step=delta.step, records=records)).clean
        return delta

    def told(self) -> tuple[Any, ...]:
        """What the guard and the books of the scheduler know."""
        guard, books = self.guard, self.books
        pages = {name: guard.pages(name) for name in ("a", "b")}
        states = {page: str(guard.page_state(page)) for page in range(1, 12)}
        known = (dict(books._group_of), {name: list(columns) for name, columns in books._columns.items()})
        noted = set(books._fresh), dict(books._published), dict(books._key_in_pass)
        return pages, states, known, [list(counts) for counts in books._counts], *noted


def both_cross(decode: Decode) -> None:
    decode.take("a", 5)
    decode.publish("b", 1, "key")
    decode.go_on()


@pytest.mark.parametrize("level", ["tags", "keys"])
def test_what_decode_does_is_learnt_in_one_call_and_as_in_full(level: str) -> None:
    """The same pages, states and columns; the next token is another step of the shortest kind."""
    short, full = Decode(level), Decode(level)
    full.books._repeats = REPEATS_MAX
    for decode in (short, full):
        before = decode.in_full
        both_cross(decode)
        decode.run()
        assert decode.in_full - before == (decode is full)
    assert short.told() == full.told()
    binding = short.guard._books.tables[0].record(4).content
    assert binding == full.guard._books.tables[0].record(4).content and (binding is not None) == (level == "keys")
    assert short.told()[0] == {"a": [1, 2, 5], "b": [3, 4]} and short.guard.page_state(4) == "complete"
    short.take("b", 6)
    short.go_on()
    before = short.in_full
    delta = short.run()
    assert short.in_full == before and short.guard.pages("b") == [3, 4, 6] and not delta.again
    short.go_on()
    assert short.run().again


def _connector(decode: Decode) -> None:
    """A request that is not scheduled got a block, too: a connector loads it."""
    decode.take("waiting", 8)


def _two_blocks(decode: Decode) -> None:
    decode.take("b", 8)
    decode.take("b", 9)


def _no_fresh_block(decode: Decode) -> None:
    """The block that a holds has not left the free queue as far as anybody knows; another one has, for nobody."""
    decode.blocks["a"][-1] = block(30)


def _a_hit_and_a_block(decode: Decode) -> None:
    decode.blocks["b"].append(decode.blocks["a"][0])
    decode.take("b", 8)


def _published_by_a_waiting_one(decode: Decode) -> None:
    decode.take("waiting", 8)
    decode.books._fresh.discard(8)
    decode.publish("waiting", 0, "loaded")


def _published_twice(decode: Decode) -> None:
    decode.publish("b", 0, "first")


def _gone_from_the_cache(decode: Decode) -> None:
    decode.books._published.clear()
    decode.publish("b", 1, "key", now="other")


def _slow(decode: Decode) -> None:
    """One of them did not go on."""
    for name in ("a", "b"):
        decode.requests[name].num_computed_tokens -= 1


ODD: dict[str, Callable[[Decode], None]] = {
    "a waiting request's block": _connector,
    "two blocks at once": _two_blocks,
    "a block that is not fresh": _no_fresh_block,
    "a hit and a block": _a_hit_and_a_block,
    "a waiting request's publication": _published_by_a_waiting_one,
    "two publications of one request": _published_twice,
    "a publication that is gone": _gone_from_the_cache,
    "a request that did not go on": _slow,
}


@pytest.mark.parametrize("case", ODD)
def test_anything_else_is_looked_at_in_full(case: str) -> None:
    """The call answers None and has noted nothing."""
    decode = Decode()
    both_cross(decode)
    ODD[case](decode)
    before = decode.told()
    assert decode.books._another_token(2, ["a", "b"]) is None
    assert decode.told() == before




def _leave_in_cache(decode: Decode, page: int) -> None:
    """A request that has ended left this block in the cache, filled and verified."""
    guard, books = decode.guard, decode.books
    guard.start("earlier")
    assert guard.allocate("earlier", [page]) and guard.publish("earlier", 0, ("earlier", page), tokens=0)
    books._group_of[page] = 0
    guard.finish("earlier")
    # Whoever starts or ends makes the next step a full one.
    books._in_step = []
    decode.run()


def test_a_cached_block_that_is_drawn_is_taken_over_in_passing() -> None:
    """A pool that has been in use is full of such blocks: each crossing draws one."""
    short, full = Decode(), Decode()
    for decode in (short, full):
        _leave_in_cache(decode, 20)
        assert decode.guard.page_state(20) == "complete"
        tag = decode.guard._books.tables[0].tag(20)
        if decode is full:
            decode.books._repeats = REPEATS_MAX
        before = decode.in_full
        decode.guard.unpublish([20])
        decode.take("a", 20)
        decode.go_on()
        decode.run()
        assert decode.in_full - before == (decode is full)
        assert decode.guard._books.tables[0].tag(20) != tag, "who was promised it before reads another's page"
    assert short.told() == full.told()
    assert short.guard.pages("a") == [1, 2, 20] and short.guard.page_state(20) == "allocated"


def test_a_block_that_is_drawn_and_was_not_evicted_is_found_by_nobody() -> None:
    """vLLM evicts each block that it draws. If one stays in the cache, another request of the pass may look it up."""
    decode = Decode()
    _leave_in_cache(decode, 20)
    decode.guard.start("later")
    hit = ("earlier", 20), 20
    assert decode.guard.vet_hits("later", [hit]) == 1
    decode.take("a", 20)
    assert decode.guard.vet_hits("later", [hit]) == 0, "before the books have learnt whose it is"
    decode.go_on()
    decode.run()
    assert decode.guard.vet_hits("later", [hit]) == 0 and decode.guard.pages("a") == [1, 2, 20]


def test_a_cached_block_that_is_drawn_and_given_back_unused_is_vacant() -> None:
    """Its request was preempted or aborted before anybody looked."""
    decode = Decode()
    _leave_in_cache(decode, 20)
    decode.guard.unpublish([20])
    decode.books._taken([block(20)], lambda _: [])
    given_back = block(20)
    given_back.ref_cnt = 0
    decode.books._freed([given_back])
    assert decode.guard.page_state(20) == "vacant"
    assert 20 not in decode.books._fresh and 20 not in decode.books._group_of


def test_a_cached_block_that_is_still_promised_is_retired_when_it_is_drawn() -> None:
    """Nobody will write it any more: the promise is broken before somebody else has the block."""
    decode = Decode()
    guard = decode.guard
    guard.start("earlier")
    assert guard.allocate("earlier", [20]) and guard.publish("earlier", 0, "key")
    decode.books._group_of[20] = 0
    promise = guard._books.tables[0].record(20).promise
    guard._books.requests["earlier"].ledgers[0].clear()
    guard._books.tables[0].release(20, "earlier")
    assert promise is not None and not guard.may_take_over([20])
    decode.take("a", 20)
    assert promise.kept is False and guard.page_state(20) == "vacant" and 20 in decode.books._fresh
