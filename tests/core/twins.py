"""Two guards that are told the same: one goes the short way where it can, the other always the long one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kvguard.config import GuardConfig
from kvguard.guard import Guard
from kvguard.kernels.verify_pages.layout import RECORD_WORDS
from kvguard.messages import StepDelta, Verdicts
from kvguard.pools import PoolSpec
from kvguard.violation import Violation


def said(delta: StepDelta) -> list[Any]:
    """Everything that a delta says but for its tag changes, wherever its arrays lie."""
    found: list[Any] = [delta.step, delta.requests, delta.enforce]
    for section in delta.sections:
        spans = [value for value in section[4:] if isinstance(value, tuple)]
        found += [section.pool, section.columns, [delta.array(span).tolist() for span in spans]]
    return found


class Twins:
    """The same engine twice: one guard is asked for another step first, the other always builds it."""

    def __init__(self, seed: int, pools: tuple[PoolSpec, ...]) -> None:
        self.rng = random.Random(seed)
        self.pools = pools
        self.short, self.long = (Guard(pools, GuardConfig.default(seed=seed)) for _ in range(2))
        self.tokens: dict[str, int] = {}
        self.batch: list[str] = []
        self.free = {spec.name: list(range(1, spec.num_pages)) for spec in self.pools}
        self.last: dict[str, int] = {}
        self.held: dict[str, dict[str, list[int]]] = {}
        self.in_flight: list[tuple[int, list[str]]] = []
        self.again = self.started = 0

    def each(self, call: Callable[[Guard], Any]) -> Any:
        """The same call of both, which must answer the same."""
        short, long = call(self.short), call(self.long)
        assert short == long
        return short

    def start(self) -> None:
        if len(self.tokens) < 5:
            self.started += 1
            name = f"r{self.started}"
            self.each(lambda guard: guard.start(name))
            self.tokens[name], self.held[name] = 0, {spec.name: [] for spec in self.pools}

    def finish(self) -> None:
        if self.tokens:
            name = self.rng.choice(sorted(self.tokens))
            self.each(lambda guard: guard.finish(name))
            del self.tokens[name]
            for pool, pages in self.held.pop(name).items():
                self.each(lambda guard, pool=pool, pages=pages: guard.retire(pages, pool=pool).reusable)  # type: ignore[misc]
                self.free[pool] += pages

    def publish(self) -> None:
        name = self.rng.choice(sorted(self.tokens) or [""])
        pages = self.held.get(name, {}).get("main", [])
        if pages:
            column = self.rng.randrange(len(pages))
            self.each(lambda guard: guard.publish(name, column, (name, column)))

    def rewind(self) -> None:
        if self.tokens and not self.in_flight:
            name = self.rng.choice(sorted(self.tokens))
            self.tokens[name] -= self.rng.randint(0, min(2, self.tokens[name]))
            self.each(lambda guard: guard.rewind(name, self.tokens[name]))

    def step(self) -> None:
        """Mostly the same requests, each a token further; pages are taken where these are needed."""
        names = [name for name in self.batch if name in self.tokens]
        if not names or self.rng.random() < 0.1:
            names = self.rng.sample(sorted(self.tokens), self.rng.randint(0, len(self.tokens)))
        starts = [self.tokens[name] for name in names]
        for name in names:
            self.tokens[name] += 1
            for spec in self.pools:
                pages, size = self.held[name][spec.name], spec.page_size or 1
                while len(pages) * size < self.tokens[name] and self.free[spec.name]:
                    page = self.free[spec.name].pop(0)
                    self.allocate(name, spec.name, page)
                    pages.append(page)
        ends = [self.tokens[name] for name in names]
        delta = self.short.step_again() if names == self.batch and self.consecutive(names) else None
        if delta is None:
            delta = self.short.step(names, range(len(names)), ends, starts)
        else:
            self.again += 1
        long = self.long.step(names, range(len(names)), ends, starts)
        assert said(delta) == said(long)
        self.batch, self.last = names, dict(zip(names, ends, strict=True))
        self.in_flight.append((delta.step, names))

    def allocate(self, name: str, pool: str, page: int) -> None:
        self.each(lambda guard: guard.allocate(name, [page], pool=pool))

    def consecutive(self, names: list[str]) -> bool:
        return all(self.tokens[name] == self.last[name] + 1 for name in names)

    def judge(self) -> None:
        if self.in_flight:
            step, names = self.in_flight.pop(0)
            records = np.zeros((len(self.pools), len(names), RECORD_WORDS), np.int64)
            if names and self.rng.random() < 0.03:
                records[0, self.rng.randrange(len(names)), 0] = 1
            judgement = self.each(lambda guard: _facts(guard.judge(Verdicts(step=step, records=records))))
            for name in judgement[0]:
                if name in self.tokens:
                    self.each(lambda guard, name=name: guard.finish(name))  # type: ignore[misc]
                    del self.tokens[name], self.held[name]

    def compare(self) -> None:
        for name in self.tokens:
            self.each(lambda guard, name=name: (guard.scheduled_tokens(name), guard._books.state(name).computed))  # type: ignore[misc]
        self.each(lambda guard: [_plain(violation) for violation in guard.violations])
        self.each(lambda guard: guard.health().counters)


def _plain(violation: Violation) -> tuple[Any, ...]:
    return violation.kind, violation.request, violation.step, violation.page, violation.detail


def _facts(judgement: Any) -> tuple[Any, ...]:
    return sorted(judgement.withheld), sorted(abort.request for abort in judgement.aborts), judgement.evict
