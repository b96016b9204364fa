"""Content keys: what a page holds, as a keyed number that an adopter computes afresh from what it wants to read.

The key of a request's first n tokens stands for all of them, in their order and at their positions, and for the domain
in which their keys and values were computed. Two parts:

* **Tokens: a multilinear hash.** Position i has secret words; a token is multiplied with those of its position, in two
  lanes of 64 bits, and a key is the running sum up to its last token, modulo 2**64. So a key is made of everything
  before it (prefix), a token counts otherwise at another place (order and position), and more tokens are added on top.
* **Everything else: BLAKE2b**, keyed, over fields that are tagged and length-prefixed. Its 128 bits are where the sum
  starts; those of a multimodal input are added where its first token stands, so that text before an image is shared.

**What an attacker can do who chooses tokens and does not know the secret.** Take two different sequences of one length
(lengths are compared as they are). They differ at some position by d, 0 < |d| < 2**32 in one half of the token.
Whatever the rest adds up to, at most 2**31 of the 2**64 values of that position's word make one lane agree, which is
2**-33, and 2**-66 for both, however the tokens were chosen, for the words do not depend on them. So q requests get one
pair to agree with chance q**2 * 2**-67, and a hit only asks for one pair: that of the adopter and the publication. One
lane of 64 bits would be too few (2**-33 for tokens 2**31 apart), so a key has 128; and a sum of fixed mixing functions,
as `kernels/mixing.py` has for tags that nobody chooses, has no such bound. It holds **only as long as nobody sees
keys**: they are linear in the words, so that enough of them with their tokens would give the words away. Reports show a
`fingerprint`, never a key.

Python's `hash` has no part in it: 64 bits at most, no key for integers, another value in each process for strings.

Words come from SHAKE-256 over the secret in blocks of positions, so that every process with the same secret has the
same keys. 16 bytes for each position that was ever used, 16 for each token of a live request.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "ContentDomain",
    "ContentError",
    "ContentHasher",
    "ContentKey",
    "RequestContent",
    "MultimodalInput",
    "draw_content_secret",
]

Words = npt.NDArray[np.uint64]

LANES: Final = 2
BLOCK: Final = 4096
"""Positions whose words are drawn at once."""
NOTED: Final = 32
"""So many tokens or fewer are noted, not hashed at once."""
SECRET_BYTES: Final = 32
_32 = np.array(32, np.uint64)
_LOW = np.array(0xFFFFFFFF, np.uint64)


class ContentError(ValueError):
    """Tokens or fields that no key can be made of."""


class ContentKey(NamedTuple):
    """What the first `tokens` tokens of a request are, domain included. Equal only if all three numbers are."""

    tokens: int
    first_lane: int
    second_lane: int


@dataclass(frozen=True, kw_only=True)
class ContentDomain:
    """What keys and values depend on besides the tokens. Every field counts, and None is not the same as "".

    model           which model, with its revision
    weights_epoch   counts weight updates under that name
    kv_layout       axis order, shape, scales, positions: whatever two engines must agree on to read each other's pages
    kv_dtype        `bf16`, `fp8_e4m3`, ...
    lora            the adapter's name or id; None: none
    lora_revision   which weights go by that name now
    tenant          cache salt, or whatever keeps tenants apart; None: shared
    """

    model: str
    weights_epoch: int = 0
    kv_layout: str = ""
    kv_dtype: str = ""
    lora: str | int | None = None
    lora_revision: str | int | None = None
    tenant: str | bytes | int | None = None

    def differing(self, other: ContentDomain) -> tuple[str, ...]:
        """Names of the fields that are not the same."""
        return tuple(f.name for f in fields(self) if _value(getattr(self, f.name)) != _value(getattr(other, f.name)))


@dataclass(frozen=True, kw_only=True)
class MultimodalInput:
    """Something that placeholder tokens stand for.

    position  of its first placeholder token in the request; tokens: how many there are
    identity  what it is: the engine's hash of it, which is taken on trust
    """

    position: int
    tokens: int
    identity: str | bytes | int


def _value(value: object) -> bytes:
    """Type and value of one field; no two values of any types have the same bytes."""
    if value is None:
        return b"n"
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return b"b" + bytes(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return b"i%d" % int(value)
    raise ContentError(f"a content key is made of text, bytes, whole numbers and None, not {type(value).__name__}")


def _encoded(kind: str, named: Sequence[tuple[str, object]]) -> bytes:
    """Fields with their names, each prefixed with its length: where one ends is not decided by what is in it."""
    parts: list[bytes] = []
    for part in (kind.encode(), *(part for name, value in named for part in (name.encode(), _value(value)))):
        parts += (len(part).to_bytes(8, "little"), part)
    return b"".join(parts)


def draw_content_secret(shared: str | None = None, seed: int | None = None) -> bytes:
    """The secret of a guard, 32 bytes. `shared`: text that all ranks and peers are configured with; else random.

    `seed`: makes a secret that was not shared replayable.
    """
    if shared is not None:
        return hashlib.blake2b(shared.encode(), digest_size=SECRET_BYTES, person=b"kvguard-shared").digest()
    if seed is not None:
        return hashlib.blake2b(str(seed).encode(), digest_size=SECRET_BYTES, person=b"kvguard-seed").digest()
    return secrets.token_bytes(SECRET_BYTES)


class ContentHasher:
    """Makes the keys of one secret. Not thread-safe: it belongs to the thread that owns the Guard."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes. ContentError for another length."""
        if len(secret) != SECRET_BYTES:
            raise ContentError(f"the secret of content keys has {SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret
        self._words = {half: np.zeros((LANES, 0), np.uint64) for half in (b"low", b"high")}

    def words(self, half: bytes, start: int, stop: int) -> Words:
        """uint64 [LANES, stop - start]: what tokens' halves (`low` or `high` 32 bits) at these positions count."""
        known = self._words[half]
        if known.shape[1] < stop:
            # To twice as many: requests that grow by a block at a time must not copy the table each time.
            wanted = max(stop, 2 * known.shape[1])
            blocks = range(known.shape[1] // BLOCK, -(-wanted // BLOCK))
            known = np.concatenate([known, *(self._draw(half, block) for block in blocks)], axis=1)
            self._words[half] = known
        return known[:, start:stop]

    def _draw(self, half: bytes, block: int) -> Words:
        named = _encoded("words", (("half", half), ("block", block)))
        drawn = hashlib.shake_256(self._secret + named).digest(LANES * BLOCK * 8)
        return np.frombuffer(drawn, "<u8").astype(np.uint64, copy=False).reshape(LANES, BLOCK)

    def _digest(self, kind: str, named: Sequence[tuple[str, object]]) -> tuple[int, int]:
        digest = hashlib.blake2b(_encoded(kind, named), key=self._secret, digest_size=16).digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")

    def domain_words(self, domain: ContentDomain) -> tuple[int, int]:
        """Where the sums of a request in this domain start."""
        return self._digest("domain", [(f.name, getattr(domain, f.name)) for f in fields(domain)])

    def input_words(self, given: MultimodalInput) -> tuple[int, int]:
        """What a multimodal input adds."""
        return self._digest("multimodal", [(f.name, getattr(given, f.name)) for f in fields(given)])

    def fingerprint(self, key: ContentKey) -> str:
        """16 hexadecimal digits that tell keys apart and give nothing away, for reports."""
        shown = _encoded("fingerprint", list(zip(key._fields, key, strict=True)))
        return hashlib.blake2b(shown, key=self._secret, digest_size=8).hexdigest()


def token_words(tokens: object) -> Words:
    """Token ids as uint64 [tokens], all 64 bits of each; int64 and uint64 arrays are not copied.

    ContentError for anything that is no flat list of whole numbers. Tensors are refused rather than converted: reading
    one from a device would wait for the device.
    """
    if isinstance(tokens, (list, tuple, range, array)):
        if not len(tokens):
            return np.zeros(0, np.uint64)
        try:
            tokens = np.array(tokens)
        except (OverflowError, ValueError) as error:
            raise ContentError(f"token ids must be whole numbers of 64 bits: {error}") from None
    if not isinstance(tokens, np.ndarray):
        raise ContentError(f"token ids must be a list or a NumPy array, not {type(tokens).__name__}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ContentError(f"token ids must be a flat list of whole numbers, not {tokens.dtype} {list(tokens.shape)}")
    if tokens.dtype == np.uint64:
        return np.ascontiguousarray(tokens)
    return np.ascontiguousarray(tokens, np.int64).view(np.uint64)


class RequestContent:
    """What one request is made of so far: keys of any number of its leading tokens.

    domain  in which its KV is computed

    A few tokens at a time, as they are generated, are only noted; they are hashed together once a key is asked for
    that covers them. Nothing is kept of tokens that were hashed.
    """

    __slots__ = ("domain", "_hasher", "_sums", "_hashed", "_noted", "_inputs")

    def __init__(self, hasher: ContentHasher, domain: ContentDomain) -> None:
        """ContentError for a field of the domain that no key can be made of."""
        self.domain = domain
        self._hasher = hasher
        self._hashed = 0
        self._noted: list[int] = []
        self._sums = np.zeros((LANES, 64), np.uint64)
        """uint64 [LANES, capacity]: of n tokens in column n."""
        self._sums[:, 0] = hasher.domain_words(domain)
        self._inputs: list[tuple[int, tuple[int, int]]] = []
        """(first token, what it adds) of those whose first token was not hashed yet."""

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return self._hashed + len(self._noted)

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer], inputs: Sequence[MultimodalInput] = ()) -> None:
        """More tokens at the end; those before are not looked at again.

        `tokens`: as `token_words` takes them. `inputs`: multimodal inputs that start at these tokens, or at later ones.
        ContentError for what is no token, or an input that starts before; nothing has changed then.
        """
        for given in inputs:
            if given.position < self.tokens:
                raise ContentError(f"a multimodal input starts at token {given.position}; {self.tokens} are known")
        added = [(given.position, self._hasher.input_words(given)) for given in inputs]
        if type(tokens) is list and len(tokens) <= NOTED and all(type(t) is int and 0 <= t < 1 << 63 for t in tokens):
            self._noted += tokens
            self._inputs += added
            return
        words = token_words(tokens)
        self._flush()
        self._inputs += added
        self._append(words)

    def _flush(self) -> None:
        if self._noted:
            noted, self._noted = self._noted, []
            self._append(token_words(noted))

    def _append(self, words: Words) -> None:
        start, stop = self._hashed, self._hashed + len(words)
        if start == stop:
            return
        if stop >= self._sums.shape[1]:
            grown = np.zeros((LANES, max(stop + 1, 2 * self._sums.shape[1])), np.uint64)
            grown[:, : start + 1] = self._sums[:, : start + 1]
            self._sums = grown
        wide = bool(words.max() >> _32)
        low = words & _LOW if wide else words
        # Lane by lane: both at once would leave the cache.
        for lane in range(LANES):
            terms = low * self._hasher.words(b"low", start, stop)[lane]
            if wide:
                terms += (words >> _32) * self._hasher.words(b"high", start, stop)[lane]
            for position, digest in self._inputs:
                if position < stop:
                    terms[position - start : position - start + 1] += np.array(digest[lane], np.uint64)
            terms[:1] += self._sums[lane, start : start + 1]
            np.cumsum(terms, out=self._sums[lane, start + 1 : stop + 1])
        if self._inputs:
            self._inputs = [entry for entry in self._inputs if entry[0] >= stop]
        self._hashed = stop

    def cut(self, tokens: int) -> None:
        """It has only its first `tokens` tokens; multimodal inputs that start behind them are gone with the rest."""
        if tokens > self._hashed:
            del self._noted[tokens - self._hashed :]
        else:
            self._noted.clear()
            self._hashed = tokens
        self._inputs = [entry for entry in self._inputs if entry[0] < tokens]

    def key(self, tokens: int) -> ContentKey | None:
        """The key of the first `tokens` tokens; None if it has fewer."""
        if not 0 <= tokens <= self.tokens:
            return None
        if tokens > self._hashed:
            self._flush()
        return ContentKey(tokens, int(self._sums[0, tokens]), int(self._sums[1, tokens]))

    def lanes(self, page_size: int, first: int = 0) -> Words:
        """uint64 [pages, LANES]: the lanes of its keys at the ends of its full pages, from page `first` on."""
        self._flush()
        return self._sums[:, (first + 1) * page_size : self._hashed + 1 : page_size].T
