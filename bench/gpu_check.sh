#!/usr/bin/env bash
# Every kernel backend on this machine's GPU: right first, then how fast. Under four minutes; JSON into bench/results/.
# Needs a Python with torch, triton and numpy (cupy and kvguard's own dependencies if they are there): PYTHON=... picks it.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD" exec "${PYTHON:-python3}" bench/gpu_check.py "$@"
