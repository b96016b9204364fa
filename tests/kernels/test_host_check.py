"""The bound check in C: "clean" is said where the oracles find no flag, and nowhere else; the records are theirs."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvguard.kernels import host_check
from kvguard.kernels.host_check import bind, is_built
from tests.kernels.cases import Case, cases, clean_case, with_right_digests
from tests.kernels.host_check_cases import Given, Reads, _overlap, all_asked, asked, problem
from tests.kernels.host_check_mutants import MUTANTS, SEEDS
from tests.kernels.slot_cases import calls, healthy_step
from tests.kernels.token_row_cases import Arguments

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "kernels" / "host_check" / "host_check.c"
HEADERS_OF_OURS = [ROOT / "kernels" / name for name in ("interface.h", "mixing.h")]
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
HEADERS = Path(sysconfig.get_path("include"))
built = pytest.mark.skipif(not is_built(), reason="NATIVE CHECK NOT TESTED: kvguard was installed without a C compiler")
compiles = pytest.mark.skipif(
    COMPILER is None or not (HEADERS / "Python.h").exists(), reason="NATIVE CHECK NOT COMPILED: no compiler or headers"
)


def read_given(case: Case) -> Given:
    """What `bind` and the oracle are given of a case, with a gap between the columns where it asks for that."""
    wide = np.full((case.table.shape[0], case.table.shape[1] * case.column_stride), 77, dtype=case.table.dtype)
    wide[:, :: case.column_stride] = case.table
    names = ("page_tag", "row_index", "expected", "extent_offset", "extent_start", "extent_stop")
    return {name: getattr(case, name) for name in (*names, "key", "split", "null_page")} | {
        "table": wide[:, :: case.column_stride],
        "columns": int(max(case.extent_stop, default=0)),
    }


@built
def test_every_kind_of_step_gets_the_right_answer() -> None:
    """Clean ones, planted faults, nonsense: as the oracles, with the very records; nothing is written otherwise."""
    asked_of = all_asked(SEEDS)
    assert min(sum(case.clean for case in asked_of), sum(not case.clean for case in asked_of)) > 100
    assert [(case.name, wrong) for case in asked_of if (wrong := problem(bind, case))] == []


@built
@given(cases())
@settings(max_examples=600, deadline=None)
def test_what_rows_read_is_judged_as_the_oracle_does(case: Case) -> None:
    """Adversarial tables, tags and extents."""
    for variant in (case, with_right_digests(case)):
        assert problem(bind, asked("drawn", read_given(variant), None)) is None


@built
@given(calls())
@settings(max_examples=600, deadline=None)
def test_what_is_written_is_judged_as_the_oracle_does(arguments: Arguments) -> None:
    """Where rows have more tokens than there are it may look no further."""
    found = asked("drawn", None, arguments)
    wrong = problem(bind, found)
    assert wrong is None or (found.clean and _overlap(arguments) and wrong == "it says False")


@built
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_no_value_leads_out_of_an_array(seed: int) -> None:
    """Any words in any array: an answer, whichever."""
    random = np.random.default_rng(seed)
    reads, writes = Reads(random, int(random.integers(1, 4))).given(), healthy_step(random, 4).arguments
    writes["null_page"] = reads["null_page"]
    for array in [array for array in (*reads.values(), *writes.values()) if isinstance(array, np.ndarray)]:
        limits = np.iinfo(array.dtype)
        spots = random.random(array.shape) < random.choice([0.0, 0.1, 1.0])
        odd = [limits.min, limits.min + 1, -1, 0, 1, 2, len(array), limits.max - 1, limits.max]
        small = random.integers(0, 9, array.shape)
        junk = np.where(random.random(array.shape) < 0.5, random.choice(odd, array.shape), small)
        array[...] = np.where(spots, junk.astype(array.dtype), array)
    check = bind(reads, writes)
    assert check is not None
    rows = len(reads["row_index"]) + len(writes["writer"]) + 1
    assert check(np.zeros((1, rows, 4), np.int64), 0) in (True, False)


@built
@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("rows,columns", [(0, 0), (1, 1), (3, 0), (7, 33), (256, 16), (4096, 8)])
def test_ordinary_rows_are_found_clean(rows: int, columns: int, split: int) -> None:
    """Short and long ones, NumPy arrays and tensors; for the longest other threads are let in meanwhile."""
    given = read_given(clean_case(rows=rows, columns=columns, split=split))
    tensors: Given = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in given.items()
    }
    wanted = asked("clean", given, None, clean=True)
    assert problem(bind, wanted) is None
    check = bind(tensors, None)
    record = np.full((1, rows, 4), -7, np.int64)
    assert check is not None and check(record, 0) and np.array_equal(record[0], wanted.record)


@built
def test_values_are_looked_at_anew_and_arrays_are_held() -> None:
    """What was bound goes on to be checked, as it is now, though nobody else has the arrays any more."""
    world = Reads(np.random.default_rng(3), 1)
    reads = world.given()
    check = bind(reads, None)
    assert check is not None
    row, column = world.any_live()
    cell, rows = world.cell(int(world.row_index[row]), column), len(world.row_index)
    record = np.full((1, rows, 4), -7, np.int64)
    assert check(record, 0)
    cell += 1
    assert not check(record, 0)
    cell -= 1
    del world, reads, cell
    gc.collect()
    spare = [np.full(2000, -1) for _ in range(50)]
    assert check(record, 0) and len(spare) == 50


@built
def test_what_it_does_not_know_is_not_bound() -> None:
    """Kinds and shapes that are not in the contract go the way that they went before."""
    reads, writes = Reads(np.random.default_rng(1), 2).given(), healthy_step(np.random.default_rng(1), 4).arguments
    writes |= {"null_page": reads["null_page"], "floor": np.zeros(len(writes["writer"]), np.int64)}
    writes["query_start"] = np.arange(len(writes["lengths"]) + 1)
    assert bind(reads, writes) is not None and bind(reads, None) is not None and bind(None, writes) is not None
    for name in ("table", "page_tag", "row_index", "expected", "extent_offset", "extent_start", "extent_stop"):
        for other in (np.int16, np.float64, np.uint64, ">i8"):
            assert bind(reads | {name: reads[name].astype(other)}, None) is None, (name, other)
        assert bind(reads | {name: reads[name][None]}, None) is None, name
        if name not in ("table", "page_tag"):
            assert bind(reads | {name: reads[name][:-1]}, None) is None, name
        assert bind(reads | {name: None}, None) is None, name
    for name in ("query_start", "lengths", "writer", "floor", "page_writer"):
        assert bind(None, writes | {name: writes[name].astype(np.float32)}) is None, name
        if name not in ("lengths", "page_writer"):
            assert bind(None, writes | {name: writes[name][:-1]}) is None, name
    for name in ("slot_mapping", "lengths", "writer", "page_writer"):
        assert bind(None, writes | {name: None}) is None, name
    assert bind(None, writes | {"query_row": np.arange(len(writes["writer"]) + 1)}) is None
    assert bind(None, writes | {"page_writer": writes["page_writer"][:0]}) is None
    for changes in ({"page_size": 0}, {"page_size": 2**62}, {"skip_slot": 2**64}, {"null_page": 5}):
        assert bind(reads, writes | changes) is None, changes
    for changes in ({"split": 0}, {"split": 2**62}):
        assert bind(reads | changes, None) is None, changes


@built
def test_a_record_that_does_not_fit_is_refused() -> None:
    """A caller's mistake is an error, and nothing is written."""
    check: Any = bind(Reads(np.random.default_rng(2), 1).given(), None)
    rows = len(Reads(np.random.default_rng(2), 1).row_index)
    fitting = np.zeros((2, rows, 4), np.int64)
    assert check(fitting, 1)
    for record, pool in (
        (fitting, 2), (fitting, -1), (fitting[0], 0), (fitting[:, 1:].copy(), 0), (fitting[:, :, :3].copy(), 0),
        (fitting.astype(np.int32), 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="record must be"):
            check(record, pool)
    with pytest.raises(BufferError if sys.version_info >= (3, 12) else (BufferError, ValueError)):
        check(np.zeros((2, rows * 2, 4), np.int64)[:, ::2], 0)
    for wrong in ((fitting,), (fitting, "0"), (None, 0)):
        with pytest.raises(TypeError):
            check(*wrong)


@built
def test_no_reference_is_kept_or_dropped_too_much() -> None:
    """Of what was bound, of what was refused, of a record, and of the type itself."""
    reads = Reads(np.random.default_rng(2), 1).given()
    record = np.zeros((1, len(reads["row_index"]), 4), np.int64)
    counted: list[Any] = [reads["expected"], reads["extent_stop"], record, host_check._native.HostCheck]
    before = list(map(sys.getrefcount, counted))
    for _ in range(10):
        check: Any = bind(reads, None)
        assert check(record, 0) and bind(reads | {"table": None}, None) is None
        with pytest.raises(ValueError, match="record must be"):
            check(record, 1)
    del check
    assert list(map(sys.getrefcount, counted)) == before


def test_without_the_extension_nothing_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes on as it did."""
    monkeypatch.setattr(host_check, "_native", None)
    assert not is_built() and bind(Reads(np.random.default_rng(2), 1).given(), None) is None


def build(source: str, path: Path, *options: str) -> None:
    """Compile as pyproject.toml says, but faster."""
    assert COMPILER is not None
    path.with_suffix(".c").write_text(source)
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-DPy_LIMITED_API=0x030B0000", f"-I{HEADERS}", *options]
    done = subprocess.run(
        [*command, str(path.with_suffix(".c")), "-o", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@compiles
@pytest.mark.slow
def test_a_check_that_lacks_anything_gives_a_wrong_answer(tmp_path: Path) -> None:
    """One thing at a time is taken out of the source. The source itself gives none, and no sum in it overflows."""
    text = SOURCE.read_text()
    for header in HEADERS_OF_OURS:
        include = f'#include "../{header.name}"\n'
        assert include in text
        text = text.replace(include, header.read_text())
    for number, (name, old, new) in enumerate(MUTANTS):
        assert text.count(old) == 1, f"{name}: its text is there {text.count(old)} times"
        build(text.replace(old, new), tmp_path / f"{number}.so")
    strict = ["-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    build(text, tmp_path / "whole.so", *strict)
    command = [sys.executable, "-m", "tests.kernels.host_check_mutants", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("whole") is None
    missed = [MUTANTS[int(number)][0] for number, wrong in found.items() if wrong is None]
    assert len(found) == len(MUTANTS) and missed == []
