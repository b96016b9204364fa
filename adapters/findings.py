"""What `kvguard doctor` finds, engine by engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points

ENGINES = {"vllm": "kvguard.adapters.vllm.doctor", "sglang": "kvguard.adapters.sglang.doctor"}
"""Engine -> the module whose `examine()` looks at it; the engine's package has the engine's name."""


class Verdict(StrEnum):
    """What a finding means for somebody who relies on the guard."""

    OK = "ok"
    LIMIT = "limit"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. LIMIT: guarded, but not in this respect; FAILED: an engine would not be guarded."""

    topic: str
    verdict: Verdict
    text: str


def worst(findings: Iterable[Finding]) -> Verdict:
    """FAILED before LIMIT before OK."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)


def version_finding(engine: str, version: str, tested: Sequence[str]) -> Finding:
    """Whether this release of an engine is one that kvguard's tests run on; a local version label does not count."""
    topic = f"{engine} version"
    if version.partition("+")[0] in tested:
        return Finding(topic=topic, verdict=Verdict.OK, text=f"{version}, tested")
    text = (
        f"{version} is not one of the tested releases ({', '.join(tested)}); the hook points are checked all the same"
    )
    return Finding(topic=topic, verdict=Verdict.LIMIT, text=text)


def plugin_finding(
    engine: str, name: str, group: str, target: str, variable: str, setting: str | None, loads: Callable[[str], bool]
) -> Finding:
    """Whether the engine finds kvguard's entry point, and loads it.

    name      how the engine is spelt; variable, setting: what chooses among plug-ins, and its value
    loads     whether the engine loads a plug-in of this name under that setting
    """
    topic = f"{engine} plug-in"
    found = [point for point in entry_points(group=group) if point.value == target]
    if not found:
        text = f"no entry point of group {group} names kvguard: install kvguard in {name}'s environment"
        return Finding(topic=topic, verdict=Verdict.FAILED, text=text)
    if not loads(found[0].name):
        text = f"{variable}={setting} keeps {name} from loading it: add {found[0].name}"
        return Finding(topic=topic, verdict=Verdict.FAILED, text=text)
    text = f"entry point {found[0].name} is installed, and {name} loads it"
    return Finding(topic=topic, verdict=Verdict.OK, text=text)
