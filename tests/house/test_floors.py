"""The four floors: dependencies point one way, kernels <- core <- adapters <- fault_injection; and files stay short."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

FLOORS = ("kernels", "kvguard", "adapters", "fault_injection")
FLOORS_ABOVE = {
    "kernels": (),  # see forbidden(): they may import nothing of kvguard but themselves
    "kvguard": ("kvguard.adapters", "kvguard.fault_injection"),
    "adapters": ("kvguard.fault_injection",),
    "fault_injection": (),
}
ENGINES = ("vllm", "sglang")
KERNEL_PACKAGES = ("numpy", "torch", "triton", "cupy")
LINES_MAX = 450  # the habit is 400; this leaves room for a file that is being taken apart


def sources(root: Path, *folders: str) -> Iterator[Path]:
    """The Python files under these folders, each once: links are not followed."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(root / folder)):
                yield path


def imports_of(source: str) -> set[str]:
    """Every module that a source text imports, at any depth; a relative import starts with a dot."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.update(f"kvguard.{alias.name}" for alias in node.names) if module == "kvguard" else found.add(module)
    return found


def within(module: str, *packages: str) -> bool:
    """True where the module is one of the packages or lies in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def forbidden(path: str, module: str) -> bool:
    """True where the file at this path, relative to the repository, may not import the module."""
    floor, *below = PurePosixPath(path).parts
    if module.startswith(".") or within(module, *FLOORS_ABOVE[floor]):
        return True
    if floor == "kernels":
        ours = within(module, "kvguard.kernels")
        return not ours and not within(module, *sys.stdlib_module_names, *KERNEL_PACKAGES)
    if floor == "kvguard":
        return within(module, *ENGINES)
    if floor == "adapters":
        return within(module, *(engine for engine in ENGINES if engine != below[0]))
    return False


@pytest.mark.parametrize("floor", FLOORS)
def test_dependencies_point_one_way(floor: str, root: Path) -> None:
    """No file imports a floor above its own, and only an engine's own adapter imports the engine."""
    found = [
        f"{path.relative_to(root)} imports {module}"
        for path in sources(root, floor)
        for module in imports_of(path.read_text(encoding="utf-8"))
        if forbidden(path.relative_to(root).as_posix(), module)
    ]
    assert not found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/mixing.py", "import kvguard.tags"),
        ("kernels/mixing.py", "from kvguard import tags"),
        ("kernels/mixing.py", "import kvguard.kernels.backend, kvguard.kernelsmith"),
        ("kernels/mixing.py", "import pydantic"),
        ("kernels/mixing.py", "from . import backend"),
        ("kvguard/guard.py", "from kvguard import adapters"),
        ("kvguard/guard.py", "def f():\n    from kvguard.fault_injection.engine import Engine"),
        ("kvguard/guard.py", "import vllm.v1"),
        ("adapters/generic.py", "import kvguard.fault_injection"),
        ("adapters/generic.py", "import sglang"),
        ("adapters/vllm/plugin.py", "if TYPE_CHECKING:\n    import sglang.srt"),
    ],
)
def test_a_forbidden_import_is_seen(path: str, source: str) -> None:
    """The rule itself notices each kind of import that points the wrong way."""
    assert any(forbidden(path, module) for module in imports_of(source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/mixing.py", "import numpy as np\nimport dataclasses\nimport triton.language as tl"),
        ("kernels/mixing.py", "from kvguard.kernels.mixing import mix\nfrom kvguard import kernels"),
        ("kvguard/guard.py", "import torch\nfrom kvguard.kernels import backend\nfrom kvguard import tags"),
        ("adapters/vllm/plugin.py", "from vllm.v1 import engine\nfrom kvguard.guard import Guard"),
        ("fault_injection/trial.py", "from kvguard.adapters import generic\nfrom kvguard import guard"),
    ],
)
def test_an_allowed_import_is_let_be(path: str, source: str) -> None:
    """The rule lets each floor import what lies below it."""
    assert not any(forbidden(path, module) for module in imports_of(source))


def test_the_rule_sees_each_floor(root: Path) -> None:
    """Each floor with files has them looked at, under their own name and not through the links."""
    seen = [path.relative_to(root).as_posix() for path in sources(root, *FLOORS)]
    assert "kvguard/config.py" in seen
    assert not [path for path in seen if path.startswith(("kvguard/kernels/", "kvguard/adapters/"))]
    assert len(seen) == len(set(seen))


def test_files_are_short(root: Path) -> None:
    """No Python file of ours is longer than one sitting."""
    lengths = {
        path.relative_to(root).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources(root, *FLOORS, "tests", "bench", "tools")
    }
    assert not {path: lines for path, lines in lengths.items() if lines > LINES_MAX}
