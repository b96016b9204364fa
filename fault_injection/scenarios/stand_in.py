"""A stand-in for a model, beside the unmodified bookkeeping of a real engine's release.

Its forward computes histories instead of tensors: the KV of a token is a mark of everything that it depends on, and the
token that comes out depends on every mark that was read. Wrong KV is seen, and so is what it does to the answer. The
guard is told what the release's code does, and checks the table that the forward reads.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.content_key import ContentDomain
from kvguard.fault_injection.runs import PROOFS, guard_trouble
from kvguard.fault_injection.scenarios.scenario import ALL, ReplayRun
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs

__all__ = ["PAGE", "PAGES", "VOCABULARY", "Asked", "StandIn", "in_turn", "prompt_of"]

PAGE, PAGES, ROWS, COLUMNS = 16, 64, 8, 16
"""Tokens in a page, pages of the pool, rows and columns of the block table."""
VOCABULARY = 1000


def mark_of(*parts: object) -> int:
    """A number that stands for all of this, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def prompt_of(seed: int, tokens: int = 60) -> list[int]:
    """Random token ids, the same for the same seed."""
    rng = random.Random(f"stand-in-{seed}")
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


@dataclass(eq=False)
class Asked:
    """A request.

    weights, tenant  what it is really computed with, and whose it is: the contents of the adapter, not its name
    lora     (name, id, path) as the engine is told; salt: what the engine is told of the tenant
    lora_revision, weights_epoch  how often the adapter under that name, and the model's weights, were replaced
    request  the engine's own object for it
    """

    name: str
    prompt: list[int]
    new: int
    salt: str | None = None
    lora: tuple[str, int, str] | None = None
    lora_revision: int = 0
    weights_epoch: int = 0
    weights: str = "base"
    tenant: str | None = None
    tokens: list[int] = field(default_factory=list)
    row: int = -1
    computed: int = 0
    request: Any = None

    @property
    def domain(self) -> ContentDomain:
        """What the guard is told of it."""
        return ContentDomain(
            model="stand-in",
            weights_epoch=self.weights_epoch,
            lora=None if self.lora is None else f"{self.lora[0]} {self.lora[1]} {self.lora[2]}",
            lora_revision=self.lora_revision,
            tenant=self.tenant,
        )

    def history(self) -> list[int]:
        """The mark of each of its tokens, as it has to be."""
        mark, marks = mark_of(self.weights, self.tenant), []
        for token in self.tokens:
            mark = mark_of(mark, token)
            marks.append(mark)
        return marks


def _inputs(table: Any, backend: str) -> PoolInputs:
    """The step's table, a NumPy array, for a guard of that backend: the same memory."""
    if backend == "numpy":
        return PoolInputs(table=table)
    import torch

    return PoolInputs(table=torch.from_numpy(table))


class StandIn:
    """One run. What is below the line is the release's to say.

    at_launch  called with the run and the requests of a step when its table is complete, before the guard's check
    """

    def __init__(self, *, proofs: str | None, backend: str, seed: int) -> None:
        self.run = ReplayRun()
        self.guard: PagedGuard | None = None
        if proofs is not None:
            pool = PoolSpec(num_pages=PAGES, page_size=PAGE, null_page=0)
            settings = GuardConfig.default(seed=seed, level="keys")
            chosen = PROOFS["keys" if proofs == ALL else proofs]
            self.guard = PagedGuard([pool], config=settings, backend=backend, proofs=chosen)
        self.table = np.zeros((ROWS, COLUMNS), np.int32)
        self.marks: dict[int, int] = {}
        self.live: list[Asked] = []
        self.at_launch: list[Callable[[StandIn, list[Asked]], None]] = []
        self._backend = backend
        self._free_rows = list(range(ROWS - 1, -1, -1))

    def pages_of(self, asked: Asked) -> list[int]:
        """The request's pages, by column."""
        raise NotImplementedError

    def _admit(self, asked: Asked) -> int:
        """Pages for the prompt; how many of its tokens need not be computed."""
        raise NotImplementedError

    def _grow(self, asked: Asked) -> None:
        """A page for one more token, if that needs one."""
        raise NotImplementedError

    def _give_back(self, asked: Asked) -> list[int]:
        """The request's pages are the release's again; those that hold nothing that anybody can find."""
        raise NotImplementedError

    def _computed(self, asked: Asked) -> None:
        """The request's last step is verified: all of its tokens have their KV."""

    # -- the same for every release --------------------------------------------------------------------------------

    def submit(self, asked: Asked) -> None:
        """A request enters."""
        asked.tokens, asked.row = list(asked.prompt), self._free_rows.pop()
        self.run.outputs[asked.name], self.run.emitted[asked.name] = ((), None), ()
        self.run.ended_step[asked.name] = -1
        if self.guard is not None:
            self.guard.start(asked.name)
            self.guard.identify(asked.name, asked.domain, asked.tokens)
        asked.computed = self._admit(asked)
        self.live.append(asked)

    def step(self) -> None:
        """One forward for everybody, and what its tokens mean."""
        self.run.counts.steps += 1
        step, batch = self.run.counts.steps, list(self.live)
        for asked in batch:
            if len(asked.tokens) > len(asked.prompt):
                self._grow(asked)
            pages = self.pages_of(asked)
            self.table[asked.row, : len(pages)] = pages
        # A token is written where the request's own row says; hooks change what is read.
        written = self.table.copy()
        for hook in self.at_launch:
            hook(self, batch)
        # Rows are gathered for the step, as a runner gathers them: what the guard neutralises is this step's only.
        table, pending = self.table.copy(), None
        if self.guard is not None:
            pending = self.guard.before_forward(
                [asked.name for asked in batch],
                [asked.row for asked in batch],
                [len(asked.tokens) for asked in batch],
                _inputs(table, self._backend),
                tokens_start=[asked.computed for asked in batch],
            )
        said = {asked.name: self._forward(asked, table, written, step) for asked in batch}
        withheld: frozenset[str] = frozenset()
        if self.guard is not None:
            judgement = self.guard.after_forward(pending)
            withheld = judgement.withheld
            for abort in judgement.aborts:
                self._end(next(asked for asked in batch if asked.name == abort.request), str(abort.violation.message))
            if self.run.detected_step < 0 and self.guard.violations:
                self.run.detected_step = step
        for asked in batch:
            if asked.name not in withheld:
                self._emit(asked, said[asked.name], step)

    def _forward(self, asked: Asked, table: Any, written: Any, step: int) -> int:
        """Write what is not computed yet, read everything, say a token."""
        own = asked.history()

        def slot(rows: Any, position: int) -> int:
            return int(rows[asked.row, position // PAGE]) * PAGE + position % PAGE

        for position in range(asked.computed, len(own)):
            self.marks[slot(written, position)] = own[position]
        read = [self.marks.get(slot(table, position), 0) for position in range(len(own))]
        if read != own:
            self.run.misread.setdefault(asked.name, []).append(step)
            for position in range(asked.computed, len(own)):
                self.marks[slot(written, position)] = mark_of("computed from", read)
        return mark_of(*read) % VOCABULARY

    def _emit(self, asked: Asked, token: int, step: int) -> None:
        asked.computed = len(asked.tokens)
        self._computed(asked)
        asked.tokens.append(token)
        if self.guard is not None:
            self.guard.add_tokens(asked.name, [token])
        run = self.run
        run.outputs[asked.name] = ((*run.outputs[asked.name][0], token), None)
        run.emitted[asked.name] += (step,)
        if len(asked.tokens) - len(asked.prompt) >= asked.new:
            self._end(asked, None)

    def _end(self, asked: Asked, error: str | None) -> None:
        if self.guard is not None:
            self.guard.finish(asked.name)
        vacant = self._give_back(asked)
        self.live.remove(asked)
        self._free_rows.append(asked.row)
        self.run.outputs[asked.name] = (self.run.outputs[asked.name][0], error)
        self.run.ended_step[asked.name] = self.run.counts.steps
        if self.guard is not None:
            self.guard.retire(vacant)

    def go(self, steps: Sequence[Sequence[Asked]]) -> ReplayRun:
        """Submit the requests of each step before it; then until all have ended."""
        for arriving in steps:
            for asked in arriving:
                self.submit(asked)
            if self.live:
                self.step()
        while self.live:
            self.step()
        if self.guard is not None:
            self.run.violations = self.guard.violations
            self.run.guard_trouble = guard_trouble(self.guard.health())
        return self.run


def in_turn(first: Asked, second: Asked) -> list[list[Asked]]:
    """The second arrives when the first has ended."""
    return [[first], *([] for _ in range(first.new + 1)), [second]]
