"""The pytest plugin: the sample project is green, red where its allocator is broken, and nobody else is disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.plan import UNSUPPORTED, TrialPlan
from kvguard.fault_injection.pytest_campaign import MarkerError, plan_jobs
from kvguard.fault_injection.pytest_report import CampaignReport
from kvguard.fault_injection.targets.own import why_unsupported

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "docs" / "examples" / "toy_engine"

pytestmark = pytest.mark.slow


def run_pytest(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """pytest as a user's shell would run it, with the plugin from its entry point."""
    outside = {
        name: value for name, value in os.environ.items()
        if not name.startswith(("KVGUARD_", "PYTEST_", "GITHUB_", "TOY_", "COV_"))
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments],
        cwd=folder, env={**outside, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


def properties_of(element: ET.Element | None) -> dict[str, str]:
    assert element is not None
    return {found.get("name", ""): found.get("value", "") for found in element.findall("properties/property")}


def test_the_sample_project_is_green(tmp_path: Path) -> None:
    """Every fault found, alone with each proof; totals stand in the JUnit file, on the terminal and in the summary."""
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    done = run_pytest(
        SAMPLE, "--kvguard-campaign", f"--junitxml={tmp_path / 'junit.xml'}", "-q", GITHUB_STEP_SUMMARY=str(summary)
    )
    assert done.returncode == 0, done.stdout
    assert "43 passed, 3 skipped" in done.stdout
    assert "seed 1: 36 of 36 trials detected, 0 missed, 0 not injected" in done.stdout
    suite = ET.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    totals = properties_of(suite)
    wanted = {
        "seed": "1", "trials": "36", "detected": "36", "missed": "0", "not_injected": "0", "unsupported": "3",
        "errors": "0", "clean_runs": "6", "tokens_after_fault": "0", "bystanders_changed": "0",
        "false_positives": "0", "miss_rate_upper_95": "0.0833",
    }  # fmt: skip
    assert {name: totals[f"kvguard_{name}"] for name in wanted} == wanted
    assert int(totals["kvguard_potent"]) > 20
    assert suite is not None
    cases = {case.get("name"): properties_of(case) for case in suite.findall("testcase")}
    outcomes = [case["kvguard_outcome"] for case in cases.values() if "kvguard_outcome" in case]
    assert sorted(set(outcomes)) == ["clean", "detected", "unsupported"] and len(outcomes) == 45
    by_fault = {case["kvguard_fault"] for case in cases.values() if case.get("kvguard_outcome") == "detected"}
    assert by_fault == set(PAGE_FAULTS)
    text = summary.read_text()
    assert text.startswith("before\n## kvguard fault campaign\n\nAll proven.\n")
    assert "| stale-row | control_plane | 0 | 0 | 0 | 0 | 1 | 0 |" in text
    assert "| stale-row | tag | 2 | 2 | 0 | 0 | 0 | 2 |" in text
    assert "unsupported: stale-row: the fault is a write to the block table" in text
    contained = re.search(r"6 clean runs \((.*)\)", done.stdout)
    assert contained is not None and " 0 evictions" not in contained[1] and " 0 prefix hits" not in contained[1]


@pytest.mark.parametrize("manager,kind", [("reissuing", "double-allocation"), ("careless", "free-while-held")])
def test_the_sample_project_is_red_where_its_allocator_is_broken(manager: str, kind: str) -> None:
    """The clean runs fail and name the violation; failures name fault, seed and how to run them again."""
    done = run_pytest(
        SAMPLE, "--kvguard-campaign", "--kvguard-seed", "3", "-k", "clean or stale-row-all", TOY_ENGINE_MANAGER=manager
    )
    assert done.returncode == 1, done.stdout
    assert re.search(r"kvguard clean run \d \(seed 3\): flagged where nothing was wrong", done.stdout)
    assert re.search(rf"^  {kind}: kvguard kvg-\S+: ", done.stdout, re.MULTILINE)
    again = re.search(r"^again: pytest (--kvguard-campaign --kvguard-seed 3) '(\S+)'$", done.stdout, re.MULTILINE)
    assert again is not None
    if manager == "careless":
        return
    once_more = run_pytest(SAMPLE, *again[1].split(), again[2], TOY_ENGINE_MANAGER=manager)
    assert once_more.returncode == 1 and "1 failed" in once_more.stdout
    sound = run_pytest(SAMPLE, *again[1].split(), again[2])
    assert sound.returncode == 0 and "1 passed" in sound.stdout


def test_workers_of_xdist_share_one_campaign(tmp_path: Path) -> None:
    """Items keep their names in every process, and the totals count what all of them ran."""
    pytest.importorskip("xdist")
    done = run_pytest(
        SAMPLE, "-n", "2", "--kvguard-campaign", f"--junitxml={tmp_path / 'junit.xml'}", "-k", "null-entry or clean-0",
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    totals = properties_of(ET.parse(tmp_path / "junit.xml").getroot().find("testsuite"))
    assert (totals["kvguard_trials"], totals["kvguard_detected"], totals["kvguard_clean_runs"]) == ("4", "4", "1")
    assert (tmp_path / "summary.md").read_text().count("## kvguard fault campaign") == 1


def test_without_the_option_nothing_runs_and_the_reason_is_said(tmp_path: Path) -> None:
    """The other tests of the project run as ever; no summary is written."""
    done = run_pytest(SAMPLE, "-rs", GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"))
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout
    assert "a fault campaign: give --kvguard-campaign to run it" in done.stdout
    assert not (tmp_path / "summary.md").exists()


def test_a_project_that_merely_has_kvguard_installed_is_not_disturbed(tmp_path: Path) -> None:
    """The plugin is there, and with it nothing of kvguard but its name: no torch, no numpy, no pydantic."""
    (tmp_path / "test_theirs.py").write_text(
        textwrap.dedent("""
        import sys

        def test_nothing_was_imported(request):
            assert request.config.pluginmanager.hasplugin("kvguard")
            heavy = ("torch", "numpy", "pydantic", "structlog", "typer", "rich", "yaml")
            assert [name for name in heavy if name in sys.modules] == []
            ours = {name for name in sys.modules if name.split(".")[0] == "kvguard"}
            assert ours == {"kvguard", "kvguard.fault_injection", "kvguard.fault_injection.pytest_plugin"}
        """)
    )
    done = run_pytest(tmp_path, "-p", "no:hypothesispytest", "--strict-markers", "--strict-config", "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-m kvguard" not in done.stdout
    markers = run_pytest(tmp_path, "--markers")
    assert "@pytest.mark.kvguard(trials=N, clean_runs=N" in markers.stdout


TESTS_THAT_PROVE_NOTHING = '''
import itertools, sys
sys.path[:0] = [{sample!r}, {tests!r}]
import pytest
from test_campaign import EngineUnderTest, make_engine

numbers = itertools.count()


class Moody(EngineUnderTest):
    def tokens(self, request):
        found = list(super().tokens(request))
        return [*found[:-1], next(numbers)] if found else found


class WithoutRows(EngineUnderTest):
    unsupported = {{"stale-cache-entry": "its cache is another process"}}

    def __init__(self, engine):
        super().__init__(engine)
        del self.block_table


class Deaf(EngineUnderTest):
    """Tells its guard of requests and pages, and never asks before it reads."""

    def __init__(self, engine):
        super().__init__(engine)
        if engine.guard is not None:
            engine.guard.before_forward = lambda *given: None


def wrapped(kind):
    return lambda make_guard: kind(make_engine(make_guard).engine)


@pytest.mark.kvguard(trials=0, clean_runs=1)
def test_forgets_to_run(kvguard_campaign):
    pass


@pytest.mark.kvguard(trials=0, clean_runs=1)
def test_has_its_own_reason(kvguard_campaign):
    raise RuntimeError("before the trial")


@pytest.mark.kvguard(trials=1, clean_runs=0, faults="null-entry", proofs="all")
def test_moody(kvguard_campaign):
    kvguard_campaign.run(wrapped(Moody))


@pytest.mark.kvguard(trials=1, clean_runs=0, faults="null-entry", proofs="all")
def test_unguarded(kvguard_campaign):
    kvguard_campaign.run(lambda make_guard: make_engine(None))


@pytest.mark.kvguard(trials=3, clean_runs=0,
                     faults=["null-entry", "stale-cache-entry", "double-allocation"], proofs=["all"])
def test_parts(kvguard_campaign):
    kvguard_campaign.run(wrapped(WithoutRows))


@pytest.mark.kvguard(trials=1, clean_runs=1, faults="null-entry", proofs="all")
def test_deaf(kvguard_campaign):
    kvguard_campaign.run(wrapped(Deaf))
'''


def test_what_proves_nothing_does_not_pass(tmp_path: Path) -> None:
    """A test that never runs its trial, an engine that cannot be compared or is not guarded; unsupported is listed."""
    text = TESTS_THAT_PROVE_NOTHING.format(sample=str(SAMPLE), tests=str(SAMPLE / "tests"))
    (tmp_path / "test_nothing.py").write_text(text)
    done = run_pytest(tmp_path, "--kvguard-campaign", f"--junitxml={tmp_path / 'junit.xml'}", "-rs")
    assert done.returncode == 1, done.stdout
    assert "kvguard_campaign.run(factory) was not called: this test proves nothing" in done.stdout
    assert done.stdout.count("was not called: this test proves nothing") == 1, "who left early has another reason"
    assert "Warning" not in done.stdout and "During handling" not in done.stdout
    assert "the engine gives other tokens for the same traffic the second time" in done.stdout
    assert "the factory was given a function that makes a guard, and did not call it" in done.stdout
    assert "WithoutRows offers no block_table" in done.stdout
    assert "stale-cache-entry: its cache is another process" in done.stdout
    assert "null-entry, proofs on: all: missed: 0 steps seen, 0 verified" in done.stdout
    assert "kvguard clean run 0 (seed 1): 0 steps seen, 0 verified" in done.stdout
    totals = properties_of(ET.parse(tmp_path / "junit.xml").getroot().find("testsuite"))
    assert totals["kvguard_unsupported"] == "2" and totals["kvguard_detected"] == "1"
    assert totals["kvguard_errors"] == "4"


def marked(**arguments: Any) -> Any:
    return pytest.mark.kvguard(**arguments).mark


def test_a_plan_is_a_function_of_marker_and_seed_and_lists_what_proves_nothing() -> None:
    """Every pair comes once before any twice; pairs that prove nothing are items too; names differ."""
    jobs = plan_jobs(None, 5)
    assert jobs == plan_jobs(None, 5) and [job.plan for job in jobs] != [job.plan for job in plan_jobs(None, 6)]
    pairs = [(job.plan.cell.fault, job.plan.cell.proofs) for job in jobs if isinstance(job.plan, TrialPlan)]
    assert len(pairs) == len(set(pairs)) == 3 * len(PAGE_FAULTS) and set(UNSUPPORTED) <= set(pairs)
    assert len({job.name for job in jobs}) == len(jobs) == len(pairs) + 3
    few = plan_jobs(marked(trials=4, clean_runs=0, faults="stale-row", proofs=("all", "tag")), 1)
    assert [job.name.rsplit("-", 1)[0] for job in few].count("stale-row-tag") == 2 and len(few) == 4


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"trails": 3}, "unknown argument 'trails': choose from trials, clean_runs, faults, proofs"),
        ({"faults": "stale"}, "unknown fault 'stale': choose from use-after-free"),
        ({"proofs": ["none"]}, "unknown proof set 'none'"),
        ({"faults": []}, "no fault given"),
        ({"faults": 5}, "5 names no fault: give one or more of use-after-free"),
        ({"proofs": 5}, "5 names no proof set"),
        ({"faults": [["stale-row"]]}, "unknown fault"),
        ({"trials": -1}, "trials=-1 is no number of runs"),
        ({"clean_runs": "many"}, "clean_runs='many' is no number of runs"),
        ({"faults": "stale-row", "proofs": "control_plane"}, "none of these faults passes the control plane"),
    ],
)
def test_a_marker_that_cannot_be_is_said(arguments: dict[str, Any], message: str) -> None:
    """Each wrong argument gets a line that says what can be."""
    with pytest.raises(MarkerError, match=message):
        plan_jobs(marked(**arguments), 1)


def test_a_fault_is_unsupported_exactly_where_the_engine_lacks_what_it_needs() -> None:
    """The reason names what is missing; an engine that offers everything supports every fault."""
    whole: Any = SimpleNamespace(
        null_page=0, block_table=[[0]], row=min, free_pages=[], release=min, prefix_cache={}, prefix_keys=min
    )
    for fault, kind in PAGE_FAULTS.items():
        assert why_unsupported(whole, fault, "all") == ""
        assert bool(why_unsupported(whole, fault, "control_plane")) != kind.reaches_control_plane
    bare: Any = SimpleNamespace(null_page=None, row=min, block_table=[[0]], free_pages=[])
    assert why_unsupported(bare, "null-entry", "tag") == (
        "null page inside the live extent of a row: SimpleNamespace offers no null_page"
    )
    assert "offers no release" in why_unsupported(bare, "use-after-free", "all")
    assert "offers no prefix_cache and no prefix_keys" in why_unsupported(bare, "stale-cache-entry", "all")
    assert why_unsupported(bare, "stale-row", "all") == why_unsupported(bare, "double-allocation", "all") == ""


def test_an_item_that_ended_without_an_outcome_is_an_error_of_the_campaign() -> None:
    """What crashed is neither detected nor missed, and is counted."""
    report = CampaignReport(SimpleNamespace(getoption=lambda name: 9, stash={}))  # type: ignore[arg-type]
    for when, outcome, properties in (
        ("setup", "passed", [("kvguard_job", "x")]),
        ("call", "failed", [("kvguard_job", "x"), ("kvguard_seed", 9)]),
        ("teardown", "passed", [("kvguard_job", "x")]),
        ("call", "passed", [("theirs", "y")]),
    ):
        seen = SimpleNamespace(
            when=when, outcome=outcome, passed=outcome == "passed", user_properties=properties, nodeid="t.py::t[x|y]"
        )
        report.pytest_runtest_logreport(seen)  # type: ignore[arg-type]
    assert report.totals()["errors"] == 1 and report.totals()["trials"] == 0
    assert "1 items failed" in report.markdown() and "t.py::t[x|y]" in report.markdown()
