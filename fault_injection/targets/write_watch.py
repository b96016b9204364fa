"""Misleads a write at the first forward that suits, in the embedded engine."""

from __future__ import annotations

from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.faults.write_fault import PATIENCE_STEPS, WriteFault
from kvguard.fault_injection.runs import Run
from kvguard.fault_injection.targets.embedded import EmbeddedTarget


class WriteWatch:
    """Hooks of an engine: the fault goes in right before a forward, and is live in that forward."""

    def __init__(self, fault: type[WriteFault], seed: int, run: Run, first_step: int, recites: bool) -> None:
        self._fault, self._seed, self._run, self._first_step = fault, seed, run, first_step
        self._recites = recites
        self._untested = False

    def _made(self, engine: Engine) -> WriteFault:
        return self._fault(
            seed=self._seed,
            target=EmbeddedTarget(engine, recites=self._recites),
            patient=engine.step_index < self._first_step + PATIENCE_STEPS,
        )

    def _try(self, engine: Engine) -> None:
        run = self._run
        run.injection = self._made(engine).inject()
        if run.injection is not None:
            run.injected_step = engine.step_index

    def at_schedule(self, engine: Engine) -> None:
        run = self._run
        if run.injection is not None:
            return
        self._made(engine).prepare()
        if not self._fault.before_forward and engine.step_index >= self._first_step:
            self._try(engine)
            self._untested = run.injection is not None

    def at_launch(self, engine: Engine, batch: list[Sequence]) -> None:
        run = self._run
        if self._untested and run.injection is not None:
            fault, self._untested = self._made(engine), False
            if not fault.took(run.injection):
                fault.undo(run.injection)
                run.injection, run.injected_step = None, -1
        if run.injection is None and self._fault.before_forward and engine.step_index >= self._first_step:
            self._try(engine)
        if run.injection is not None and run.live_step < 0:
            if run.injection.live_when(frozenset(sequence.id for sequence in batch)):
                run.live_step = engine.step_index
                run.affected = run.injection.affected()
