"""What `kvguard doctor` finds, engine by engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

ENGINES = {"vllm": "kvguard.adapters.vllm.doctor"}
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
