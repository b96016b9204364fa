"""The books of pages alone, without SGLang: what was wrong with a row stays wrong, whoever takes over its pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvguard.adapters.sglang.books import TokenBooks
from kvguard.kernels.events import TREE
from kvguard.tags import TagCounter

ROWS, PAGES, CONTEXT = 4, 40, 256


class World:
    """Books beside a table of slots; `page_size` tokens a page."""

    def __init__(self, page_size: int) -> None:
        self.size = page_size
        self.books = TokenBooks(
            num_pages=PAGES, page_size=page_size, rows=ROWS, device="cpu", tags=TagCounter(1), key=0x1234567
        )
        self.table = torch.zeros((ROWS, CONTEXT), dtype=torch.int32)
        self.lengths = [0] * ROWS

    def slots(self, pages: list[int]) -> torch.Tensor:
        """All slots of some pages, in order."""
        return (torch.tensor(pages)[:, None] * self.size + torch.arange(self.size)).flatten()

    def extend(self, row: int, pages: list[int], adopted: list[int] | None = None) -> None:
        """Whole new pages for a row; `adopted`: it is fresh, and these come from the tree before them."""
        books, prefix = self.books, self.slots(adopted or [])
        start = len(prefix) if adopted is not None else self.lengths[row]
        slots = self.slots(pages)
        self.table[row, : len(prefix)] = prefix.int()
        self.table[row, start : start + len(slots)] = slots.int()
        self.lengths[row] = start + len(slots)
        taken = None
        if adopted is not None:
            taken = prefix[-1:] if adopted else books.no_prefix
        offset = torch.from_numpy(np.array([0, len(slots)]))
        books.stamp(slots, torch.tensor([row]), torch.tensor([start]), offset=offset, adopted=taken)

    def publish(self, row: int, start: int, stop: int) -> None:
        """Columns of a row go into the tree, which had none of them."""
        entries = self.table[row, : self.lengths[row] : self.size].long()
        place = self.books.reserve()
        new = entries[max(start - 1, 0) : stop]
        self.books.publish(place, row=row, start=start, stop=stop, old=entries[start:].clone(), new=new.clone())

    def flagged(self, *rows: int) -> list[bool]:
        """Which rows fail their proof."""
        self.books.settle()
        record = torch.full((len(rows), 4), -1)
        self.books.verify(
            table=self.table,
            rows=torch.tensor(rows),
            lengths=torch.tensor([self.lengths[row] for row in rows]),
            enforce=False,
            record=record,
            slot_mapping=None,
            query_start=None,
        )
        return [bool(flags) for flags in record[:, 0].tolist()]


@pytest.fixture(params=[1, 16])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def test_a_row_its_publication_and_its_adopter_are_healthy(world: World) -> None:
    """Also when the next part of it is published, and adopted."""
    world.extend(0, [5, 6, 7], adopted=[])
    assert world.flagged(0) == [False]
    world.publish(0, 0, 2)
    world.extend(1, [8], adopted=[5, 6])
    assert world.flagged(0, 1) == [False, False]
    world.publish(0, 2, 3)
    world.extend(2, [9, 10], adopted=[5, 6, 7])
    world.extend(0, [11])
    assert world.flagged(0, 1, 2) == [False, False, False]
    assert world.books.page_owner[[5, 6, 7]].tolist() == [TREE] * 3


def test_an_adopter_is_held_to_what_was_published(world: World) -> None:
    """Not to what the page has become: freed and filled anew under the tree, its tag is another one."""
    world.extend(0, [5, 6, 7], adopted=[])
    world.publish(0, 0, 3)
    world.books.retire(torch.tensor([6]), ((TREE, 1),))
    world.extend(3, [6], adopted=[])
    world.extend(1, [8], adopted=[5, 6, 7])
    world.extend(2, [9], adopted=[5])
    assert world.flagged(1, 2, 3) == [True, False, False]


def test_a_publication_forgives_nothing(world: World) -> None:
    """A row whose last page changed hands publishes the first ones: it stays flagged, and so is who adopts them."""
    world.extend(0, [5, 6, 7], adopted=[])
    world.books.retire(torch.tensor([7]), ((1, 1),))
    world.extend(3, [7], adopted=[])
    world.publish(0, 0, 2)
    world.extend(1, [8], adopted=[5, 6])
    assert world.flagged(0, 1, 3) == [True, True, False]


def test_a_free_by_somebody_else_is_an_event(world: World) -> None:
    """Whose page it is stands in the books; twice free is one as well."""
    world.extend(0, [5, 6], adopted=[])
    for holders in (((2, 1),), ((TREE, 1),)):
        world.books.retire(torch.tensor([5]), holders)
        _, events = world.books.settle()
        assert events[-1, 0] != 0
    world.books.retire(torch.tensor([6]), ((1, 1),))
    _, events = world.books.settle()
    assert events[-1, 0] == 0
