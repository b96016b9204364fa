"""The vLLM campaign as far as it needs no vLLM: its plan, its options, and what its cells look like in the reports."""

from __future__ import annotations

import json
import platform
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvguard.fault_injection import options
from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.html_report import report_html
from kvguard.fault_injection.junit import junit_xml
from kvguard.fault_injection.options import Options, UsageError, make_plan
from kvguard.fault_injection.plan import RUNNERS, SCHEDULINGS, VLLM_KV_DTYPES, build_plan, build_vllm_plan
from kvguard.fault_injection.results import CampaignResults, CleanResult, TrialResult, results_json
from kvguard.fault_injection.run_folder import RunFolderError, plan_toml, read_plan
from kvguard.fault_injection.targets import vllm_cpu
from kvguard.fault_injection.targets.vllm_writes import NOT_IN_VLLM, VLLM_WRITE_FAULTS
from kvguard.fault_injection.terminal import trial_line
from tests.campaign.test_command import assert_one_line_and_exit_2, campaign

needs_no_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_plan_lets_every_fault_meet_every_setup(seed: int) -> None:
    """84 trials are runner x scheduling x KV dtype x fault, each once; 24 clean runs are each set-up twice."""
    plan = build_vllm_plan(seed=seed, trials=84, clean_runs=24, model="tiny")
    met = {(t.cell.runner, t.cell.scheduling, t.cell.kv_dtype, t.cell.fault) for t in plan.trials}
    assert len(met) == 84 == len(RUNNERS) * len(SCHEDULINGS) * len(VLLM_KV_DTYPES) * len(PAGE_FAULTS)
    clean = [(run.runner, run.scheduling, run.kv_dtype) for run in plan.clean_runs]
    assert sorted(clean) == sorted(set(clean)) * 2 or all(clean.count(setup) == 2 for setup in clean)
    for fault, kind in PAGE_FAULTS.items():
        proofs = {trial.cell.proofs for trial in plan.trials if trial.cell.fault == fault}
        assert proofs == {"all", "tag"} | ({"control_plane"} if kind.reaches_control_plane else set())
    assert plan == build_vllm_plan(seed=seed, trials=84, clean_runs=24, model="tiny")


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """Runner and scheduling are written and read; the embedded engine's plans have none; nonsense is refused."""
    plan = build_vllm_plan(seed=1, trials=12, clean_runs=3, model="tiny")
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    embedded = plan_toml(build_plan(seed=1, trials=12, clean_runs=3))
    assert "runner" not in embedded and "scheduling" not in embedded
    for old, new in (('runner = "v1"', 'runner = "v9"'), ('scheduling = "sync"', 'scheduling = "never"')):
        (tmp_path / "plan.toml").write_text(plan_toml(plan).replace(old, new))
        with pytest.raises(RunFolderError, match="not a plan of this release"):
            read_plan(tmp_path)


OLD_CPU = {"fp8_e4m3": "no AVX-512", "fp8_e5m2": "no AVX-512", "int4": "no kernel"}


def vllm_options(**given: str) -> Options:
    chosen: dict[str, Any] = {name: "all" for name in ("fault", "kv_dtype", "weights", "page_size", "runner")}
    chosen |= {"scheduling": "all", "phases": "all", "seed": 1, "trials": 12, "clean_runs": 3, "backend": "torch"}
    return Options(**{**chosen, "engine": "vllm", "model": None, **given})


def test_misled_writes_are_a_campaign_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`writes` deals each of them to every set-up once, with all proofs and with theirs alone; others say why not."""
    monkeypatch.setattr(options, "check_vllm", lambda plan: None)
    monkeypatch.setattr(vllm_cpu, "cannot_run", lambda: {})
    asked = replace(vllm_options(fault="writes"), trials=None, clean_runs=None)
    plan = make_plan(asked)
    met = {(t.cell.runner, t.cell.scheduling, t.cell.kv_dtype, t.cell.fault) for t in plan.trials}
    assert len(met) == len(plan.trials) == 12 * len(VLLM_WRITE_FAULTS) and len(plan.clean_runs) == 12
    for fault in VLLM_WRITE_FAULTS:
        assert {trial.cell.proofs for trial in plan.trials if trial.cell.fault == fault} == {"all", "write_slot"}
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    mixed = make_plan(vllm_options(fault="stale-row,slots-swapped"))
    assert {trial.cell.fault for trial in mixed.trials} == {"stale-row", "slots-swapped"}
    for fault, reason in NOT_IN_VLLM.items():
        with pytest.raises(UsageError, match="none of vLLM's") as refused:
            make_plan(vllm_options(fault=fault))
        assert reason in str(refused.value)


def test_what_this_cpu_cannot_run_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`all` is what the machine runs, with the reason in the plan; what is asked for by name is refused with it."""
    monkeypatch.setattr(options, "check_vllm", lambda plan: None)
    monkeypatch.setattr(vllm_cpu, "cannot_run", lambda: {})
    plan = make_plan(vllm_options())
    assert plan.left_out == () and "fp8_e4m3" in {trial.cell.kv_dtype for trial in plan.trials}
    monkeypatch.setattr(vllm_cpu, "cannot_run", lambda: OLD_CPU)
    plan = make_plan(vllm_options())
    assert {trial.cell.kv_dtype for trial in plan.trials} == {"fp32", "bf16"}
    assert plan.left_out == ("fp8_e4m3: no AVX-512",)
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    plan = make_plan(vllm_options(model="smollm2"))
    assert plan.left_out == ("fp8_e4m3: no AVX-512", "int4: no kernel")
    with pytest.raises(UsageError, match="fp8_e4m3 cannot run here: no AVX-512"):
        make_plan(vllm_options(kv_dtype="fp8,bf16"))
    with pytest.raises(UsageError, match="int4 cannot run here: no kernel"):
        make_plan(vllm_options(model="smollm2", weights="int4"))


def test_the_cpu_is_asked_as_vllm_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX-512 or AMX on x86; other machines are vLLM's business."""
    for machine, avx512, amx, refuses in (
        ("x86_64", True, False, False),
        ("x86_64", False, True, False),
        ("AMD64", False, False, True),
        ("aarch64", False, False, False),
    ):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda avx512=avx512: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert (set(vllm_cpu.cannot_run()) == {"fp8_e4m3", "fp8_e5m2", "int4"}) is refuses, machine


def test_weights_that_do_not_go_with_a_kv_dtype_are_no_setup() -> None:
    """The KV cache of vLLM has the model's dtype unless it is fp8; SmolLM2 comes in bf16 and int4."""
    assert {t.cell.weights for t in build_vllm_plan(seed=1, trials=60, clean_runs=0, model="tiny").trials} == {
        "fp32",
        "bf16",
    }
    plan = build_vllm_plan(seed=1, trials=20, clean_runs=0, model="smollm2", weights=["int4"], kv_dtypes=["fp8_e4m3"])
    assert {(t.cell.weights, t.cell.kv_dtype) for t in plan.trials} == {("int4", "fp8_e4m3")}
    with pytest.raises(ValueError, match="no weights go with"):
        build_vllm_plan(seed=1, trials=1, clean_runs=0, model="tiny", weights=["int4"])


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--runner", "v3"), ("v3", "v1, v2")),
        (("--scheduling", "later"), ("later", "sync, async")),
        (("--page-size", "16"), ("16", "32, 64, 96 or 128")),
        (("--backend", "numpy"), ("numpy", "torch")),
        (("--weights", "int4"), ("no weights go with",)),
        (("--kv-dtype", "fp4"), ("fp4", "fp8_e4m3")),
        (("--model", "/no/such/folder"), ("/no/such/folder", "smollm2")),
    ],
)
def test_a_wrong_option_of_vllm_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """They are refused before vLLM is looked for."""
    assert_one_line_and_exit_2(campaign("--engine", "vllm", *arguments, cwd=tmp_path), *words)
    assert not (tmp_path / "runs").exists()


@needs_no_vllm
def test_without_vllm_the_line_says_how_to_get_it(tmp_path: Path) -> None:
    """The core's environment has no vLLM: the campaign names the target that builds one."""
    result = campaign("--engine", "vllm", cwd=tmp_path)
    assert_one_line_and_exit_2(result, "make env-vllm", ".venv-vllm/bin/kvguard campaign --engine vllm")


def test_a_real_model_that_was_not_prepared_names_the_target(tmp_path: Path) -> None:
    """`--model smollm2` needs `make models`."""
    arguments = ("--engine", "vllm", "--model", "smollm2", "--weights", "bf16", "--kv-dtype", "bf16")
    result = campaign(*arguments, cwd=tmp_path, KVGUARD_TEST_CACHE=str(tmp_path / "nothing"))
    assert_one_line_and_exit_2(result, "make models")


def test_runners_are_no_option_of_the_embedded_engine(tmp_path: Path) -> None:
    """An option that has no effect is refused rather than ignored."""
    assert_one_line_and_exit_2(campaign("--runner", "v1", cwd=tmp_path), "--engine vllm")


def test_fp8_means_e4m3_in_the_embedded_engine_too(tmp_path: Path) -> None:
    """`--kv-dtype fp8` is what engines call fp8_e4m3."""
    arguments = ("--trials", "2", "--clean-runs", "0", "--fault", "null-entry", "--page-size", "16")
    result = campaign(*arguments, "--weights", "fp32", "--kv-dtype", "fp8", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert {cell["kv_dtype"] for cell in json.loads(result.stdout)["cells"]} == {"fp8_e4m3"}


def test_reports_name_runner_and_scheduling() -> None:
    """JSON, JUnit, HTML and the terminal tell set-ups apart; cells of the embedded engine read as before."""
    plan = build_vllm_plan(seed=1, trials=84, clean_runs=1, model="tiny")
    trials = [
        TrialResult(index=t.index, cell=t.cell, traffic_seed=1, fault_seed=1, outcome="detected") for t in plan.trials
    ]
    embedded = [
        TrialResult(index=84, cell=t.cell, traffic_seed=1, fault_seed=1, outcome="detected")
        for t in build_plan(seed=1, trials=1, clean_runs=0).trials
    ]
    run = plan.clean_runs[0]
    clean = CleanResult(
        index=0,
        engine="vllm",
        runner=run.runner,
        scheduling=run.scheduling,
        kv_dtype=run.kv_dtype,
        weights=run.weights,
        page_size=32,
        traffic_seed=1,
        violations=("x",),
        requests_changed=(),
        preemptions=1,
        evictions=1,
        prefix_hits=1,
        promised_hits=1,
        client_aborts=1,
        steps=1,
    )
    results = CampaignResults(trials=[*trials, *embedded], clean=[clean])
    data = results_json(results, {"seed": 1})
    assert len({(cell["runner"], cell["scheduling"], cell["kv_dtype"]) for cell in data["cells"]}) == 13
    names = [
        case.get("name", "") for case in ElementTree.fromstring(junit_xml(results).split("\n", 1)[1]).iter("testcase")
    ]
    assert len(names) == len(set(names)) == 86
    assert any(name.startswith("runner=v2-sched=async-kv=fp8_e4m3-w=bf16-page=32-proofs=") for name in names)
    assert any(name.startswith("kv=") for name in names)
    html = report_html(results, data)
    assert '<th scope="row">v2 async fp8_e4m3</th>' in html and "runner " + run.runner in html
    cell = replace(trials[0].cell, runner="v2", scheduling="sync")
    assert "runner=v2 scheduling=sync" in trial_line(replace(trials[0], cell=cell))
    assert "runner" not in trial_line(embedded[0])
