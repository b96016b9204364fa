"""Calls of the operations on token rows, most of them nonsense, and a runner for any backend.

Sizes come from Hypothesis, what fills the arrays from a generator seeded by it: drawing each element would take longer
than all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvguard.kernels.events import ANYBODY, EVENT_WORDS, ROW_SHIFT, TREE, UNSAID, owner_of
from kvguard.kernels.mixing import mix, signed64
from kvguard.kernels.publish_row import publish_row
from kvguard.kernels.retire_pages import retire_pages
from kvguard.kernels.stamp_rows import stamp_rows
from kvguard.kernels.verify_rows import verify_rows
from tests.kernels.cases import int64

Int64 = npt.NDArray[np.int64]
Arguments = dict[str, Any]
OPERATIONS: dict[str, Callable[..., None]] = {
    "stamp_rows": stamp_rows,
    "retire_pages": retire_pages,
    "publish_row": publish_row,
    "verify_rows": verify_rows,
}
PAGE_SIZES = (1, 2, 16, 64)
KEY = 0xC0FFEE_0123456789
GAP = 77


def gapped(array: npt.NDArray[Any], gap: int) -> npt.NDArray[Any]:
    """The array with a gap behind each row of a table, or between the elements of a list."""
    if gap == 0:
        return array
    if array.ndim == 1:
        wide = np.full(len(array) * (gap + 1), GAP, array.dtype)
        wide[:: gap + 1] = array
        return wide[:: gap + 1]
    wide = np.full((array.shape[0], array.shape[1] + gap), GAP, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide[:, : array.shape[1]]


def copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy with the same gaps."""
    if array.base is None or array.flags.c_contiguous:
        return array.copy()
    base: npt.NDArray[Any] = array.base.copy()
    return base[:, : array.shape[1]] if array.ndim == 2 else base[:: len(base) // len(array)]


def run(operation: str, arguments: Arguments, backend: str) -> dict[str, npt.NDArray[Any]]:
    """Every array as the operation leaves it; what is passed in stays as it is."""
    arrays = {name: copied(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    passed = arrays if backend == "numpy" else {name: torch.from_numpy(array) for name, array in arrays.items()}
    OPERATIONS[operation](**(arguments | passed), backend=backend)
    for name, array in arrays.items():
        if array.base is not None and array.ndim == 2 and array.base.shape != array.shape:
            assert (array.base[:, array.shape[1] :] == GAP).all(), f"the gap of {name} was written"
    return arrays


def require_equal(operation: str, arguments: Arguments, backend: str) -> dict[str, npt.NDArray[Any]]:
    """What the oracle leaves, which is what `backend` leaves, in every array."""
    wanted, found = run(operation, arguments, "numpy"), run(operation, arguments, backend)
    for name, array in wanted.items():
        assert np.array_equal(array, found[name]), (name, array, found[name], arguments)
    return wanted


def words(random: np.random.Generator, count: int, zeros: float = 0.3) -> Int64:
    """Words of all 64 bits, some of them 0."""
    found = random.integers(-(2**63), 2**63, count)
    return np.where(random.random(count) < zeros, 0, found)


def books(random: np.random.Generator, pages: int, rows: int, zeros: float = 0.3) -> dict[str, Int64]:
    """Books in which nothing needs to fit; owners are often plausible."""
    owner = np.array([owner_of(int(random.integers(rows)), int(random.integers(4))) for _ in range(pages)], np.int64)
    kind = random.integers(4, size=pages)
    return {
        "page_tag": words(random, pages, zeros),
        "page_owner": np.where(kind == 0, 0, np.where(kind == 1, -1, owner)),
        "page_chain": words(random, pages),
        "digest": words(random, rows),
    }


def contents(random: np.random.Generator, pages: int, count: int) -> dict[str, Int64]:
    """What pages hold and what so many rows or columns are: of few kinds, so that they are often the same."""
    kinds = int64([[0, 0], [0, 5], [5, 0], [5, 7], [-(2**63), -1]])
    return {"page_content": random.choice(kinds, pages), "content": random.choice(kinds, count)}


def odd_slots(random: np.random.Generator, count: int, pages: int, page_size: int) -> Int64:
    """Slots, every few of them in the null page, just outside of the pool, or far outside."""
    end = pages * page_size
    slots = random.integers(0, end, count)
    odd = np.array([-1, 0, end - 1, end, end + page_size, -page_size, -(2**31), 2**31 - 1])
    return np.where(random.random(count) < 0.2, random.choice(odd, count), slots)


def _integers(random: np.random.Generator) -> type[np.int32] | type[np.int64]:
    """One of the types that slots and positions come in."""
    return np.int32 if random.integers(2) else np.int64


@st.composite
def calls(draw: st.DrawFn, operation: str, sizes: tuple[int, ...] = PAGE_SIZES) -> Arguments:
    """Arguments of a call."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page_size, pages, rows = draw(st.sampled_from(sizes)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    maker = {
        "stamp_rows": _stamp_call,
        "retire_pages": _retire_call,
        "publish_row": _publish_call,
        "verify_rows": _verify_call,
    }[operation]
    return maker(random, page_size, pages, rows)


def _stamp_call(random: np.random.Generator, page_size: int, pages: int, rows: int) -> Arguments:
    batch = int(random.integers(0, 5))
    decode, adopts = bool(random.integers(2)), bool(random.integers(2))
    wide = _integers(random)
    counts = np.ones(batch, np.int64) if decode else random.integers(0, 2 * page_size + 2, batch)
    offset = np.concatenate(([0], counts.cumsum()))
    listed = random.integers(-1, rows + 1, batch)
    adopted = None
    if adopts:
        # A row that is made fresh comes once.
        listed = random.permutation(np.arange(-1, max(rows + 1, batch)))[:batch]
        adopted = np.where(random.random(batch) < 0.3, -1, odd_slots(random, batch, pages, page_size))
    first = random.integers(0, 4, batch) * page_size + random.integers(-1, 2, batch) * (random.random(batch) < 0.4)
    slots = odd_slots(random, int(offset[-1]), pages, page_size)
    event = np.zeros(EVENT_WORDS, np.int64)
    arrays = books(random, pages, rows, zeros=random.choice([0.5, 1.0]))
    if random.random() < 0.6:
        arrays |= contents(random, pages, batch)
    return arrays | {
        "slots": slots.astype(_integers(random)),
        "rows": listed,
        "first": (first + 1 if decode else first).astype(wide),
        "first_delta": -1 if decode else int(random.integers(-1, 2)) * page_size,
        "offset": None if decode else offset.astype(_integers(random)),
        "adopted": adopted,
        "page_size": page_size,
        "base_tag": int(random.choice([1, 1000, 2**63 - 2, 2**62])),
        "key": KEY,
        "event": event,
    }


def _retire_call(random: np.random.Generator, page_size: int, pages: int, rows: int) -> Arguments:
    divisor = int(random.choice([1, page_size]))
    given = odd_slots(random, int(random.integers(0, 2 * divisor + 9)), pages, divisor)
    arrays = books(random, pages, rows, zeros=random.choice([0.0, 0.2]))
    del arrays["digest"]
    # Holders as the books name them, nobody's row, the tree, and callers that cannot say.
    known = np.append(arrays["page_owner"] >> ROW_SHIFT, [ANYBODY, UNSAID, TREE, rows + 1])
    by: Any = int(random.choice(known))
    if random.random() < 0.5:
        # One for each page: who gives a page back that others give back as well depends on the order, on a GPU.
        by = random.choice(known, pages)[np.clip(given // divisor, 0, pages - 1)]
    return arrays | {
        "by": by,
        "pages": gapped(given.astype(_integers(random)), int(random.integers(3))),
        "divisor": divisor,
        "event": np.zeros(EVENT_WORDS, np.int64),
    }


def _publish_call(random: np.random.Generator, page_size: int, pages: int, rows: int) -> Arguments:
    start = int(random.integers(0, 3))
    stop = start + int(random.integers(0, 6))
    row = int(random.integers(rows))
    arrays = books(random, pages, rows)
    count = stop - start + int(random.integers(0, 3))
    old = odd_slots(random, count, pages, page_size)
    new = np.concatenate((odd_slots(random, int(start > 0), pages, page_size), old[: stop - start]))
    new = np.where(random.random(len(new)) < 0.2, odd_slots(random, len(new), pages, page_size), new)
    for j in range(start, stop):
        # Most columns hold a page that the books give to them.
        page = int(old[j - start]) // page_size
        if random.random() < 0.8 and 0 <= page < pages:
            arrays["page_owner"][page] = owner_of(row, j)
    kind, gap = _integers(random), int(random.integers(3))
    if random.random() < 0.6:
        arrays |= contents(random, pages, stop - start) | {"event": np.zeros(EVENT_WORDS, np.int64)}
    return arrays | {
        "row": row,
        "old": gapped(old.astype(kind), gap),
        "new": gapped(new.astype(kind), gap),
        "start": start,
        "stop": stop,
        "page_size": page_size,
        "key": KEY,
    }


def _verify_call(random: np.random.Generator, page_size: int, pages: int, rows: int) -> Arguments:
    """Tables that are mostly sound, so that one thing at a time can be wrong with a row."""
    width = int(random.integers(0, 3 * page_size + 2))
    batch = int(random.integers(0, 5))
    arrays = books(random, pages, rows, zeros=random.choice([0.0, 0.1]))
    column = np.arange(width) // page_size
    table = random.integers(min(1, pages - 1), pages, (rows, width // page_size + 1))[:, column]
    table = table * page_size + np.arange(width) % page_size
    odd = odd_slots(random, rows * width, pages, page_size).reshape(rows, width)
    table = np.where(random.random(table.shape) < random.choice([0.0, 0.02, 0.2]), odd, table).astype(np.int32)
    lengths = random.integers(0, width + 1, batch)
    lengths = np.where(random.random(batch) < 0.1, random.choice([-1, width, width + 3], batch), lengths)
    listed = np.where(random.random(batch) < 0.1, random.choice([-1, rows], batch), random.integers(0, rows, batch))
    arguments: Arguments = {
        "table": gapped(table, int(random.integers(3))),
        "rows": listed,
        "lengths": lengths.astype(_integers(random)),
        "page_tag": arrays["page_tag"],
        "digest": arrays["digest"],
        "page_size": page_size,
        "key": KEY,
        "enforce": bool(random.random() < 0.7),
        "record": np.full((batch, 4), -1, np.int64),
    }
    if random.random() < 0.5:
        writes = random.integers(-1, 9, (batch + int(random.integers(2)), 4))
        writes[:, 0] = np.where(random.random(len(writes)) < 0.8, 0, writes[:, 0] << 8)
        arguments["writes"] = writes
    if random.random() < 0.7:
        counts = random.integers(0, 4, batch + 2)
        start = np.concatenate(([0], counts.cumsum())).astype(_integers(random))
        arguments["query_start"] = start if random.random() < 0.5 else None
        arguments["slot_mapping"] = random.integers(1, 99, int(start[-1]) + 2)
        arguments["skip_slot"] = int(random.integers(-1, 1))
    if random.random() < 0.7:
        # The digests that the rows have.
        for b, record in enumerate(run("verify_rows", arguments, "numpy")["record"]):
            if 0 <= listed[b] < rows:
                arrays["digest"][listed[b]] = record[1]
    return arguments


def empty_books(pages: int = 6, rows: int = 3) -> Arguments:
    """Nobody has anything."""
    names = ("page_tag", "page_owner", "page_chain")
    return {name: np.zeros(pages, np.int64) for name in names} | {"digest": np.zeros(rows, np.int64)}


def sound_publish(**changes: Any) -> Arguments:
    """Row 1 adopted a page of the tree, column 0, and has columns 1 .. 4 of its own; the tree has column 2 already."""
    arguments = empty_books(pages=10, rows=2) | {
        "row": 1, "old": int64([4, 6, 8, 10]), "new": int64([2, 4, 12, 8]), "start": 1, "stop": 4, "page_size": 2,
        "key": KEY,
    }  # fmt: skip
    arguments["page_tag"][1:7] = 11, 12, 13, 14, 15, 16
    arguments["page_owner"][1:7] = -1, owner_of(1, 1), owner_of(1, 2), owner_of(1, 3), owner_of(1, 4), -1
    arguments["page_chain"][[1, 6]] = 1000, 2000
    arguments["digest"][1] = signed64(1000 + sum(mix(KEY, j, 11 + j) for j in (1, 2, 3, 4)))
    return arguments | changes


def sound_verify(**changes: Any) -> Arguments:
    """Two rows of five and three tokens in pages of two, as promised."""
    tags = int64([0, 11, 12, 13, 14, 0])
    promised = [[(0, 11), (1, 12), (2, 13)], [(0, 14), (1, 12)]]
    digests = [signed64(sum(mix(KEY, j, tag) for j, tag in row)) for row in promised]
    table = np.array([[2, 3, 4, 5, 6, -9], [8, 9, 4, -9, -9, -9]], np.int32)
    return {
        "table": table, "rows": int64([0, 1]), "lengths": int64([5, 3]), "page_tag": tags, "digest": int64(digests),
        "page_size": 2, "key": KEY, "enforce": True, "record": np.full((2, 4), -1, np.int64),
        "slot_mapping": int64([6, 4]),
    } | changes  # fmt: skip


def shared_table_row() -> Arguments:
    """Two checked rows are one row of the table, in which a slot is out of range: both must say so."""
    arguments = sound_verify(rows=int64([0, 0]), lengths=int64([5, 5]))
    arguments["table"][0, 4] = -1
    return arguments


def repeated_page() -> Arguments:
    """Column 3 names the page that the row owns at column 1, whose chain something else wrote."""
    arguments = sound_publish(new=int64([2, 4, 12, 4]))
    arguments["page_chain"][2] = 777
    return arguments


def page_opened_twice() -> Arguments:
    """Three rows get their first token; the third one's page is that of the first."""
    return empty_books() | {
        "slots": int64([4, 8, 4]), "rows": int64([0, 1, 2]), "first": int64([0, 0, 0]), "first_delta": 0,
        "offset": None, "adopted": None, "page_size": 4, "base_tag": 1000, "key": KEY,
        "event": np.zeros(EVENT_WORDS, np.int64),
    }  # fmt: skip
