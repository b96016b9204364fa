"""The CUDA source of the CuPy backend: it compiles for every target, and it does what the oracle does.

No GPU is needed: the same text, with stand-ins for what CUDA adds to C++, is compiled for the CPU, where one thread or
several per block run it.
"""

from __future__ import annotations

import ctypes
import dataclasses
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
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvguard.kernels.scatter_tags import cupy_op as scatter_cupy
from kvguard.kernels.scatter_tags.descriptor import describe_scatter
from kvguard.kernels.verify_pages import cuda_source
from tests.kernels.cases import Case, cases, run_case, with_right_digests
from tests.kernels.interpreted import Packer, run_step
from tests.kernels.test_triton import BROKEN

TARGETS = ("sm_80", "sm_90", "sm_100")
REGISTERS_MAX = 128
"""With 128 threads a block they leave room for four blocks, 16 warps, on each multiprocessor of every target."""
SEED = 20_262
SOURCES = {"verify": cuda_source.source(), "scatter": scatter_cupy.source()}
ENTRIES = """
extern "C" void verify_on_cpu(unsigned x, unsigned y, unsigned z, unsigned threads,
                              const i64* descriptors, const i64* packed, i64* out, u64* workspace) {
  run_grid({x, y, z}, threads, [=] { verify_step(descriptors, packed, out, workspace); });
}
"""
SCATTER_ENTRY = """
extern "C" void scatter_on_cpu(unsigned x, unsigned y, unsigned threads, const i64* descriptors, const i64* packed) {
  run_grid({x, y, 1}, threads, [=] { scatter_step(descriptors, packed); });
}
"""


def nvrtc() -> Any | None:
    """NVRTC's library, of a CUDA toolkit or of a Python package; None where there is none."""
    folders = [Path(path) / "nvidia" for path in sys.path]
    wheels = sorted(path for folder in folders for path in folder.glob("**/libnvrtc.so.1[0-9]"))
    toolkits = sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so.1[0-9]"))
    for name in (*map(str, wheels), *map(str, toolkits), "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_with_nvrtc(library: Any, source: str, target: str) -> None:
    """As CuPy compiles it; the compiler's log is in the failure."""
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
    status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()


@pytest.mark.parametrize("target", TARGETS)
def test_the_source_compiles(target: str, tmp_path: Path) -> None:
    """NVRTC, which CuPy uses, takes it; nvcc makes code of it without spills and within the bound of registers."""
    library, nvcc = nvrtc(), shutil.which("nvcc")
    if library is None and nvcc is None:
        pytest.skip("CUDA SOURCE NOT COMPILED: no NVRTC, no nvcc; pip install nvidia-cuda-nvrtc-cu12 brings one")
    for name, source in SOURCES.items():
        if library is not None:
            compile_with_nvrtc(library, source, target)
        if nvcc is None:
            continue
        path = tmp_path / f"{name}.cu"
        path.write_text(source)
        command = [nvcc, "-std=c++17", f"-arch={target}", "-cubin", "-Xptxas", "-v", str(path), "-o", f"{path}bin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
        registers = re.search(r"Used (\d+) registers", done.stderr)
        assert registers is not None and int(registers.group(1)) <= REGISTERS_MAX
    print(f"{target}: compiled by {'NVRTC ' * (library is not None)}{'nvcc' * (nvcc is not None)}")


def test_rows_are_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    """The loads that the layout allows are there: four int32 or two int64 at a time."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("CUDA SOURCE NOT LOOKED AT: no nvcc here")
    path = tmp_path / "verify.cu"
    path.write_text(SOURCES["verify"])
    subprocess.run([nvcc, "-std=c++17", "-arch=sm_90", "-ptx", str(path), "-o", f"{path}.ptx"], check=True)
    ptx = Path(f"{path}.ptx").read_text()
    assert re.search(r"ld\.(global\.)?v4\.(u|s|b)32", ptx) and re.search(r"ld\.(global\.)?v2\.(u|s|b)64", ptx)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both kernels as functions of a shared library for the CPU."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("CUDA SOURCE NOT RUN: no C++ compiler here")
    folder = tmp_path_factory.mktemp("cuda")
    stand_ins = (Path(__file__).parent / "cpu_stand_ins.h").read_text()
    libraries = types.SimpleNamespace()
    for name, source in (("verify", SOURCES["verify"] + ENTRIES), ("scatter", SOURCES["scatter"] + SCATTER_ENTRY)):
        path = folder / f"{name}.cpp"
        path.write_text(stand_ins + source)
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w", str(path), "-o", f"{path}.so"]
        subprocess.run(command, check=True)
        setattr(libraries, name, getattr(ctypes.CDLL(f"{path}.so"), f"{name}_on_cpu"))
    return libraries


class FakeCupy(types.ModuleType):
    """In the place of CuPy: its kernels are the ones for the CPU, with so many threads a block."""

    def __init__(self, libraries: Any, threads: int) -> None:
        super().__init__("cupy")
        self.threads = threads
        self.libraries = libraries
        self.launches = 0

    def RawKernel(self, source: str, name: str, options: tuple[str, ...] = ()) -> Callable[..., None]:  # noqa: N802
        assert source in SOURCES.values() and options

        def launch(grid: tuple[int, int, int], block: tuple[int, int, int], pointers: tuple[np.uint64, ...]) -> None:
            self.launches += 1
            addresses = [ctypes.c_void_p(int(pointer)) for pointer in pointers]
            if name == "verify_step":
                self.libraries.verify(*grid, self.threads, *addresses)
            else:
                # Each thread makes one change, so the grid is as the source wants it.
                self.libraries.scatter(*grid[:2], block[0], *addresses)

        return launch


@pytest.fixture(params=[1, 4])
def cupy(request: pytest.FixtureRequest, on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """The CuPy backend on the CPU, with one thread a block or four."""
    from kvguard.kernels.arrays import address
    from kvguard.kernels.verify_pages import cupy_op

    fake = FakeCupy(on_cpu, request.param)
    monkeypatch.setitem(sys.modules, "cupy", fake)

    def launch(kernel_of: Any, grid: Any, threads: int, arrays: tuple[Any, ...]) -> None:
        kernel_of(0)(grid, (threads, 1, 1), tuple(np.uint64(address(array)) for array in arrays))

    monkeypatch.setattr(cupy_op, "launch_kernel", launch)
    monkeypatch.setattr(scatter_cupy, "launch_kernel", launch)
    for cached in (cupy_op._kernel, scatter_cupy._kernel):
        cached.cache_clear()
    yield fake
    for cached in (cupy_op._kernel, scatter_cupy._kernel):
        cached.cache_clear()


def require_equal(batch: list[Case], outcomes: list[Any]) -> None:
    for case, outcome in zip(batch, outcomes, strict=True):
        oracle = run_case(case, "numpy")
        for field in dataclasses.fields(oracle):
            wanted, found = getattr(oracle, field.name), getattr(outcome, field.name)
            assert np.array_equal(wanted, found), (field.name, wanted, found, case)


@pytest.mark.parametrize("programs", [1, 1000])
def test_the_source_writes_what_the_oracle_writes(cupy: FakeCupy, programs: int) -> None:
    """Every kind of fault as a pool of one launch, and hundreds of random pools: the same bytes everywhere."""
    require_equal(list(BROKEN.values()), run_step(list(BROKEN.values()), backend="cupy", block=4, programs=programs))
    compared = 0

    @seed(SEED)
    @given(st.lists(cases(splits=(1, 1, 2, 3), column_counts=(0, 1, 3, 4, 7, 8)), min_size=12, max_size=12))
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def check(drawn: list[Case]) -> None:
        nonlocal compared
        batch = [with_right_digests(case) if index % 2 else case for index, case in enumerate(drawn)]
        require_equal(batch, run_step(batch, backend="cupy", block=4, programs=programs))
        compared += len(batch)

    check()
    print(f"{compared} cases, seed {SEED}, {cupy.threads} threads a block")
    assert compared >= 200


def test_one_pool_through_the_usual_front(cupy: FakeCupy) -> None:
    """`verify_pages` takes the backend by name and launches once."""
    for name in ("clean", "another row's page", "slots by place"):
        found, wanted = run_case(BROKEN[name], "cupy"), run_case(BROKEN[name], "numpy")
        for field in dataclasses.fields(wanted):
            assert np.array_equal(getattr(wanted, field.name), getattr(found, field.name)), (name, field.name)
    assert cupy.launches == 3


def test_tag_changes_of_several_pools_in_one_launch(cupy: FakeCupy) -> None:
    """Each pool gets its own changes; pages outside of a pool change nothing."""
    from kvguard.kernels.scatter_tags import scatter_step

    packer, descriptors, pools, wanted = Packer(), [], [], []
    for num_pages, pages in ((5, [4, -1, 5, 0]), (9, [8])):
        array = np.arange(num_pages)
        changes = np.array(pages, np.int64)
        tensor = torch.from_numpy(array.copy())
        words = describe_scatter(
            page_tag=tensor, pages=packer.add(changes), tags=packer.add(changes + 2**40), changes=len(pages)
        )
        descriptors.append(words)
        pools.append(tensor)
        wanted.append([page + 2**40 if page in pages else page for page in range(num_pages)])
    scatter_step(
        backend="cupy", pools=2, changes=4,
        descriptors=torch.from_numpy(np.array(descriptors, np.int64)), packed=torch.from_numpy(packer.packed()),
    )  # fmt: skip
    assert [tensor.tolist() for tensor in pools] == wanted and cupy.launches == 1


def test_a_torch_tensor_is_launched_on_torchs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses go to the kernel as they are, on the device and the current stream of the tensors."""
    from kvguard.kernels.cupy_launch import launch_kernel

    calls: list[Any] = []

    class Scope:
        def __init__(self, *arguments: int) -> None:
            calls.append(arguments)

        def __enter__(self) -> None: ...

        def __exit__(self, *exc: object) -> None: ...

    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=Scope, ExternalStream=Scope))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=77 + index))
    tensor = torch.zeros(4, dtype=torch.int64)
    launch_kernel(lambda index: lambda *launch: calls.append((index, *launch)), (2, 3, 4), 128, (tensor,))
    assert calls == [(3,), (80, 3), (3, (2, 3, 4), (128, 1, 1), (np.uint64(tensor.data_ptr()),))]
