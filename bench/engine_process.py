"""An engine in a process of its own that takes commands: one JSON object a line each way. Both ends of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO


class EngineProcess:
    """The parent's end. `facts`: the process's first answer, which it gives once its engine is up."""

    def __init__(self, command: Sequence[str], *, guarded: bool, environment: Mapping[str, str]) -> None:
        """`environment`: more variables. kvguard's own are not passed on; a guarded engine is at tags by default."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("KVGUARD_")}
        variables |= {name: os.environ[name] for name in ("KVGUARD_TEST_CACHE",) if name in os.environ}
        variables |= environment
        if guarded:
            variables.setdefault("KVGUARD_LEVEL", "tags")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=variables,
        )
        self.facts = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine has ended; VERBOSE=1 shows what it printed")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer to a command; without one what the process counts."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


def require_guard(is_guarded: bool, wanted: bool) -> None:
    """SystemExit where an engine is not what the pair needs: its figures would say nothing."""
    if is_guarded != wanted:
        raise SystemExit("the engine that should be guarded is not, or the other way round")


def own_channel() -> TextIO:
    """In the process: standard output is for answers alone; what the engine prints goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def answer_commands(
    channel: TextIO, run: Callable[..., dict[str, Any]], count: Callable[[], dict[str, Any]]
) -> None:
    """In the process: say what is counted, then answer each command of standard input, an empty one with the counts."""
    print(json.dumps(count()), file=channel)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run(**command) if command else count()), file=channel)
