"""Random operations on a guard and on the plain model at once; whatever one answers the other must answer.

`World` takes every choice from a `random.Random`, so that a run is replayed from its seed alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvguard.config import GuardConfig
from kvguard.guard import Guard
from kvguard.messages import StepDelta
from kvguard.pools import PoolSpec
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier
from kvguard.violation import Proof
from tests.core.plain_model import PAGE_SIZE, PlainModel

PAGES = 12
ROWS = 4
COLUMNS = 8
QUARANTINE_MAX = 3
IN_FLIGHT_MAX = 3
ANY_PAGE = range(-1, PAGES + 1)


class World:
    """One guard, one verifier on NumPy, one model.

    A step's verification lags behind its making by what `verify` decides, each step with the block table of its own
    time: what a stream does. `counts` says what a run contained.
    """

    def __init__(self, seed: int, *, enforce: bool = True, control: bool = True) -> None:
        self.rng = random.Random(seed)
        proofs = {Proof.TAG, Proof.CONTROL_PLANE} if control else {Proof.TAG}
        config = GuardConfig.load(
            seed=seed % 2**32,
            on_violation="abort" if enforce else "observe",
            quarantine_pages_max=QUARANTINE_MAX,
            breaker_violations=0,
            recorder_events_per_page=2,
        )
        pool = PoolSpec(num_pages=PAGES, page_size=PAGE_SIZE)
        self.guard = Guard([pool], config, proofs=frozenset(proofs))
        self.verifier = Verifier(self.guard.setup, backend="numpy")
        self.model = PlainModel(PAGES, QUARANTINE_MAX, enforce=enforce, control=control)
        self.row: dict[str, int] = {}
        self.unverified: list[tuple[StepDelta, Any]] = []
        self.unjudged: list[PendingVerdicts] = []
        self.cached: list[tuple[int, int]] = []
        self.names = 0
        self.counts: Counter[str] = Counter()

    # -- choices --------------------------------------------------------------------------------------------------

    def chance(self, percent: int) -> bool:
        return self.rng.random() * 100 < percent

    def request(self) -> str | None:
        return self.rng.choice(list(self.row)) if self.row else None

    def page(self) -> int:
        """Mostly a vacant page, sometimes any."""
        vacant = [page for page in range(1, PAGES) if not self.model.life.get(page)]
        return self.rng.choice(vacant) if vacant and self.chance(85) else self.rng.choice(ANY_PAGE)

    # -- operations -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        if len(self.row) == ROWS:
            return
        name = f"r{self.names % 6}"
        self.names += 1
        if name in self.row:
            return
        self.row[name] = min(set(range(ROWS)) - set(self.row.values()))
        self.guard.start(name)
        self.model.start(name)

    def finish(self, name: str, retire: bool | None = None) -> None:
        pages = [entry[0] for entry in self.model.requests[name]["ledger"] if entry]
        self.guard.finish(name)
        self.model.finish(name)
        del self.row[name]
        if self.chance(80) if retire is None else retire:
            self.retire_pages(pages, None)

    def allocate(self, name: str) -> None:
        room = COLUMNS - len(self.model.requests[name]["ledger"])
        pages = [self.page() for _ in range(min(room, self.rng.randint(1, 3)))]
        accepted = self.guard.allocate(name, pages)
        assert accepted == self.model.allocate(name, pages), pages
        self.counts["page_refused"] += len(accepted) < len(pages)

    def allocate_each(self) -> None:
        """One page for each of some requests, as in a step in which they all cross a page."""
        names = [name for name in self.row if len(self.model.requests[name]["ledger"]) < COLUMNS and self.chance(70)]
        pages = [self.page() for _ in names]
        refused = self.guard.allocate_each(names, pages)
        answers = [self.model.allocate(name, [page]) for name, page in zip(names, pages, strict=True)]
        assert refused == [place for place, accepted in enumerate(answers) if not accepted], pages
        self.counts["page_refused"] += bool(refused)
        self.counts["allocated_each"] += len(names) > 1

    def publish(self, name: str) -> None:
        length = len(self.model.requests[name]["ledger"])
        column = self.rng.randint(0, max(0, length - 1)) if self.chance(95) else length + 1
        key = self.rng.randint(0, 5)
        page = self.guard._books.state(name).ledgers[0].page(column)
        published = self.guard.publish(name, column, key)
        assert published == self.model.publish(name, column, key), (name, column)
        if published:
            self.cached = [*self.cached[-5:], (key, page)]
            self.counts["promised"] += self.model.state(page) == "promised"

    def adopt(self, name: str) -> None:
        room = COLUMNS - len(self.model.requests[name]["ledger"])
        promised = [(self.model.key[page], page) for page in self.model.promise]
        found = promised if promised and self.chance(60) else self.cached
        hits = [
            self.rng.choice(found) if found and self.chance(90) else (self.rng.randint(0, 5), self.page())
            for _ in range(min(room, self.rng.randint(1, 2)))
        ]
        accepted = self.guard.adopt(name, hits)
        assert accepted == self.model.adopt(name, hits), hits
        self.counts["adopted"] += accepted
        self.counts["hit_refused"] += accepted < len(hits)

    def retire_pages(self, pages: list[int], by: str | None) -> None:
        retired = self.guard.retire(pages, by=by)
        answers = (retired.reusable, retired.refused, retired.quarantined)
        assert answers == self.model.retire(pages, by), (pages, by)
        self.counts["free_refused"] += bool(retired.refused)
        self.counts["free_quarantined"] += bool(retired.quarantined)

    def retire(self) -> None:
        idle = [page for page in range(1, PAGES) if self.model.life.get(page) and not self.model.holders[page]]
        right = bool(idle) and self.chance(85)
        page = self.rng.choice(idle) if right else self.rng.choice(ANY_PAGE)
        self.retire_pages([page] * self.rng.choice((1, 1, 1, 2)), self.request() if self.chance(30) else None)

    def unpublish(self) -> None:
        pages = [self.rng.choice(ANY_PAGE)]
        self.guard.unpublish(pages)
        self.model.unpublish(pages)

    def truncate(self, name: str) -> None:
        columns = self.rng.randint(0, len(self.model.requests[name]["ledger"]))
        cut = self.guard.truncate(name, columns)
        assert cut == self.model.cut(name, columns, None)
        self.retire_pages(cut, None)

    def drop(self, name: str) -> None:
        start = self.rng.randint(0, 2)
        stop = start + self.rng.randint(0, 3)
        dropped = self.guard.drop(name, start, stop)
        assert dropped == self.model.cut(name, start, stop)

    def preempt(self, name: str) -> None:
        pages = [entry[0] for entry in self.model.requests[name]["ledger"] if entry]
        self.guard.preempt(name)
        self.model.preempt(name)
        self.retire_pages(pages, None)
        self.counts["preempted"] += 1

    def resume(self, name: str) -> None:
        if self.model.requests[name]["preempted"]:
            self.guard.resume(name)
            self.model.resume(name)

    def rewind(self, name: str) -> None:
        tokens = self.rng.randint(0, COLUMNS * PAGE_SIZE)
        self.guard.rewind(name, tokens)
        self.model.rewind(name, tokens)

    def reset(self) -> None:
        if self.chance(20):
            revoke = self.chance(30)
            assert self.guard.reset(revoke_held=revoke) == self.model.reset(revoke)
            self.counts["reset"] += 1

    def batch(self) -> list[str]:
        """Who is in the next step."""
        return self.rng.sample(list(self.row), self.rng.randint(0, len(self.row)))

    def step(self) -> None:
        """A step of some requests, its block table right or corrupted in one place."""
        if len(self.unverified) + len(self.unjudged) >= IN_FLIGHT_MAX:
            return
        names = self.batch()
        table = np.zeros((ROWS, COLUMNS), np.int32)
        ends = []
        for name in names:
            ledger = self.model.requests[name]["ledger"]
            for column, entry in enumerate(ledger):
                table[self.row[name], column] = self.rng.choice(ANY_PAGE) if entry is None else entry[0]
            full = len(ledger) * PAGE_SIZE
            ends.append(full + 1 if self.chance(2) else self.rng.randint(0, full) if self.chance(20) else full)
        if self.chance(12):
            table[self.rng.randrange(ROWS), self.rng.randrange(COLUMNS // 2)] = self.rng.choice(ANY_PAGE)
            self.counts["corrupted"] += 1
        rows = [self.row[name] for name in names]
        self.model.step(names, ends, [table[row].tolist() for row in rows])
        self.unverified.append((self.guard.step(names, rows, ends), table))
        self.counts["in_flight_2"] += len(self.unverified) + len(self.unjudged) == 2
        self.counts["in_flight_3"] += len(self.unverified) + len(self.unjudged) == 3

    def verify(self) -> None:
        """The device gets to the oldest step that was made."""
        if self.unverified:
            delta, table = self.unverified.pop(0)
            before = table.copy()
            self.unjudged.append(self.verifier.check(delta, {"main": PoolInputs(table=table)}))
            if not self.model.enforce:
                assert (table == before).all()

    def judge(self) -> None:
        """The oldest verdicts come back, and the engine ends whom it is told to."""
        if not self.unjudged:
            self.verify()
        if not self.unjudged:
            return
        judgement = self.guard.judge(self.unjudged.pop(0).resolve())
        reported, withheld, aborts, evict = self.model.judge()
        assert sorted(str(violation.request) for violation in judgement.violations) == sorted(reported)
        assert judgement.withheld == withheld
        assert sorted(abort.request for abort in judgement.aborts) == sorted(aborts)
        assert {page for _, page in judgement.evict} == evict
        self.counts["judged"] += 1
        self.counts["flagged"] += bool(reported)
        self.counts["dependents"] += sum(violation.cause is not None for violation in judgement.violations)
        for abort in judgement.aborts:
            assert list(abort.foreign_pages.get("main", ())) == self.model.foreign(self.model.requests[abort.request])
        for abort in judgement.aborts:
            if self.chance(90):
                self.finish(abort.request)

    def abandon(self) -> None:
        """A step failed after its check: mostly the newest, sometimes one that others were launched behind."""
        if self.unjudged and self.chance(60):
            newest = not self.unverified and self.chance(50)
            pending = self.unjudged.pop(-1 if newest else self.rng.randrange(len(self.unjudged)))
            assert self.guard.abandon(pending.step) == self.model.abandon(pending.step)
            self.counts["abandoned"] += 1

    # -- driving --------------------------------------------------------------------------------------------------

    def perform(self, operation: str) -> None:
        """One operation by name, then the agreement of every page's state and of the number of violations."""
        method: Callable[..., None] = getattr(self, operation)
        if operation in OF_A_REQUEST:
            name = self.request()
            if name is None:
                return
            method(name)
        else:
            method()
        self.counts["operations"] += 1
        model, guard = self.model, self.guard
        for page in range(PAGES):
            assert guard.page_state(page).value == model.state(page), (operation, page)
        assert guard.health().counters["violations"] == model.violations, operation
        assert guard.health().quarantined_pages == len(model.quarantine)


OF_A_REQUEST = {
    "finish": 2, "allocate": 14, "publish": 10, "adopt": 9, "truncate": 2, "drop": 2, "preempt": 2, "resume": 3,
    "rewind": 2,
}  # fmt: skip
OF_THE_ENGINE = {
    "start": 6, "allocate_each": 5, "retire": 6, "unpublish": 2, "reset": 1, "step": 16, "verify": 8, "judge": 16,
    "abandon": 2,
}  # fmt: skip
WEIGHTS = OF_A_REQUEST | OF_THE_ENGINE
MUST_HAPPEN = (
    "page_refused", "allocated_each", "promised", "adopted", "hit_refused", "free_refused", "free_quarantined",
    "preempted", "reset", "corrupted", "in_flight_2", "in_flight_3", "judged", "flagged", "dependents", "abandoned",
)  # fmt: skip
