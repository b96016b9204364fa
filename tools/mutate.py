"""Takes one check out of the guard at a time and demands that a test goes red: `python tools/mutate.py [NAME ...]`.

Each mutation of tools/mutations.py is applied to a copy of the source tree in a temporary folder, where the named tests
are run. A mutation whose text no longer matches, a run that cannot collect its tests and a test that is red without
any mutation are errors, not passes.

tools/mutation_hints.json says which test went red last time. That one is run first, and where it goes red again the
others need not be; where it does not, they are all run. It saves time and decides nothing. `--remember` brings it up to
date with what this run saw.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run as a script, only tools/ is there

from tools.mutation import Mutation  # noqa: E402
from tools.mutations import MUTATIONS  # noqa: E402
from tools.warm_python import PRELOADED, WarmPython  # noqa: E402

HINTS = ROOT / "tools" / "mutation_hints.json"
COPIED = ("kvguard", "kernels", "adapters", "fault_injection", "tests", "docs", "pyproject.toml")
WORKERS = 2
TIMEOUT_S = 600
GREEN, RED = 0, 1


class MutationError(RuntimeError):
    """The mutation says nothing about the tests: it does not match, or its tests could not be run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one mutation. `red`: the test that went red, None if it survived; `error`: why it says nothing."""

    name: str
    red: str | None = None
    error: str | None = None


@contextmanager
def source_tree() -> Iterator[Path]:
    """A copy of the source tree, links kept as links, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvguard-mutate-") as folder:
        tree = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(ROOT / name, tree / name)
        yield tree


def run_python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in the copy, which is first on its path."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S,
    )  # fmt: skip


def _environment(tree: Path) -> dict[str, str]:
    """No bytecode is written, for a mutation may keep a file's size and second."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVGUARD_", "PYTEST_"))}
    return environment | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def compile_tree(tree: Path) -> None:
    """Bytecode for the copy that is checked against what is in the source, not against its time."""
    folders = [str(tree / name) for name in COPIED if (tree / name).is_dir()]
    run_python(tree, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *folders)


def run_tests(
    tree: Path, tests: Sequence[str], warm: WarmPython | None = None
) -> subprocess.CompletedProcess[str]:
    """The quick tests of these files, up to the first that is red; in a fork of `warm`, if there is one."""
    options = (
        "-x", "-q", "-rf", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not soak",
        "--hypothesis-profile=mutation",
    )  # fmt: skip
    if warm is not None:
        return warm.run([*options, *tests], timeout=TIMEOUT_S)
    return run_python(tree, "-m", "pytest", *options, *tests)


def check_tree(tree: Path, tests: Sequence[str]) -> None:
    """The copy is what runs, and it is green as it is. MutationError otherwise."""
    code = "import kvguard, kvguard.kernels.mixing as k, kvguard.adapters.generic as a; print(k.__file__, a.__file__)"
    found = run_python(tree, "-c", code)
    inside = [Path(path).resolve().is_relative_to(tree.resolve()) for path in found.stdout.split()]
    if found.returncode or not all(inside):
        raise MutationError(f"the tests would not run on the copy: {found.stdout}{found.stderr}")
    if tests:
        require_green(tree, tests)


def require_green(tree: Path, tests: Sequence[str], warm: WarmPython | None = None) -> None:
    """Without a mutation these tests pass. MutationError otherwise."""
    done = run_tests(tree, tests, warm)
    if done.returncode != GREEN:
        raise MutationError(f"the copy is not green without a mutation:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def read_hints() -> dict[str, str]:
    """Mutation -> the test that it turned red when somebody last remembered."""
    return dict(json.loads(HINTS.read_text(encoding="utf-8"))) if HINTS.exists() else {}


def usable_hints(tree: Path, mutations: Sequence[Mutation]) -> dict[str, str]:
    """Those hints whose tests are there still, among the ones that their mutation names."""
    remembered = read_hints()
    hints = {
        mutation.name: remembered[mutation.name]
        for mutation in mutations
        if mutation.name in remembered
        and any(remembered[mutation.name].startswith(test.split("[")[0]) for test in mutation.tests)
    }
    if not hints:
        return {}
    options = ("-q", "--no-header", "-p", "no:cacheprovider", "--collect-only")
    files = sorted({hint.split("::")[0] for hint in hints.values()})
    found = set(run_python(tree, "-m", "pytest", *options, *files).stdout.splitlines())
    return {name: hint for name, hint in hints.items() if hint in found}


def mutated_text(source: str, mutation: Mutation) -> str:
    """The file's text with the mutation in it. MutationError unless `old` is there once and `new` is another text."""
    count = source.count(mutation.old)
    if count != 1 or mutation.old == mutation.new:
        raise MutationError(f"{mutation.path}: its text occurs {count} times, not once: bring it up to date")
    text = source.replace(mutation.old, mutation.new)
    if mutation.path.endswith(".py"):
        compile(text, mutation.path, "exec")
    return text


class Extension(NamedTuple):
    """A C extension: what it is built of, and where."""

    sources: tuple[str, ...]
    built: Path


def extension_of(tree: Path, path: str) -> Extension | None:
    """The extension that a C source or header belongs to; None for a source in Python. ValueError: none."""
    if path.endswith(".py"):
        return None
    settings = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
    for module in settings["tool"]["setuptools"]["ext-modules"]:
        if path in (*module["sources"], *module.get("depends", ())):
            sources = tuple(str(tree / source) for source in module["sources"])
            return Extension(sources, tree / f"{module['name'].replace('.', '/')}.abi3.so")
    raise ValueError(f"pyproject.toml builds no extension from {path}")


def build_extension(extension: Extension) -> None:
    """In the place of the one that is there, which another process may have loaded. MutationError where it fails."""
    command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030B0000"]
    command += [f"-I{sysconfig.get_paths()['include']}", *extension.sources, "-o", str(extension.built)]
    extension.built.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MutationError(f"the mutated C does not compile: {done.stderr[-500:]}")


def try_mutation(
    tree: Path,
    mutation: Mutation,
    warm: WarmPython | None = None,
    hint: str | None = None,
    green: set[str] | None = None,
) -> Outcome:
    """Apply, test, restore.

    `hint`: a test to be run before the others. `green`: tests that are known to pass without a mutation; a test that
    went red and is not among them is run once more without it.
    """
    green = set() if green is None else green
    path, extension = tree / mutation.path, extension_of(tree, mutation.path)
    source = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutated_text(source, mutation), encoding="utf-8")
        if extension is not None:
            build_extension(extension)
        done = run_tests(tree, [hint] if hint else mutation.tests, warm)
        if hint and done.returncode != RED:
            done = run_tests(tree, mutation.tests, warm)
        path.write_text(source, encoding="utf-8")
        if extension is not None:
            build_extension(extension)
        red = re.search(r"^FAILED (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode == RED and red is not None:
            if red.group(1) not in green:
                require_green(tree, [red.group(1)], warm)
                green.add(red.group(1))
            return Outcome(name=mutation.name, red=red.group(1))
    except (MutationError, SyntaxError, subprocess.TimeoutExpired) as error:
        return Outcome(name=mutation.name, error=str(error))
    finally:
        path.write_text(source, encoding="utf-8")
        if extension is not None:
            build_extension(extension)
    if done.returncode == GREEN:
        return Outcome(name=mutation.name)
    if extension is not None and done.returncode < 0:
        # In C a look past an array ends the tests rather than one of them.
        return Outcome(name=mutation.name, red=f"signal {-done.returncode}")
    return Outcome(name=mutation.name, error=f"pytest exit code {done.returncode}: {done.stdout[-500:]}")


def run_all(
    mutations: Sequence[Mutation] = MUTATIONS,
    workers: int = WORKERS,
    *,
    preloaded: Sequence[str] = PRELOADED,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Every mutation, on as many copies as workers; raises MutationError if the unmutated copy is not green.

    `preloaded`: tests run in forks of a Python that has imported these modules, with more variables in its
    `environment`; none: each in a Python of its own.
    """
    trees: queue.SimpleQueue[tuple[Path, WarmPython | None]] = queue.SimpleQueue()
    green: set[str] = set()

    def on_a_free_tree(mutation: Mutation) -> Outcome:
        tree, warm = trees.get()
        try:
            return try_mutation(tree, mutation, warm, hints.get(mutation.name), green)
        finally:
            trees.put((tree, warm))

    with source_tree() as first, source_tree() as second, ThreadPoolExecutor(workers) as pool:
        check_tree(first, ())
        started = []
        for tree in (first, second)[:workers]:
            warm = None
            if preloaded:
                compile_tree(tree)
                warm = WarmPython(tree, _environment(tree) | dict(environment or {}), preloaded)
                started.append(warm)
            trees.put((tree, warm))
        try:
            hints = usable_hints(first, mutations)
            green.update(hints.values())
            if green:
                require_green(first, sorted(green), started[0] if started else None)
            return list(pool.map(on_a_free_tree, mutations))
        finally:
            for warm in started:
                warm.stop()


def remember(outcomes: Sequence[Outcome]) -> None:
    """Write down which test each mutation turned red, for the next run."""
    hints = read_hints() | {outcome.name: outcome.red for outcome in outcomes if outcome.red}
    HINTS.write_text(json.dumps(hints, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def main(names: Sequence[str]) -> int:
    """Print the table; 0 if every mutation turned a test red."""
    remembering, names = "--remember" in names, [name for name in names if name != "--remember"]
    chosen = [mutation for mutation in MUTATIONS if not names or any(name in mutation.name for name in names)]
    if not chosen:
        print(f"usage: mutate.py [NAME ...]; no mutation has {' or '.join(names)} in its name", file=sys.stderr)
        return 2
    outcomes = run_all(chosen)
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    for outcome in outcomes:
        print(f"{outcome.name:<{width}}  {outcome.red or outcome.error or 'SURVIVED'}")
    if remembering:
        remember(outcomes)
    bad = sum(outcome.red is None for outcome in outcomes)
    print(f"{len(outcomes)} mutations, {bad} without a red test")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
