"""Runs Python with another release of vLLM than the one in .venv-vllm, without building a second environment.

`python -m tools.run_older_vllm 0.28.0 -m some.module ARGUMENTS`, in .venv-vllm. The release's wheel is downloaded
once, unpacked in the cache folder, and put first on PYTHONPATH; its dependencies are those of .venv-vllm. That is sound
only for releases built for the same torch, which is checked.
"""

from __future__ import annotations

import subprocess
import sys

from kvguard.fault_injection.scenarios.older_release import OlderReleaseError, environment, unpacked

__all__ = ["OlderReleaseError", "environment", "main", "unpacked"]


def main() -> int:
    """Run Python with the given arguments; its exit status."""
    if len(sys.argv) < 3:
        print("usage: python -m tools.run_older_vllm VERSION PYTHON-ARGUMENTS", file=sys.stderr)
        return 2
    try:
        variables = environment(sys.argv[1])
    except OlderReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, *sys.argv[2:]], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
