"""`kvguard doctor`: would an engine started here be guarded, and what of it would not be covered?"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated

import typer

from kvguard.adapters.activation import VARIABLES, asked_for
from kvguard.adapters.findings import ENGINES, Finding, Verdict, worst
from kvguard.config import GuardConfig
from kvguard.kernels.native import EXTENSIONS, extension

CONTENT_ENGINES = ("vllm", "sglang")
"""Engines whose plug-in says what requests are made of, as level `keys` needs."""
_MARKS = {Verdict.OK: "ok", Verdict.LIMIT: "limit", Verdict.FAILED: "FAILED"}


def doctor(
    engine: Annotated[
        list[str] | None, typer.Option("--engine", help="Engine to look at (vllm); default: every one installed here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Check whether an engine started in this environment would be guarded; exit 1 if not."""
    unknown = [name for name in engine or () if name not in ENGINES]
    if unknown:
        typer.echo(f"kvguard: no engine {unknown[0]!r}; there are: {', '.join(ENGINES)}", err=True)
        raise typer.Exit(2)
    findings = [*_configuration(), _native_parts()]
    names = engine or [name for name in ENGINES if importlib.util.find_spec(name) is not None]
    for name in names:
        findings += _engine(name)
    if not names:
        findings.append(
            Finding(topic="engine", verdict=Verdict.FAILED, text=f"none of {', '.join(ENGINES)} is installed here")
        )
    if as_json:
        import dataclasses
        import json

        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{_MARKS[finding.verdict]:<6}  {finding.topic:<14}  {finding.text}")
    raise typer.Exit(1 if worst(findings) is Verdict.FAILED else 0)


def _configuration() -> list[Finding]:
    if not asked_for():
        text = f"neither {' nor '.join(VARIABLES)} is set, so nothing is guarded: set KVGUARD_LEVEL=tags for the engine"
        return [Finding(topic="configuration", verdict=Verdict.FAILED, text=text)]
    # A broken file or variable is reported by the command line itself, as for every command.
    config = GuardConfig.load()
    if config.is_off:
        text = "level is off, so nothing is guarded: set KVGUARD_LEVEL=tags where the engine is started"
        return [Finding(topic="configuration", verdict=Verdict.FAILED, text=text)]
    text = f"level {config.level}, on_violation {config.on_violation}, on_guard_error {config.on_guard_error}"
    findings = [Finding(topic="configuration", verdict=Verdict.OK, text=text)]
    if config.on_violation == "observe":
        text = "on_violation is observe: violations are counted and logged, wrong tokens are emitted all the same"
        findings.append(Finding(topic="configuration", verdict=Verdict.LIMIT, text=text))
    for proof, on in (("tag", config.device_check), ("control plane", config.control_plane)):
        if not on:
            text = f"the {proof} proof is switched off"
            findings.append(Finding(topic="configuration", verdict=Verdict.LIMIT, text=text))
    return findings


def _native_parts() -> Finding:
    missing = [name for name in EXTENSIONS if extension(name) is None]
    text = "built: what a step of decode does most is done in C"
    if missing:
        text = f"not built from this source: {', '.join(missing)}; Python does the same, slower: install kvguard again"
        text += " where there is a C compiler"
    return Finding(topic="native parts", verdict=Verdict.OK, text=text)


def _engine(name: str) -> list[Finding]:
    if importlib.util.find_spec(name) is None:
        return [Finding(topic=name, verdict=Verdict.FAILED, text="it is not installed in this environment")]
    module = importlib.import_module(ENGINES[name])
    findings: list[Finding] = module.examine()
    if asked_for() and GuardConfig.load().level == "keys" and name not in CONTENT_ENGINES:
        text = "level keys does not work with this engine's plug-in in this release: set KVGUARD_LEVEL=tags"
        findings.insert(0, Finding(topic=f"{name} level", verdict=Verdict.FAILED, text=text))
    return findings
