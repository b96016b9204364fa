"""Requests with images, for replays: what the prompt shows is a run of placeholders, what the model sees is the image.

The embedded engine has no vision tower. An image is given to the model as tokens of its own (its patches); the engine's
cache, and the guard, are told placeholders and the image's hash, as engines tell them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvguard.content_key import ContentDomain, MultimodalInput
from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.recall.tokenizer import encode
from kvguard.fault_injection.engine.scheduler import Sequence

__all__ = ["Image", "MediaEngine", "hash_of_image", "image_key_tokens", "two_images"]

PATCHES = 15
"""Tokens of an image: with the start token they fill two pages of 8."""
PLACEHOLDER = 96
_VOCABULARY = 97


@dataclass(frozen=True)
class Image:
    """patches: the token ids that stand for it in the model."""

    patches: tuple[int, ...]

    def prompt(self, question: str) -> tuple[int, ...]:
        """The start token, the image, the question."""
        return (0, *self.patches, *encode(question + "\n")[1:])


def hash_of_image(patches: tuple[int, ...]) -> int:
    """The engine's hash of an image, all 256 bits of it."""
    return int.from_bytes(hashlib.sha256(bytes(patches)).digest(), "little")


def two_images(rng: random.Random, bits: int) -> tuple[Image, Image]:
    """Two images whose hashes share their lowest `bits` bits: with 16, one pair in 65,536."""
    seen: dict[int, Image] = {}
    while True:
        image = Image(tuple(rng.randrange(2, _VOCABULARY - 1) for _ in range(PATCHES)))
        other = seen.setdefault(hash_of_image(image.patches) & ((1 << bits) - 1), image)
        if other != image:
            return other, image


def _patches(sequence: Sequence) -> tuple[int, ...]:
    return tuple(sequence.request.prompt[1 : 1 + PATCHES])


def image_key_tokens(
    sequence: Sequence, tokens: list[int], identity: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> list[int]:
    """`tokens` with placeholders in place of the image, or with what `identity` makes of it."""
    stands_for = identity(_patches(sequence)) or (PLACEHOLDER,)
    hidden = [stands_for[place % len(stands_for)] for place in range(PATCHES)]
    return [*tokens[:1], *hidden, *tokens[1 + PATCHES :]][: len(tokens)]


class MediaEngine(Engine):
    """Every request has one image, right behind the start token."""

    def _identify(self, sequence: Sequence) -> None:
        if self.guard is None or not self.guard.wants_contents:
            return
        domain = ContentDomain(model="recall", weights_epoch=self.weights_epoch, kv_dtype=self.config.kv_dtype)
        tokens = image_key_tokens(sequence, sequence.tokens, lambda patches: ())
        image = MultimodalInput(position=1, tokens=PATCHES, identity=hash_of_image(_patches(sequence)))
        self.guard.identify(sequence.id, domain, tokens, [image])
