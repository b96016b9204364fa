"""A prefill worker in a process of its own: started once, it serves one run after another.

Both sides talk over one pipe, a message and its answer at a time. The process ends when the other side closes the pipe
or dies.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kvguard.fault_injection.engine.decode import PrefillDied
from kvguard.fault_injection.engine.kv_wire import Part
from kvguard.fault_injection.engine.prefill import PrefillEngine
from kvguard.fault_injection.engine.scheduler import Request

__all__ = ["PrefillProcess", "ServedRun"]

STOP_S = 5.0


class ServedRun(Protocol):
    """What a process serves: an engine, and what is to be told of it at the end."""

    engine: PrefillEngine

    def report(self) -> Any:
        """Anything that pickles; asked for once, at the end of the run."""


RunMaker = Callable[[Any], ServedRun]


@dataclass(frozen=True, kw_only=True)
class _Tick:
    submitted: tuple[tuple[Request, str], ...]
    aborted: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Begin:
    spec: Any


@dataclass(frozen=True, kw_only=True)
class _Failed:
    error: str


class PrefillProcess:
    """The decode worker's handle. One thread uses it; a run is `begin`, any number of `tick`, `end`."""

    def __init__(self, make_run: RunMaker) -> None:
        """Start the process. `make_run`: a function of a module, called there with what `begin` is given."""
        # Fork is off the table: PyTorch's threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make_run), daemon=True, name="kvguard-prefill")
        self._process.start()
        # The only other end is the process's own: it is closed when that dies, and reading here then fails.
        there.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or -1

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def begin(self, spec: Any) -> None:
        """A new run, with a fresh engine; one that was not ended is dropped. Raises PrefillDied, or RuntimeError."""
        self._ask(_Begin(spec=spec))

    def tick(
        self, submitted: list[tuple[Request, str]], aborted: list[str]
    ) -> tuple[list[Part], list[tuple[str, str]]]:
        """See `PrefillPort`. RuntimeError if the engine there fell over."""
        parts, ended = self._ask(_Tick(submitted=tuple(submitted), aborted=tuple(aborted)))
        return parts, ended

    def end(self) -> Any:
        """What the run has to tell. Raises PrefillDied, or RuntimeError."""
        return self._ask("end")

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, message: Any) -> Any:
        try:
            self._connection.send(message)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise PrefillDied("the prefill worker died") from None
        if isinstance(answer, _Failed):
            raise RuntimeError(f"the prefill worker failed: {answer.error}")
        return answer


def _serve(connection: Connection, make_run: RunMaker) -> None:
    run: ServedRun | None = None
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            return
        answer: Any = None
        try:
            if isinstance(message, _Begin):
                run = make_run(message.spec)
            elif run is None:
                raise RuntimeError("no run has begun")
            elif isinstance(message, _Tick):
                answer = _tick(run.engine, message)
            else:
                answer = run.report()
                run = None
        except Exception as error:
            answer = _Failed(error=f"{type(error).__name__}: {error}")
        try:
            connection.send(answer)
        except OSError:
            return


def _tick(engine: PrefillEngine, message: _Tick) -> tuple[list[Part], list[tuple[str, str]]]:
    for name in message.aborted:
        engine.abort(name)
    for request, ticket in message.submitted:
        engine.prefill(request, ticket)
    parts = engine.tick()
    ended = [
        (name, output.error)
        for name, output in engine.outputs.items()
        if output.error is not None and output.ended_step == engine.step_index and name not in message.aborted
    ]
    return parts, ended
