"""The check on a GPU: right first, then fast. Every backend against the oracle, graphs, bandwidth, the host's path.

    bash bench/gpu_check.sh                  # under four minutes; JSON into bench/results/
    python bench/gpu_check.py --dry-run      # on a CPU: tiny shapes, Triton interpreted, no figure means anything

Needs torch, triton, numpy and this checkout on PYTHONPATH; cupy if it is there, and kvguard's own dependencies for the
host's path: what is missing is said loudly and stands in the JSON. No figure is taken from a backend that differs from
the oracle. Exit 1 where a backend differs or a check costs more than it may.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from bench.gpu_cases import compare
from bench.gpu_model import ALLOWED_OVER_FLOOR, PAGE_SIZES, ROWS, TOKENS, floor_of
from kvguard.kernels.mixing import mix_array
from kvguard.kernels.verify_pages import layout, verify_pages, verify_step
from kvguard.kernels.verify_pages.descriptor import PoolStep, describe

ROOT = Path(__file__).resolve().parents[1]
SEED = 20_263
KEY = 0x1234_5678_9ABC_DEF0
FLUSH_BYTES = 512 << 20
"""Written between measurements, so that tables and tags come from memory as after a forward: larger than any L2."""
TORCH_PAGES_MAX = 1 << 21
EVIDENCE_ROWS, EVIDENCE_WIDTH = 4, 4096


class Machine:
    """The device and how time is taken on it."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = torch.device("cpu" if dry_run else "cuda")
        self._flush = None if dry_run else torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def to(self, array: Any) -> torch.Tensor:
        """A NumPy array's copy on the device, with its strides."""
        host = torch.from_numpy(array)
        if host.dim() == 2 and not host.is_contiguous():
            wide = torch.zeros((host.shape[0], max(1, host.shape[1]) * 2), dtype=host.dtype, device=self.device)
            target = wide[:, ::2][:, : host.shape[1]]
            target.copy_(host)
            return target
        return host.to(self.device, copy=True)

    def wait(self) -> None:
        """Until the device is done."""
        if not self.dry_run:
            torch.cuda.synchronize()

    def medians_us(self, call: Callable[[], Any], repeats: int) -> float:
        """Median device time of one call, caches flushed before each; wall time in a dry run."""
        samples = []
        for _ in range(repeats + 2):
            if self._flush is None:
                started = time.perf_counter()
                call()
                samples.append((time.perf_counter() - started) * 1e6)
                continue
            cuda: Any = torch.cuda
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            # Long enough for the host to enqueue what follows, so that no gap is measured.
            self._flush.add_(1)
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(samples[2:])

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The replay of a CUDA graph that holds the call; the call itself in a dry run."""
        if self.dry_run:
            return call
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


class Rows:
    """Clean rows of one length on the device: what a check of `rows` requests with `tokens` tokens each reads."""

    def __init__(self, machine: Machine, rows: int, tokens: int, page_size: int, *, scattered: bool) -> None:
        """`scattered`: pages in random order, the worst for the tags' reads; else each row's pages in one run."""
        columns = -(-tokens // page_size)
        self.rows, self.columns, num_pages = rows, columns, rows * columns + 1
        rng = np.random.default_rng(SEED)
        pages = rng.permutation(num_pages - 1) if scattered else np.arange(num_pages - 1)
        host = (pages + 1).astype(np.int32).reshape(rows, columns)
        tags = rng.integers(1, 2**62, num_pages)
        terms = mix_array(KEY, np.arange(columns, dtype=np.uint64), tags.view(np.uint64)[host])
        self.expected = terms.sum(axis=1, dtype=np.uint64).view(np.int64)
        # As engines have them: a few columns more than are live, rows on multiples of 16 bytes.
        self.table = torch.zeros((rows, (columns + 16) // 16 * 16), dtype=torch.int32, device=machine.device)
        self.table[:, :columns] = machine.to(host)
        self.page_tag = machine.to(tags)
        width = min(EVIDENCE_WIDTH, self.table.shape[1])
        parts = [np.arange(rows), self.expected, np.arange(rows + 1), np.zeros(rows, np.int64), np.full(rows, columns)]
        self.starts = np.cumsum([0, *(len(part) for part in parts)])
        self.packed = machine.to(np.concatenate(parts))
        self.written = rows * layout.RECORD_WORDS + EVIDENCE_ROWS * (width + 1)
        self.out = torch.full((self.written,), layout.NOT_CHECKED, dtype=torch.int64, device=machine.device)
        self.pool = PoolStep(
            table=self.table, page_tag=self.page_tag, rows=rows, columns=columns, split=1, null_page=0,
            neutral_page=0, skip_slot=-1, key=KEY, row_index=0, expected=int(self.starts[1]),
            extent_offset=int(self.starts[2]), extent_start=int(self.starts[3]), extent_stop=int(self.starts[4]),
            record=0, evidence=rows * layout.RECORD_WORDS,
            evidence_row=rows * layout.RECORD_WORDS + EVIDENCE_ROWS * width, evidence_places=EVIDENCE_ROWS,
            evidence_width=width,
        )  # fmt: skip
        described, self.launch = describe([self.pool])
        self.descriptors = machine.to(described)
        self.workspace = torch.zeros(self.launch.workspace_words, dtype=torch.int64, device=machine.device)

    def check(self, backend: str) -> None:
        """One check, as a Verifier makes it."""
        if backend in ("triton", "cupy"):
            verify_step(
                backend=backend, launch=self.launch, descriptors=self.descriptors, packed=self.packed, out=self.out,
                workspace=self.workspace,
            )  # fmt: skip
            return
        row_index, expected, offset, start, stop = (
            self.packed[begin:end] for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True)
        )
        record, evidence, evidence_row = self.split()
        verify_pages(
            table=self.table, page_tag=self.page_tag, row_index=row_index, expected=expected, extent_offset=offset,
            extent_start=start, extent_stop=stop, columns=self.columns, key=KEY, null_page=0, neutral_page=0,
            record=record, evidence=evidence, evidence_row=evidence_row, backend=backend,
        )  # fmt: skip

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """record [rows, 4], evidence [places, width] and evidence_row [places] in what is written."""
        record, rest = self.out[: self.pool.evidence], self.out[self.pool.evidence :]
        evidence = rest[:-EVIDENCE_ROWS].view(EVIDENCE_ROWS, -1)
        return record.view(self.rows, layout.RECORD_WORDS), evidence, rest[-EVIDENCE_ROWS:]

    def flagged(self) -> list[int]:
        """Rows that the last check flagged."""
        return np.flatnonzero(self.split()[0][:, layout.FLAGS].cpu().numpy()).tolist()


def check_graph(machine: Machine, backend: str) -> str:
    """A captured check gives the right verdicts when it is replayed over tables that changed. AssertionError if not."""
    rows = Rows(machine, 3, 64, 1, scattered=True)
    replay = machine.captured(lambda: rows.check(backend))
    kept = rows.table.clone()
    for wrong in (None, (1, 5), None, (2, 63), (0, 0)):
        rows.table.copy_(kept)
        if wrong is not None:
            rows.table[wrong] = kept[(wrong[0] + 1) % 3, wrong[1]]
        rows.out.fill_(layout.NOT_CHECKED)
        replay()
        machine.wait()
        assert rows.flagged() == ([] if wrong is None else [wrong[0]]), f"{backend}: replay with {wrong} wrong"
        if wrong is not None:
            assert not rows.table[wrong[0], :64].any(), f"{backend}: replay with {wrong} wrong did not neutralise"
    return "five replays, right verdicts" if not machine.dry_run else "five launches (no graphs on a CPU)"


def copy_bandwidth(machine: Machine) -> float:
    """Bytes read and written by a copy, 1e12 a second."""
    source = torch.zeros((1 << 16) if machine.dry_run else (1 << 30), dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / machine.medians_us(lambda: target.copy_(source), 10) / 1e6


def measure(machine: Machine, backends: list[str], shapes: list[tuple[int, int, int]], repeats: int) -> dict[str, Any]:
    """Device medians of each backend and shape, against the floor at this machine's own bandwidth and launch."""
    tiny = torch.zeros(1, device=machine.device)
    copy_tb_s = copy_bandwidth(machine)
    launch_us = machine.medians_us(machine.captured(lambda: tiny.zero_()), 50)
    results = []
    for (rows, tokens, page_size), scattered in ((shape, scattered) for shape in shapes for scattered in (False, True)):
        floor = floor_of(rows, tokens, page_size, copy_tb_s=copy_tb_s, launch_us=launch_us)
        case = Rows(machine, rows, tokens, page_size, scattered=scattered)
        for backend in backends:
            if backend == "torch" and floor.pages > TORCH_PAGES_MAX:
                continue
            call = partial(case.check, backend)
            median = machine.medians_us(machine.captured(call) if backend != "torch" else call, repeats)
            assert case.flagged() == [], f"{backend}: clean rows were flagged"
            results.append({
                "backend": backend, "rows": rows, "tokens": tokens, "page_size": page_size, "scattered": scattered,
                "median_us": round(median, 2), "read_bytes": floor.read_bytes,
                "tb_s": round(floor.read_bytes / median / 1e6, 4), "floor_us": round(floor.floor_us, 2),
                "over_floor": round(median / floor.floor_us, 3),
            })  # fmt: skip
    return {"copy_tb_s": round(copy_tb_s, 3), "launch_us": round(launch_us, 2), "checks": results}


def measure_host(machine: Machine, backends: list[str], repeats: int) -> dict[str, Any] | str:
    """Microseconds of the host for a step: Guard.step, Verifier.check as far as it returns, judge with the verdicts."""
    missing = [name for name in ("pydantic_settings", "structlog", "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not measured: {', '.join(missing)} not installed"
    import structlog
    import structlog.testing

    from kvguard.config import GuardConfig
    from kvguard.guard import Guard
    from kvguard.pools import PoolSpec
    from kvguard.verifier import PoolInputs, Verifier

    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    found: dict[str, Any] = {}
    for backend in backends:
        for crossing in (0, 2):
            batch, columns = 32, 16
            guard = Guard([PoolSpec(num_pages=batch * columns + repeats * 2 + 10)], GuardConfig.default(seed=SEED))
            verifier = Verifier(guard.setup, backend=backend, device=machine.device)
            table = torch.zeros((batch, columns + repeats + 8), dtype=torch.int32, device=machine.device)
            names, free = [f"r{row}" for row in range(batch)], iter(range(1, 1 << 30))
            held: dict[str, list[int]] = {name: [] for name in names}
            for name in names:
                guard.start(name)
                held[name] = guard.allocate(name, [next(free) for _ in range(columns)])
            given, samples = {"main": PoolInputs(table=table)}, []
            for step in range(repeats + 5):
                for place in range(crossing):
                    name = names[(step * crossing + place) % batch]
                    held[name] += guard.allocate(name, [next(free)])
                for row, name in enumerate(names):
                    table[row, : len(held[name])] = torch.tensor(held[name], dtype=torch.int32)
                machine.wait()
                started = time.perf_counter()
                delta = guard.step(names, list(range(batch)), [16] * batch)
                pending = verifier.check(delta, given).depart()
                enqueued = time.perf_counter()
                machine.wait()
                ready = time.perf_counter()
                judgement = guard.judge(pending.resolve())
                samples.append((enqueued - started + time.perf_counter() - ready) * 1e6)
                assert judgement.clean, f"{backend}: a clean step was flagged"
            found[f"{backend}, {crossing} pages crossed"] = round(statistics.median(samples[5:]), 1)
    return found


def environment(machine: Machine) -> dict[str, Any]:
    """What the figures were taken on."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    def version(name: str) -> str:
        return str(getattr(__import__(name), "__version__", "?")) if importlib.util.find_spec(name) else "not installed"

    driver = "none" if machine.dry_run else said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": "CPU, dry run" if machine.dry_run else torch.cuda.get_device_name(),
        "driver": driver, "cuda": torch.version.cuda, "hip": torch.version.hip, "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton", "cupy", "numpy")},
        "commit": said("git", "rev-parse", "--short=12", "HEAD"),
        "changed": said("git", "status", "--porcelain", "--untracked-files=no") != "",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "seed": SEED,
    }  # fmt: skip


def run(machine: Machine) -> dict[str, Any]:
    """All parts, in order of what the later ones rest on."""
    started, notes = time.monotonic(), []
    backends = ["torch", "triton", "cupy"]
    for name in ("triton", "cupy"):
        absent = importlib.util.find_spec(name) is None
        if absent or (name == "cupy" and machine.dry_run):
            notes.append(f"{name.upper()} NOT CHECKED: {'not installed' if absent else 'needs a GPU'}")
            backends.remove(name)
    data: dict[str, Any] = {"environment": environment(machine), "notes": notes}
    cases, columns_max = (32, 12) if machine.dry_run else (1600, 40)
    data["agreement"] = {
        name: compare(
            name, machine.to, lambda tensor: tensor.cpu().numpy(), seed=SEED, cases=cases, columns_max=columns_max
        )
        for name in backends
    }
    fused = [name for name in backends if name != "torch"]
    data["graphs"] = {name: check_graph(machine, name) for name in fused}
    shapes = [(rows, tokens, size) for rows in ROWS for tokens in TOKENS for size in PAGE_SIZES]
    shapes, repeats = ([(2, 64, 16), (3, 40, 1)], 2) if machine.dry_run else (shapes, 30)
    data |= measure(machine, backends, shapes, repeats)
    data["host_step_us"] = measure_host(machine, backends, 3 if machine.dry_run else 200)
    if isinstance(data["host_step_us"], str):
        notes.append(f"HOST PATH {data['host_step_us']}")
    data["seconds"] = round(time.monotonic() - started, 1)
    return data


def too_slow(data: dict[str, Any]) -> list[str]:
    """Checks with Triton that cost more than they may, where pages lie in runs; scattered ones are only shown."""
    return [
        f"{row['rows']} x {row['tokens']} tokens, pages of {row['page_size']}: {row['over_floor']} x the floor"
        for row in data["checks"]
        if row["backend"] == "triton" and not row["scattered"] and row["over_floor"] > ALLOWED_OVER_FLOOR
    ]


def main() -> int:
    """Run, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU: is the script itself in order?")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the JSON")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; --dry-run runs the script itself on a CPU", file=sys.stderr)
        return 2
    machine = Machine(arguments.dry_run)
    print(f"seed {SEED}")
    try:
        data = run(machine)
    except AssertionError as error:
        print(f"gpu_check: WRONG RESULT, so nothing is measured: {error}", file=sys.stderr)
        return 1
    for note in data["notes"]:
        print(f"NOTE: {note}")
    for name, cases in data["agreement"].items():
        print(f"{name}: {cases} cases equal to the oracle; graph: {data['graphs'].get(name, 'not captured')}")
    print(f"copy {data['copy_tb_s']} TB/s, launch {data['launch_us']} us; host per step, us: {data['host_step_us']}")
    print("backend  rows  tokens  page  pages      median us  TB/s     x floor")
    for row in data["checks"]:
        order = "scattered" if row["scattered"] else "in runs"
        print(
            f"{row['backend']:<8} {row['rows']:>4}  {row['tokens']:>6}  {row['page_size']:>4}  {order:<9} "
            f"{row['median_us']:>10}  {row['tb_s']:<7}  {row['over_floor']}"
        )
    name = re.sub(r"[^a-z0-9]+", "-", data["environment"]["device"].lower()).strip("-")
    path = arguments.out / f"gpu-{name}-{data['environment']['date'][:10]}.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
    print(f"{data['seconds']} s; {path}")
    slow = [] if arguments.dry_run else too_slow(data)
    for line in slow:
        print(f"TOO SLOW: {line}; allowed {ALLOWED_OVER_FLOOR}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
