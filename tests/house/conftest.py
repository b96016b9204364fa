"""What the house tests share: the repository's root, a clean Python and a clean make."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs code in a fresh Python outside the repository, with `path` first on sys.path, and gives what it printed."""

    def run(code: str, path: Path = ROOT, cwd: Path | None = None) -> str:
        prelude = f"import sys; sys.path.insert(0, {str(path)!r})\n"
        command = [sys.executable, "-I", "-c", prelude + code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd or "/", check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def make_env() -> ModuleType:
    """tools/make_env.py as a fresh module; it is a script, not part of a package."""
    spec = importlib.util.spec_from_file_location("make_env_under_test", ROOT / "tools" / "make_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs make in the repository without the flags of a make that may have started these tests."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PYTHON", "ARGS", "PYTEST_ARGS")
        environment = {key: value for key, value in os.environ.items() if key not in given}
        command = ["make", "--no-print-directory", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No KVGUARD_* variables, whatever the person who runs the tests has set."""
    for name in list(os.environ):
        if name.upper().startswith("KVGUARD_"):
            monkeypatch.delenv(name)
