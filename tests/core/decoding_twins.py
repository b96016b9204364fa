"""Two guards in decode, pages taken and published as an engine does: one is asked for a step in one call first."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kvguard.config import GuardConfig
from kvguard.content_key import ContentDomain
from kvguard.guard import Guard
from kvguard.messages import StepDelta
from kvguard.pools import PoolSpec
from tests.core.twins import Twins, said

SIZE = 4
POOL = PoolSpec(name="main", num_pages=48, page_size=SIZE, null_page=0)


def changes(delta: StepDelta) -> set[tuple[int, int, int]]:
    """Page, tag and writer word of every tag change."""
    (section,) = delta.sections
    return set(zip(*(delta.array(span).tolist() for span in section[1:4]), strict=True))


def standing(guard: Guard) -> list[Any]:
    """What the books hold, down to the last page and row; but for progress, which is written once somebody asks."""
    books = guard._books
    (table,) = books.tables
    pages = [
        (page, record.tag, sorted(record.holders), record.owner, record.publication, record.former, record.was_used)
        + (None if record.promise is None else (record.promise.writer.id, record.promise.step),)
        + (guard._books.recorder.history("main", page), record.content)
        for page, record in sorted(table._records.items())
    ]
    rows = [
        (name, state.ledgers[0].digest, state.ledgers[0].extents, list(state.ledgers[0].entries()), state.floor)
        + (state.capacity, len(state.promises), books.rows.table[:, state.slot].tolist())
        for name, state in sorted(books.requests.items())
    ]
    return [pages, rows, table.changes, table.writers, books.tags.upcoming, len(books.marked), len(books.rows.touched)]


def unclaimed(guard: Guard, page: int) -> bool:
    """Whether a page may be taken as it is; in the cache or not, the books end what it was."""
    return guard._books.tables[0].unclaimed([page])


class DecodingTwins(Twins):
    """Pages are taken and published as decode does: in the step that needs them, and in the one that fills them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, (POOL,))
        self.onward = 0
        self.due: dict[tuple[str, int], int] = {}
        """(request, length) at which a page is published, filled by then or some tokens ago -> its column."""

    def step(self) -> None:
        names = [name for name in self.batch if name in self.tokens]
        if not names or self.rng.random() < 0.1:
            names = self.rng.sample(sorted(self.tokens), self.rng.randint(0, len(self.tokens)))
        starts = [self.tokens[name] for name in names]
        grown, published = [], []
        for row, name in enumerate(names):
            pages = self.held[name]["main"]
            needed = len(pages) * SIZE <= self.tokens[name]
            # Now and then a page ahead, for a column that is not reached yet.
            for take in (needed, self.rng.random() < 0.1):
                if take and self.free["main"]:
                    grown.append((row, self.free["main"].pop(0)))
                    pages.append(grown[-1][1])
            self.tokens[name] += 1
            if self.tokens[name] % SIZE == 0 and self.rng.random() < 0.8:
                self.due[name, self.tokens[name] + self.rng.choice([0, 0, 1, 2, 3])] = self.tokens[name] // SIZE - 1
            column = self.due.pop((name, self.tokens[name]), None)
            if column is not None:
                published.append((row, column, self.key(name)))
        ends = [self.tokens[name] for name in names]
        delta = None
        if names == self.batch and self.consecutive(names):
            before = standing(self.short)
            delta = self.short.step_onward(grown, published)
            assert delta is not None or standing(self.short) == before
        if delta is None:
            self.take(self.short, names, grown, published)
            delta = self.short.step(names, range(len(names)), ends, starts)
        else:
            self.onward += bool(grown or published)
        self.take(self.long, names, grown, published)
        long = self.long.step(names, range(len(names)), ends, starts)
        assert said(delta) == said(long) and changes(delta) == changes(long)
        self.batch, self.last = names, dict(zip(names, ends, strict=True))
        self.in_flight.append((delta.step, names))
        assert standing(self.short) == standing(self.long)

    def finish(self) -> None:
        """Pages of some requests stay in the cache: whoever draws one takes it over as it is."""
        if self.tokens and self.rng.random() < 0.4:
            name = self.rng.choice(sorted(self.tokens))
            self.each(lambda guard: guard.finish(name))
            del self.tokens[name]
            for pages in self.held.pop(name).values():
                idle = [page for page in pages if self.each(lambda guard, page=page: unclaimed(guard, page))]  # type: ignore[misc]
                rest = [page for page in pages if page not in idle]
                self.each(lambda guard, rest=rest: guard.retire(rest).reusable)  # type: ignore[misc]
                self.free["main"][:0] = idle
                self.free["main"] += rest
        else:
            super().finish()

    def key(self, name: str) -> Hashable:
        """Now and then one that another page is published under."""
        return ("shared", self.tokens[name]) if self.rng.random() < 0.2 else (name, self.tokens[name])

    @staticmethod
    def take(guard: Guard, names: list[str], grown: list[tuple[int, int]], published: list[Any]) -> None:
        """The long way to the same books."""
        if grown:
            assert not guard.allocate_each([names[row] for row, _ in grown], [page for _, page in grown])
        for row, column, key in published:
            guard.publish(names[row], column, key)


class KeyedTwins(DecodingTwins):
    """The same at level `keys`: some requests are said to be more than they will ever be, some less, some nothing."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.short, self.long = (Guard((POOL,), GuardConfig.load(seed=seed, level="keys")) for _ in range(2))

    def start(self) -> None:
        before = self.started
        super().start()
        if self.started > before and self.rng.random() < 0.95:
            tokens = [self.rng.randrange(3) for _ in range(self.rng.choice([300, 300, 300, 9]))]
            domain = ContentDomain(model="m", tenant=self.rng.choice([None, "t"]))
            self.each(lambda guard: guard.identify(f"r{self.started}", domain, tokens))
