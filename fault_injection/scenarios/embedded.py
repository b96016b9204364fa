"""Replays in the embedded engine: its own code, with one piece of it replaced by what the reported engine did."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.engine.pool import NULL_PAGE
from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.engine.window import WINDOW_POOL
from kvguard.fault_injection.runs import PROOFS, guard_trouble
from kvguard.fault_injection.scenarios.provenance import Provenance
from kvguard.fault_injection.scenarios.scenario import ALL, ReplayRun
from kvguard.fault_injection.targets.embedded_runs import RECALL_FOLDER
from kvguard.fault_injection.traffic import Arrival, drive, recall_prompt, secret
from kvguard.pools import PoolSpec

__all__ = ["PLAIN", "EmbeddedReplay", "Input", "Method", "ask", "patch", "text", "when"]

PLAIN = EngineConfig(num_pages=64, page_size=8, max_rows=4, token_budget=96, max_tokens=160)
"""Room for everything, unless the scenario says otherwise."""
STEPS_MAX = 120

Change = Callable[[Engine], None]
Input = Callable[[random.Random], list[Arrival]]
Method = Callable[..., Any]


def text(rng: random.Random, characters: int) -> str:
    """A text of exactly so many characters, of one client."""
    made = secret(rng)
    while len(made) < characters:
        made += f" {secret(rng)}"
    return made[:characters]


def ask(name: str, prompt: str | Sequence[int], *, at: int = 0, new: int = 12, **fields: Any) -> Arrival:
    """The request `name` arrives before step `at` + 1 and wants `new` tokens. `fields`: of `Request`, or `leaves`."""
    leaves = fields.pop("leaves", None)
    ids = recall_prompt(random.Random(0), prompt) if isinstance(prompt, str) else tuple(prompt)
    return Arrival(step=at, request=Request(id=name, prompt=ids, max_new_tokens=new, **fields), abort_step=leaves)


def patch(owner: object, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method of one object by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def when(step: int, act: Callable[[Engine], object]) -> Change:
    """What happens right before that step is scheduled."""

    def install(engine: Engine) -> None:
        def act_in_time(running: Engine) -> None:
            if running.step_index == step:
                act(running)

        engine.at_schedule.append(act_in_time)

    return install


def _unchanged(engine: Engine) -> None:
    """The engine as it is."""


@lru_cache(maxsize=4)
def _model(window: int | None) -> LlamaModel:
    return LlamaModel.from_pretrained(RECALL_FOLDER, "fp32", window=window)


@dataclass(frozen=True, kw_only=True)
class EmbeddedReplay:
    """Implements `Replay`.

    arrivals  the input
    bug       puts the mechanism into an engine before its first step
    setting   what the reported engine does besides, rightly: it is there in every run
    engine_type, window  the engine, and the window of every second layer in tokens (None: none)
    """

    arrivals: Input
    bug: Change
    config: EngineConfig = PLAIN
    setting: Change = _unchanged
    engine_type: type[Engine] = field(default=Engine)
    window: int | None = None

    def __call__(self, *, bug: bool, proofs: str | None, backend: str, seed: int) -> ReplayRun:
        run = ReplayRun()
        guard = None if proofs is None else self._guard(proofs, backend, seed)
        engine = self.engine_type(_model(self.window), self.config, guard)
        provenance = Provenance(engine)
        self.setting(engine)
        if bug:
            self.bug(engine)
        arrivals = self.arrivals(random.Random(f"scenario-{seed}"))

        def look(running: Engine) -> None:
            if guard is not None and run.detected_step < 0 and guard.violations:
                run.detected_step = running.step_index

        try:
            if not drive(engine, arrivals, max_steps=STEPS_MAX, after_step=[look]):
                run.crash = f"not done after {STEPS_MAX} steps"
        except Exception as error:
            # An unguarded engine may fall over the bug: that is harm, and not the replay's fault.
            if guard is not None or not bug:
                raise
            run.crash = f"{type(error).__name__}: {error}"
        for name, output in engine.outputs.items():
            run.outputs[name] = (output.token_ids, output.error)
            run.emitted[name] = tuple(emitted.step for emitted in output.tokens)
            run.ended_step[name] = output.ended_step
            run.prompts[name] = output.request.prompt
        run.counts, run.misread = engine.scheduler.counts, provenance.misread
        if guard is not None:
            run.violations, run.guard_trouble = guard.violations, guard_trouble(guard.health())
        return run

    def _guard(self, proofs: str, backend: str, seed: int) -> PagedGuard:
        config, window_pages = self.config, self.config.window_pages
        pools = [PoolSpec(num_pages=config.num_pages, page_size=config.page_size, null_page=NULL_PAGE)]
        if self.window is not None:
            pages = config.num_pages if window_pages is None else window_pages
            pools.append(
                PoolSpec(name=WINDOW_POOL, num_pages=pages, page_size=config.page_size, null_page=NULL_PAGE)
            )
        chosen = PROOFS["keys" if proofs == ALL else proofs]
        return PagedGuard(pools, config=GuardConfig.default(seed=seed, level="keys"), backend=backend, proofs=chosen)
