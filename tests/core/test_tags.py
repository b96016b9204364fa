"""Tags and the digest key: unique, positive, replayable from a seed and otherwise unpredictable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvguard.tags import VACANT, TagCounter, draw_digest_key


def test_no_tag_is_given_twice_and_none_is_vacant() -> None:
    """Tags of one counter are distinct, and none of them is the vacant tag."""
    counter = TagCounter(1)
    tags = [counter.take() for _ in range(10_000)]
    assert len(set(tags)) == len(tags)
    assert VACANT not in tags


@given(st.one_of(st.none(), st.integers()))
def test_tags_are_positive_int64_with_room_for_a_lifetime(seed: int | None) -> None:
    """A counter starts in [2**32, 2**62): far from the vacant tag, and 2**62 allocations away from leaving int64."""
    tag = TagCounter(seed).take()
    assert 2**32 <= tag < 2**62


def test_a_seed_makes_tags_and_key_replayable() -> None:
    """The same seed gives the same tags and key; another seed gives others."""
    assert [TagCounter(5).take(), draw_digest_key(5)] == [TagCounter(5).take(), draw_digest_key(5)]
    assert TagCounter(5).take() != TagCounter(6).take()
    assert draw_digest_key(5) != draw_digest_key(6)


def test_tags_and_key_of_one_seed_are_not_derived_from_each_other() -> None:
    """The secret key does not follow from the tags that reports show: the two draws share no stream."""
    assert TagCounter(5).take() != draw_digest_key(5) >> 2
    assert TagCounter(5).take() != draw_digest_key(5)


def test_without_a_seed_every_process_has_its_own_tags_and_key() -> None:
    """Unseeded counters and keys differ from draw to draw, and keys use all 64 bits."""
    assert len({TagCounter().take() for _ in range(8)}) == 8
    keys = [draw_digest_key() for _ in range(64)]
    assert len(set(keys)) == 64
    assert max(keys) >= 2**62 and all(0 <= key < 2**64 for key in keys)
