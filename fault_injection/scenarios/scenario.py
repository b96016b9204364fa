"""What a replay of a public bug is: where it was reported, what went wrong, which proof finds it, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from kvguard.fault_injection.runs import Run
from kvguard.violation import Proof

__all__ = ["ALL", "EMBEDDED", "Replay", "ReplayRun", "Scenario"]

ALL = "all"
"""Every proof, at level `keys`: how a scenario is run first."""
EMBEDDED = "embedded"
_NOBODY: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass
class ReplayRun(Run):
    """What a run left behind, and whose KV was read: see `provenance.py`.

    misread  request -> steps in which it read KV that is not of its own tokens, in its own domain; with a guard that
             withholds their tokens too
    prompts  request -> its prompt
    """

    misread: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def harm(self) -> dict[str, int]:
        """request -> tokens that left the engine and were computed in or after a step of `misread`; none: no harm."""
        counts = {
            name: sum(step >= min(steps) for step in self.emitted.get(name, ())) for name, steps in self.misread.items()
        }
        return {name: count for name, count in counts.items() if count}


class Replay(Protocol):
    """Runs the smallest input of a scenario once, in a fresh engine."""

    def __call__(self, *, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
        """`bug`: with the bug in it. `proofs`: a name of `runs.PROOFS`, None for no guard. `seed`: texts and tags.

        Where an unmodified release is run, the bug is in the release: without `bug` the input leaves out what
        triggers it.
        """


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One public bug, replayed.

    name       of the command line and of reports
    link       issue or pull request; reported_in: the project, as its tracker names it
    family     class of the bug: pages, rows, writes, keys, stores
    proof      that finds it with all proofs on, and with the others off
    story      what went wrong in that engine, and what the replay's input is
    replay     how it is run
    alone      other proofs, each of which finds it with the others off
    ended      set of proofs (`all`, or the name of one) -> requests that are ended; nobody where it is not named
    release    of the unmodified engine that it is replayed on, such as "0.28.0"; "": the mechanism, in the embedded
               engine
    engine     embedded, vllm or sglang
    page_size  tokens in a page
    """

    name: str
    link: str
    reported_in: str
    family: str
    proof: Proof
    story: str
    replay: Replay
    alone: tuple[Proof, ...] = ()
    ended: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NOBODY)
    release: str = ""
    engine: str = EMBEDDED
    page_size: int = 8

    @property
    def proof_sets(self) -> tuple[str, ...]:
        """With which proofs it is tried."""
        return (ALL, *(str(proof) for proof in (self.proof, *self.alone)))

    def expected(self, proofs: str) -> Proof:
        """The proof that has to find it."""
        return self.proof if proofs == ALL else Proof(proofs)

    @property
    def place(self) -> str:
        """Where it is replayed, in words."""
        return f"{self.engine} {self.release}, unmodified" if self.release else "embedded engine"
