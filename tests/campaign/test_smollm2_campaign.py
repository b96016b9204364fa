"""`kvguard campaign --model smollm2`: the faults under a real model in the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvguard.fault_injection.models import CACHE_VARIABLE
from kvguard.fault_injection.options import Options, make_plan
from tests.campaign.test_command import assert_one_line_and_exit_2, campaign
from tests.campaign.test_default_campaign import ZEROS


def test_it_needs_the_model(tmp_path: Path) -> None:
    """Before `make models` the message names that target."""
    result = campaign("--model", "smollm2", cwd=tmp_path, **{CACHE_VARIABLE: str(tmp_path)})
    assert_one_line_and_exit_2(result, "make models")


@pytest.mark.slow
def test_its_default_plan_covers_every_cell() -> None:
    """Every fault under every set of proofs, and every storage cell, at least once."""
    nothing = {"runner": "all", "scheduling": "all", "trials": None, "clean_runs": None}
    options = Options(
        seed=1,
        fault="all",
        engine="embedded",
        model="smollm2",
        backend="torch",
        kv_dtype="all",
        weights="all",
        page_size="all",
        **nothing,  # type: ignore[arg-type]
    )
    plan = make_plan(options)
    cells = [trial.cell for trial in plan.trials]
    assert len({(cell.fault, cell.proofs) for cell in cells}) == 18
    storage = {(cell.kv_dtype, cell.weights, cell.page_size) for cell in cells}
    assert storage == {
        (kv, weights, size)
        for kv in ("fp32", "bf16", "fp8_e4m3")
        for weights in ("bf16", "int4")
        for size in (16, 64)
    }
    assert plan.model == "smollm2" and len(plan.clean_runs) == 6


@pytest.mark.slow
def test_a_short_campaign_proves_everything(tmp_path: Path) -> None:
    """INT4 weights over an FP8 cache: both faults are found in time, nobody else is touched, and it can be read."""
    arguments = ("--model", "smollm2", "--weights", "int4", "--kv-dtype", "fp8", "--page-size", "16")
    faults = ("--fault", "stale-row,double-allocation", "--trials", "2", "--clean-runs", "1", "--workers", "1")
    result = campaign(*arguments, *faults, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    data = json.loads(result.stdout)
    assert data["model"] == "smollm2" and data["detected"] == data["trials"] == 2
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["clean_runs"] == 1 and data["clean_runs_contained"]["client_aborts"] > 0
