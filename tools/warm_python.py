"""A Python that has imported what tests of this project need, and forks for each run of them.

Its owner speaks to it through `WarmPython`: one JSON object a line each way. Nothing of the project is imported before
the fork, so that a run sees the files as they are then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = (
    "pytest", "hypothesis", "numpy", "torch", "structlog", "pydantic_settings", "typer", "rich.console", "jinja2",
)  # fmt: skip
"""Not Triton: whether it interprets is decided when it is imported."""


class WarmPython:
    """The process that forks. `run` may be called from one thread at a time."""

    def __init__(self, folder: Path, environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED) -> None:
        """`preloaded`: names of modules, none of which may import anything of the project."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *preloaded],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
        """`python -m pytest` with these arguments. subprocess.TimeoutExpired after `timeout` seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": list(arguments), "timeout": timeout}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        answer = json.loads(line)
        if answer["code"] is None:
            raise subprocess.TimeoutExpired("pytest", timeout)
        return subprocess.CompletedProcess(["pytest", *arguments], answer["code"], answer["output"], "")

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def _forked(arguments: list[str], timeout: float) -> tuple[int | None, str]:
    """Exit code (None: it took too long) and output of a run in a process of its own."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _be_pytest(arguments, output.fileno())
        code = _waited_for(child, timeout)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _be_pytest(arguments: list[str], output: int) -> None:
    """Never returns."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(0)
        sys.argv = ["pytest", *arguments]
        import pytest

        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _waited_for(child: int, timeout: float) -> int | None:
    import signal
    import time

    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    """Answer until standard input ends."""
    import importlib

    # Where this file lies is no place to import from.
    del sys.path[0]
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "kvguard" in sys.modules:
        raise SystemExit("the project was imported: its runs would not see their own files")
    for line in sys.stdin:
        command = json.loads(line)
        code, output = _forked(command["arguments"], command["timeout"])
        channel.write(json.dumps({"code": code, "output": output}) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
