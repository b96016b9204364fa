"""Level `keys` in a real SGLang: hits on sound pages that hold somebody else's content, and healthy traffic."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvguard.violation import Action, Kind, Proof, Violation
from tests.sglang.apart import on
from tests.sglang.engine import Client, Engine, checkpoint
from tests.sglang.scenarios import assert_clean, assert_whole, at_step, prompts, unguarded_tokens, victims

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
ON = {"KVGUARD_LEVEL": "keys", "KVGUARD_BREAKER_VIOLATIONS": "1000"}
SIZES = pytest.mark.parametrize("page_size", [1, 16])
TOKENS = 12
PROMPT = [(7 * token + 3) % 241 + 3 for token in range(150)]
OTHER = [(11 * token + 5) % 239 + 3 for token in range(150)]


@contextmanager
def hits_of(engine: Engine) -> Iterator[dict[str, int]]:
    """Request -> tokens that SGLang says it took from its cache."""
    found: dict[str, int] = {}
    streamer = engine.scheduler.output_streamer
    sender = streamer.send_to_detokenizer

    def noting(output: Any, request: Any = None) -> Any:
        found.update(zip(getattr(output, "rids", ()), getattr(output, "cached_tokens", None) or (), strict=False))
        return sender.send_output(output, request)

    streamer.send_to_detokenizer = SimpleNamespace(send_output=noting)
    try:
        yield found
    finally:
        streamer.send_to_detokenizer = sender


@contextmanager
def every_request(engine: Engine, action: Callable[[Any], None]) -> Iterator[None]:
    """action(req) as SGLang puts a request into its queue."""
    add = engine.scheduler._add_request_to_queue

    def adding(req: Any, *args: Any, **kwargs: Any) -> Any:
        action(req)
        return add(req, *args, **kwargs)

    engine.scheduler._add_request_to_queue = adding
    try:
        yield
    finally:
        del engine.scheduler._add_request_to_queue


@contextmanager
def looked_up_as(engine: Engine, names: dict[str, list[int]], method: str = "match_prefix") -> Iterator[None]:
    """The tree takes these requests for such as have other tokens: what a collision of its keys would do."""
    tree = engine.scheduler.tree_cache
    original = getattr(tree, method)

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        params = args[-1]
        owner = params.req if method == "match_prefix" else current.get("req")
        if owner is not None and owner.rid in names:
            key = params.key[:]
            count = min(len(params.key), len(names[owner.rid]))
            key.token_ids, key.limit = array("q", [*names[owner.rid][:count], *key.raw_token_ids()[count:]]), None
            args = (*args[:-1], dataclasses.replace(params, key=key))
        return original(*args, **kwargs)

    current: dict[str, Any] = {}
    checkpoint = tree.checkpoint

    def noting(req: Any, *args: Any, **kwargs: Any) -> Any:
        current["req"] = req
        try:
            return checkpoint(req, *args, **kwargs)
        finally:
            del current["req"]

    setattr(tree, method, mistaken)
    tree.checkpoint = noting
    try:
        yield
    finally:
        delattr(tree, method)
        del tree.checkpoint


def once_ended(count: int, action: Callable[[Engine], None]) -> Client:
    """A client that does this once, when so many requests have ended; True while it waits."""
    done: list[bool] = []

    def client(engine: Engine) -> bool:
        if not done and len(engine.ends) >= count:
            done.append(True)
            action(engine)
        return not done

    return client


def new_violations(engine: Engine) -> list[Violation]:
    """Those since this was last asked; tests of one module share engines."""
    seen = getattr(engine, "violations_seen", 0)
    found = list(engine.guard.violations[seen:])
    engine.violations_seen = seen + len(found)  # type: ignore[attr-defined]
    return found


def golden(engine: Engine, scenario: Callable[[Engine], Client | None]) -> dict[str, list[int]]:
    """What an unguarded engine without a fault sends."""
    tokens, ends = unguarded_tokens(engine, scenario)
    assert set(ends.values()) == {"length"}
    return tokens


def tenants(engine: Engine) -> Client:
    """Two tenants and the public ask the same: what one has cached is no other's; then more, from the cache.

    The second time they go on from the answers: pages of generated tokens are found as well.
    """
    rng, made = random.Random(5), prompts(5, 6)
    asked = [(place, tenant) for place in range(6) for tenant in ("", "a", "b")]
    rng.shuffle(asked)
    for place, tenant in asked:
        engine.add(f"{tenant or 'public'}{place}", made[place], 2 * TOKENS, tenant=tenant)

    def again(engine: Engine) -> None:
        for place, tenant in asked:
            name = f"{tenant or 'public'}{place}"
            engine.add(f"{name}-again", [*made[place], *engine.tokens[name], 7, 8, 9], TOKENS, tenant=tenant)

    return once_ended(18, again)


@LOOPS
@SIZES
@on(environment=ON, alone=True)
def test_healthy_tenants_hit_what_is_their_own(engine: Engine, page_size: int, overlap: bool) -> None:
    """Tokens and hits are those of an unguarded engine, and nothing is flagged."""
    with engine.unguarded(), hits_of(engine) as wanted_hits:
        engine.tokens, engine.ends = {}, {}
        engine.run(tenants(engine))
        wanted = engine.tokens
    assert len(wanted) == 36
    with hits_of(engine) as hits:
        engine.run(tenants(engine))
    assert engine.tokens == wanted
    assert hits == wanted_hits and sum(count > 0 for count in hits.values()) > 12
    assert (engine.guard.books.page_content != 0).any()
    assert_clean(engine)


@LOOPS
@on(environment=ON, max_total_tokens=384, max_running_requests=8)
def test_healthy_pressure(engine: Engine, overlap: bool) -> None:
    """Few pages: requests are retracted and come back, cached pages are evicted and published with other content."""

    def scenario(engine: Engine) -> Client | None:
        for place, prompt in enumerate(prompts(7, 16)):
            engine.add(f"r{place}", prompt, 100, tenant="ab"[place % 2], exact=False)
        return None

    tokens, _ = unguarded_tokens(engine, scenario)
    retracted: list[str] = []

    def note(req: Any) -> None:
        if req.is_retracted:
            retracted.append(req.rid)

    with every_request(engine, note):
        engine.run(scenario(engine))
    assert engine.tokens == tokens and retracted
    assert_clean(engine)


@LOOPS
@SIZES
@on(environment=ON)
def test_a_tenant_whose_salt_got_lost_reads_nobody_elses_pages(engine: Engine, page_size: int, overlap: bool) -> None:
    """SGLang drops the extra key on the way to its tree: the second tenant's hit is on pages of the first."""

    def scenario(engine: Engine) -> Client:
        engine.add("a", PROMPT, TOKENS, tenant="a")
        engine.add("other", OTHER, TOKENS)
        return once_ended(2, lambda engine: engine.add("b", PROMPT, TOKENS, tenant="b"))

    wanted = golden(engine, scenario)

    def lose(req: Any) -> None:
        req.extra_key = None

    with every_request(engine, lose), hits_of(engine) as hits:
        engine.run(scenario(engine))
    assert victims(engine, wanted, dict.fromkeys(wanted, TOKENS)) == ["b"]
    assert engine.tokens.get("b", []) == [] and hits.get("b", 0) in (0, 149, 144)
    (violation,) = new_violations(engine)
    assert (violation.request, violation.kind) == ("b", Kind.CONTENT_DOMAIN)
    assert violation.proof is Proof.CONTENT_KEY and violation.action is Action.ABORTED
    assert "differing in tenant" in violation.detail and violation.column == 0
    assert_whole(engine)
    assert not engine.guard.audits and engine.guard.armed


def with_image(req: Any, identity: int) -> None:
    """The request's tokens 40 to 59 stand for an image; a text model computes them as they are."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

    item = MultimodalDataItem(modality=Modality.IMAGE, hash=identity, offsets=[(40, 59)])
    req.multimodal_inputs = MultimodalInputs(mm_items=[item])


@LOOPS
@on(environment=ON)
def test_an_image_that_is_not_in_the_key_is_another_content(engine: Engine, overlap: bool) -> None:
    """SGLang puts a value made of the image's hash in the placeholders' place; here it has not. What stands before the
    image is the same, the image's own pages find nobody but those who sent it too."""
    images = {"first": 1, "same": 1, "other": 2}

    def attach(req: Any) -> None:
        with_image(req, images[req.rid])

    with every_request(engine, attach), hits_of(engine) as hits:
        for name in images:
            engine.add(name, PROMPT, TOKENS)
            engine.run()
    assert hits["same"] == 144 and engine.tokens["same"] == engine.tokens["first"]
    assert engine.tokens.get("other", []) == [] and engine.ends["other"]["type"] == "abort"
    (violation,) = new_violations(engine)
    # Of pages of 16 tokens the third holds the image's first ones.
    assert (violation.request, violation.kind, violation.column) == ("other", Kind.CONTENT_TOKENS, 2)
    assert_whole(engine)


@LOOPS
@SIZES
@on(environment=ON)
def test_a_collision_ends_its_first_victim_and_the_next_ones_compute(
    engine: Engine, page_size: int, overlap: bool
) -> None:
    """The tree hands out pages of other tokens: from the second time on the match is cut, and nobody is aborted."""

    def scenario(engine: Engine) -> Client:
        engine.add("first", OTHER, TOKENS)
        engine.add("long", PROMPT[::-1], 60)
        steps = [at_step(12, lambda engine: engine.add("victim", PROMPT, TOKENS)),
                 at_step(24, lambda engine: engine.add("later", PROMPT, TOKENS))]  # fmt: skip
        return lambda engine: any([step(engine) for step in steps])

    wanted = golden(engine, scenario)
    # The first page is its own; what the tree takes the rest for is somebody else's.
    with looked_up_as(engine, {"victim": OTHER, "later": OTHER}):
        engine.run(scenario(engine))
    assert victims(engine, wanted, {name: len(tokens) for name, tokens in wanted.items()}) == ["victim"]
    assert engine.tokens.get("victim", []) == []
    (violation,) = new_violations(engine)
    assert (violation.request, violation.kind, violation.column) == ("victim", Kind.CONTENT_TOKENS, 0)
    assert_whole(engine)


@LOOPS
@SIZES
@on(environment=ON)
def test_a_collision_at_the_start_of_a_prompt_in_chunks_is_named(
    engine: Engine, page_size: int, overlap: bool
) -> None:
    """With overlap the first chunk behind the wrong pages is in the tree before the verdict: they are named, not it."""

    def scenario(engine: Engine) -> Client:
        engine.add("first", OTHER, TOKENS)
        return once_ended(1, lambda engine: engine.add("victim", PROMPT, TOKENS))

    wanted = golden(engine, scenario)
    with looked_up_as(engine, {"victim": OTHER[:32]}), hits_of(engine) as hits:
        engine.run(scenario(engine))
    assert victims(engine, wanted, dict.fromkeys(wanted, TOKENS)) == ["victim"]
    assert hits.get("victim", 32) == 32 and engine.tokens.get("victim", []) == []
    (violation,) = new_violations(engine)
    assert (violation.kind, violation.column) == (Kind.CONTENT_TOKENS, 0), violation
    assert violation.proof is Proof.CONTENT_KEY
    assert_whole(engine)


@LOOPS
@SIZES
@on(environment=ON)
def test_a_record_that_is_put_on_other_pages_ends_its_request(engine: Engine, page_size: int, overlap: bool) -> None:
    """Between two chunks of a prompt the tree takes the record for another one, and points the row to its pages."""

    def scenario(engine: Engine) -> Client:
        engine.add("first", OTHER, TOKENS)
        return once_ended(1, lambda engine: engine.add("victim", PROMPT, TOKENS))

    wanted = golden(engine, scenario)
    with looked_up_as(engine, {"victim": OTHER}, "insert"):
        engine.run(scenario(engine))
    assert victims(engine, wanted, dict.fromkeys(wanted, TOKENS)) == ["victim"]
    assert engine.tokens.get("victim", []) == []
    violations = new_violations(engine)
    found = [violation for violation in violations if violation.action is Action.ABORTED]
    assert [violation.kind for violation in found] == [Kind.CONTENT_TOKENS]
    assert {violation.proof for violation in violations} == {Proof.CONTENT_KEY}
    assert {violation.request for violation in violations} == {"victim"}
    assert any("as its record went into the prefix cache" in one.detail for one in violations)
    assert_whole(engine)


@LOOPS
@pytest.mark.parametrize("flushes", [False, True], ids=["kept", "flushed"])
@on(environment=ON)
def test_new_weights_find_nothing_that_was_computed_with_old_ones(
    engine: Engine, flushes: bool, overlap: bool
) -> None:
    """Where SGLang is told to keep its cache over an update, it is not used, and emptied once nobody runs."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    def ask(name: str, count: int = TOKENS) -> None:
        engine.add(name, PROMPT, count)

    def update(engine: Engine) -> None:
        assert engine.guard.contents.epoch == epoch
        path = str(checkpoint())
        engine.send(UpdateWeightFromDiskReqInput(model_path=path, load_format="auto", flush_cache=flushes))
        if not flushes:
            ask("after")

    epoch = engine.guard.contents.epoch
    with hits_of(engine) as hits:
        ask("before")
        if flushes:
            # Only where nobody runs.
            engine.run()
            update(engine)
            engine.run()
            assert not engine.guard.outdated
            ask("after")
            engine.run()
        else:
            engine.add("across", OTHER, 90)
            engine.run(once_ended(1, update))
        assert engine.guard.contents.epoch == epoch + 1 and not engine.guard.outdated
        (answer,) = engine.control
        assert answer.success, answer
        assert engine.tokens["before"] == engine.tokens["after"], "they are the same weights after all"
        assert hits.get("after", 0) == 0
        ask("next")
        engine.run()
        # Of the other weights' cache nothing is left: what is found is what came after the update.
        assert hits.get("next", 0) == (144 if flushes else 0)
        ask("last")
        engine.run()
        assert hits["last"] == 144
    engine.control.clear()
    assert {end["type"] for end in engine.ends.values()} == {"length"}
    assert new_violations(engine) == [] and engine.guard.armed
    assert_whole(engine)


@LOOPS
@on(environment=ON, disable_radix_cache=True)
def test_without_a_tree_nothing_is_hashed(engine: Engine, overlap: bool) -> None:
    """Nobody can take a page of another's."""

    def scenario(engine: Engine) -> Client | None:
        for place, prompt in enumerate(prompts(7, 6)):
            engine.add(f"r{place}", prompt, TOKENS)
        return None

    wanted = golden(engine, scenario)
    assert engine.guard.contents is None
    engine.run(scenario(engine))
    assert engine.tokens == wanted
    assert_clean(engine)
