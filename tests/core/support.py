"""A rig for tests: a Guard, a Verifier and block tables, with the calls an engine would make around a step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvguard.config import GuardConfig
from kvguard.guard import Guard, Judgement
from kvguard.messages import StepDelta
from kvguard.pools import PoolSpec
from kvguard.recorder import PageHistory
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier
from kvguard.violation import Action, Kind, Proof, Violation

Table = npt.NDArray[np.int32]

MAIN = PoolSpec(name="main", num_pages=32, page_size=4)
TAG_ONLY = frozenset({Proof.TAG})


class Rig:
    """One engine by hand: `tables` int32 [rows, columns * split] per pool, filled with the null page.

    Allocations and adoptions go to the guard and into the block table; a test then breaks what it likes.
    """

    def __init__(
        self,
        *pools: PoolSpec,
        backend: str = "numpy",
        rows: int = 8,
        columns: int = 8,
        proofs: frozenset[Proof] | None = None,
        **settings: Any,
    ) -> None:
        self.pools = pools or (MAIN,)
        self.guard = Guard(self.pools, GuardConfig.load(**{"seed": 7, **settings}), proofs=proofs)
        self.verifier = Verifier(self.guard.setup, backend=backend)
        self.backend = backend
        self.tables: dict[str, Table] = {
            pool.name: np.zeros((rows, columns * pool.split), np.int32) for pool in self.pools
        }
        self.rows: dict[str, int] = {}
        self.columns: dict[tuple[str, str], int] = {}

    def _pool(self, name: str | None) -> PoolSpec:
        return self.pools[0] if name is None else next(pool for pool in self.pools if pool.name == name)

    def start(self, *requests: str) -> None:
        """The requests enter, each with the next row of the block table."""
        for request in requests:
            self.guard.start(request)
            self.rows[request] = len(self.rows)

    def write(self, request: str, column: int, page: int, pool: str | None = None) -> None:
        """One manager page into the request's row of the block table, as its kernel pages."""
        spec = self._pool(pool)
        entries = page * spec.split + np.arange(spec.split)
        self.tables[spec.name][self.rows[request], column * spec.split : (column + 1) * spec.split] = entries

    def _append(self, request: str, pages: list[int], pool: str | None) -> None:
        place = (request, self._pool(pool).name)
        for page in pages:
            column = self.columns.get(place, 0)
            self.write(request, column, page, pool)
            self.columns[place] = column + 1

    def allocate(self, request: str, *pages: int, pool: str | None = None) -> list[int]:
        """Pages for the next columns; those accepted go into the block table."""
        accepted = self.guard.allocate(request, pages, pool=pool)
        self._append(request, accepted, pool)
        return accepted

    def adopt(self, request: str, *hits: tuple[Hashable, int], pool: str | None = None) -> int:
        """Cached pages for the next columns; those accepted go into the block table."""
        accepted = self.guard.adopt(request, hits, pool=pool)
        self._append(request, [page for _, page in hits[:accepted]], pool)
        return accepted

    def full_length(self, request: str) -> int:
        """Tokens that fill every column of the request in the first pool."""
        return self.columns.get((request, self.pools[0].name), 0) * (self.pools[0].page_size or 0)

    def delta(self, *requests: str, ends: dict[str, int] | None = None) -> StepDelta:
        """The guard's message for a step of these requests; `ends`: where it is not `full_length`."""
        lengths = {request: self.full_length(request) for request in requests} | (ends or {})
        return self.guard.step(requests, [self.rows[request] for request in requests], list(lengths.values()))

    def check(self, delta: StepDelta, tables: dict[str, Table] | None = None) -> PendingVerdicts:
        """The device half of a step, on the rig's tables or others."""
        tables = self.tables if tables is None else tables
        return self.verifier.check(delta, {name: PoolInputs(table=table) for name, table in self._wrap(tables).items()})

    def _wrap(self, tables: dict[str, Table]) -> dict[str, Any]:
        if self.backend == "numpy":
            return dict(tables)
        import torch

        # The same memory: what the check writes is seen in the NumPy array.
        return {name: torch.from_numpy(table) for name, table in tables.items()}

    def launch(self, *requests: str, ends: dict[str, int] | None = None) -> PendingVerdicts:
        """A step up to the point where its verdicts are on the device."""
        return self.check(self.delta(*requests, ends=ends))

    def judge(self, pending: PendingVerdicts) -> Judgement:
        """The verdicts of a step, brought to the host and judged."""
        return self.guard.judge(pending.resolve())

    def run(self, *requests: str, ends: dict[str, int] | None = None) -> Judgement:
        """A whole step."""
        return self.judge(self.launch(*requests, ends=ends))

    def row(self, request: str, pool: str | None = None) -> list[int]:
        """The request's row of the block table."""
        row: list[int] = self.tables[self._pool(pool).name][self.rows[request]].tolist()
        return row


def promised(*, proofs: frozenset[Proof] | None = None) -> Rig:
    """The writer w published pages 1 and 2 before they are computed; b adopted both, c adopted page 1."""
    rig = Rig(proofs=proofs)
    rig.start("w", "b", "c", "d")
    rig.allocate("w", 1, 2, 3)
    for column in (0, 1):
        assert rig.guard.publish("w", column, f"k{column}")
    rig.adopt("b", ("k0", 1), ("k1", 2))
    rig.adopt("c", ("k0", 1))
    rig.allocate("b", 4)
    rig.allocate("c", 5)
    return rig


def flag(rig: Rig, request: str) -> None:
    """Break the request's own last page, which nobody shares."""
    rig.tables["main"][rig.rows[request], rig.columns[request, "main"] - 1] = 31


def kinds(judgement: Judgement) -> dict[str | None, Kind]:
    """What was found of each request."""
    return {violation.request: violation.kind for violation in judgement.violations}


def aborted(judgement: Judgement) -> set[str]:
    """The requests that the engine must end."""
    return {abort.request for abort in judgement.aborts}


def sample_violation(**fields: Any) -> Violation:
    """A violation with every field filled, for report tests."""
    values: dict[str, Any] = {
        "id": "kvg-1-1",
        "proof": Proof.TAG,
        "kind": Kind.STALE_PAGE,
        "action": Action.ABORTED,
        "pool": "main",
        "request": "alice",
        "step": 12,
        "row": 3,
        "column": 2,
        "page": 9,
        "expected_tag": 0x1111,
        "found_tag": 0x2222,
        "owner": "bob",
        "page_size": 16,
        "row_entries": (4, 5, 9),
        "promised_pages": (4, 6, 9),
        "history": PageHistory(pool="main", page=9, events=()),
        "cause": "kvg-1-0",
        "quarantined": True,
        "detail": "one more thing",
        "time_s": 1.5,
    }
    return Violation(**{**values, **fields})
