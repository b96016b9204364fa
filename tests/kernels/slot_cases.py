"""Steps for `verify_slots`, healthy ones and nonsense, and runners for any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from kvguard.kernels.events import TREE, owner_of
from kvguard.kernels.verify_slots import verify_slots, verify_slots_step
from kvguard.kernels.verify_slots.descriptor import SlotStep, describe_slots
from tests.kernels.cases import int64
from tests.kernels.interpreted import Packer, interpreting
from tests.kernels.token_row_cases import GAP, Arguments, copied, gapped, odd_slots, words

PAGE_SIZES = (1, 2, 16, 64)
SPECIAL = ((0, -1), (0, 0), (-1, -1), (-1, 0), (2, 2), (0, 1))
"""Null page, and the page of the skip slot, which is then its last slot; a negative one is the skip slot itself."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A healthy step. spans: the tokens of each row, at least one; free: a page that nobody writes."""

    arguments: Arguments
    spans: list[range]
    free: int

    def position(self, row: int, token: int) -> int:
        """Where a token of a row is in its context."""
        query_row = self.arguments["query_row"]
        place = row if query_row is None else int(query_row[row])
        return int(self.arguments["lengths"][place]) - (self.spans[row].stop - token)

    def padding(self) -> list[int]:
        """The tokens that are no row's."""
        owned = {token for span in self.spans for token in span}
        return [token for token in range(len(self.arguments["slot_mapping"])) if token not in owned]


def kind(random: np.random.Generator) -> type[np.int32] | type[np.int64]:
    return np.int32 if random.integers(2) else np.int64


def healthy_step(
    random: np.random.Generator, page_size: int, *, special: tuple[int, int] = (0, -1), skip_allowed: bool = False
) -> Step:
    """Chunks of prompts, decodes and drafts that are written again, in a padded batch; or a decode of a token each."""
    null_page, skip_page = special
    skip_slot = skip_page if skip_page < 0 else skip_page * page_size + page_size - 1
    rows, decode, rewrites = int(random.integers(2, 5)), bool(random.integers(2)), bool(random.integers(2))
    spare_places, padding = int(random.integers(3)), int(random.integers(1, 4))
    places = rows + spare_places
    query_row = random.permutation(places)[:rows] if random.integers(2) else np.arange(rows)
    counts = np.ones(places, np.int64)
    if not decode:
        counts = random.integers(0, 3, places)
        counts[query_row] = random.integers(1, 2 * page_size + 2, rows)
    start = np.concatenate(([0], counts.cumsum()))
    tokens = int(start[-1]) + padding
    done = random.integers(0, 3 * page_size, rows)
    floor = np.maximum(done - (random.integers(0, 3, rows) if rewrites else 0), 0)
    lengths = random.integers(0, 99, places)
    lengths[query_row] = done + counts[query_row]
    # Where each row's positions are kept; two pages are nobody's and one is the tree's.
    columns = -(-lengths[query_row] // page_size)
    reserved = {null_page, skip_page} - {-1}
    num_pages = int(columns.sum()) + 3 + len(reserved)
    pages = random.permutation([page for page in range(max(num_pages, 3)) if page not in reserved])
    names = random.permutation(100)[:rows]
    page_writer = np.zeros(max(num_pages, 3), np.int64)
    page_writer[pages[-2]] = TREE
    slots = np.full(tokens, skip_slot, np.int64)
    used, spans = 0, []
    for row, place in enumerate(query_row.tolist()):
        own = pages[used : used + columns[row]]
        used += columns[row]
        for column in range(floor[row] // page_size, columns[row]):
            page_writer[own[column]] = owner_of(int(names[row]), column)
        span = range(int(start[place]), int(start[place + 1]))
        position = np.arange(done[row], lengths[place])
        slots[span.start : span.stop] = own[position // page_size] * page_size + position % page_size
        spans.append(span)
    if skip_allowed:
        nowhere = random.random(tokens) < 0.3
        in_null = random.integers(page_size, size=tokens) + null_page * page_size
        choice = np.where((random.random(tokens) < 0.5) & (null_page >= 0), in_null, skip_slot)
        slots = np.where(nowhere & (np.arange(tokens) < start[-1]) & (slots != skip_slot), choice, slots)
    arguments: Arguments = {
        "slot_mapping": gapped(slots.astype(kind(random)), int(random.integers(2))),
        "query_start": None if decode and random.integers(2) else start.astype(kind(random)),
        "query_row": None if (query_row == np.arange(rows)).all() else query_row,
        "lengths": gapped(lengths.astype(kind(random)), int(random.integers(2))),
        "writer": int64([owner_of(int(name), 0) for name in names]),
        "floor": floor if rewrites or random.integers(2) else None,
        "page_writer": page_writer,
        "page_size": page_size,
        "skip_slot": skip_slot,
        "skip_allowed": skip_allowed,
        "enforce": bool(random.random() < 0.8),
        "record": np.full((rows + 1, 4), -7, np.int64),
        "null_page": null_page,
    }
    return Step(arguments=arguments, spans=spans, free=int(pages[-1]))


@st.composite
def calls(draw: st.DrawFn) -> Arguments:
    """Arguments of a call: a healthy step in which anything may be off."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    page_size = draw(st.sampled_from(PAGE_SIZES))
    return nonsense(random, page_size)


def nonsense(random: np.random.Generator, page_size: int) -> Arguments:
    """Everything that the contract defines, whether an engine would do it or not."""
    special = SPECIAL[random.integers(len(SPECIAL))]
    step = healthy_step(random, page_size, special=special, skip_allowed=bool(random.integers(2)))
    arguments, chance = step.arguments, random.choice([0.0, 0.05, 0.3])
    rows, places, pages = len(step.spans), len(arguments["lengths"]), len(arguments["page_writer"])

    def spoil(name: str, values: Any) -> None:
        array = arguments[name]
        if array is not None and random.random() < 0.4:
            limits = np.iinfo(array.dtype)
            fitting = np.clip(np.array(values, np.int64), limits.min, limits.max).astype(array.dtype)
            array[...] = np.where(random.random(len(array)) < chance, random.choice(fitting, len(array)), array)

    spoil("slot_mapping", odd_slots(random, 9, pages, page_size))
    spoil("slot_mapping", [arguments["skip_slot"], 2**63 - 1, -(2**63), 2**40])
    spoil("query_start", [-1, 0, 1, len(arguments["slot_mapping"]), 2**62, -(2**63), 2**63 - 1])
    spoil("query_row", [-1, 0, places, places - 1, 2**62, -(2**63)])
    spoil("lengths", [-1, 0, 1, page_size, 2**33, 2**62, 2**63 - 1, -(2**63)])
    spoil("writer", [0, -1, 2**63 - 1, -(2**63), arguments["writer"][0], arguments["writer"][0] + 1])
    spoil("floor", [-1, 0, page_size, 2**62, -(2**63)])
    spoil("page_writer", [0, -1, 1, 2**63 - 1, -(2**63), arguments["writer"][0], *words(random, 3)])
    if random.random() < 0.2:
        # No rows, or fewer; no tokens, or fewer; fewer places. Empty lists have no gaps.
        rows = int(random.integers(rows))
        for name in ("query_row", "writer", "floor"):
            arguments[name] = None if arguments[name] is None else arguments[name][:rows].copy()
        arguments["record"] = arguments["record"][: rows + 1].copy()
    if random.random() < 0.2:
        tokens = int(random.integers(len(arguments["slot_mapping"])))
        arguments["slot_mapping"] = arguments["slot_mapping"][:tokens].copy()
    if random.random() < 0.2:
        arguments["lengths"] = arguments["lengths"][: int(random.integers(places))].copy()
    return arguments


def run(arguments: Arguments, backend: str) -> dict[str, npt.NDArray[Any]]:
    """Every array as the operation leaves it; what is passed in stays as it is."""
    arrays = {name: copied(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    passed = arrays if backend == "numpy" else {name: torch.from_numpy(array) for name, array in arrays.items()}
    verify_slots(**(arguments | passed), backend=backend)
    _require_gaps(arrays["slot_mapping"])
    return arrays


def _require_gaps(slots: npt.NDArray[Any]) -> None:
    if slots.base is not None and len(slots) and slots.strides[0] > slots.itemsize:
        assert (slots.base[1::2] == GAP).all(), "the gaps of slot_mapping were written"


def require_same(arguments: Arguments, wanted: dict[str, npt.NDArray[Any]], found: dict[str, npt.NDArray[Any]]) -> None:
    """Every array is the same."""
    for name, array in found.items():
        assert np.array_equal(wanted[name], array), (name, wanted[name], array, arguments)


def require_equal(arguments: Arguments, backend: str) -> dict[str, npt.NDArray[Any]]:
    """What the oracle leaves, which is what `backend` leaves, in every array."""
    wanted = run(arguments, "numpy")
    require_same(arguments, wanted, run(arguments, backend))
    return wanted


def run_step(cases: Sequence[Arguments], *, backend: str, block: int, chunks: int) -> list[dict[str, npt.NDArray[Any]]]:
    """Every case as a pool of one launch: slots and records as they are left. Up to so many programs share a row.
    Every other place is in `packed`."""
    packer, out = Packer(), Packer()
    pools, left, slots = [], [], [copied(case["slot_mapping"]) for case in cases]
    for index, case in enumerate(cases):
        arrays = {
            name: None if case[name] is None else torch.from_numpy(copied(case[name]))
            for name in ("query_start", "query_row", "lengths", "page_writer")
        } | {"slot_mapping": torch.from_numpy(slots[index])}
        packed_place = case["query_row"] is not None and index % 2 == 1
        pool = SlotStep(
            **arrays,  # type: ignore[arg-type]
            **{name: case[name] for name in ("page_size", "skip_slot", "skip_allowed", "enforce", "null_page")},
            rows=len(case["writer"]),
            writer=packer.add(case["writer"]),
            floor=None if case["floor"] is None else packer.add(case["floor"]),
            record=out.add(case["record"]),
            place_is_row=packed_place,
            row_index=packer.add(case["query_row"]) if packed_place else 0,
        )
        pools.append(pool)
    rows = max(1, *(pool.rows for pool in pools), 0)
    described, launch = describe_slots(pools, block=block, programs=chunks * rows * len(pools))
    written, workspace = torch.from_numpy(out.packed()), torch.zeros(launch.workspace_words, dtype=torch.int64)
    arguments = {"descriptors": torch.from_numpy(described), "packed": torch.from_numpy(packer.packed())}
    with interpreting():
        verify_slots_step(backend=backend, launch=launch, out=written, workspace=workspace, **arguments)
    assert not workspace.any(), "the workspace was not left at zero for the next launch"
    for case, pool, array in zip(cases, pools, slots, strict=True):
        _require_gaps(array)
        words = written[pool.record : pool.record + case["record"].size].numpy()
        left.append({"slot_mapping": array, "record": words.reshape(-1, 4)})
    return left
