"""Calls of the operations on windows: mostly sound books, with a few things wrong in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvguard.kernels.events import EVENT_WORDS
from kvguard.kernels.pair_windows import pair_windows
from kvguard.kernels.verify_windows import verify_windows
from tests.kernels.token_row_cases import GAP, PAGE_SIZES, Arguments, copied, gapped, odd_slots, words

OPERATIONS: dict[str, Callable[..., None]] = {"pair_windows": pair_windows, "verify_windows": verify_windows}


def run(operation: str, arguments: Arguments, backend: str) -> dict[str, npt.NDArray[Any]]:
    """Every array as the operation leaves it; what is passed in stays as it is."""
    arrays = {name: copied(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    passed = arrays if backend == "numpy" else {name: torch.from_numpy(array) for name, array in arrays.items()}
    OPERATIONS[operation](**(arguments | passed), backend=backend)
    table = arrays.get("table")
    if table is not None and table.base is not None and table.base.shape != table.shape:
        assert (table.base[:, table.shape[1] :] == GAP).all(), "the gap of the table was written"
    return arrays


def require_equal(operation: str, arguments: Arguments, backend: str) -> dict[str, npt.NDArray[Any]]:
    """What the oracle leaves, which is what `backend` leaves, in every array."""
    wanted, found = run(operation, arguments, "numpy"), run(operation, arguments, backend)
    for name, array in wanted.items():
        assert np.array_equal(array, found[name]), (name, array, found[name], arguments)
    return wanted


@st.composite
def calls(draw: st.DrawFn, operation: str) -> Arguments:
    """Arguments of a call."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page_size, pages, window_pages = draw(st.sampled_from(PAGE_SIZES)), draw(st.integers(1, 9)), draw(st.integers(1, 7))
    maker = {"pair_windows": _pair_call, "verify_windows": _verify_call}[operation]
    return maker(random, page_size, pages, window_pages)


def _kind(random: np.random.Generator) -> npt.DTypeLike:
    return np.int32 if random.integers(2) else np.int64


def _pair_call(random: np.random.Generator, page_size: int, pages: int, window_pages: int) -> Arguments:
    count = int(random.integers(0, 6))
    # Heads of pages for the most part: nothing else pairs.
    full = odd_slots(random, count, pages, page_size)
    full = np.where(random.random(count) < 0.8, full // page_size * page_size, full)
    if random.random() < 0.5:
        # A full page that comes twice is for `stamp_rows` to report, and which pair stays is not defined.
        full = full[np.sort(np.unique(full // page_size, return_index=True)[1])]
    else:
        full = random.permutation(np.arange(-1, pages + 1))[:count] * page_size
    window = odd_slots(random, len(full), window_pages, page_size)
    return {
        "full": full.astype(_kind(random)),
        "window": window.astype(_kind(random)),
        "fresh": bool(random.integers(2)),
        "peer_tag": words(random, pages),
        "window_tag": words(random, window_pages, zeros=random.choice([0.5, 1.0])),
        "window_holder": random.integers(0, pages, window_pages),
        "page_size": page_size,
        "base_tag": int(random.choice([1, 1000, 2**63 - 2, 2**62])),
        "event": np.zeros(EVENT_WORDS, np.int64),
    }


def _verify_call(random: np.random.Generator, page_size: int, pages: int, window_pages: int) -> Arguments:
    width, rows, batch = int(random.integers(1, 3 * page_size + 3)), int(random.integers(1, 5)), int(random.integers(5))
    column, piece = np.arange(width) // page_size, np.arange(width) % page_size
    table = random.integers(min(1, pages - 1), pages, (rows, width // page_size + 1))[:, column] * page_size + piece
    odd = odd_slots(random, rows * width, pages, page_size).reshape(rows, width)
    table = np.where(random.random(table.shape) < random.choice([0.0, 0.02, 0.2]), odd, table).astype(np.int32)
    lengths = random.integers(0, width + 1, batch)
    lengths = np.where(random.random(batch) < 0.1, random.choice([-1, width, width + 3], batch), lengths)
    listed = np.where(random.random(batch) < 0.1, random.choice([-1, rows], batch), random.integers(0, rows, batch))
    counts = np.maximum(np.where(random.random(batch) < 0.7, random.integers(0, 4, batch), lengths), 0)
    start = np.concatenate(([0], counts.cumsum(), [counts.sum() + 2])).astype(_kind(random))
    queries = random.random() < 0.6
    # Pairs as they should be, and then not.
    peer_page = random.integers(min(1, window_pages - 1), window_pages, pages)
    window_tag = words(random, window_pages, zeros=0.05)
    peer_tag = window_tag[peer_page]
    mapping = (peer_page[:, None] * page_size + np.arange(page_size)).flatten()
    wrong = random.choice([0.0, 0.02, 0.2])
    peer_tag = np.where(random.random(pages) < wrong, words(random, pages), peer_tag)
    odd = odd_slots(random, len(mapping), window_pages, page_size)
    mapping = np.concatenate((np.where(random.random(len(mapping)) < wrong, odd, mapping), [-1]))
    flags = random.choice([0, 0, 1, 8], batch)
    record = np.stack((flags, words(random, batch), np.where(flags == 8, 3, -1), np.where(flags == 8, 7, -1)), 1)
    arguments: Arguments = {
        "table": gapped(table, int(random.integers(3))),
        "rows": listed,
        "lengths": lengths.astype(_kind(random)),
        "window": int(random.choice([0, 1, page_size, width])),
        "mapping": mapping,
        "peer_tag": peer_tag,
        "window_tag": window_tag,
        "page_size": page_size,
        "enforce": bool(random.random() < 0.7),
        "record": record,
        "query_start": start if queries else None,
    }
    if random.random() < 0.7:
        arguments["slot_mapping"] = random.integers(1, 99, int(start[-1] if queries else batch) + 2)
        arguments["skip_slot"] = int(random.integers(-1, 1))
    return arguments
