"""Content keys: everything they stand for changes them, nothing else does, and growing is the same as starting over."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from array import array
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.content_key import (
    BLOCK,
    ContentDomain,
    ContentError,
    ContentHasher,
    ContentKey,
    MultimodalInput,
    RequestContent,
    draw_content_secret,
    token_words,
)

SECRET = draw_content_secret("a secret that ranks and peers share, for tests")
HASHER = ContentHasher(SECRET)
DOMAIN = ContentDomain(
    model="llama@1f3c",
    weights_epoch=2,
    kv_layout="NHD/2x4x64",
    kv_dtype="bf16",
    lora="a",
    lora_revision="1",
    tenant="t",
)
OTHER: dict[str, Any] = {
    "model": "llama@1f3d",
    "weights_epoch": 3,
    "kv_layout": "HND/2x4x64",
    "kv_dtype": "fp8_e4m3",
    "lora": "b",
    "lora_revision": "2",
    "tenant": "u",
}
TOKEN = st.one_of(st.integers(0, 300), st.integers(0, (1 << 63) - 1), st.integers(-(1 << 63), -1))
TOKENS = st.lists(TOKEN, max_size=60)
TEXT = st.one_of(st.none(), st.text(max_size=6), st.sampled_from(["", "a", "aa", "x:y", "none", "1"]))
SALT = st.one_of(TEXT, st.integers(-3, 12), st.binary(max_size=4))


def content(
    tokens: Any, domain: ContentDomain = DOMAIN, inputs: Any = (), hasher: ContentHasher = HASHER
) -> RequestContent:
    """A request of these tokens."""
    made = RequestContent(hasher, domain)
    made.extend(tokens, inputs)
    return made


def key(tokens: Any, domain: ContentDomain = DOMAIN, inputs: Any = (), hasher: ContentHasher = HASHER) -> ContentKey:
    """The key of all of them."""
    made = content(tokens, domain, inputs, hasher)
    found = made.key(made.tokens)
    assert found is not None
    return found


def oracle(secret: bytes, domain: ContentDomain, tokens: list[int], inputs: Any = ()) -> ContentKey:
    """The same key in plain Python, written from the definition and not from the code."""

    def packed(kind: str, named: list[tuple[str, Any]]) -> bytes:
        letters = {int: "i", str: "s", bytes: "b", type(None): "n"}
        out = len(kind).to_bytes(8, "little") + kind.encode()
        for name, value in named:
            raw = value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
            raw = letters[type(value)].encode() + raw
            out += len(name).to_bytes(8, "little") + name.encode() + len(raw).to_bytes(8, "little") + raw
        return out

    def two(kind: str, record: Any) -> list[int]:
        named = [(f.name, getattr(record, f.name)) for f in fields(record)]
        digest = hashlib.blake2b(packed(kind, named), key=secret, digest_size=16).digest()
        return [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]

    def word(half: bytes, lane: int, position: int) -> int:
        named = [("half", half), ("block", position // BLOCK)]
        drawn = hashlib.shake_256(secret + packed("words", named)).digest(2 * BLOCK * 8)
        at = 8 * (lane * BLOCK + position % BLOCK)
        return int.from_bytes(drawn[at : at + 8], "little")

    lanes = two("domain", domain)
    for given_input in inputs:
        if given_input.position < len(tokens):
            lanes = [a + b for a, b in zip(lanes, two("multimodal", given_input), strict=True)]
    for position, token in enumerate(tokens):
        low, high = token & 0xFFFFFFFF, (token >> 32) & 0xFFFFFFFF
        for lane in range(2):
            lanes[lane] += low * word(b"low", lane, position) + high * word(b"high", lane, position)
    return ContentKey(len(tokens), lanes[0] % (1 << 64), lanes[1] % (1 << 64))


# -- what it is -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(TOKEN, max_size=12), tenant=SALT)
def test_keys_are_those_of_the_definition(tokens: list[int], tenant: Any) -> None:
    """The arrays give what plain Python gives that follows the definition."""
    domain = replace(DOMAIN, tenant=tenant)
    inputs = [MultimodalInput(position=p, tokens=2, identity=f"i{p}") for p in range(0, len(tokens), 3)]
    array_of = np.array([t - (1 << 64) if t >= 1 << 63 else t for t in tokens], np.int64)
    assert key(array_of, domain, inputs) == oracle(SECRET, domain, tokens, inputs)


def test_positions_behind_the_first_block_have_words_of_their_own() -> None:
    """Blocks of words are not repeated, and a request may cross them."""
    tokens = list(range(2 * BLOCK + 5))
    made = content(tokens)
    assert made.key(BLOCK + 3) == oracle(SECRET, DOMAIN, tokens[: BLOCK + 3])
    words = HASHER.words(b"low", 0, 2 * BLOCK)
    assert len(np.unique(words)) == words.size
    assert not np.isin(HASHER.words(b"high", 0, 64), words).any()


# -- what it stands for -----------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(one=TOKENS, other=TOKENS)
def test_other_tokens_have_another_key(one: list[int], other: list[int]) -> None:
    """Keys of two token lists are equal only if the lists are; negative ids and ids of 64 bits included."""
    assert (key(np.array(one, np.int64)) == key(np.array(other, np.int64))) == (one == other)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(TOKEN, min_size=1, max_size=40), data=st.data())
def test_one_changed_bit_of_one_token_changes_every_key_behind_it(tokens: list[int], data: st.DataObject) -> None:
    """Token ids count at full width, and a page's key covers all pages before it, but none behind it."""
    place = data.draw(st.integers(0, len(tokens) - 1))
    plain = np.array(tokens, np.int64)
    changed = plain.view(np.uint64).copy()
    changed[place] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    one, other = content(plain), content(changed)
    for n in range(len(tokens) + 1):
        assert (one.key(n) == other.key(n)) == (n <= place)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(TOKEN, min_size=2, max_size=40), data=st.data())
def test_order_counts(tokens: list[int], data: st.DataObject) -> None:
    """Two tokens that change places make another key, unless they are the same."""
    i, j = data.draw(st.lists(st.integers(0, len(tokens) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(tokens)
    swapped[i], swapped[j] = tokens[j], tokens[i]
    assert (key(np.array(tokens, np.int64)) == key(np.array(swapped, np.int64))) == (tokens[i] == tokens[j])


@settings(max_examples=100, deadline=None)
@given(
    page=st.lists(st.integers(0, 5), min_size=4, max_size=4), prefix=st.lists(st.integers(0, 5), min_size=4, max_size=4)
)
def test_the_same_page_behind_another_prefix_is_another(page: list[int], prefix: list[int]) -> None:
    """Positions count too: the same tokens one page on have another key, zeros included."""
    assert content([*prefix, *page]).key(8) != content([*[6] * 4, *page]).key(8)
    assert content(page).key(4) != content([*prefix, *page]).key(8)
    zeros = content([0] * 12)
    assert len({zeros.key(4), zeros.key(8), zeros.key(12)}) == 3


@pytest.mark.parametrize("name", [f.name for f in fields(ContentDomain)])
def test_every_field_of_the_domain_counts(name: str) -> None:
    """The same tokens with one field changed, or left out, have another key, and the field is named."""
    other = replace(DOMAIN, **{name: OTHER[name]})
    assert key([1, 2, 3], other) != key([1, 2, 3])
    assert DOMAIN.differing(other) == (name,)
    assert key([], other) != key([])


@settings(max_examples=500, deadline=None)
@given(one=st.tuples(TEXT, TEXT, SALT, st.text(max_size=3)), other=st.tuples(TEXT, TEXT, SALT, st.text(max_size=3)))
def test_equal_strings_in_different_fields_differ(one: Any, other: Any) -> None:
    """Fields are injective: what stands in one cannot be taken for what stands in another, nor 1 for "1" or b"1"."""
    names = ("lora", "lora_revision", "tenant", "model")
    named: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in (one, other)]
    made = [ContentDomain(**given) for given in named]
    same = [(type(a), a) for a in one] == [(type(b), b) for b in other]
    assert (key([1], made[0]) == key([1], made[1])) == same
    assert (made[0].differing(made[1]) == ()) == same


def test_a_salt_is_no_adapter() -> None:
    """Two tenants whose equal strings stand in different fields have nothing in common."""
    pairs: list[dict[str, Any]] = [
        {"lora": "x"},
        {"tenant": "x"},
        {"lora_revision": "x"},
        {"lora": "x", "tenant": ""},
        {"tenant": None},
    ]
    assert len({key([1, 2], ContentDomain(model="m", **pair)) for pair in pairs}) == len(pairs)


@pytest.mark.parametrize("change", [{"position": 3}, {"tokens": 3}, {"identity": "b"}, {"identity": b"a"}])
def test_a_multimodal_input_counts_from_its_first_token_on(change: dict[str, Any]) -> None:
    """Text before an image is shared; behind it everything about the image counts."""
    image = MultimodalInput(position=4, tokens=2, identity="a")
    other = replace(image, **change)
    one, two = content([9] * 12, inputs=[image]), content([9] * 12, inputs=[other])
    first = min(image.position, other.position)
    assert [one.key(n) == two.key(n) for n in range(13)] == [n <= first for n in range(13)]
    assert content([9] * 12).key(4) == one.key(4) and content([9] * 12).key(5) != one.key(5)


# -- growing ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 1 << 40), max_size=50), max_size=8), asks=st.booleans())
def test_extension_equals_the_whole(parts: list[list[int]], asks: bool) -> None:
    """A request that grows by any parts has the keys of one that came whole, whenever keys are asked for."""
    whole = [token for part in parts for token in part]
    images = [MultimodalInput(position=at, tokens=1, identity=at) for at in range(0, len(whole), 7)]
    grown = RequestContent(HASHER, DOMAIN)
    for part in parts:
        start = grown.tokens
        grown.extend(part, [image for image in images if start <= image.position < start + len(part)])
        if asks:
            assert grown.key(grown.tokens) == key(whole[: grown.tokens], inputs=images)
    at_once = content(np.array(whole, np.int64), inputs=images)
    assert [grown.key(n) for n in range(len(whole) + 2)] == [at_once.key(n) for n in range(len(whole) + 2)]
    assert grown.key(len(whole) + 1) is None and grown.key(-1) is None


@pytest.mark.parametrize("size", [1, 3, 16])
def test_page_ends_at_once_are_those_one_by_one(size: int) -> None:
    """The lanes of all full pages, or of those from some page on, are those of single keys; a part page has none."""
    made = content(list(range(50)))
    made.extend([7, 8, 9])
    lanes = made.lanes(size)
    assert lanes.shape == (53 // size, 2)
    singles = [made.key((page + 1) * size) for page in range(53 // size)]
    assert [tuple(row) for row in lanes.tolist()] == [(k.first_lane, k.second_lane) for k in singles if k is not None]
    assert made.lanes(size, 2).tolist() == lanes[2:].tolist()
    assert made.lanes(size, 60).shape == (0, 2)


def test_what_was_noted_comes_before_what_follows() -> None:
    """A few tokens that were only noted are hashed before a long turn that follows them."""
    made = content(list(range(40)))
    made.extend([7, 8])
    made.extend(np.arange(50))
    assert made.key(92) == key([*range(40), 7, 8, *range(50)])


def test_an_input_may_be_told_before_its_tokens_and_not_after() -> None:
    """Engines know images when the request arrives; one behind tokens that are known already is refused."""
    image = MultimodalInput(position=5, tokens=2, identity="a")
    early = content([1, 2], inputs=[image])
    early.extend([3] * 10)
    late = content([1, 2])
    late.extend([3] * 10, [image])
    assert early.key(12) == late.key(12) != content([1, 2] + [3] * 10).key(12)
    with pytest.raises(ContentError, match="starts at token 5; 12 are known"):
        late.extend([1], [image])
    assert late.tokens == 12


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda t: np.array(t, np.int32), lambda t: np.array(t, np.uint64), lambda t: array("q", t)]
)
def test_the_kind_of_list_does_not_matter(kind: Any) -> None:
    """Lists, tuples, arrays of any width give one key."""
    tokens = [5, 0, 151_000, 7] * 20
    assert key(kind(tokens)) == key(np.array(tokens, np.int64))


@pytest.mark.parametrize(
    "wrong", [[1.0, 2.0], [True, False], ["1"], [[1, 2]], [1 << 64], [None], "12", {1}, object(), np.zeros(2)]
)
def test_what_is_no_token_is_refused(wrong: Any) -> None:
    """Nothing is rounded, converted or read from a device, and the request is as it was."""
    made = content([1, 2, 3])
    before = made.key(3)
    with pytest.raises(ContentError):
        made.extend(wrong)
    assert made.tokens == 3 and made.key(3) == before


@pytest.mark.parametrize("field", [{"tenant": 1.5}, {"lora": True}, {"model": ["m"]}])
def test_what_is_no_field_is_refused(field: dict[str, Any]) -> None:
    """A value whose bytes could mean two things makes no key."""
    with pytest.raises(ContentError, match="content key"):
        RequestContent(HASHER, replace(DOMAIN, **field))


# -- the secret -------------------------------------------------------------------------------------------------------


def test_processes_with_one_secret_have_the_same_keys() -> None:
    """Another process, with another seed of Python's own hash, makes the same key; without the secret it does not."""
    program = (
        "from kvguard.content_key import *\n"
        "h = ContentHasher(draw_content_secret('a secret that ranks and peers share, for tests'))\n"
        "c = RequestContent(h, ContentDomain(model='m', tenant='t'))\n"
        "c.extend(list(range(100)))\n"
        "print(tuple(c.key(100)), RequestContent(ContentHasher(draw_content_secret()), c.domain).key(0))"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    ours = tuple(key(list(range(100)), ContentDomain(model="m", tenant="t")))
    assert all(text.startswith(str(ours)) for text in shown) and shown[0] != shown[1]


def test_secrets_come_from_configuration_seed_or_chance() -> None:
    """A shared text and a seed give one secret each, nothing gives another one each time; the length is checked."""
    assert draw_content_secret("x" * 32) == draw_content_secret("x" * 32, seed=1) != draw_content_secret("y" * 32)
    assert draw_content_secret(seed=1) == draw_content_secret(seed=1) != draw_content_secret(seed=2)
    assert draw_content_secret("1") != draw_content_secret(seed=1)
    assert draw_content_secret() != draw_content_secret()
    other = ContentHasher(draw_content_secret())
    assert key([1], hasher=other) != key([1])
    with pytest.raises(ContentError, match="32 bytes"):
        ContentHasher(b"short")


def test_a_fingerprint_tells_keys_apart_and_shows_none() -> None:
    """What reports show differs where keys differ, and none of a key's numbers stands in it."""
    one, other = key([1, 2]), key([1, 3])
    assert HASHER.fingerprint(one) == HASHER.fingerprint(key([1, 2])) != HASHER.fingerprint(other)
    assert len(HASHER.fingerprint(one)) == 16
    assert f"{one.first_lane:x}" not in HASHER.fingerprint(one)
    assert ContentHasher(draw_content_secret()).fingerprint(one) != HASHER.fingerprint(one)


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 16])
def test_a_hundred_thousand_tokens_take_milliseconds(size: int) -> None:
    """From an int64 buffer to the keys of all pages; the best of many, for the machine has other work, too."""
    tokens = np.random.default_rng(1).integers(0, 150_000, 100_000)
    content(tokens)
    best = 1.0
    for _ in range(50):
        start = time.perf_counter()
        assert content(tokens).lanes(size).shape == (100_000 // size, 2)
        best = min(best, time.perf_counter() - start)
    # What a shared machine may need; docs/performance.md has what a quiet one does.
    assert best <= 0.005


def test_an_array_of_tokens_is_not_copied() -> None:
    """An engine's int64 buffer is hashed where it lies."""
    tokens = np.arange(100)
    assert np.shares_memory(token_words(tokens), tokens)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    """Engines take positions and lengths from arrays: such a request must not end the guard, and is the same one."""
    hasher = ContentHasher(bytes(32))
    plain = MultimodalInput(position=3, tokens=2, identity=9)
    drawn: dict[str, Any] = {"position": np.int64(3), "tokens": np.int32(2), "identity": np.uint64(9)}
    assert hasher.input_words(MultimodalInput(**drawn)) == hasher.input_words(plain)
    for wrong in (1.0, np.bool_(True)):
        with pytest.raises(ContentError):
            hasher.input_words(MultimodalInput(**drawn | {"identity": wrong}))
