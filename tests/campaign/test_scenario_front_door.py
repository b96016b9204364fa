"""`kvguard campaign --scenarios` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvguard.fault_injection.options import UsageError
from kvguard.fault_injection.plan import SCENARIO_LEVEL
from kvguard.fault_injection.run_folder import PLAN, RunFolderError, plan_toml, read_plan
from kvguard.fault_injection.scenarios.plan import scenario_plan
from kvguard.fault_injection.scenarios.registry import SCENARIOS, scenarios_of
from tests.campaign.test_command import assert_one_line_and_exit_2, campaign
from tests.campaign.test_write_campaign import options

ZEROS = ("missed", "not_injected", "unsupported", "false_positives", "tokens_after_fault", "bystanders_changed")


@pytest.mark.slow
def test_the_campaign_of_scenarios_finds_every_bug(tmp_path: Path) -> None:
    """At least 25 bugs detected, none missed, no false alarm, in the JSON of every campaign."""
    done = campaign("--scenarios", "--json", "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    data = json.loads(done.stdout)
    wanted = scenarios_of("embedded")
    assert data["detected"] == data["trials"] == sum(len(scenario.proof_sets) for scenario in wanted)
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0) and data["all_proven"]
    assert [record["name"] for record in data["scenarios"] if record["detected"]] and len(data["scenarios"]) >= 25
    for record in data["scenarios"]:
        scenario = SCENARIOS[record["name"]]
        assert record["detected"] and record["proof"] in record["detected_by"] and record["link"] == scenario.link
    assert all(data["clean_runs_contained"][name] for name in ("preemptions", "evictions", "client_aborts"))
    assert json.loads((tmp_path / "runs" / "latest" / "results.json").read_text()) == data


def test_named_scenarios_run_alone_and_again(tmp_path: Path) -> None:
    """Only what is named; a table with a line each; a trial of it is run again from its folder."""
    named = ("row-index-wraps", "padding-slot-as-index")
    done = campaign("--scenarios", *named, "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(f" {name} " in done.stdout for name in named) and "All proven." in done.stdout
    assert not [name for name in SCENARIOS if name not in named and f" {name} " in done.stdout]
    again = campaign("--replay", "0", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr[-3000:]
    trial = json.loads(again.stdout)
    assert trial["cell"]["fault"] == "row-index-wraps" and trial["cell"]["level"] == SCENARIO_LEVEL
    assert trial["outcome"] == "detected" and SCENARIOS["row-index-wraps"].link in trial["description"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scenarios", "nosuch"), ("nosuch", "docs/scenarios.md")),
        (("row-index-wraps",), ("row-index-wraps", "--scenarios")),
        (("--scenarios", "--fault", "stale-row"), ("--fault", "smallest input")),
        (("--scenarios", "--kv-dtype", "fp8"), ("--kv-dtype", "smallest input")),
        (("--scenarios", "vllm-salt-equal-to-adapter"), ("vllm", "--engine vllm")),
        (("--scenarios", "--engine", "nosuch"), ("nosuch", "sglang")),
        (("--scenarios", "--engine", "vllm"), ("vLLM is not installed here",)),
        (("--scenarios", "--engine", "sglang"), ("SGLang is not installed here",)),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) and value[0].startswith("--") else "",
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    """Before anything runs, with exit status 2."""
    assert_one_line_and_exit_2(campaign(*arguments, cwd=tmp_path), *words)


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """And one that names a scenario, an engine or a proof that there is not is refused."""
    plan = scenario_plan(options(fault="all"), ())
    text = plan_toml(plan)
    (tmp_path / PLAN).write_text(text, encoding="utf-8")
    assert read_plan(tmp_path) == plan
    for old, new in (
        ('"row-index-wraps"', '"nosuch"'),
        ('engine = "embedded"\nfault', 'engine = "vllm"\nfault'),
        ('proofs = "write_slot"', 'proofs = "transfer"'),
    ):
        assert old in text
        (tmp_path / PLAN).write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(RunFolderError, match="has scenario|has proofs"):
            read_plan(tmp_path)


def test_a_seed_is_a_plan() -> None:
    """Each scenario with all proofs and with each of its own, and once without its bug."""
    plan = scenario_plan(options(fault="all", seed=4), ())
    assert plan == scenario_plan(options(fault="all", seed=4), ()) != scenario_plan(options(fault="all", seed=5), ())
    assert [run.scenario for run in plan.clean_runs] == [scenario.name for scenario in scenarios_of("embedded")]
    with pytest.raises(UsageError, match="nosuch"):
        scenario_plan(options(fault="all"), ("nosuch",))
