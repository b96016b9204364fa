"""A short way out of `verify_slots` for tensors in host memory: does every token write where it should?

Almost every step is clean, and NumPy on the same memory looks at the tokens that each row has, where PyTorch, which may
not look at a bound, has to cover rows times tokens. Whatever is not provably clean goes the full way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]

_CLEAN = np.array([0, 0, -1, -1])
# Arrays without dimensions: NumPy takes them up faster than its scalars, and a small batch feels it.
_ONE, _SIGN, _POSITIONS_MAX = np.array(1), np.array(63), np.array((1 << 32) - 1)
_COUNTING = {bytes: np.arange(1025, dtype=f"i{bytes}") for bytes in (4, 8)}
"""What query_start is in a decode, a token for each place, and query_row where the rows are in the batch's order."""


def all_slots_right(
    *,
    slot_mapping: Integers,
    query_start: Integers | None,
    query_row: Int64 | None,
    lengths: Integers,
    writer: Int64,
    floor: Int64 | None,
    page_writer: Int64,
    page_size: int,
    skip_slot: int,
    skip_allowed: bool,
    record: Int64,
    null_page: int,
) -> bool:
    """True if no token is wrong; `record` int64 [rows + 1, 4] is then written. False says only: look closer."""
    # A slot that is nobody's may not be some row's own as well: one look at the pages' words is then enough.
    for nobodys in (null_page, skip_slot // page_size):
        if 0 <= nobodys < len(page_writer) and page_writer[nobodys] > 0:
            return False
    rows, tokens, places = len(writer), len(slot_mapping), len(lengths)
    if query_start is not None and _counts_up(query_start[: places + 1]):
        query_start = None
    if query_row is not None and _counts_up(query_row):
        query_row = None
    if query_start is None and query_row is None:
        # The first rows have the first tokens.
        count = min(rows, tokens, places)
        slots, padding = slot_mapping[:count], slot_mapping[count:]
        position = lengths[:count].astype(np.int64)
        position -= _ONE
        if count < rows:
            writer, floor = writer[:count], None if floor is None else floor[:count]
    else:
        found = _tokens_of_rows(query_start, query_row, lengths, rows, tokens)
        if found is None:
            return False
        token, position, counts = found
        slots = slot_mapping[token]
        if counts is not None:
            writer, floor = writer.repeat(counts), None if floor is None else floor.repeat(counts)
        owned = np.zeros(tokens, bool)
        owned[token] = True
        padding = slot_mapping[:0] if np.count_nonzero(owned) == tokens else slot_mapping[~owned]
    if len(padding) and np.count_nonzero(padding != skip_slot):
        return False
    page, column = slots, position
    if page_size > 1:
        size = np.array(page_size)
        page, column = slots // size, position // size
    try:
        word = page_writer[page]
    except IndexError:
        # A page past the pool; a negative one is looked up from the pool's end, and its slot found out below.
        return False
    # Zero where a token is right: its page's word,
    wrong = writer + column
    wrong ^= word
    if page_size > 1:
        # its offset,
        offset = slots - position
        offset %= size
        wrong |= offset
    # and the signs of what must not be negative; a difference that wraps only leads the long way.
    sign = slots | position
    sign |= word
    word -= _ONE
    sign |= word
    if lengths.itemsize == 8:
        sign |= _POSITIONS_MAX - position
    if floor is not None:
        sign |= position - floor
    sign >>= _SIGN
    wrong |= sign
    if np.count_nonzero(wrong):
        if not skip_allowed:
            return False
        right = (wrong == 0) | (slots == skip_slot)
        if null_page >= 0:
            right |= page == null_page
        if not right.all():
            return False
    record[:] = _CLEAN
    return True


def _counts_up(array: Integers) -> bool:
    """Whether it is 0, 1, 2 and so on; a long one may be said not to be."""
    counting = _COUNTING[array.itemsize][: len(array)]
    return len(array) == len(counting) and array.tobytes() == counting.tobytes()


def _tokens_of_rows(
    query_start: Integers | None, query_row: Int64 | None, lengths: Integers, rows: int, tokens: int
) -> tuple[Int64, Int64, Int64 | None] | None:
    """Tokens and their positions, row by row, and how many each row has (None: one each).

    None where a row has no place, where spans go past the tokens or backwards, and where they are more than the tokens.
    """
    places = len(lengths)
    if rows == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), None
    if query_row is None:
        if rows > places:
            return None
        place = np.arange(rows)
    else:
        place = query_row
        if place.min() < 0 or place.max() >= places:
            return None
    length = lengths[place].astype(np.int64)
    if query_start is None:
        return (place, length - 1, None) if place.max() < tokens else None
    start, stop = query_start[place].astype(np.int64), query_start[place + 1].astype(np.int64)
    if start.min() < 0 or stop.max() > tokens or (start > stop).any():
        return None
    counts = stop - start
    ends = counts.cumsum()
    if ends[-1] > tokens:
        return None
    token = np.arange(ends[-1]) + (start - ends + counts).repeat(counts)
    return token, token + (length - stop).repeat(counts), counts
