"""What one run of the traffic through an engine leaves behind, whichever engine it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvguard.fault_injection.engine.scheduler import Counts
from kvguard.fault_injection.faults.pages import Injection, PageFault
from kvguard.fault_injection.results import CleanResult, TrialResult
from kvguard.telemetry import Health
from kvguard.violation import Proof, Violation

MAX_STEPS = 300
EARLY_STEPS, LATE_STEPS = range(3, 7), range(5, 13)
"""When a fault is first tried: early enough that somebody still arrives after it, where it needs that."""
PROOFS = {
    "all": frozenset(Proof) - {Proof.CONTENT_KEY},
    "tags": frozenset(Proof) - {Proof.CONTENT_KEY},
    "keys": frozenset(Proof),
    "content_key": frozenset({Proof.CONTENT_KEY}),
    "tag": frozenset({Proof.TAG}),
    "control_plane": frozenset({Proof.CONTROL_PLANE}),
    "transfer": frozenset({Proof.TRANSFER}),
    "write_slot": frozenset({Proof.WRITE_SLOT}),
    "none": frozenset[Proof](),
}


@dataclass
class Run:
    """What one run of the engine left behind.

    outputs      request -> (token ids, error)
    emitted      request -> step of each token: the forward that computed it
    ended_step   request -> step with whose tokens it was over
    involved     requests that may be aborted: they took the bad page from a cache that names it twice, for what its new
                 holder wrote
    promised_adoptions  (step, reader, writer): the reader took a page that the writer was to write in that very step
    guard_trouble  why the guard of this run proves nothing: it failed, or steps went unverified; "" if it is sound
    crash        what stopped the engine, "" if it came to its end
    taken        request -> cached tokens that it took each time it was admitted, where a harness keeps that
    hand_overs   requests that a decode worker took over from a prefill worker
    """

    outputs: dict[str, tuple[tuple[int, ...], str | None]] = field(default_factory=dict)
    emitted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended_step: dict[str, int] = field(default_factory=dict)
    promised_adoptions: list[tuple[int, str, str]] = field(default_factory=list)
    violations: tuple[Violation, ...] = ()
    injection: Injection | None = None
    injected_step: int = -1
    live_step: int = -1
    detected_step: int = -1
    affected: frozenset[str] = frozenset()
    involved: frozenset[str] = frozenset()
    counts: Counts = field(default_factory=Counts)
    taken: dict[str, list[int]] = field(default_factory=dict)
    hand_overs: int = 0
    guard_trouble: str = ""
    crash: str = ""


class TrialRuns(Protocol):
    """The runs of one trial, in one engine. The same traffic each time; steps count the engine's forwards.

    exact  whether the arithmetic gives the same tokens whatever else is in the batch
    text   how a request's prompt and tokens read, None where they do not
    """

    exact: bool
    text: Callable[[tuple[int, ...]], str] | None
    prompts: dict[str, tuple[int, ...]]

    def golden(self) -> Run:
        """Without fault and guard."""

    def off(self) -> Run:
        """With the fault, without the guard."""

    def on(self) -> Run:
        """With fault and guard."""

    def control(self, aborts: dict[str, int]) -> Run:
        """Without fault and guard; clients leave at the step whose tokens they must not get: request -> step."""


def first_step(fault: type[PageFault], seed: int) -> int:
    """The step before which the fault is first tried."""
    steps = EARLY_STEPS if fault.needs_arrival else LATE_STEPS
    return steps[seed % len(steps)]


def guard_trouble(health: Health) -> str:
    """A guard that fell over, or was called wrongly, would pass every clean run."""
    counters = health.counters
    if not health.armed or counters["guard_faults"] or counters["adapter_errors"]:
        return f"the guard failed ({counters['guard_faults']} faults, {counters['adapter_errors']} adapter errors)"
    if not 0 < counters["steps_seen"] == counters["steps_verified"]:
        return f"{counters['steps_seen']} steps seen, {counters['steps_verified']} verified"
    return ""


Result = TrialResult | CleanResult
