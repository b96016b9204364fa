"""Faults for `verify_slots`: a healthy step with one planted in it, and what must be flagged and redirected then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.kernels.events import TREE
from kvguard.kernels.verify_slots.layout import (
    SLOT_FLOOR,
    SLOT_LOST,
    SLOT_OFFSET,
    SLOT_PADDING,
    SLOT_PAGE,
    SLOT_RANGE,
)
from tests.kernels.slot_cases import SPECIAL, Step, healthy_step

PADDING = -1
"""In the place of a row: the padding."""
Planted = dict[int, tuple[int, list[int]]]
"""For each row that must be flagged its flags and wrong tokens."""


def _pick(random: np.random.Generator, step: Step) -> tuple[int, int, int]:
    """A row, one of its tokens, and the token's offset in its page."""
    row = int(random.integers(len(step.spans)))
    token = int(random.choice(list(step.spans[row])))
    return row, token, step.position(row, token) % int(step.arguments["page_size"])


def _victims_slot(random: np.random.Generator, step: Step) -> Planted:
    row, token, offset = _pick(random, step)
    other = (row + 1) % len(step.spans)
    size = step.arguments["page_size"]
    page = step.arguments["slot_mapping"][random.choice(list(step.spans[other]))] // size
    step.arguments["slot_mapping"][token] = page * size + offset
    return {row: (SLOT_PAGE, [token])}


def _nobodys_page(random: np.random.Generator, step: Step) -> Planted:
    row, token, offset = _pick(random, step)
    step.arguments["slot_mapping"][token] = step.free * step.arguments["page_size"] + offset
    return {row: (SLOT_PAGE, [token])}


def _shared_page(random: np.random.Generator, step: Step) -> Planted:
    row, token, offset = _pick(random, step)
    page = int((step.arguments["page_writer"] == TREE).argmax())
    step.arguments["slot_mapping"][token] = page * step.arguments["page_size"] + offset
    return {row: (SLOT_PAGE, [token])}


def _complete_page(random: np.random.Generator, step: Step) -> Planted:
    row, token, _ = _pick(random, step)
    page = step.arguments["slot_mapping"][token] // step.arguments["page_size"]
    step.arguments["page_writer"][page] = 0
    size = step.arguments["page_size"]
    wrong = [t for t in step.spans[row] if step.arguments["slot_mapping"][t] // size == page]
    return {row: (SLOT_PAGE, wrong)}


def _shifted(random: np.random.Generator, step: Step) -> Planted | None:
    row, token, offset = _pick(random, step)
    size = step.arguments["page_size"]
    if size == 1:
        return None
    step.arguments["slot_mapping"][token] += (offset + 1) % size - offset
    return {row: (SLOT_OFFSET, [token])}


def _shifted_in_nobodys(random: np.random.Generator, step: Step) -> Planted | None:
    row, token, offset = _pick(random, step)
    size = step.arguments["page_size"]
    step.arguments["slot_mapping"][token] = step.free * size + (offset + 1) % size
    return {row: (SLOT_PAGE | (SLOT_OFFSET if size > 1 else 0), [token])}


def _past_the_pool(random: np.random.Generator, step: Step) -> Planted:
    row, token, _ = _pick(random, step)
    end = len(step.arguments["page_writer"]) * step.arguments["page_size"]
    step.arguments["slot_mapping"][token] = random.choice([end, 2**31 - 1])
    return {row: (SLOT_RANGE, [token])}


def _negative(random: np.random.Generator, step: Step) -> Planted:
    row, token, _ = _pick(random, step)
    slot = random.choice([-2, -step.arguments["page_size"] - 1, -(2**31)])
    if step.arguments["skip_slot"] >= 0 and random.integers(2):
        slot = -1
    step.arguments["slot_mapping"][token] = slot
    return {row: (SLOT_RANGE, [token])}


def _below_floor(random: np.random.Generator, step: Step) -> Planted:
    row, token, _ = _pick(random, step)
    if step.arguments["floor"] is None:
        step.arguments["floor"] = np.zeros(len(step.spans), np.int64)
    step.arguments["floor"][row] = step.position(row, token) + 1
    return {row: (SLOT_FLOOR, list(range(step.spans[row].start, token + 1)))}


def _negative_position(random: np.random.Generator, step: Step) -> Planted:
    row, _, _ = _pick(random, step)
    query_row = step.arguments["query_row"]
    step.arguments["lengths"][row if query_row is None else query_row[row]] = 0
    return {row: (SLOT_FLOOR, list(step.spans[row]))}


def _sent_nowhere(random: np.random.Generator, step: Step) -> Planted:
    row, token, _ = _pick(random, step)
    slot, null_page = step.arguments["skip_slot"], step.arguments["null_page"]
    if null_page >= 0 and random.integers(2):
        slot = null_page * step.arguments["page_size"] + int(random.integers(step.arguments["page_size"]))
    step.arguments["slot_mapping"][token] = slot
    return {row: (SLOT_LOST, [token])}


def _padding_lane(random: np.random.Generator, step: Step) -> Planted:
    lanes = [lane for lane in step.padding() if random.integers(2)] or step.padding()[-1:]
    step.arguments["slot_mapping"][lanes] = step.arguments["slot_mapping"][step.spans[0].start]
    return {PADDING: (SLOT_PADDING, lanes)}


def _swapped(random: np.random.Generator, step: Step) -> Planted | None:
    one, two = step.spans[0].start, step.spans[1].start
    size = step.arguments["page_size"]
    slots = step.arguments["slot_mapping"]
    slots[[one, two]] = slots[[two, one]]
    flags = SLOT_PAGE | (SLOT_OFFSET if (slots[one] - slots[two]) % size else 0)
    return {0: (flags, [one]), 1: (flags, [two])}


def _no_word(random: np.random.Generator, step: Step) -> Planted:
    """A row that was given no word, whose pages are nobody's: nobody's word is nobody's right."""
    row, _, _ = _pick(random, step)
    writer = int(step.arguments["writer"][row])
    step.arguments["writer"][row] = 0
    words = step.arguments["page_writer"]
    words[(words >= writer) & (words < writer + 2**32)] = 0
    return {row: (SLOT_PAGE, list(step.spans[row]))}


def _tree_as_writer(random: np.random.Generator, step: Step) -> Planted:
    """Words that are not positive are no row's, even where they are what a row expects."""
    row, token, offset = _pick(random, step)
    size, slots = step.arguments["page_size"], step.arguments["slot_mapping"]
    step.arguments["writer"][row] = -(2**40)
    for page in {int(slots[t]) // size for t in step.spans[row]}:
        column = next(step.position(row, t) // size for t in step.spans[row] if slots[t] // size == page)
        step.arguments["page_writer"][page] = -(2**40) + column
    return {row: (SLOT_PAGE, list(step.spans[row]))}


def _own_page_of_another_column(random: np.random.Generator, step: Step) -> Planted | None:
    """One past the end of a page lands in the page's own beginning: the slots of a step before."""
    size = step.arguments["page_size"]
    for row, span in enumerate(step.spans):
        token = span.stop - 1
        if step.position(row, token) // size > step.position(row, span.start) // size:
            step.arguments["slot_mapping"][token] = (
                step.arguments["slot_mapping"][span.start] // size * size + step.position(row, token) % size
            )
            return {row: (SLOT_PAGE, [token])}
    return None


FAULTS: dict[str, Callable[[np.random.Generator, Step], Planted | None]] = {
    "a page of another row": _victims_slot,
    "a page that nobody writes": _nobodys_page,
    "a page of the tree": _shared_page,
    "a page that is complete": _complete_page,
    "an offset that is shifted": _shifted,
    "a page that nobody writes, shifted": _shifted_in_nobodys,
    "a slot past the pool": _past_the_pool,
    "a negative slot": _negative,
    "a position below the floor": _below_floor,
    "a negative position": _negative_position,
    "a lost write": _sent_nowhere,
    "a padding lane in a live page": _padding_lane,
    "slots of two rows swapped": _swapped,
    "a row without a word": _no_word,
    "words that are not positive": _tree_as_writer,
    "the page of another column": _own_page_of_another_column,
}


def planted_step(name: str, number: int, page_size: int) -> tuple[Step, Planted]:
    """A healthy step with this fault in it; the first from this number on that it can be planted in."""
    while True:
        random = np.random.default_rng([number, page_size])
        step = healthy_step(random, page_size, special=SPECIAL[number % len(SPECIAL)])
        planted = FAULTS[name](random, step)
        if planted is not None:
            return step, planted
        number += 101


def require_planted(step: Step, planted: Planted, left: dict[str, npt.NDArray[Any]]) -> None:
    """Exactly the planted rows are flagged, and exactly their wrong slots are redirected."""
    arguments, slots = step.arguments, step.arguments["slot_mapping"].copy()
    for row in range(len(step.spans)):
        flags, wrong = planted.get(row, (0, []))
        first = [step.position(row, wrong[0]), slots[wrong[0]]] if wrong else [-1, -1]
        assert left["record"][row].tolist() == [flags, len(wrong), *first], (row, arguments)
    flags, wrong = planted.get(PADDING, (0, []))
    first = [wrong[0], slots[wrong[0]]] if wrong else [-1, -1]
    assert left["record"][-1].tolist() == [flags, len(wrong), *first], arguments
    if arguments["enforce"]:
        for _, wrong in planted.values():
            slots[wrong] = arguments["skip_slot"]
    assert left["slot_mapping"].tolist() == slots.tolist(), arguments
