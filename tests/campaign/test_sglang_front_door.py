"""The SGLang campaign as far as it needs no SGLang: its plan, its options, and its cells in the reports."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvguard.fault_injection.html_report import report_html
from kvguard.fault_injection.junit import junit_xml
from kvguard.fault_injection.key_options import SGLANG_KEY_SETTINGS
from kvguard.fault_injection.key_plan import KEYS
from kvguard.fault_injection.plan import PROOF_SETS, Cell, TrialPlan
from kvguard.fault_injection.results import UNSUPPORTED, CampaignResults, CleanResult, TrialResult, results_json
from kvguard.fault_injection.run_folder import RunFolderError, plan_toml, read_plan
from kvguard.fault_injection.sglang_plan import (
    LOOPS,
    SGLANG_FAULTS,
    SGLANG_KEY_PAGE_SIZES,
    SGLANG_KV_DTYPES,
    SGLANG_PAGE_SIZES,
    SGLANG_UNSUPPORTED,
    build_sglang_plan,
)
from kvguard.fault_injection.targets.sglang_keys import SGLANG_KEY_FAULTS, SGLANG_KEY_PROOF_SETS
from kvguard.fault_injection.terminal import trial_line
from kvguard.fault_injection.trial import run_trial
from tests.campaign.test_command import assert_one_line_and_exit_2, campaign

needs_no_sglang = pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed here")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_default_plan_lets_every_fault_meet_every_setup(seed: int) -> None:
    """96 trials are page size x KV dtype x loop x fault, each once; 24 clean runs are each set-up twice."""
    plan = build_sglang_plan(seed=seed, trials=96, clean_runs=24, model="tiny")
    met = {(t.cell.page_size, t.cell.kv_dtype, t.cell.scheduling, t.cell.fault) for t in plan.trials}
    assert len(met) == 96 == len(SGLANG_PAGE_SIZES) * len(SGLANG_KV_DTYPES) * len(LOOPS) * len(SGLANG_FAULTS)
    clean = [(run.page_size, run.kv_dtype, run.scheduling) for run in plan.clean_runs]
    assert len(set(clean)) == 12 and all(clean.count(setup) == 2 for setup in clean)
    for fault in SGLANG_FAULTS:
        assert {trial.cell.proofs for trial in plan.trials if trial.cell.fault == fault} == {"all", "tag"}
    assert plan == build_sglang_plan(seed=seed, trials=96, clean_runs=24, model="tiny")


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """Loops are written and read; those of another engine, and faults that SGLang has not, are refused."""
    plan = build_sglang_plan(seed=1, trials=16, clean_runs=3, model="tiny")
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    for old, new in (('scheduling = "normal"', 'scheduling = "sync"'), ('"stale-radix-node"', '"stale-cache-entry"')):
        (tmp_path / "plan.toml").write_text(plan_toml(plan).replace(old, new))
        with pytest.raises(RunFolderError, match="not a plan of this release"):
            read_plan(tmp_path)


def test_the_plan_of_wrong_keys_lets_every_fault_meet_every_setup(tmp_path: Path) -> None:
    """80 trials are page size x KV dtype x loop x fault at level keys, each with the proofs that it is tried with."""
    settings = {"faults": tuple(SGLANG_KEY_FAULTS), "page_sizes": SGLANG_KEY_PAGE_SIZES, **SGLANG_KEY_SETTINGS}
    plan = build_sglang_plan(seed=1, trials=80, clean_runs=16, model="tiny", **settings)
    met = {(t.cell.page_size, t.cell.kv_dtype, t.cell.scheduling, t.cell.fault) for t in plan.trials}
    assert len(met) == 80 == 2 * 2 * 2 * len(SGLANG_KEY_FAULTS)
    assert {trial.cell.level for trial in plan.trials} == {run.traffic for run in plan.clean_runs} == {KEYS}
    for fault, proof_sets in SGLANG_KEY_PROOF_SETS.items():
        assert {trial.cell.proofs for trial in plan.trials if trial.cell.fault == fault} == set(proof_sets)
    (tmp_path / "plan.toml").write_text(plan_toml(plan))
    assert read_plan(tmp_path) == plan
    (tmp_path / "plan.toml").write_text(plan_toml(plan).replace('"tag"', '"control_plane"'))
    with pytest.raises(RunFolderError, match="not a plan of this release"):
        read_plan(tmp_path)


def test_weights_that_do_not_go_with_a_kv_dtype_are_no_setup() -> None:
    """SGLang's KV cache has the model's dtype unless it is fp8; SmolLM2 comes in bf16 and int4."""
    plan = build_sglang_plan(seed=1, trials=16, clean_runs=0, model="smollm2", weights=["int4"], kv_dtypes=["fp8_e4m3"])
    assert {(t.cell.weights, t.cell.kv_dtype) for t in plan.trials} == {("int4", "fp8_e4m3")}
    with pytest.raises(ValueError, match="no weights go with"):
        build_sglang_plan(seed=1, trials=1, clean_runs=0, model="tiny", weights=["int4"])


@pytest.mark.parametrize("pair", sorted(SGLANG_UNSUPPORTED))
def test_what_proves_nothing_is_unsupported_with_its_reason(pair: tuple[str, str]) -> None:
    """Only combinations of the list are unsupported, and no engine is started for them."""
    fault, proofs = pair
    cell = Cell(engine="sglang", fault=fault, kv_dtype="fp32", weights="fp32", page_size=16, proofs=proofs)
    plan = TrialPlan(index=0, cell=cell, traffic_seed=1, fault_seed=1)
    result = run_trial(plan, model="tiny", backend="torch")
    assert result.outcome == UNSUPPORTED and result.reason == SGLANG_UNSUPPORTED[pair]


def test_every_fault_is_tried_with_the_tag_proof_alone() -> None:
    """The list leaves every fault of SGLang all proofs together, and one alone."""
    for fault in SGLANG_FAULTS:
        assert [proofs for proofs in PROOF_SETS if (fault, proofs) not in SGLANG_UNSUPPORTED] == ["all", "tag"]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--runner", "v1"), ("--runner", "vLLM's")),
        (("--scheduling", "async"), ("async", "normal, overlap")),
        (("--page-size", "24"), ("24", "1, 2, 4, 8, 16, 32 or 64")),
        (("--backend", "numpy"), ("numpy", "torch")),
        (("--weights", "int4"), ("no weights go with",)),
        (("--fault", "stale-cache-entry"), ("stale-cache-entry", "stale-radix-node")),
        (("--fault", "hit-not-loaded"), ("hit-not-loaded", "HiCache")),
        (("--fault", "keys,stale-row"), ("stale-row", "one campaign each")),
        (("--fault", "keys", "--model", "smollm2"), ("smollm2", "tiny")),
        (("--phases", "pd"), ("--phases", "SGLang")),
        (("--model", "/no/such/folder"), ("/no/such/folder", "smollm2")),
    ],
)
def test_a_wrong_option_of_sglang_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """They are refused before SGLang is looked for."""
    assert_one_line_and_exit_2(campaign("--engine", "sglang", *arguments, cwd=tmp_path), *words)
    assert not (tmp_path / "runs").exists()


@needs_no_sglang
def test_without_sglang_the_line_says_how_to_get_it(tmp_path: Path) -> None:
    """The core's environment has no SGLang: the campaign names the target that builds one."""
    result = campaign("--engine", "sglang", cwd=tmp_path)
    assert_one_line_and_exit_2(result, "make env-sglang", ".venv-sglang/bin/kvguard campaign --engine sglang")


def test_a_real_model_that_was_not_prepared_names_the_target(tmp_path: Path) -> None:
    """`--model smollm2` needs `make models`, also for INT4, which is made of its bf16 checkpoint."""
    arguments = ("--engine", "sglang", "--model", "smollm2", "--weights", "int4", "--kv-dtype", "fp8")
    result = campaign(*arguments, cwd=tmp_path, KVGUARD_TEST_CACHE=str(tmp_path / "nothing"))
    assert_one_line_and_exit_2(result, "make models")


def test_reports_name_the_loop() -> None:
    """JSON, JUnit, HTML and the terminal tell the loops apart."""
    plan = build_sglang_plan(seed=1, trials=96, clean_runs=1, model="tiny")
    trials = [
        TrialResult(index=t.index, cell=t.cell, traffic_seed=1, fault_seed=1, outcome="detected") for t in plan.trials
    ]
    run = plan.clean_runs[0]
    clean = CleanResult(
        index=0,
        engine="sglang",
        scheduling=run.scheduling,
        kv_dtype=run.kv_dtype,
        weights=run.weights,
        page_size=run.page_size,
        traffic_seed=1,
        violations=(),
        requests_changed=(),
        preemptions=1,
        evictions=1,
        prefix_hits=1,
        promised_hits=1,
        client_aborts=1,
        steps=1,
    )
    results = CampaignResults(trials=trials, clean=[clean])
    data = results_json(results, {"seed": 1})
    assert {cell["scheduling"] for cell in data["cells"]} == set(LOOPS)
    names = [
        case.get("name", "") for case in ElementTree.fromstring(junit_xml(results).split("\n", 1)[1]).iter("testcase")
    ]
    assert len(names) == len(set(names)) == 97
    assert any(name.startswith("sched=overlap-kv=fp8_e4m3-w=fp32-page=64-proofs=") for name in names)
    html = report_html(results, data)
    assert '<th scope="row">overlap fp8_e4m3</th>' in html
    assert "scheduling=" in trial_line(trials[0]) and "runner" not in trial_line(trials[0])
