"""`kvguard doctor` in an environment with SGLang."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvguard.adapters import findings as findings_module
from kvguard.adapters.sglang import layout
from kvguard.cli import build_app


def run(*arguments: str) -> tuple[int, list[dict[str, str]], str]:
    """Exit code, findings and the output of `kvguard doctor --json`."""
    given = ["doctor", "--json", *arguments]
    result = CliRunner().invoke(build_app(given), given)
    findings = json.loads(result.stdout) if result.stdout.startswith("[") else []
    return result.exit_code, findings, result.output


def failed(findings: list[dict[str, str]]) -> list[str]:
    return [finding["topic"] for finding in findings if finding["verdict"] == "failed"]


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level is set; SGLANG_PLUGINS is what the tests say."""
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def test_a_sound_environment_passes_and_names_its_limits() -> None:
    """Exit 0: version, plug-in and hook points are fine; what is not covered is named."""
    code, findings, output = run("--engine", "sglang")
    assert code == 0 and failed(findings) == [], output
    text = "\n".join(finding["text"] for finding in findings if finding["verdict"] == "limit")
    for _, _, what in layout.REFUSED:
        assert f"refused: {what}" in text
    for limit in layout.STANDING_LIMITS:
        assert limit in text
    assert all(name in text for name in layout.COVERED_ALLOCATORS)
    fine = {finding["topic"] for finding in findings if finding["verdict"] == "ok"}
    assert {"sglang version", "sglang plug-in", "sglang hooks"} <= fine


def test_level_keys_is_one_that_sglang_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0, with the level among the findings."""
    monkeypatch.setenv("KVGUARD_LEVEL", "keys")
    code, findings, output = run("--engine", "sglang")
    assert code == 0 and failed(findings) == [] and "level keys" in output


@pytest.mark.parametrize(("allowed", "code"), [("cputest", 1), ("cputest, kvguard", 0), ("none", 1), ("kvguard", 0)])
def test_a_list_that_leaves_the_plug_in_out(allowed: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, and what to add; SGLang itself would start without a word."""
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    found, findings, output = run("--engine", "sglang")
    assert found == code, output
    assert failed(findings) == (["sglang plug-in"] if code else [])
    if code:
        assert "SGLANG_PLUGINS" in output and "add kvguard" in output


def test_what_would_leave_sglang_unguarded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level off, no entry point, a function that looks different: exit 1."""
    monkeypatch.setenv("KVGUARD_LEVEL", "off")
    code, findings, output = run("--engine", "sglang")
    assert code == 1 and failed(findings) == ["configuration"] and "KVGUARD_LEVEL=tags" in output
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    with monkeypatch.context() as patch:
        patch.setattr(findings_module, "entry_points", lambda group: [])
        assert failed(run("--engine", "sglang")[1]) == ["sglang plug-in"]
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    monkeypatch.delattr(UnifiedRadixCache, "_apply_cache_action")
    code, findings, output = run("--engine", "sglang")
    assert code == 1 and failed(findings) == ["sglang hooks"]
    assert "UnifiedRadixCache has no _apply_cache_action" in output and layout.sglang_version() in output


def test_an_untested_release_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may work: the hook points are looked at all the same."""
    monkeypatch.setattr(layout, "TESTED_RELEASES", ("0.4.0",))
    code, findings, _ = run("--engine", "sglang")
    assert code == 0
    assert [one["verdict"] for one in findings if one["topic"] == "sglang version"] == ["limit"]


def test_what_is_refused_are_arguments_of_this_sglang() -> None:
    """A renamed argument would never be refused again."""
    from sglang.srt.server_args import ServerArgs

    names = inspect.signature(ServerArgs).parameters
    plain = ServerArgs(model_path="none")
    for name, covered, _ in layout.REFUSED:
        assert name in names and getattr(plain, name) == covered, name
    layout.check_configuration(plain)


OTHER: dict[type, Any] = {bool: True, int: 2, str: "decode", type(None): "EAGLE"}


@pytest.mark.parametrize("name", [name for name, _, _ in layout.REFUSED])
def test_what_is_not_covered_is_refused_by_name(name: str) -> None:
    """The line says which argument and what it means."""
    from sglang.srt.server_args import ServerArgs

    covered, what = next((covered, what) for refused, covered, what in layout.REFUSED if refused == name)
    value = OTHER[type(covered)]
    with pytest.raises(layout.Unsupported) as caught:
        layout.check_configuration(ServerArgs(model_path="none", **{name: value}))
    assert f"{name} = {value}" in str(caught.value) and what in str(caught.value)
