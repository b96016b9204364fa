"""Page tags: one 64-bit counter per process, from a random start, gives every allocation the next value.

No two allocations of any two pages share a tag, so a row that points to *another* page fails too, which a counter per
page would miss. Tags are positive int64 values: 0 is vacant, and the counter starts in [2**32, 2**62), so that at a
billion allocations a second it would take more than 146 years to leave int64.
"""

from __future__ import annotations

import random
import secrets

VACANT = 0


class TagCounter:
    """The source of tags. Not thread-safe: it belongs to the thread that owns the Guard."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed`: None takes the operating system's randomness; a number makes a run replayable."""
        if seed is None:
            self._next = secrets.randbelow((1 << 62) - (1 << 32)) + (1 << 32)
        else:
            self._next = random.Random(f"kvguard-tags-{seed}").randrange(1 << 32, 1 << 62)

    @property
    def upcoming(self) -> int:
        """The tag that is given out next: a page whose tag is smaller had it before now."""
        return self._next

    def take(self) -> int:
        """The next tag, never given out before by this counter."""
        tag = self._next
        self._next = tag + 1
        return tag

    def take_many(self, count: int) -> range:
        """The next `count` tags."""
        first = self._next
        self._next = first + count
        return range(first, first + count)


def draw_digest_key(seed: int | None = None) -> int:
    """The secret 64-bit key of the row digests; the same for every pool of a guard."""
    if seed is None:
        return secrets.randbits(64)
    return random.Random(f"kvguard-digest-{seed}").getrandbits(64)
