"""The keyed 64-bit mixing function behind a row digest, for Python integers and NumPy arrays.

A row digest is the sum, modulo 2**64, of `mix(key, column, tag)` over the row's live columns. Two properties matter:

* For a fixed column the map from tag to term is a bijection (odd multiplication, xor, xor-shift and odd
  multiplication are each invertible modulo 2**64), so one wrong page in a row always changes the digest.
* Several wrong pages escape only if their differences sum to zero: 2**-64 for tags that do not depend on the key.

The finaliser is the "mix13" variant of David Stafford's search (shifts 30, 27, 31), as in SplitMix64.
Every backend must produce the same bits; `tests/kernels` holds them to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK64 = (1 << 64) - 1
TAG_MULTIPLIER = 0x9E3779B97F4A7C15
COLUMN_MULTIPLIER = 0xD1342543DE82EF95
FINAL_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
FINAL_MULTIPLIER_2 = 0x94D049BB133111EB

# Arrays without dimensions: NumPy takes them up faster than its scalars, and a small batch feels it.
_TAG_MULTIPLIER, _COLUMN_MULTIPLIER, _FINAL_MULTIPLIER_1, _FINAL_MULTIPLIER_2, _30, _27, _31 = (
    np.array(value, np.uint64)
    for value in (TAG_MULTIPLIER, COLUMN_MULTIPLIER, FINAL_MULTIPLIER_1, FINAL_MULTIPLIER_2, 30, 27, 31)
)


def signed64(value: int) -> int:
    """The int64 with the same 64 bits as `value`, which is taken modulo 2**64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def mix(key: int, column: int, tag: int) -> int:
    """The digest term of one page, in [0, 2**64).

    `key`: the guard's secret 64-bit digest key; `column`: the page's column in the block table; `tag`: its tag.
    """
    x = ((tag * TAG_MULTIPLIER) ^ (column * COLUMN_MULTIPLIER + key)) & MASK64
    x = ((x ^ (x >> 30)) * FINAL_MULTIPLIER_1) & MASK64
    x = ((x ^ (x >> 27)) * FINAL_MULTIPLIER_2) & MASK64
    return x ^ (x >> 31)


def mix_array(
    key: int, columns: npt.NDArray[np.uint64], tags: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """`mix` for arrays that broadcast against each other: uint64 in, uint64 out, wrapping modulo 2**64.

    At least one dimension: NumPy warns of an overflow in scalars, not in arrays.
    """
    x = tags * _TAG_MULTIPLIER
    x = x ^ (columns * _COLUMN_MULTIPLIER + np.array(key, np.uint64))
    shifted = x >> _30
    x ^= shifted
    x *= _FINAL_MULTIPLIER_1
    np.right_shift(x, _27, shifted)
    x ^= shifted
    x *= _FINAL_MULTIPLIER_2
    np.right_shift(x, _31, shifted)
    x ^= shifted
    return x
