"""The CUDA source of `verify_slots`: it compiles for every target, and on a CPU it does what the oracle does."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvguard.kernels.arrays import address
from kvguard.kernels.verify_slots import cuda_source, cupy_op
from tests.kernels.slot_cases import healthy_step, nonsense, require_equal, require_same, run, run_step
from tests.kernels.slot_faults import FAULTS, planted_step, require_planted
from tests.kernels.test_cuda_source import TARGETS, compile_with_nvrtc, nvrtc
from tests.kernels.test_verify_slots import ODD, decode
from tests.kernels.token_row_cases import Arguments

REGISTERS_MAX = 80
"""As for the other operations on tokens: six blocks of 128 threads, 24 warps, on an NVIDIA multiprocessor."""
ENTRY = """
extern "C" void slots_on_cpu(unsigned x, unsigned y, unsigned z, unsigned threads,
                             const i64* descriptors, const i64* packed, i64* out, u64* workspace) {
  run_grid({x, y, z}, threads, [=] { verify_slots_step(descriptors, packed, out, workspace); });
}
"""


@pytest.mark.parametrize("target", TARGETS)
def test_the_source_compiles(target: str, tmp_path: Path) -> None:
    """NVRTC, which CuPy uses, takes it; nvcc makes code of it without spills and within the bound of registers."""
    library, nvcc = nvrtc(), shutil.which("nvcc")
    if library is None and nvcc is None:
        pytest.skip("CUDA SOURCE NOT COMPILED: no NVRTC, no nvcc; pip install nvidia-cuda-nvrtc-cu12 brings one")
    if library is not None:
        compile_with_nvrtc(library, cuda_source.source(), target)
    if nvcc is not None:
        path = tmp_path / "slots.cu"
        path.write_text(cuda_source.source())
        command = [nvcc, "-std=c++17", f"-arch={target}", "-cubin", "-Xptxas", "-v", str(path), "-o", f"{path}bin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
        registers = re.search(r"Used (\d+) registers", done.stderr)
        assert registers is not None and int(registers.group(1)) <= REGISTERS_MAX


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel as a function of a shared library for the CPU."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("CUDA SOURCE NOT RUN: no C++ compiler here")
    path = tmp_path_factory.mktemp("cuda") / "slots.cpp"
    stand_ins = (Path(__file__).parent / "cpu_stand_ins.h").read_text()
    path.write_text(stand_ins + cuda_source.source() + ENTRY)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", str(path), "-o", f"{path}.so"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(f"{path}.so").slots_on_cpu


class FakeCupy(types.ModuleType):
    """In the place of CuPy: its kernel is the one for the CPU, with so many threads a block."""

    def __init__(self, function: Any, threads: int) -> None:
        super().__init__("cupy")
        self.function, self.threads, self.launches = function, threads, 0

    def RawKernel(self, source: str, name: str, options: tuple[str, ...] = ()) -> Callable[..., None]:  # noqa: N802
        assert source == cuda_source.source() and name == "verify_slots_step" and options

        def launch(grid: tuple[int, int, int], block: tuple[int, int, int], pointers: tuple[np.uint64, ...]) -> None:
            self.launches += 1
            self.function(*grid, self.threads, *(ctypes.c_void_p(int(pointer)) for pointer in pointers))

        return launch


@pytest.fixture(params=[1, 4])
def cupy(request: pytest.FixtureRequest, on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """The CuPy backend on the CPU, with one thread a block or four."""
    fake = FakeCupy(on_cpu, request.param)
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def launch(kernel_of: Any, grid: Any, threads: int, arrays: tuple[Any, ...]) -> None:
        kernel_of(0)(grid, (threads, 1, 1), tuple(np.uint64(address(array)) for array in arrays))

    monkeypatch.setattr(cupy_op, "launch_kernel", launch)
    cupy_op._kernel.cache_clear()
    yield fake
    cupy_op._kernel.cache_clear()


def require_step(cases: list[Arguments], chunks: int) -> None:
    """All of them in one launch."""
    for case, left in zip(cases, run_step(cases, backend="cupy", block=4, chunks=chunks), strict=True):
        require_same(case, run(case, "numpy"), left)


@pytest.mark.parametrize("chunks", [1, 20])
def test_the_source_writes_what_the_oracle_writes(cupy: FakeCupy, chunks: int) -> None:
    """Everything odd that has a name, and hundreds of calls of all kinds: the same words everywhere."""
    cases = [decode(**changes) | {"null_page": changes.get("null_page", 0)} for changes, _, _ in ODD.values()]
    require_step(cases, chunks)
    for number in range(20):
        random = np.random.default_rng([number, chunks])
        require_step([nonsense(random, (1, 2, 3, 16)[index % 4]) for index in range(12)], chunks)
    assert cupy.launches == 21


@pytest.mark.parametrize("chunks", [1, 20])
def test_faults_are_flagged_where_they_are_and_healthy_steps_are_clean(cupy: FakeCupy, chunks: int) -> None:
    """As pools of one launch."""
    planted = [
        planted_step(name, number, page_size)
        for number, name in enumerate(FAULTS)
        for page_size in (1, 2, 16)
        if name != "an offset that is shifted" or page_size > 1
    ]
    for number in range(8):
        random = np.random.default_rng(number)
        planted.append((healthy_step(random, (1, 2, 16)[number % 3], skip_allowed=number % 2 == 1), {}))
    found = run_step([step.arguments for step, _ in planted], backend="cupy", block=4, chunks=chunks)
    for (step, faults), left in zip(planted, found, strict=True):
        require_planted(step, faults, left)


def test_one_pool_through_the_usual_front(cupy: FakeCupy) -> None:
    """`verify_slots` takes the backend by name and launches once."""
    for name in ("clean", "only observed", "spans that overlap: wrong for one is wrong"):
        require_equal(decode(**ODD[name][0]), "cupy")
    assert cupy.launches == 3
