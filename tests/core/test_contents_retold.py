"""Contents of engines that look pages up before their publication is recorded, or that take tokens back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.content_key import ContentDomain, ContentHasher, MultimodalInput, RequestContent
from kvguard.guard import UsageError
from kvguard.violation import Kind
from tests.core.test_content_key import DOMAIN, OTHER
from tests.core.test_contents import PROMPT, WINDOW, enter, keyed, published, refused

TOKENS = st.lists(st.integers(0, 9), max_size=80)


@given(TOKENS, st.integers(0, 80), TOKENS, st.data())
def test_what_is_left_of_a_content_is_what_it_would_have_been(
    first: list[int], kept: int, then: list[int], data: st.DataObject
) -> None:
    """Cut to any length and told more, hashed or only noted, inputs included: as if it had been told so at once."""
    hasher = ContentHasher(bytes(32))
    places = data.draw(st.lists(st.integers(0, 40), max_size=3, unique=True).map(sorted))
    inputs = [MultimodalInput(position=place, tokens=2, identity=place) for place in places]
    cut = RequestContent(hasher, DOMAIN)
    cut.extend(np.array(first, np.int64) if data.draw(st.booleans()) else first, inputs)
    if data.draw(st.booleans()):
        cut.key(len(first))
    cut.cut(kept)
    cut.extend(then)
    plain = RequestContent(hasher, DOMAIN)
    plain.extend([*first[:kept], *then], [given for given in inputs if given.position < kept])
    assert cut.tokens == plain.tokens == min(kept, len(first)) + len(then)
    assert [cut.key(end) for end in range(cut.tokens + 1)] == [plain.key(end) for end in range(plain.tokens + 1)]


def test_a_token_that_was_taken_back_counts_for_nothing() -> None:
    """A session's next input takes the place of the token that was sampled last; its page is shared as what it is."""
    rig = keyed()
    enter(rig, "w", PROMPT[:8])
    rig.guard.add_tokens("w", [55], [MultimodalInput(position=9, tokens=1, identity="never came")])
    rig.guard.cut_tokens("w", 8)
    rig.guard.add_tokens("w", PROMPT[8:])
    rig.allocate("w", 1, 2, 3)
    assert all(rig.guard.publish("w", column, f"k{column}") for column in range(3))
    enter(rig, "b")
    assert rig.adopt("b", ("k0", 1), ("k1", 2), ("k2", 3)) == 3 and refused(rig) == []
    rig.start("nobody")
    for request, tokens in (("nobody", 1), ("w", -1)):
        with pytest.raises(UsageError):
            rig.guard.cut_tokens(request, tokens)


@pytest.mark.parametrize(
    ("tokens", "domain", "column", "kind"),
    [
        (PROMPT, DOMAIN, 1, None),
        ([*PROMPT[:7], 0], DOMAIN, 1, Kind.CONTENT_TOKENS),
        (PROMPT, ContentDomain(model=DOMAIN.model, tenant=OTHER["tenant"]), 1, Kind.CONTENT_DOMAIN),
        (PROMPT, DOMAIN, 0, Kind.CONTENT_RANGE),
        (PROMPT[:7], DOMAIN, 1, Kind.CONTENT_TOO_SHORT),
    ],
    ids=["own", "tokens", "domain", "range", "short"],
)
def test_a_page_whose_publication_is_not_recorded_yet_is_compared_with_its_publisher(
    tokens: list[int], domain: ContentDomain, column: int, kind: Kind | None
) -> None:
    """The two requests themselves are compared, column by column; the report names the publisher."""
    rig = keyed()
    enter(rig, "w")
    rig.allocate("w", 1, 2, 3)
    enter(rig, "b", tokens, domain)
    assert rig.guard.vet_promised("b", column, 2, "w", 1) == (kind is None)
    assert refused(rig) == [] if kind is None else [kind]
    if kind is not None:
        assert "published by request w" in rig.guard.violations[0].detail


def test_who_was_not_identified_promises_nothing() -> None:
    """Neither as publisher nor as reader, and tokens that the publisher was not said to have are not proven."""
    rig = keyed()
    enter(rig, "w", PROMPT[:6])
    rig.start("stranger")
    enter(rig, "b")
    assert not rig.guard.vet_promised("b", 0, 1, "stranger", 0)
    assert not rig.guard.vet_promised("stranger", 0, 1, "w", 0)
    counters = rig.guard.health().counters
    assert counters["adapter_errors"] == 2 and counters["violations"] == 0
    assert not rig.guard.vet_promised("b", 1, 1, "w", 1)
    assert [violation.kind for violation in rig.guard.violations] == [Kind.CONTENT_UNBOUND]


def test_hits_behind_empty_columns_are_compared_at_their_own() -> None:
    """A window's hits begin somewhere in the prompt, and the ledger is still empty when they are vetted."""
    rig = keyed(WINDOW)
    enter(rig, "w")
    rig.guard.skip("w", 1, pool="window")
    rig.guard.allocate("w", [5, 6], pool="window")
    hits = [("k1", 5), ("k2", 6)]
    assert all(rig.guard.publish("w", 1 + place, key, pool="window") for place, (key, _) in enumerate(hits))
    enter(rig, "b")
    assert rig.guard.vet_hits("b", hits, pool="window", columns=[1, 2]) == 2 and refused(rig) == []
    enter(rig, "c", [*PROMPT[:8], 0, 0, 0, 0])
    assert rig.guard.vet_hits("c", hits, pool="window", columns=[1, 2]) == 1
    assert rig.guard.vet_hits("c", hits, pool="window") == 0
    assert refused(rig) == [Kind.CONTENT_TOKENS, Kind.CONTENT_RANGE]
    assert rig.guard.violations[0].column == 2


def test_a_page_that_a_load_filled_holds_what_ends_with_it() -> None:
    """Published as complete before any step of its request: bound to the tokens up to its end, and adopted by them."""
    rig = published()
    enter(rig, "r")
    rig.allocate("r", 7, 8)
    assert all(rig.guard.publish("r", column, f"r{column}", tokens=0) for column in range(2))
    enter(rig, "b")
    assert rig.adopt("b", ("r0", 7), ("r1", 8)) == 2 and refused(rig) == []
    enter(rig, "c", [*PROMPT[:4], 0, 0, 0, 0])
    assert rig.guard.vet_hits("c", [("r0", 7), ("r1", 8)]) == 1 and refused(rig) == [Kind.CONTENT_TOKENS]
