"""Live SGLang engines that are never used up: each run goes into a fork of one, and starts where the engine started.

SGLang takes some fifteen seconds to import and one to start. A worker imports it once; a *template* is a fork of the
worker in which a scheduler is built, with or without the guard; a run is a fork of the template, gone when it is over.
So every run begins in the very same state, and nothing of a run with a fault is left for the next. On a CPU with one
thread PyTorch survives a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from kvguard.fault_injection.targets.sglang_engine import SglangEngine, SglangOptions, import_sglang

TEMPLATES_MAX = 5
"""Live templates of a process; each holds a copy of the model and of the pool."""
RUN_SECONDS_MAX = 240
CLOSE_SECONDS_MAX = 5
_PR_SET_PDEATHSIG = 1


class Template:
    """A process with a built scheduler, in which nothing has run yet. `guard`: KVGUARD_* variables; None: no guard."""

    def __init__(self, options: SglangOptions, guard: dict[str, str] | None) -> None:
        import_sglang()
        self._here, there = Pipe()
        self._pid = _fork(lambda: _be_template(options, guard, there))
        there.close()
        started = self._answer()
        if started != "ready":
            self.close()
            raise RuntimeError(f"SGLang did not start: {started}")

    def run(self, call: Callable[[SglangEngine], Any]) -> tuple[Any, str]:
        """`call(engine)` in a fork: what it returned, and "", or None and why there is nothing. Both are pickled."""
        try:
            self._here.send_bytes(pickle.dumps(call))
            answer: tuple[Any, str] | str = self._answer()
        except OSError as error:
            answer = f"the template's process is gone: {error}"
        return (None, answer) if isinstance(answer, str) else answer

    def _answer(self) -> Any:
        try:
            return pickle.loads(self._here.recv_bytes())
        except EOFError:
            return "the template's process died"

    def close(self) -> None:
        """End the process: it is asked first, so that it can take its semaphores with it."""
        with contextlib.suppress(OSError):
            self._here.send_bytes(pickle.dumps(None))
            self._here.poll(CLOSE_SECONDS_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._here.close()


def _fork(main: Callable[[], None]) -> int:
    """A child that runs `main` and nothing of this process's ends; it dies with its parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() == parent:
            main()
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _be_template(options: SglangOptions, guard: dict[str, str] | None, connection: Connection) -> None:
    for name in [name for name in os.environ if name.startswith("KVGUARD_") and not name.startswith("KVGUARD_TEST_")]:
        del os.environ[name]
    os.environ.update(guard or {})
    import torch

    torch.set_num_threads(1)
    try:
        engine = SglangEngine(options, guarded=guard is not None)
    except BaseException as error:
        traceback.print_exc()
        connection.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
        return
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        call = pickle.loads(connection.recv_bytes())
        if call is None:
            # Nothing else would: the process leaves by `_exit`. It has no public name.
            run_finalizers: Any = vars(multiprocessing.util)["_run_finalizers"]
            run_finalizers()
            return
        pid = _fork(lambda call=call: _run(call, engine, connection))  # type: ignore[misc]
        _, status = os.waitpid(pid, 0)
        if status:
            connection.send_bytes(pickle.dumps((None, _what_ended(status))))


def _run(call: Callable[[SglangEngine], Any], engine: SglangEngine, connection: Connection) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(RUN_SECONDS_MAX)
    connection.send_bytes(pickle.dumps((call(engine), "")))


def _what_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"the engine's process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"the engine's process ended with status {os.WEXITSTATUS(status)}; see the engine's log"


class Templates:
    """The templates of this process, one for each set-up and guard; the one that was idle longest goes first."""

    def __init__(self) -> None:
        self._live: dict[str, Template] = {}

    def get(self, options: SglangOptions, guard: dict[str, str] | None) -> Template:
        """A template that is ready. RuntimeError if SGLang does not start."""
        name = repr((options, sorted(guard.items()) if guard is not None else None))
        template = self._live.pop(name, None)
        while template is None and len(self._live) >= TEMPLATES_MAX:
            self._live.pop(next(iter(self._live))).close()
        self._live[name] = template = template or Template(options, guard)
        return template

    def close(self) -> None:
        """End them all."""
        while self._live:
            self._live.popitem()[1].close()


templates = Templates()
# Runs at the end of a worker too, which leaves without atexit.
multiprocessing.util.Finalize(None, templates.close, exitpriority=10)
