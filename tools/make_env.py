"""Builds .venv: kvguard in editable form with the dev extra, and the CPU build of torch where there is no GPU.

`make env` calls it. It needs nothing but the standard library, and old Pythons can read it far enough to be told that
they are too old. An environment counts as built only when the stamp inside it was written, which is the last step.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple
from urllib.parse import unquote, urlparse

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "kvguard-env.stamp")
PYTHON = os.path.join(VENV, "bin", "python")
OLDEST_PYTHON = (3, 11)
TORCH = "torch>=2.6"
OLDEST_TORCH = (2, 6)
HEARTBEAT_S = 20.0


class EnvError(Exception):
    """The environment cannot be built; the message is one line for the person who ran make."""


class TorchPlan(NamedTuple):
    """How torch comes into the environment."""

    tool: str  # "pip" or "uv"
    arguments: tuple[str, ...]  # what follows `install`
    why: str  # for the progress line


def choose_torch(system: str, machine: str, python_tag: str, gpu: str | None, wheels: list[str]) -> TorchPlan:
    """Decides where torch comes from. A pure function.

    `system` and `machine` as the platform module gives them, `python_tag` such as "cp311", `gpu` one of None, "nvidia"
    and "amd", `wheels` the file names of local wheels that pip is configured to look at.
    """
    if gpu == "nvidia":
        return TorchPlan("pip", (TORCH,), "the CUDA build, for the NVIDIA GPU found here")
    if gpu == "amd":
        return TorchPlan("uv", ("--torch-backend=auto", TORCH), "the ROCm build, for the AMD GPU found here")
    versions = [version for wheel in wheels if (version := cpu_wheel_version(wheel, machine, python_tag))]
    if versions and system == "Linux":
        newest = max(versions, key=_version_key)
        return TorchPlan("pip", (f"torch=={newest}",), f"{newest}, a CPU build in a local folder of wheels")
    if system == "Linux":
        return TorchPlan("uv", ("--torch-backend=cpu", TORCH), "the CPU build, as there is no GPU here")
    return TorchPlan("pip", (TORCH,), f"the usual build for {system}, which is a CPU build")


def cpu_wheel_version(wheel: str, machine: str, python_tag: str) -> str | None:
    """The version in a wheel's file name, or None where it is no CPU build of torch for this machine and Python."""
    pattern = rf"torch-([0-9][^-]*\+cpu[^-]*)-{python_tag}-{python_tag}-\S*_{re.escape(machine)}\.whl"
    match = re.fullmatch(pattern, wheel)
    return match.group(1) if match and _version_key(match.group(1)) >= OLDEST_TORCH else None


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def find_gpu() -> str | None:
    """Which GPU this machine has, as far as its device files say: "nvidia", "amd" or None."""
    if os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi"):
        return "nvidia"
    return "amd" if os.path.exists("/dev/kfd") else None


def local_wheels(pip_config: str) -> list[str]:
    """Names of the torch wheels in local folders that pip looks at; `pip_config` is what `pip config list` says."""
    names: set[str] = set()
    for key, value in re.findall(r"^\S*?([a-z-]+)='(.*)'$", pip_config, flags=re.MULTILINE):
        for place in value.replace("\\n", " ").split():
            folder = unquote(urlparse(place).path) if place.startswith("file://") else place
            if key == "find-links":
                names.update(map(os.path.basename, glob.glob(os.path.join(glob.escape(folder), "torch-*.whl"))))
            elif key in ("index-url", "extra-index-url") and place.startswith("file://"):
                names.update(_wheels_of_index(os.path.join(folder, "torch")))
    return sorted(names)


def _wheels_of_index(folder: str) -> set[str]:
    """Wheel names that one project's folder of a file:// index lists."""
    names = set(map(os.path.basename, glob.glob(os.path.join(glob.escape(folder), "torch-*.whl"))))
    page = os.path.join(folder, "index.html")
    if os.path.isfile(page):
        with open(page, encoding="utf-8", errors="replace") as file:
            names.update(re.findall(r"torch-[^\"'<>#/\s]+\.whl", unquote(file.read())))
    return names


def built_from(root: str) -> list[str]:
    """The files that an editable install of kvguard was made of: all its Python is looked at where it lies."""
    sources = glob.glob(os.path.join(glob.escape(root), "kernels", "**", "*.[ch]"), recursive=True)
    sources += glob.glob(os.path.join(glob.escape(root), "kvguard", "*.[ch]"))
    return [os.path.join(root, "pyproject.toml"), *sorted(sources)]


def digest_of(*paths: str) -> str:
    """A digest of these files' contents, in this order."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def stamp_text(root: str, python_version: str) -> str:
    """What the stamp of a finished environment says; anything that makes an environment unusable changes it."""
    return f"{root}\n{python_version}\n{digest_of(*built_from(root))}\n"


def check_python(version: tuple[int, ...], has_venv: bool) -> None:
    """Refuses a Python that cannot build the environment."""
    wanted, found = ".".join(map(str, OLDEST_PYTHON)), ".".join(map(str, version[:2]))
    if tuple(version[:2]) < OLDEST_PYTHON:
        raise EnvError(f"kvguard needs Python {wanted} or newer, this is {found}: try make PYTHON=python3.12 env")
    if not has_venv:
        raise EnvError(f"this Python has no venv module: on Debian and Ubuntu, apt-get install python{found}-venv")


def say(text: str) -> None:
    """One progress line."""
    print(f"env: {text}", flush=True)


def run(what: str, *command: str) -> None:
    """Runs a command quietly, with a line now and then while it takes long; its output is shown where it fails."""
    say(what)
    environment = {**os.environ, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONHOME", None)
    with tempfile.TemporaryFile() as output:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        while True:
            try:
                code = process.wait(timeout=HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                say(f"... {time.monotonic() - started:.0f} s")
            except KeyboardInterrupt:
                process.wait()
                raise
        if code:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            told = [line for line in lines if "is ignored: it is neither a file nor a directory" not in line]
            print("\n".join(told[-25:]), file=sys.stderr)
            raise EnvError(f"failed with status {code}: {' '.join(command)}")


def pip(what: str, *arguments: str) -> None:
    """pip install inside the environment. pip compiles the bytecode itself, whatever PYTHONDONTWRITEBYTECODE says."""
    run(what, PYTHON, "-m", "pip", "install", "--quiet", "--compile", "--no-input", *arguments)


def install_torch() -> None:
    """Brings torch in by the plan that suits this machine."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    plan = choose_torch(platform.system(), platform.machine(), tag, find_gpu(), local_wheels(listed.stdout))
    what = f"installing torch: {plan.why}"
    if plan.tool == "pip":
        pip(what, *plan.arguments)
        return
    try:
        # uv knows where torch's own builds for each kind of machine are; pip would have to be told an address.
        pip("installing uv, which finds the right build of torch", "uv")
        run(what, PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--compile-bytecode", *plan.arguments)
    except EnvError as error:
        say(f"{error}")
        say("WARNING: that build of torch cannot be had; falling back to plain `pip install torch`, a CUDA build:")
        say("WARNING: about 3 GB to download and 7 GB on disk. It runs on a CPU too. Ctrl-C stops it.")
        pip("installing torch from the package index", TORCH)


def build() -> None:
    """Makes .venv what pyproject.toml asks for, the C extensions built; does nothing where it is already."""
    check_python(sys.version_info[:3], all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")))
    wanted = stamp_text(ROOT, platform.python_version())
    found = ""
    if os.path.isfile(STAMP) and os.path.exists(PYTHON) and os.path.exists(os.path.join(VENV, "bin", "kvguard")):
        with open(STAMP, encoding="utf-8") as file:
            found = file.read()
    if found == wanted:
        return
    started = time.monotonic()
    if found.splitlines()[:2] == wanted.splitlines()[:2]:
        say("pyproject.toml or a C source has changed: bringing .venv up to date")
        os.remove(STAMP)
    else:
        create()
        pip("installing setuptools", "setuptools>=77")
    install_torch()
    pip("installing kvguard and its dev extra", "--no-build-isolation", "--editable", f"{ROOT}[dev]")
    with open(STAMP, "w", encoding="utf-8") as file:
        file.write(wanted)
    say(f"ready after {time.monotonic() - started:.0f} s: .venv/bin/kvguard")


def create() -> None:
    """A fresh .venv in place of whatever stands there."""
    if os.path.islink(VENV):
        raise EnvError(".venv is a link to somewhere else: remove it, then make env again")
    if os.path.exists(VENV):
        say("removing a .venv that is half-built, moved or made with another Python")
        shutil.rmtree(VENV)
    run(f"creating .venv with Python {platform.python_version()}", sys.executable, "-m", "venv", VENV)


def main() -> int:
    """Builds under a lock, so that two makes at the same time do not build into each other."""
    try:
        import fcntl

        with open(os.path.abspath(__file__), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            build()
    except EnvError as error:
        print(f"env: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("env: interrupted; the next make env starts afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
