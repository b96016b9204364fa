"""`kvguard doctor` in an environment with vLLM."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kvguard.adapters import doctor as doctor_module
from kvguard.adapters import findings as findings_module
from kvguard.adapters.vllm import layout
from kvguard.cli import build_app
from kvguard.kernels import native


def run(*arguments: str) -> tuple[int, list[dict[str, str]], str]:
    """Exit code, findings and the output of `kvguard doctor --json`."""
    given = ["doctor", "--json", *arguments]
    result = CliRunner().invoke(build_app(given), given)
    findings = json.loads(result.stdout) if result.stdout.startswith("[") else []
    return result.exit_code, findings, result.output


def failed(findings: list[dict[str, str]]) -> list[str]:
    return [finding["topic"] for finding in findings if finding["verdict"] == "failed"]


def test_a_sound_environment_passes_and_names_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 0: version, plug-in and hook points are fine; what is not covered is named."""
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    code, findings, output = run("--engine", "vllm")
    assert code == 0 and failed(findings) == [], output
    text = "\n".join(finding["text"] for finding in findings if finding["verdict"] == "limit")
    for missing in ("pipeline", "data", "context parallel", "drafter", "others are refused", "KV connector"):
        assert missing in text
    assert any(finding["topic"] == "vllm runner v2" and finding["verdict"] == "ok" for finding in findings)


def test_what_would_leave_vllm_unguarded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1 and a line that says what to do: level off, plug-in kept out, a vLLM that looks different."""
    for level in (None, "off"):
        if level is not None:
            monkeypatch.setenv("KVGUARD_LEVEL", level)
        code, findings, output = run()
        assert code == 1 and failed(findings) == ["configuration"] and "KVGUARD_LEVEL=tags" in output
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    code, findings, output = run()
    assert code == 1 and failed(findings) == ["vllm plug-in"] and "VLLM_PLUGINS" in output
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(findings_module, "entry_points", lambda group: [])
    assert failed(run()[1]) == ["vllm plug-in"]
    monkeypatch.undo()
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.delattr(BlockPool, "evict_blocks")
    code, findings, output = run()
    assert code == 1 and failed(findings) == ["vllm scheduler"] and "BlockPool has no evict_blocks" in output
    assert layout.vllm_version() in output


def test_level_keys_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's adapter says what requests are made of; an engine whose adapter does not is named and fails."""
    monkeypatch.setenv("KVGUARD_LEVEL", "keys")
    code, findings, output = run("--engine", "vllm")
    assert code == 0 and failed(findings) == [] and "level keys" in output
    monkeypatch.setattr(doctor_module, "CONTENT_ENGINES", ())
    code, findings, output = run("--engine", "vllm")
    assert code == 1 and failed(findings) == ["vllm level"] and "KVGUARD_LEVEL=tags" in output


def test_an_unknown_engine_is_a_usage_error() -> None:
    """One line, exit 2."""
    code, _, output = run("--engine", "vlm")
    assert code == 2 and "no engine 'vlm'" in output


def test_the_native_parts_are_there_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them an engine is guarded all the same."""
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")

    def said() -> list[tuple[str, str]]:
        _, findings, _ = run("--engine", "vllm")
        return [(found["verdict"], found["text"]) for found in findings if found["topic"] == "native parts"]

    def stand_in(name: str, interface: int) -> str:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(INTERFACE=interface))
        return name

    declared = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert list(native.EXTENSIONS) == [part["name"] for part in declared["tool"]["setuptools"]["ext-modules"]]
    # Stand-ins: this environment may have been built with a compiler or without.
    built, older = stand_in("kvguard_built", native.INTERFACE), stand_in("kvguard_older", native.INTERFACE - 1)
    monkeypatch.setattr(doctor_module, "EXTENSIONS", (built,))
    assert said() == [("ok", "built: what a step of decode does most is done in C")]
    (tmp_path / "kvguard_of_another_machine.abi3.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    for missing in ("kvguard.nowhere", older, "kvguard_of_another_machine"):
        monkeypatch.setattr(doctor_module, "EXTENSIONS", (built, missing))
        ((verdict, text),) = said()
        assert verdict == "ok" and f"not built from this source: {missing};" in text and "C compiler" in text
