"""Contents: a hit is taken only by who is made of what was published; a wrong one is refused, and nobody is aborted."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kvguard.config import GuardConfig
from kvguard.content_key import ContentDomain, MultimodalInput
from kvguard.guard import Guard, UsageError
from kvguard.pools import PoolSpec
from kvguard.report import report_json, report_text
from kvguard.violation import ADVICE, MEANING, Action, Kind, Proof
from tests.core.support import MAIN, Rig, aborted
from tests.core.test_content_key import DOMAIN, OTHER

ALONE = frozenset({Proof.CONTENT_KEY})
PROMPT = list(range(100, 112))
"""Three pages of four tokens."""
WINDOW = PoolSpec(name="window", num_pages=16, page_size=4, windowed=True)
STATE = PoolSpec(name="state", num_pages=16, page_size=None)

both = pytest.mark.parametrize("proofs", [None, ALONE], ids=["all", "alone"])


def keyed(*pools: PoolSpec, proofs: frozenset[Proof] | None = None, **settings: Any) -> Rig:
    """A rig at level keys."""
    return Rig(*pools, proofs=proofs, **{"level": "keys", **settings})


def enter(rig: Rig, request: str, tokens: Any = PROMPT, domain: ContentDomain = DOMAIN, inputs: Any = ()) -> None:
    """A request enters and is identified."""
    rig.start(request)
    rig.guard.identify(request, domain, tokens, inputs)


def published(proofs: frozenset[Proof] | None = None, **settings: Any) -> Rig:
    """The writer w computed three pages of PROMPT, 1 to 3, and published them under k0 to k2."""
    rig = keyed(proofs=proofs, **settings)
    enter(rig, "w")
    rig.allocate("w", 1, 2, 3)
    assert rig.run("w").aborts == ()
    assert all(rig.guard.publish("w", column, f"k{column}") for column in range(3))
    return rig


HITS = (("k0", 1), ("k1", 2), ("k2", 3))


def refused(rig: Rig) -> list[Kind]:
    """What was refused, all of it by the content proof, and nothing else happened."""
    assert all(v.action is Action.REFUSED and v.proof is Proof.CONTENT_KEY for v in rig.guard.violations)
    assert rig.guard.health().counters["adapter_errors"] == 0
    return [v.kind for v in rig.guard.violations]


# -- healthy ----------------------------------------------------------------------------------------------------------


@both
def test_a_request_takes_what_it_is_made_of(proofs: frozenset[Proof] | None) -> None:
    """Whoever has the same tokens in the same domain takes every hit, be the rest of the prompt what it may."""
    rig = published(proofs)
    enter(rig, "b", [*PROMPT, 7, 8])
    assert rig.guard.vet_hits("b", HITS) == 3
    assert rig.adopt("b", *HITS) == 3
    enter(rig, "c", [*PROMPT[:8], 1, 2, 3, 4, 5])
    assert rig.adopt("c", *HITS[:2]) == 2
    rig.allocate("c", 4)
    judgement = rig.run("w", "b", "c")
    assert not judgement.violations and refused(rig) == []


def test_what_was_generated_is_published_too() -> None:
    """Tokens that are added one by one count as those of a prompt that holds them all."""
    rig = keyed()
    enter(rig, "w", PROMPT[:6])
    rig.allocate("w", 1)
    for token in PROMPT[6:]:
        rig.guard.add_tokens("w", [token])
    rig.allocate("w", 2, 3)
    assert all(rig.guard.publish("w", column, f"k{column}") for column in range(3))
    enter(rig, "b", PROMPT)
    assert rig.adopt("b", *HITS) == 3 and refused(rig) == []


def test_a_part_of_a_page_and_pools_of_other_shapes() -> None:
    """A page that is published before it is full, columns behind a window, and pages without a token range."""
    rig = keyed(MAIN, WINDOW, STATE)
    enter(rig, "w", PROMPT)
    rig.allocate("w", 1, 2, 3)
    assert rig.guard.publish("w", 2, "part", tokens=10)
    rig.guard.skip("w", 2, pool="window")
    rig.guard.allocate("w", [5], pool="window")
    assert rig.guard.publish("w", 2, "k2", pool="window")
    rig.guard.allocate("w", [6], pool="state")
    assert rig.guard.publish("w", 0, "s", pool="state", tokens=9)
    enter(rig, "b", [*PROMPT[:10], 3, 4])
    rig.allocate("b", 7, 8)
    assert rig.guard.adopt("b", [("part", 3)]) == 1
    assert rig.guard.adopt("b", [("s", 6)], pool="state") == 1
    enter(rig, "c", PROMPT)
    rig.guard.skip("c", 2, pool="window")
    assert rig.guard.adopt("c", [("k2", 5)], pool="window") == 1
    assert refused(rig) == []
    enter(rig, "d", [*PROMPT[:8], 0, 0])
    assert rig.guard.adopt("d", [("s", 6)], pool="state") == 0
    rig.guard.skip("d", 2, pool="window")
    assert rig.guard.adopt("d", [("k2", 5)], pool="window") == 0
    assert refused(rig) == [Kind.CONTENT_TOKENS, Kind.CONTENT_TOO_SHORT]


def test_text_before_an_image_is_shared() -> None:
    """Two requests with different images share what stands before them, and nothing behind."""
    rig = keyed()
    enter(rig, "w", PROMPT, inputs=[MultimodalInput(position=5, tokens=2, identity="cat")])
    rig.allocate("w", 1, 2, 3)
    assert all(rig.guard.publish("w", column, f"k{column}") for column in range(3))
    enter(rig, "b", PROMPT, inputs=[MultimodalInput(position=5, tokens=2, identity="dog")])
    assert rig.adopt("b", *HITS) == 1
    assert refused(rig) == [Kind.CONTENT_TOKENS]


def test_below_level_keys_nothing_is_kept_and_nothing_is_checked() -> None:
    """At level tags the calls do nothing, whatever they are given, and hits are taken as ever."""
    rig = Rig()
    rig.start("w", "b")
    rig.guard.identify("w", DOMAIN, "no tokens at all")
    rig.guard.add_tokens("w", object())
    assert not rig.guard.wants_contents and rig.guard._books.state("w").content is None
    rig.allocate("w", 1)
    assert rig.guard.publish("w", 0, "k0") and rig.guard._books.tables[0].record(1).content is None
    assert rig.adopt("b", ("k0", 1)) == 1
    assert rig.guard.stored("k0", 1) and rig.guard.vet_stored("b", ["x", "y"], 0) == 2
    assert rig.guard.vet_loaded("b", ["x"], [], 0) == 1
    assert not rig.guard._books.stored and keyed().guard.wants_contents


# -- hits that are refused --------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("name", [f.name for f in fields(ContentDomain)])
def test_another_domain_is_refused_with_the_fields_that_differ(name: str, proofs: frozenset[Proof] | None) -> None:
    """Another tenant, adapter, model, weights or layout takes nothing; the report names the field and not its value."""
    rig = published(proofs)
    enter(rig, "b", PROMPT, replace(DOMAIN, **{name: OTHER[name]}))
    assert rig.guard.vet_hits("b", HITS) == 0
    assert rig.adopt("b", *HITS) == 0
    assert refused(rig) == [Kind.CONTENT_DOMAIN] * 2
    violation = rig.guard.violations[0]
    assert f"differing in {name};" in violation.detail and "published by request w" in violation.detail
    assert (violation.request, violation.page, violation.column, violation.owner) == ("b", 1, 0, "w")
    assert str(OTHER["tenant"]) not in violation.detail.replace("tenant", "").split()


@both
def test_other_tokens_are_refused_where_they_begin(proofs: frozenset[Proof] | None) -> None:
    """What is common is taken; from the first page with other tokens on the request computes itself."""
    rig = published(proofs)
    enter(rig, "b", [*PROMPT[:5], 0, *PROMPT[6:]])
    assert rig.adopt("b", *HITS) == 1
    assert refused(rig) == [Kind.CONTENT_TOKENS]
    rig.allocate("b", 4, 5)
    judgement = rig.run("w", "b")
    assert not judgement.aborts and not judgement.withheld


@both
def test_the_same_tokens_behind_another_prefix_are_refused(proofs: frozenset[Proof] | None) -> None:
    """A page is what stands before it, too: engines that hash a page alone confuse two of them."""
    rig = published(proofs)
    enter(rig, "b", [1, 2, 3, 4, *PROMPT[4:]])
    rig.allocate("b", 4)
    assert rig.adopt("b", *HITS[1:]) == 0 and refused(rig) == [Kind.CONTENT_TOKENS]


@both
def test_a_page_of_another_place_is_refused(proofs: frozenset[Proof] | None) -> None:
    """Hits that are off by one page, though each page is alive, current, and the request's own."""
    rig = published(proofs)
    enter(rig, "b")
    assert rig.adopt("b", *HITS[1:]) == 0 and refused(rig) == [Kind.CONTENT_RANGE]


@both
def test_hits_beyond_the_tokens_are_refused(proofs: frozenset[Proof] | None) -> None:
    """Tokens that were cut off while their hashes were kept."""
    rig = published(proofs)
    enter(rig, "b", PROMPT[:9])
    assert rig.adopt("b", *HITS) == 2 and refused(rig) == [Kind.CONTENT_TOO_SHORT]


def test_a_refilled_page_is_refused_without_the_control_plane() -> None:
    """A cache entry that outlived its page finds a page that was published for others, is not published, or no page."""
    rig = published(ALONE)
    rig.guard.finish("w")
    rig.guard.retire([2, 3])
    enter(rig, "v", [9] * 8)
    rig.allocate("v", 4, 2)
    assert rig.guard.publish("v", 1, "v1")
    enter(rig, "b")
    assert rig.adopt("b", *HITS) == 1
    enter(rig, "c")
    assert rig.adopt("c", HITS[0]) == 1 and rig.adopt("c", ("k1", 3)) == 0 and rig.adopt("c", ("k1", 99)) == 0
    assert refused(rig) == [Kind.CONTENT_TOKENS, Kind.CONTENT_UNBOUND, Kind.CONTENT_UNBOUND]


def test_a_page_that_leaves_the_cache_loses_what_it_was_published_for() -> None:
    """Unpublished, retired, handed out again, revoked or promised in vain: nothing is bound to the page any more."""

    def forgotten(act: Any) -> None:
        rig = published(ALONE)
        act(rig)
        enter(rig, "b")
        assert rig.adopt("b", HITS[0]) == 0 and refused(rig) == [Kind.CONTENT_UNBOUND]

    forgotten(lambda rig: rig.guard.unpublish([1]))
    forgotten(lambda rig: rig.guard.retire([1]))
    forgotten(lambda rig: rig.guard.reset())
    forgotten(lambda rig: rig.guard.reset(revoke_held=True))
    forgotten(lambda rig: (rig.start("x"), rig.guard.allocate("x", [1])))
    rig = keyed(proofs=ALONE)
    enter(rig, "w")
    rig.allocate("w", 1)
    assert rig.guard.publish("w", 0, "k0")
    rig.guard.finish("w")
    enter(rig, "b")
    assert rig.adopt("b", ("k0", 1)) == 0 and refused(rig) == [Kind.CONTENT_UNBOUND]


def test_a_hit_that_the_engine_acted_on_already_is_flagged_by_the_device() -> None:
    """Where a hit can no longer be refused, no page meets the expectation, and the adopter alone is ended."""
    rig = published()
    enter(rig, "b", PROMPT, replace(DOMAIN, tenant="u"))
    assert rig.guard.adopt("b", HITS[:1], refusable=False) == 1
    rig.write("b", 0, 1)
    rig.columns["b", "main"] = 1
    judgement = rig.run("w", "b")
    assert aborted(judgement) == {"b"} and judgement.withheld == {"b"}


def test_where_violations_are_only_observed_the_hit_is_taken() -> None:
    """`observe` reports and changes nothing: the adopter reads on."""
    rig = published(on_violation="observe")
    enter(rig, "b", PROMPT, replace(DOMAIN, lora=None))
    assert rig.adopt("b", *HITS) == 3
    assert {(v.kind, v.action) for v in rig.guard.violations} == {(Kind.CONTENT_DOMAIN, Action.OBSERVED)}
    assert rig.guard.adopt("b", [], refusable=False) == 0
    assert not rig.run("w", "b").violations


# -- publications -----------------------------------------------------------------------------------------------------


def test_a_page_that_ends_behind_the_tokens_is_not_published() -> None:
    """What a page holds that nobody said the tokens of is not known: it must not be found."""
    rig = keyed()
    enter(rig, "w", PROMPT[:7])
    rig.allocate("w", 1, 2)
    assert rig.guard.publish("w", 0, "k0") and not rig.guard.publish("w", 1, "k1")
    assert refused(rig) == [Kind.PUBLISH_BEYOND]
    enter(rig, "b")
    assert rig.adopt("b", ("k0", 1)) == 1


def test_one_key_for_two_contents_is_refused_where_it_is_published() -> None:
    """A prefix that is published again changes nothing; under the same key for other content it is not."""
    rig = published()
    assert rig.guard.publish("w", 0, "k0") and refused(rig) == []
    content = rig.guard._books.state("w").content
    assert content is not None
    content.domain = replace(DOMAIN, tenant="u")
    other = type(content)(rig.guard._books.hasher, content.domain)
    other.extend(PROMPT)
    rig.guard._books.state("w").content = other
    assert not rig.guard.publish("w", 0, "k0")
    assert refused(rig) == [Kind.PUBLISH_CONTENT]


# -- identity ---------------------------------------------------------------------------------------------------------


def test_a_request_that_was_not_identified_shares_nothing_and_is_no_violation() -> None:
    """An adapter that forgets it costs hits, not requests, and is told so."""
    rig = published()
    rig.start("b")
    assert rig.guard.vet_hits("b", HITS) == 0 and rig.adopt("b", *HITS) == 0
    assert rig.guard.vet_stored("b", ["k0"], 0) == 0
    rig.allocate("b", 4)
    assert not rig.guard.publish("b", 0, "k9")
    assert rig.guard.violations == () and rig.guard.health().counters["adapter_errors"] == 4
    with pytest.raises(UsageError, match="not identified"):
        rig.guard.add_tokens("b", [1])


def test_a_request_cannot_become_another_one_while_it_holds_pages() -> None:
    """New weights, another tenant or other tokens need a preemption first; more of the same tokens do not."""
    rig = published()
    guard = rig.guard
    for tokens, domain in ((PROMPT, replace(DOMAIN, weights_epoch=3)), ([0, *PROMPT[1:]], DOMAIN)):
        with pytest.raises(UsageError, match="preempt it"):
            guard.identify("w", domain, tokens)
    guard.identify("w", DOMAIN, [*PROMPT, 5])
    guard.identify("w", DOMAIN, PROMPT[:6])
    guard.preempt("w")
    guard.identify("w", replace(DOMAIN, weights_epoch=3), PROMPT)
    with pytest.raises(UsageError, match="token ids"):
        guard.identify("w", DOMAIN, ["a"])
    with pytest.raises(UsageError, match="token ids"):
        guard.add_tokens("w", [0.5])
    guard.resume("w")
    assert rig.guard.adopt("w", HITS) == 0 and refused(rig) == [Kind.CONTENT_DOMAIN]


def test_guards_with_one_secret_agree_and_show_no_keys() -> None:
    """The secret of the configuration is that of the keys; reports show fingerprints of both sides, and no key."""
    settings: dict[str, Any] = {"content_key_secret": "ab" * 20}
    one, other = published(**settings), published(**settings, seed=8)
    keys = [rig.guard._books.tables[0].record(1).content for rig in (one, other, published())]
    assert all(key is not None for key in keys)
    assert keys[0] == keys[1] != keys[2]
    enter(one, "b", [0] * 12)
    one.adopt("b", *HITS)
    (violation,) = one.guard.violations
    text, data = report_text(violation), report_json(violation)
    assert violation.detail in text and data["proof"] == "content_key"
    for rig_keys in (keys[0],):
        assert rig_keys is not None
        assert f"{rig_keys.key.first_lane:x}" not in text and str(rig_keys.key.first_lane) not in text
    assert text.count("content ") >= 2 and "aborted this request" not in text


def test_every_kind_says_what_it_means_and_what_to_do() -> None:
    """A report of any kind has words."""
    assert set(MEANING) == set(ADVICE) == set(Kind)


def test_the_level_decides() -> None:
    """Level keys adds the proof to those of level tags; alone it may stand without either check."""
    pool = [PoolSpec(num_pages=8, page_size=4)]
    tags, keys = (Guard(pool, GuardConfig.default(level=level))._books.proofs for level in ("tags", "keys"))
    assert keys - tags == {Proof.CONTENT_KEY} and tags < keys
    alone = GuardConfig.default(level="keys", control_plane=False, device_check=False)
    assert Proof.CONTENT_KEY in Guard(pool, alone)._books.proofs


# -- the external store -----------------------------------------------------------------------------------------------


def test_hits_of_an_external_store_are_compared_with_what_was_stored() -> None:
    """The store gives a page to who is made of it, after it has left the cache, too, and to nobody else."""
    rig = published()
    assert all(rig.guard.stored(key, page) for key, page in HITS)
    assert not rig.guard.stored("k0", 2) and not rig.guard.stored("k9", 9)
    rig.guard.finish("w")
    rig.guard.retire([1, 2, 3])
    keys = [key for key, _ in HITS]
    enter(rig, "b", [*PROMPT, 1])
    assert rig.guard.vet_stored("b", keys, 0) == 3
    enter(rig, "c", PROMPT, replace(DOMAIN, lora="b"))
    assert rig.guard.vet_stored("c", keys, 0) == 0
    enter(rig, "d", [*PROMPT[:4], 0, *PROMPT[5:]])
    assert rig.guard.vet_stored("d", keys[1:], 1) == 0
    assert rig.guard.vet_stored("b", keys[1:], 0) == 0
    assert refused(rig) == [Kind.CONTENT_DOMAIN, Kind.CONTENT_TOKENS, Kind.CONTENT_RANGE]
    rig.guard.unstored(["k1"])
    assert rig.guard.vet_stored("b", keys, 0) == 1 and len(rig.guard.violations) == 3


def test_a_hit_that_was_not_loaded_does_not_count() -> None:
    """Copies that were completed are compared with the hits that were reported."""
    rig = published()
    enter(rig, "b")
    assert rig.guard.vet_loaded("b", ["k0", "k1"], ["k1", "k0"], 0) == 2 and refused(rig) == []
    assert rig.guard.vet_loaded("b", ["k0", "k1", "k2"], ["k0", "k2"], 0) == 1
    assert refused(rig) == [Kind.CONTENT_NOT_LOADED] and rig.guard.violations[0].column == 1
