"""The guard in one process, for an engine whose code you can edit: both halves behind one object.

This is the surface that other adapters fill in from an engine's hooks, too. The embedded engine of the fault campaign
calls exactly this, and nothing else of kvguard.

A step has two calls. `before_forward` goes after the block table, its padding and the slot mapping are final and before
attention reads the cache; `after_forward` goes where the sampled tokens are read, before any of them leaves.

A fault inside the guard is logged loudly, `health().armed` says so, and every later book-keeping call is a no-op: books
that broke once prove nothing. With `on_guard_error` = `disarm` the engine then runs unguarded; with `abort` every
`before_forward` raises GuardFault, so that nothing unproven leaves until the replica is restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from kvguard.adapters.wrapping import AllocatorGuard, AttachError, guard_allocator
from kvguard.config import GuardConfig
from kvguard.content_key import ContentDomain, MultimodalInput
from kvguard.guard import Guard, GuardHalt, Retired, UsageError
from kvguard.judge import Abort, Judgement
from kvguard.kernels.backend import default_backend
from kvguard.pools import PoolSpec
from kvguard.telemetry import Health
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier
from kvguard.violation import Proof, Violation

__all__ = ["AllocatorGuard", "AttachError", "GuardFault", "GuardHalt", "PagedGuard", "guard_allocator"]

T = TypeVar("T")


class GuardFault(RuntimeError):
    """A fault inside kvguard while `on_guard_error` is `abort`.

    The requests of the step in hand are unproven: the engine must drop their tokens and end them. `requests` names
    them.
    """

    def __init__(self, message: str, requests: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.requests = requests


class PagedGuard:
    """Guard and Verifier of one engine in one process.

    All calls belong to the thread that schedules and launches the forward, except `health` and `violations`.
    See `kvguard.guard.Guard` for what each book-keeping call means.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        *,
        config: GuardConfig | None = None,
        backend: str | None = None,
        device: Any = "cpu",
        proofs: frozenset[Proof] | None = None,
    ) -> None:
        """`backend`: kernel backend; None takes torch where it is installed, else numpy; on a GPU triton, else torch.

        `device`: a torch device.
        """
        settings = GuardConfig.load() if config is None else config
        self._guard: Guard | None = None
        self.pool_names = tuple(pool.name for pool in pools)
        self._in_flight: dict[int, tuple[tuple[str, ...], bool]] = {}
        self._unproven: dict[int, frozenset[str]] = {}
        self._watchers: list[Callable[[str], None]] = []
        if settings.is_off:
            # Nothing is kept and nothing is checked: every call answers as if there were no guard.
            return
        self._guard = Guard(pools, settings, proofs=proofs)
        self._verifier = Verifier(self._guard.setup, backend=backend or default_backend(device), device=device)

    @property
    def is_off(self) -> bool:
        """Level `off`: nothing is kept and nothing is checked."""
        return self._guard is None

    @property
    def armed(self) -> bool:
        """Whether there is a guard and it has not failed."""
        return self._guard is not None and self._guard.armed

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent violations, oldest first."""
        return () if self._guard is None else self._guard.violations

    def health(self) -> Health:
        """Whether the guard is armed, fit and alive, and its counters; at level `off` it is not armed."""
        if self._guard is None:
            return Health(armed=False, fit=True, alive=True, in_flight=0, quarantined_pages=0, counters={})
        return self._guard.health()

    def show_content(self, content_of: Callable[[str], str]) -> None:
        """What a report may show of a request; only used if `report_content` is set."""
        if self._guard is not None:
            self._guard.show_content(content_of)

    def kept(self, unguarded: T, call: Callable[[Guard], T]) -> T:
        """A book-keeping call; `unguarded` is the answer of an engine without a guard.

        A call that makes no sense (a request that has ended, an id used twice) is an error of the adapter: it is logged
        and counted, changes nothing, and does not cost the guard. Anything else that goes wrong is the guard's fault.
        """
        guard = self._guard
        if guard is None or not guard.armed:
            return unguarded
        try:
            return call(guard)
        except GuardHalt:
            raise
        except UsageError as error:
            guard.adapter_error(error)
            return unguarded
        except Exception as error:
            guard.fault(error)
            return unguarded

    def _checked(self, unguarded: T, call: Callable[[Guard], T]) -> T:
        """A call of a step: whatever goes wrong, the step was not verified, and that is a fault of the guard."""
        guard = self._guard
        if guard is None or not guard.armed:
            return unguarded
        try:
            return call(guard)
        except Exception as error:
            guard.fault(error)
            return unguarded

    def _require_armed(self, requests: tuple[str, ...]) -> None:
        """Raise GuardFault if the guard failed and the engine may not go on without it."""
        guard = self._guard
        if guard is not None and not guard.armed and guard.config.on_guard_error == "abort":
            raise GuardFault("kvguard has failed: this step is unproven", requests)

    # -- requests and pages ---------------------------------------------------------------------------------------

    def start(self, request: str) -> None:
        """A request enters."""
        self.kept(None, lambda guard: guard.start(request))

    def finish(self, request: str) -> None:
        """A request ends; call this before `retire` of its pages."""
        self._tell(request)
        self.kept(None, lambda guard: guard.finish(request))

    def preempt(self, request: str) -> None:
        """A request loses its pages and waits."""
        self._tell(request)
        self.kept(None, lambda guard: guard.preempt(request))

    def resume(self, request: str) -> None:
        """A preempted request gets pages again."""
        self.kept(None, lambda guard: guard.resume(request))

    @property
    def wants_contents(self) -> bool:
        """Level `keys`: the guard is to be told what requests are made of; else `identify` and its like do nothing."""
        return self._guard is not None and self._guard.wants_contents

    def all_is_told(self) -> None:
        """Whatever fills pages before a request's first step is told with `adopt` and `vet_loaded`; see `Guard`."""
        self.kept(None, lambda guard: guard.all_is_told())

    def identify(
        self, request: str, domain: ContentDomain, tokens: Any, inputs: Sequence[MultimodalInput] = ()
    ) -> None:
        """What the request is made of, right after `start`: its domain, and all of its tokens that are known."""
        self.kept(None, lambda guard: guard.identify(request, domain, tokens, inputs))

    def add_tokens(self, request: str, tokens: Any, inputs: Sequence[MultimodalInput] = ()) -> None:
        """More tokens of the request, as they are generated."""
        self.kept(None, lambda guard: guard.add_tokens(request, tokens, inputs))

    def rewind(self, request: str, tokens: int) -> None:
        """Only the first `tokens` tokens of the request are confirmed."""
        self.kept(None, lambda guard: guard.rewind(request, tokens))

    def allocate(
        self, request: str, pages: Sequence[int], *, pool: str | None = None, refusable: bool = True
    ) -> list[int]:
        """The allocator gave these pages to the request; returns those that may be used.

        `refusable`: False where the engine uses them whatever is said: a page that somebody holds is the request's
        then, and its former holder is ended by the device check.
        """
        return self.kept(list(pages), lambda guard: guard.allocate(request, pages, pool=pool, refusable=refusable))

    def adopt(
        self, request: str, hits: Sequence[tuple[Hashable, int]], *, pool: str | None = None, refusable: bool = True
    ) -> int:
        """The request takes cached pages, as (cache key, page); returns how many leading ones it may use.

        `refusable`: False where the engine uses them whatever is said: a wrong one is then flagged by the device check.
        """
        return self.kept(len(hits), lambda guard: guard.adopt(request, hits, pool=pool, refusable=refusable))

    def publish(
        self, request: str, column: int, key: Hashable, *, pool: str | None = None, tokens: int | None = None
    ) -> bool:
        """The request's page in `column` enters the cache under `key`; False: drop the entry."""
        return self.kept(True, lambda guard: guard.publish(request, column, key, pool=pool, tokens=tokens))

    def stored(self, key: Hashable, page: int, *, pool: str | None = None) -> bool:
        """A published page was copied to an external store under its key; False: take it out again."""
        return self.kept(True, lambda guard: guard.stored(key, page, pool=pool))

    def unstored(self, keys: Sequence[Hashable], *, pool: str | None = None) -> None:
        """The external store no longer holds these keys."""
        self.kept(None, lambda guard: guard.unstored(keys, pool=pool))

    def vet_stored(self, request: str, keys: Sequence[Hashable], column: int, *, pool: str | None = None) -> int:
        """Hits of an external store for the columns from `column` on: how many leading ones may be loaded."""
        return self.kept(len(keys), lambda guard: guard.vet_stored(request, keys, column, pool=pool))

    def vet_loaded(self, request: str, keys: Sequence[Hashable], loaded: Sequence[Hashable], column: int) -> int:
        """How many leading ones of the reported hits may count as computed: copies of `loaded` were completed."""
        return self.kept(len(keys), lambda guard: guard.vet_loaded(request, keys, loaded, column))

    def unpublish(self, pages: Sequence[int], *, pool: str | None = None) -> None:
        """The pages left the cache; who holds them keeps them."""
        self.kept(None, lambda guard: guard.unpublish(pages, pool=pool))

    def truncate(self, request: str, columns: int, *, pool: str | None = None) -> list[int]:
        """The request keeps its first `columns` pages; returns those it gave up."""
        return self.kept([], lambda guard: guard.truncate(request, columns, pool=pool))

    def skip(self, request: str, columns: int, *, pool: str | None = None) -> None:
        """The request's next `columns` columns stay empty."""
        self.kept(None, lambda guard: guard.skip(request, columns, pool=pool))

    def drop(self, request: str, start: int, stop: int, *, pool: str | None = None) -> list[int]:
        """Columns [start, stop) left the request's window; returns their pages."""
        return self.kept([], lambda guard: guard.drop(request, start, stop, pool=pool))

    def retire(self, pages: Sequence[int], *, by: str | None = None, pool: str | None = None) -> Retired:
        """The allocator takes pages back; only `reusable` ones may be handed out again."""
        unguarded = Retired(reusable=list(pages), refused=[], quarantined=[])
        return self.kept(unguarded, lambda guard: guard.retire(pages, by=by, pool=pool))

    def reset(self, *, pool: str | None = None, revoke_held: bool = False) -> list[int]:
        """The engine emptied its cache, slept or changed weights; returns released quarantined pages, to be zeroed."""
        return self.kept([], lambda guard: guard.reset(pool=pool, revoke_held=revoke_held))

    # -- what the books say, for whoever wraps an allocator ---------------------------------------------------------

    def columns(self, request: str, *, pool: str | None = None) -> int:
        """Columns in the request's ledger, -1 if it was not started or has finished."""
        return self.kept(-1, lambda guard: guard.columns(request, pool=pool))

    def pages(self, request: str, *, pool: str | None = None) -> list[int]:
        """The request's pages by column, gaps left out; none if it was not started or has finished."""
        return self.kept([], lambda guard: guard.pages(request, pool=pool))

    def foreign_pages(self, request: str, *, pool: str | None = None) -> list[int]:
        """Pages that the request still lists and that it must not free: they were freed, or are somebody else's."""
        return self.kept([], lambda guard: guard.foreign_pages(request, pool=pool))

    def unused(self, pages: Sequence[int], *, pool: str | None = None) -> list[int]:
        """Those of the pages that were handed out, that nobody holds any more, and that no cache names."""
        return self.kept([], lambda guard: guard.unused(pages, pool=pool))

    def num_pages(self, pool: str | None = None) -> int:
        """Pages of the pool."""
        return self.kept(0, lambda guard: guard._books.tables[guard._books.index(pool)].spec.num_pages)

    def page_tags(self, pages: Sequence[int], *, pool: str | None = None) -> list[int]:
        """What each page holds: another number once it was handed out again, 0 while it is vacant or no page."""

        def tags(guard: Guard) -> list[int]:
            table = guard._books.tables[guard._books.index(pool)]
            return [0 if table.problem_with_page(page) else table.tag(page) for page in pages]

        return self.kept([0] * len(pages), tags)

    def watch(self, watcher: Callable[[str], None]) -> None:
        """`watcher` is told of each request that is about to lose its pages: that finishes or is preempted."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[str], None]) -> None:
        """The opposite of `watch`; no error if it does not watch."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _tell(self, request: str) -> None:
        for watcher in self._watchers:
            watcher(request)

    # -- steps ----------------------------------------------------------------------------------------------------

    def before_forward(
        self,
        requests: Sequence[str],
        table_rows: Sequence[int],
        tokens_end: Sequence[int],
        inputs: Mapping[str, PoolInputs] | PoolInputs,
        *,
        tokens_start: Sequence[int] | None = None,
    ) -> PendingVerdicts | None:
        """Check what this step's attention will read. None once the guard is disarmed.

        `inputs`: per pool name, or one PoolInputs if there is one pool. A failing row is neutralised in place: its live
        block-table entries become the null page, its slots become the skip slot.
        A slot that is not the token's goes to the skip slot, if the inputs have `slot_mapping` and `lengths`; a batch
        without requests (a dummy run) is checked for that alone.
        `tokens_start`: the first position that each request writes in this step, see `Guard.step`.

        A request that was not started, or has finished, is an adapter error, and its row is left out: it is unproven.
        If `on_guard_error` is `abort`, the judgement withholds its tokens.
        """

        def check(guard: Guard) -> PendingVerdicts | None:
            given = {guard.setup.pools[0].name: inputs} if isinstance(inputs, PoolInputs) else inputs
            named, unknown = requests, frozenset[str]()
            try:
                delta = guard.step(requests, table_rows, tokens_end, tokens_start)
            except UsageError:
                places = [place for place, name in enumerate(requests) if guard.columns(name) >= 0]
                if len(places) == len(requests):
                    raise
                unknown = frozenset(requests) - {requests[place] for place in places}
                for name in sorted(unknown, key=str):
                    guard.adapter_error(UsageError(f"request {name!r} of a step was not started, or has finished"))
                named = [requests[place] for place in places]
                delta = guard.step(
                    named, [table_rows[place] for place in places], [tokens_end[place] for place in places]
                )
                given = {name: _only(one, places) for name, one in given.items()}
            self._in_flight[delta.step] = (tuple(named), delta.enforce)
            if unknown and delta.enforce and guard.config.on_guard_error == "abort":
                self._unproven[delta.step] = unknown
            return self._verifier.check(delta, given)

        checked = self._checked(None, check)
        self._require_armed(tuple(requests))
        return checked

    def abandon(self, pending: PendingVerdicts | None) -> list[str]:
        """The forward of that step failed and will not be judged: end, preempt or repeat the requests returned."""
        if pending is None:
            return []
        self._in_flight.pop(pending.step, None)
        self._unproven.pop(pending.step, None)
        return self._checked([], lambda guard: guard.abandon(pending.step))

    def after_forward(self, pending: PendingVerdicts | None) -> Judgement:
        """The verdicts of that step, acted on. Raises GuardHalt if one is a violation and `on_violation` is `halt`."""
        nothing = Judgement(step=0)
        if pending is None or self._guard is None:
            return nothing
        requests, enforced = self._in_flight.pop(pending.step, ((), False))
        unproven = self._unproven.pop(pending.step, None) if self._unproven else None
        judgement = self._checked(None, lambda guard: guard.judge(pending.resolve()))
        self._require_armed(requests)
        if judgement is None:
            return self._salvage(pending, requests) if enforced else nothing
        if judgement.halt:
            raise GuardHalt(judgement.violations[0])
        return judgement._replace(withheld=judgement.withheld | unproven) if unproven else judgement

    def _salvage(self, pending: PendingVerdicts, requests: tuple[str, ...]) -> Judgement:
        """The guard failed with this step in flight: what the device flagged is neutralised and may not leave."""
        assert self._guard is not None
        try:
            flagged = [requests[row] for row in pending.flagged_rows()]
        except Exception as error:
            self._guard.fault(error)
            return Judgement(step=pending.step, withheld=frozenset(requests))
        violations = [self._guard.found_too_late(name, pending.step, requests.index(name)) for name in flagged]
        return Judgement(
            step=pending.step,
            violations=tuple(violations),
            withheld=frozenset(flagged),
            aborts=tuple(Abort(request=v.request or "", violation=v) for v in violations),
        )


def _only(inputs: PoolInputs, places: Sequence[int]) -> PoolInputs:
    """The inputs of a step of which only the rows at these places are checked: each keeps its place in the batch.

    What they write is not checked: tokens of the others would be taken for padding.
    """
    inputs = replace(inputs, lengths=None)
    if inputs.query_start is None or inputs.place_is_row:
        return inputs
    if inputs.query_row is not None:
        return replace(inputs, query_row=inputs.query_row[list(places)])
    rows = np.array(places, np.int64)
    if isinstance(inputs.table, np.ndarray):
        return replace(inputs, query_row=rows)
    import torch

    return replace(inputs, query_row=torch.from_numpy(rows).to(inputs.table.device))
