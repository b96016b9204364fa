"""The runs of a trial in somebody's own engine: a fresh engine for each, made by the factory that was given."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from kvguard.adapters.generic import PagedGuard
from kvguard.config import GuardConfig
from kvguard.fault_injection.faults.pages import PAGE_FAULTS, PageFault, RowFault
from kvguard.fault_injection.plan import CleanPlan, TrialPlan
from kvguard.fault_injection.runs import MAX_STEPS, PROOFS, Run, first_step, guard_trouble
from kvguard.fault_injection.targets.own import CampaignEngine, HandedOut, OwnTarget, what_is_unfit
from kvguard.fault_injection.traffic import Arrival, token_prompts, trial_traffic
from kvguard.guard import Retired
from kvguard.pools import PoolSpec
from kvguard.verifier import PendingVerdicts, PoolInputs

__all__ = ["EngineFactory", "HarnessError", "MakeGuard", "OwnRuns", "WatchedGuard", "clean_runs"]


class MakeGuard(Protocol):
    """Makes the guard of a run, with the campaign's configuration."""

    def __call__(
        self, pools: Sequence[PoolSpec], *, backend: str | None = None, device: Any = "cpu"
    ) -> PagedGuard:
        """As `PagedGuard`: `backend` numpy or torch, None for torch where it is installed; `device` a torch device."""


EngineFactory = Callable[[MakeGuard | None], CampaignEngine]
"""Makes a fresh engine. It is given a function that makes the guard of its pools, or None: then it runs unguarded."""


class HarnessError(RuntimeError):
    """The engine under test, or the object that offers it, does not do what a campaign needs; the message says what."""


class WatchedGuard(PagedGuard):
    """A PagedGuard that also notes what the engine tells it, for the judgement: launches, hand-overs, cache hits."""

    def __init__(
        self, pools: Sequence[PoolSpec], run: Run, *, proofs: str, seed: int, backend: str | None, device: Any
    ) -> None:
        settings = GuardConfig.default(seed=seed)
        super().__init__(pools, config=settings, backend=backend, device=device, proofs=PROOFS[proofs])
        self.run, self.step = run, 0
        self.handed_out = HandedOut()
        self._published: dict[int, tuple[int, str]] = {}

    def allocate(
        self, request: str, pages: Sequence[int], *, pool: str | None = None, refusable: bool = True
    ) -> list[int]:
        accepted = super().allocate(request, pages, pool=pool, refusable=refusable)
        for page in accepted:
            self.handed_out.note(int(page), request)
        return accepted

    def adopt(
        self, request: str, hits: Sequence[tuple[Hashable, int]], *, pool: str | None = None, refusable: bool = True
    ) -> int:
        accepted = super().adopt(request, hits, pool=pool, refusable=refusable)
        self.run.counts.prefix_hits += bool(accepted)
        for _, page in hits[:accepted]:
            step, writer = self._published.get(int(page), (-1, ""))
            if step == self.step:
                self.run.promised_adoptions.append((step, request, writer))
                self.run.counts.promised_hits += 1
        return accepted

    def publish(
        self, request: str, column: int, key: Hashable, *, pool: str | None = None, tokens: int | None = None
    ) -> bool:
        published = super().publish(request, column, key, pool=pool, tokens=tokens)
        pages = self.pages(request, pool=pool)
        if published and column < len(pages):
            self._published[pages[column]] = (self.step, request)
        return published

    def retire(self, pages: Sequence[int], *, by: str | None = None, pool: str | None = None) -> Retired:
        retired = super().retire(pages, by=by, pool=pool)
        for page in retired.reusable:
            self.run.counts.evictions += self._published.pop(page, None) is not None
        return retired

    def preempt(self, request: str) -> None:
        super().preempt(request)
        self.run.counts.preemptions += 1

    def before_forward(
        self,
        requests: Sequence[str],
        table_rows: Sequence[int],
        tokens_end: Sequence[int],
        inputs: Mapping[str, PoolInputs] | PoolInputs,
        *,
        tokens_start: Sequence[int] | None = None,
    ) -> PendingVerdicts | None:
        injection, run = self.run.injection, self.run
        if injection is not None and run.live_step < 0 and injection.live_when(frozenset(requests)):
            run.live_step, run.affected = self.step, injection.affected()
        return super().before_forward(requests, table_rows, tokens_end, inputs, tokens_start=tokens_start)


class _Drive:
    """One run: feeds the arrivals to a fresh engine, step by step, and collects what its clients see."""

    def __init__(self, factory: EngineFactory, *, proofs: str, seed: int) -> None:
        self.run = Run()
        self.guard: WatchedGuard | None = None
        self.handed_out = HandedOut()
        self._seed, self._proofs = seed, proofs
        self.engine: CampaignEngine = factory(self._make_guard if proofs else None)
        if proofs and self.guard is None:
            raise HarnessError("the factory was given a function that makes a guard, and did not call it")
        self._submitted: dict[str, tuple[int, int]] = {}

    def _make_guard(
        self, pools: Sequence[PoolSpec], *, backend: str | None = None, device: Any = "cpu"
    ) -> PagedGuard:
        self.guard = WatchedGuard(
            pools, self.run, proofs=self._proofs, seed=self._seed, backend=backend, device=device
        )
        self.handed_out = self.guard.handed_out
        return self.guard

    def go(
        self, arrivals: Sequence[Arrival], fault: type[PageFault] | None, client_aborts: Mapping[str, int]
    ) -> Run:
        """To the end of the traffic, or to MAX_STEPS."""
        run, engine, position = self.run, self.engine, 0
        queue = sorted(arrivals, key=lambda arrival: (arrival.step, arrival.request.id))
        target = OwnTarget(engine, self._submitted, self.handed_out)
        while position < len(queue) or engine.busy():
            if run.counts.steps >= MAX_STEPS:
                run.crash = f"not done after {MAX_STEPS} steps"
                break
            run.counts.steps += 1
            step = run.counts.steps
            if self.guard is not None:
                self.guard.step = step
            while position < len(queue) and queue[position].step < step:
                request = queue[position].request
                self._submitted[request.id] = (len(request.prompt), request.max_new_tokens)
                run.emitted[request.id], run.ended_step[request.id] = (), -1
                engine.submit(request.id, request.prompt, request.max_new_tokens)
                position += 1
            for arrival in queue:
                if arrival.abort_step == step and arrival.request.id in self._submitted:
                    run.counts.client_aborts += 1
                    engine.abort(arrival.request.id)
            if fault is not None and step >= first_step(fault, self._seed):
                self._inject(fault, target, step)
            engine.step()
            self._look(step)
            for name, last in client_aborts.items():
                if last == step:
                    engine.abort(name)
                    run.ended_step[name] = step
        return run

    def _inject(self, fault: type[PageFault], target: OwnTarget, step: int) -> None:
        """Break something before this step, unless that was done and has not healed.

        A block-table row heals if its request was preempted in the very step: it is written anew when it comes back.
        """
        run = self.run
        if run.injection is not None and issubclass(fault, RowFault) and run.injected_step == step - 1:
            victim = run.injection.victims[0]
            ran = run.emitted[victim][-1:] == (run.injected_step,) or run.ended_step[victim] >= 0
            if not ran and run.live_step < 0:
                run.injection = None
        if run.injection is None:
            run.injection = fault(seed=self._seed, target=target).inject()
            run.injected_step = step if run.injection is not None else -1

    def _look(self, step: int) -> None:
        run = self.run
        for name, (_, wanted) in self._submitted.items():
            count = len(self.engine.tokens(name))
            run.emitted[name] += (step,) * (count - len(run.emitted[name]))
            if run.ended_step[name] < 0 and (count >= wanted or self.engine.error(name) is not None):
                run.ended_step[name] = step
        if self.guard is not None and run.detected_step < 0 and self.guard.violations:
            run.detected_step = step

    def finish(self) -> Run:
        """What the clients have in their hands, and what the guard says."""
        for name in self._submitted:
            tokens = tuple(int(token) for token in self.engine.tokens(name))
            self.run.outputs[name] = (tokens, self.engine.error(name))
        if self.guard is not None:
            self.run.violations = self.guard.violations
            self.run.guard_trouble = guard_trouble(self.guard.health())
        return self.run


def drive(
    factory: EngineFactory,
    arrivals: Sequence[Arrival],
    *,
    proofs: str = "",
    fault: type[PageFault] | None = None,
    seed: int = 0,
    client_aborts: Mapping[str, int] | None = None,
) -> Run:
    """One run in a fresh engine; `proofs` names a set of `PROOFS`, "" runs it without a guard.

    A broken engine may fall over: with a fault in it that is an effect, and becomes `Run.crash`.
    """
    driven = _Drive(factory, proofs=proofs, seed=seed)
    try:
        driven.go(arrivals, fault, client_aborts or {})
    except Exception as error:
        if fault is None:
            raise
        driven.run.crash = f"{type(error).__name__}: {error}"
    return driven.finish()


def traffic_for(engine: Any, seed: int, *, client_aborts: bool = False) -> list[Arrival]:
    """Seeded traffic within the bounds that the engine names."""
    longest = int(getattr(engine, "max_prompt_tokens", 64))
    most = int(getattr(engine, "max_new_tokens", 26))
    make_prompt = token_prompts(int(engine.vocab_size))
    return trial_traffic(
        seed,
        lambda rng, text: make_prompt(rng, text)[:longest],
        client_aborts=client_aborts,
        new_tokens=range(max(4, most * 2 // 3), most + 1),
    )


class Goldens:
    """Runs without fault and guard, made once per traffic; the first one twice, to see whether runs can be compared.

    Whoever asks gives the factory; that it makes the same engine as the one before is for the caller to know.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[int, bool], tuple[list[Arrival], Run]] = {}

    def get(
        self, factory: EngineFactory, seed: int, *, client_aborts: bool = False
    ) -> tuple[list[Arrival], Run]:
        """The traffic and its golden run. HarnessError if the engine does not give the same tokens twice."""
        known = self._runs.get((seed, client_aborts))
        if known is None:
            arrivals = traffic_for(factory(None), seed, client_aborts=client_aborts)
            golden = drive(factory, arrivals)
            if golden.crash:
                raise HarnessError(f"without a fault and a guard the engine is {golden.crash}")
            if not self._runs and drive(factory, arrivals).outputs != golden.outputs:
                raise HarnessError(
                    "the engine gives other tokens for the same traffic the second time: a campaign compares runs, so "
                    "decode greedily, seed what is random, and let the factory make a fresh engine each time"
                )
            known = self._runs[seed, client_aborts] = (arrivals, golden)
        return known


class OwnRuns:
    """Implements `TrialRuns` with engines of `factory`; the cell's `proofs` name a set of `PROOFS`.

    HarnessError where the engine offers a member that the fault cannot use.
    """

    def __init__(self, plan: TrialPlan, factory: EngineFactory, goldens: Goldens) -> None:
        self._plan, self._factory = plan, factory
        self._fault = PAGE_FAULTS[plan.cell.fault]
        engine: Any = factory(None)
        wrong = what_is_unfit(engine, plan.cell.fault)
        if wrong:
            raise HarnessError(wrong)
        self._arrivals, self._golden = goldens.get(factory, plan.traffic_seed)
        self.exact = bool(getattr(engine, "exact", False))
        self.text: Callable[[tuple[int, ...]], str] | None = getattr(engine, "text", None)
        self.prompts = {arrival.request.id: arrival.request.prompt for arrival in self._arrivals}

    def golden(self) -> Run:
        return self._golden

    def off(self) -> Run:
        return self._run(fault=self._fault)

    def on(self) -> Run:
        return self._run(fault=self._fault, proofs=self._plan.cell.proofs)

    def control(self, aborts: dict[str, int]) -> Run:
        return self._run(client_aborts=aborts)

    def _run(self, **how: Any) -> Run:
        return drive(self._factory, self._arrivals, seed=self._plan.fault_seed, **how)


def clean_runs(plan: CleanPlan, factory: EngineFactory, goldens: Goldens) -> tuple[Run, Run]:
    """Healthy traffic with clients that leave: guard off, guard on."""
    arrivals, golden = goldens.get(factory, plan.traffic_seed, client_aborts=True)
    return golden, drive(factory, arrivals, proofs="all", seed=plan.traffic_seed)
