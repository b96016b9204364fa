"""An engine with sliding-window layers in small: a pool of full pages, a pool of window pages, and rows that grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvguard.kernels.pair_windows import pair_windows
from kvguard.kernels.retire_pages import retire_pages
from kvguard.kernels.verify_pages.layout import FLAG_WINDOW, FLAGS
from kvguard.kernels.verify_windows import verify_windows

ROWS, COLUMNS, FULL_PAGES, WINDOW_PAGES = 3, 8, 40, 24


class Windows:
    """`step` is one step of healthy traffic; `check` says which rows are flagged."""

    def __init__(self, random: np.random.Generator, page_size: int, window: int) -> None:
        self.random, self.size, self.window = random, page_size, window
        self.table = torch.zeros((ROWS, COLUMNS * page_size), dtype=torch.int32)
        self.lengths = torch.zeros(ROWS, dtype=torch.int64)
        self.freed = [0] * ROWS
        self.mapping = torch.zeros(FULL_PAGES * page_size + 1, dtype=torch.int64)
        self.peer_tag = torch.zeros(FULL_PAGES, dtype=torch.int64)
        self.window_tag, self.holder = torch.zeros((2, WINDOW_PAGES), dtype=torch.int64)
        self.full_free, self.window_free = list(range(1, FULL_PAGES)), list(range(1, WINDOW_PAGES))
        self.tag = 1

    def step(self) -> None:
        """A row grows by some tokens; now and then one ends, or its last page gets another full page."""
        row = int(self.random.integers(ROWS))
        length = int(self.lengths[row])
        scarce = min(len(self.full_free), len(self.window_free)) < 4
        if length == self.table.shape[1] or scarce or self.random.random() < 0.1:
            return self._end(row)
        stop = min(length + int(self.random.integers(1, self.size + 2)), self.table.shape[1])
        full: list[int] = []
        window: list[int] = []
        for position in range(length, stop):
            piece = position % self.size
            if piece == 0:
                self._take(self.full_free, full, self.size)
                self._take(self.window_free, window, self.size)
            else:
                before = int(self.table[row, position - 1])
                full.append(full[-1] + 1 if full else before + 1)
                window.append(window[-1] + 1 if window else int(self.mapping[before]) + 1)
        self._pair(full, window, fresh=True)
        self.table[row, length:stop] = torch.tensor(full, dtype=torch.int32)
        self.lengths[row] = stop
        self._slide(row)
        if self.random.random() < 0.3:
            self._move(row)
        return None

    def check(self) -> Any:
        """bool [rows]: what a decode of every row's last token would find."""
        record = torch.zeros((ROWS, 4), dtype=torch.int64)
        record[:, 2:] = -1
        verify_windows(
            table=self.table, rows=torch.arange(ROWS), lengths=self.lengths, window=self.window, mapping=self.mapping,
            peer_tag=self.peer_tag, window_tag=self.window_tag, page_size=self.size, enforce=True, record=record,
        )  # fmt: skip
        return (record[:, FLAGS] == FLAG_WINDOW).numpy()

    def steal(self) -> tuple[int, int]:
        """A page under somebody's window is freed, and half of the time given to somebody else; (-1, -1): none is."""
        rows = [row for row in range(ROWS) if self.lengths[row]]
        if not rows:
            return -1, -1
        row = int(self.random.choice(rows))
        first = max(0, int(self.lengths[row]) - 1 - self.window)
        slot = int(self.table[row, int(self.random.integers(first, int(self.lengths[row])))])
        page = int(self.mapping[slot]) // self.size
        self._retire([page])
        if self.random.random() < 0.5:
            self._pair([self.full_free[0] * self.size], [page * self.size], fresh=True)
        return row, page

    def readers(self, page: int) -> list[int]:
        """Rows whose windows have a token in the page."""
        found = []
        for row in range(ROWS):
            length = int(self.lengths[row])
            slots = self.table[row, max(0, length - 1 - self.window) : length].long()
            if (self.mapping[slots] // self.size == page).any():
                found.append(row)
        return found

    def _take(self, free: list[int], slots: list[int], size: int) -> None:
        slots.append(free.pop(int(self.random.integers(len(free)))) * size)

    def _pair(self, full: list[int], window: list[int], *, fresh: bool) -> None:
        event = torch.zeros(4, dtype=torch.int64)
        slots, peers = torch.tensor(full), torch.tensor(window)
        self.mapping[slots] = peers
        pair_windows(
            full=slots, window=peers, fresh=fresh, peer_tag=self.peer_tag, window_tag=self.window_tag,
            window_holder=self.holder, page_size=self.size, base_tag=self.tag, event=event,
        )  # fmt: skip
        self.tag += len(full)
        assert not event.any(), event

    def _retire(self, pages: list[int]) -> None:
        event = torch.zeros(4, dtype=torch.int64)
        retire_pages(
            pages=torch.tensor(pages, dtype=torch.int64), page_tag=self.window_tag, page_owner=self.holder,
            page_chain=torch.zeros_like(self.holder), event=event,
        )  # fmt: skip
        assert not event.any(), event

    def _slide(self, row: int) -> None:
        """Whole pages before the window go back."""
        stop = max(0, (int(self.lengths[row]) - 1 - self.window) // self.size)
        self._give_back(row, self.freed[row], stop)
        self.freed[row] = max(self.freed[row], stop)

    def _give_back(self, row: int, start: int, stop: int) -> None:
        for column in range(start, stop):
            slot = int(self.table[row, column * self.size])
            page = int(self.mapping[slot]) // self.size
            self._retire([page])
            self.mapping[slot : slot + self.size] = 0
            self.window_free.append(page)

    def _move(self, row: int) -> None:
        """The row's last page is exchanged for another full page, which takes over its window page."""
        length = int(self.lengths[row])
        start = (length - 1) // self.size * self.size
        old = self.table[row, start:length].long()
        window = self.mapping[old].tolist()
        self.mapping[old] = 0
        slots: list[int] = []
        self._take(self.full_free, slots, self.size)
        full = [slots[0] + piece for piece in range(length - start)]
        self._pair(full, window, fresh=False)
        self.full_free.append(int(old[0]) // self.size)
        self.table[row, start:length] = torch.tensor(full, dtype=torch.int32)

    def _end(self, row: int) -> None:
        columns = -(-int(self.lengths[row]) // self.size)
        self._give_back(row, self.freed[row], columns)
        self.full_free += [int(self.table[row, column * self.size]) // self.size for column in range(columns)]
        self.lengths[row], self.freed[row] = 0, 0
