"""Schedulers in processes of their own, forked once SGLang is imported: one process can hold one scheduler.

    @on(page_size=16, overlap=True)
    def test_something(engine): ...

The body runs in a child that keeps one engine for these settings until the tests of the module are done, and is
flushed before each test. What fails there fails here, with the child's own traceback.
"""

from __future__ import annotations

import inspect
import os
import pickle
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.sglang.engine import Engine, checkpoint

ENGINE_PARAMETERS = ("page_size", "overlap")

_bodies: dict[tuple[str, str], Callable[..., Any]] = {}
_children: dict[str, Child] = {}


class Child:
    """A process that runs functions of this one, one after another, and may keep things between them."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        """`environment`: KVGUARD_* and other variables; no other KVGUARD_* variable is passed on."""
        # Once, for all children.
        import sglang.srt.managers.scheduler
        import sglang.srt.model_executor.model_runner
        import sglang.srt.models.registry  # noqa: F401 -- takes seconds: it imports every model there is

        checkpoint()
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(ours[1])
            os.close(theirs[0])
            for child in _children.values():
                child.hang_up()
            for name in [name for name in os.environ if name.startswith("KVGUARD_") and "_TEST_" not in name]:
                del os.environ[name]
            os.environ.update(environment or {})
            self._serve(ours[0], theirs[1])
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]

    @staticmethod
    def _serve(commands: int, answers: int) -> None:
        kept: dict[str, Any] = {}
        try:
            while command := _read(commands):
                function, args, kwargs = command
                try:
                    answer = True, function(kept, *args, **kwargs)
                except BaseException as error:
                    answer = False, (f"{type(error).__name__}: {error}", traceback.format_exc())
                _write(answers, answer)
        finally:
            os._exit(0)

    def call(self, function: Callable[..., Any], *args: Any, timeout: int = 1200, **kwargs: Any) -> Any:
        """function(kept, *args, **kwargs) in the child, whose dictionary `kept` stays; AssertionError if it raises."""
        _write(self._to, (function, args, kwargs))
        ready, _, _ = select.select([self._from], [], [], timeout)
        if not ready:
            raise AssertionError(f"the child does not answer within {timeout} s")
        answer = _read(self._from)
        if answer is None:
            raise AssertionError("the child has died")
        good, result = answer
        if not good:
            raise AssertionError(f"{result[0]}\n\nin the child:\n{result[1]}")
        return result

    def hang_up(self) -> None:
        """Close this end."""
        os.close(self._to)
        os.close(self._from)

    def stop(self) -> None:
        """End the process."""
        self.hang_up()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _write(end: int, thing: Any) -> None:
    data = pickle.dumps(thing)
    data = struct.pack("<Q", len(data)) + data
    while data:
        data = data[os.write(end, data) :]


def _read(end: int) -> Any:
    """What the other side wrote; None once it is gone."""
    size = _exactly(end, 8)
    return pickle.loads(_exactly(end, struct.unpack("<Q", size)[0])) if size else None


def _exactly(end: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(end, size - len(data))
        if not part:
            return b""
        data += part
    return data


def _run_body(kept: dict[str, Any], key: tuple[str, str], settings: dict[str, Any], kwargs: dict[str, Any]) -> None:
    engine = kept.get("engine")
    if engine is None:
        engine = kept["engine"] = Engine(**settings)
    kept["engine"] = None  # one that a test has broken is not used again
    if engine.guard is not None and engine.guard.armed:
        engine.flush()
    _bodies[key](engine, **kwargs)
    kept["engine"] = engine


def on(*, environment: dict[str, str] | None = None, alone: bool = False, **settings: Any) -> Callable[..., Any]:
    """Run a test on an engine with these settings; `alone`: on one that no other test gets. See the module.

    What a test is parametrized with under the names of ENGINE_PARAMETERS is a setting too.
    """
    given = {"KVGUARD_LEVEL": "tags"} if environment is None else environment

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        key = body.__module__, body.__qualname__
        _bodies[key] = body

        def test(**kwargs: Any) -> None:
            chosen = settings | {name: kwargs[name] for name in ENGINE_PARAMETERS if name in kwargs}
            place = f"{sorted(given.items())} {sorted(chosen.items())}" + (f" {key} {kwargs}" if alone else "")
            child = _children.get(place)
            if child is None:
                child = _children[place] = Child(given)
            try:
                child.call(_run_body, key, chosen, kwargs)
            except AssertionError:
                # Whatever state it is in: the next test gets a fresh one.
                _children.pop(place).stop()
                raise
            if alone:
                _children.pop(place).stop()

        # What pytest looks at to find the parameters.
        parameters = list(inspect.signature(body).parameters.values())[1:]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        return test

    return decorate


def stop_all() -> None:
    """End every child of this module."""
    while _children:
        _children.popitem()[1].stop()
