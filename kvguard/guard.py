"""The host half: page table, ledgers, policy. It lives next to the scheduler and never touches a device.

Threads. One thread owns a Guard: the engine's scheduling thread, which makes every call here except `health`,
`violations` and `armed`, which any thread may make. `step` and `judge` check the thread and raise if it is another one.
The Verifier is owned by the thread that launches the forward; the two halves share nothing but the messages.

Errors. UsageError, a ValueError: a call that makes no sense (an unknown request, a pool that does not exist), a bug of
the adapter.
GuardHalt: a violation while `on_violation` is `halt`. Violations are otherwise never exceptions: operations answer
which pages they accepted, and `judge` answers what to abort.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

from kvguard.batch import PendingStep
from kvguard.bookkeeping import BookKeeping, Retired
from kvguard.books import Books, GuardHalt, UsageError
from kvguard.config import GuardConfig
from kvguard.judge import Judgement, UncheckedStep, judge_step
from kvguard.messages import StepDelta, Verdicts
from kvguard.onward import continue_step, repeat_step
from kvguard.pools import GuardSetup, PoolSpec
from kvguard.steps import build_step
from kvguard.telemetry import Health, counter_values, emit
from kvguard.violation import Action, Kind, Proof, Violation

__all__ = ["Guard", "GuardHalt", "Judgement", "Retired", "UncheckedStep", "UsageError"]


class Guard(BookKeeping):
    """Keeps the books of one engine: what every request was promised, and who holds every page.

    Pages are the allocator's ("manager pages"); a pool is named by its PoolSpec, None meaning the first one.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        config: GuardConfig | None = None,
        *,
        proofs: frozenset[Proof] | None = None,
    ) -> None:
        """`proofs` overrides which checks run; only fault campaigns use it, to show what each proof does alone."""
        config = GuardConfig.load() if config is None else config
        if config.is_off:
            raise ValueError("level is off: make no Guard at all, so that the engine keeps its own functions")
        if proofs is None:
            chosen = {
                Proof.TAG: config.device_check,
                Proof.WRITE_SLOT: config.device_check and config.write_check,
                Proof.CONTROL_PLANE: config.control_plane,
                Proof.CONTENT_KEY: config.level == "keys",
            }
            # A transfer costs nothing where no connector asks for it.
            proofs = frozenset({Proof.TRANSFER, *(proof for proof, on in chosen.items() if on)})
        super().__init__(Books(pools, config, proofs))
        self._thread: int | None = None
        self._late = False
        self.armed = True
        emit("armed", pools=[spec.name for spec in pools], proofs=sorted(proofs), level=config.level)

    @property
    def config(self) -> GuardConfig:
        """The settings this guard was made with."""
        return self._books.config

    @property
    def setup(self) -> GuardSetup:
        """What the Verifier needs once; picklable."""
        books = self._books
        return GuardSetup(
            pools=tuple(table.spec for table in books.tables),
            digest_key=books.key,
            check=books.checks_tags,
            check_writes=books.checks_writes,
        )

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The most recent violations, oldest first. Any thread."""
        return tuple(self._books.recent)

    def show_content(self, content_of: Callable[[str], str]) -> None:
        """Let reports show what `content_of(request)` returns; only used if `report_content` is set."""
        self._books.content_of = content_of

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(
        self,
        requests: Sequence[str],
        table_rows: Sequence[int],
        tokens_end: Sequence[int],
        tokens_start: Sequence[int] | None = None,
    ) -> StepDelta:
        """The engine is about to run a forward for `requests`; returns the message for the device half.

        `table_rows[r]`: the block-table row of requests[r]; `tokens_end[r]`: its KV length after this step, in tokens.
        `tokens_start[r]`: the first position that it writes, or an earlier one; None: a write into a page that the
        request has filled goes unnoticed.
        Call it once per forward, in the order in which forwards run, after all page calls for it.
        """
        self._check_thread()
        books = self._books
        starts = len(requests) if tokens_start is None else len(tokens_start)
        if not len(requests) == len(table_rows) == len(tokens_end) == starts:
            raise ValueError(
                f"{len(requests)} requests, {len(table_rows)} table rows, {len(tokens_end)} lengths and {starts} "
                "starts: one each"
            )
        # A refused call takes no step number: the device half would miss it for ever.
        step = books.step + 1
        delta, pending = build_step(books, step, requests, table_rows, tokens_end, tokens_start)
        self._in_flight(pending)
        return delta

    def step_again(self, tokens: int = 1) -> StepDelta | None:
        """The last step once more: the same requests in the same rows, each `tokens` tokens further.

        A short way for steady decode. None where it would not be true, because a ledger or a tag has changed, a request
        has come or gone, a row needs another page, or the books look closer at somebody: call `step` then.
        """
        if self._thread != threading.get_ident():
            self._check_thread()
        made = repeat_step(self._books, self._books.step + 1, tokens)
        if made is None:
            return None
        self._in_flight(made[1])
        return made[0]

    def step_onward(
        self,
        grown: Sequence[tuple[int, int]],
        published: Sequence[tuple[int, int, Hashable]] = (),
        *,
        tokens: int = 1,
    ) -> StepDelta | None:
        """`step_again` in which rows go on to another page: decode where pages are crossed, in one call.

        grown: (row, page), the page being for the next column of the row's request; published: (row, column, the
        engine's cache key) of pages that this step fills at last. The same as `allocate_each`, `publish` and `step` of
        tokens that start where the last step ended. None where that takes a closer look, and nothing was done: make
        those calls. Always so with several pools.
        """
        if self._thread != threading.get_ident():
            self._check_thread()
        made = continue_step(self._books, self._books.step + 1, grown, published, tokens)
        if made is None:
            return None
        self._in_flight(made[1])
        return made[0]

    def _in_flight(self, pending: PendingStep) -> None:
        """A step was built: it has its number now."""
        books, step = self._books, pending.step
        books.step = step
        books.recorder.step = step + 1
        books.pending[step] = pending
        books.counters.steps_seen += 1
        books.counters.rows_seen += len(pending.base)
        if len(books.pending) > books.config.steps_in_flight_max:
            if not self._late:
                emit("heartbeat_lost", severity="critical", in_flight=len(books.pending), step=books.step)
            self._late = True

    def judge(self, verdicts: Verdicts) -> Judgement:
        """The verdicts of a step are back: what to withhold, whom to abort, what to forget. In step order.

        Raises UncheckedStep if the verification did not run: a fault of the guard, not a violation.
        """
        if self._thread != threading.get_ident():
            self._check_thread()
        books = self._books
        pending = books.pending.get(verdicts.step)
        if pending is None:
            raise ValueError(f"step {verdicts.step} is not in flight: judged before, or never made")
        first = next(iter(books.pending))
        if verdicts.step != first:
            raise ValueError(f"step {verdicts.step} judged out of order: step {first} comes first")
        books.recorder.step = pending.step
        judgement = judge_step(books, pending, verdicts)
        books.recorder.step = books.step + 1
        del books.pending[verdicts.step]
        books.counters.steps_verified += 1
        books.counters.rows_verified += len(pending.states)
        if len(books.pending) <= books.config.steps_in_flight_max:
            self._late = False
        return judgement

    def abandon(self, step: int) -> list[str]:
        """A step will never be judged (the forward failed): returns its requests, whose tokens are unproven.

        Promises that it would have kept are broken, and later steps of these requests that are in flight are flagged:
        they read what was not written. End or preempt these requests, or run the same tokens again.
        """
        books = self._books
        pending = books.pending.pop(step, None)
        if pending is None:
            return []
        if books.batch is not None:
            books.batch.again = None
        for _, promise in pending.promises:
            books.settle(promise, kept=False)
        detail = f"step {step} of this request was abandoned before it had written its part"
        for row, state in enumerate(pending.states):
            if state.incarnation != pending.incarnations[row] or not state.alive:
                continue
            for other in books.pending.values():
                if other.step > step:
                    for place in other.rows_of(state):
                        other.suspects.setdefault(place, (Kind.WRITER_NEVER_RAN, detail))
        return [state.id for state in pending.states]

    def change_thread(self) -> None:
        """The calling thread is the engine's from now on; for engines that never let two in at once themselves."""
        self._thread = None

    def _check_thread(self) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        elif self._thread != thread:
            raise RuntimeError("a Guard belongs to one thread, the engine's scheduling thread; this is another one")

    def fault(self, error: Exception) -> None:
        """A fault inside the guard: count it, log it, and disarm: books that broke once prove nothing any more."""
        self._books.counters.guard_faults += 1
        self.armed = False
        emit(
            "guard_fault",
            severity="critical",
            error=f"{type(error).__name__}: {error}",
            armed=self.armed,
            on_guard_error=self.config.on_guard_error,
        )

    def adapter_error(self, error: Exception) -> None:
        """A call of the adapter made no sense; the books are as they were. Count it and say so."""
        self._books.misused(str(error))

    def found_too_late(self, request: str, step: int, row: int) -> Violation:
        """A row that the device flagged in a step that was in flight when the guard failed."""
        return self._books.violate(
            Violation(
                id="",
                proof=Proof.TAG,
                kind=Kind.FOREIGN_ROW,
                action=Action.ABORTED,
                pool=self._books.tables[0].spec.name,
                request=request,
                step=step,
                row=row,
                detail="flagged on the device in a step that was in flight when kvguard failed",
            )
        )

    def health(self) -> Health:
        """A snapshot for a health endpoint or a metrics exporter. Any thread."""
        books = self._books
        in_flight = len(books.pending)
        return Health(
            armed=self.armed,
            fit=not books.breaker.tripped,
            alive=in_flight <= books.config.steps_in_flight_max,
            in_flight=in_flight,
            quarantined_pages=len(books.quarantine),
            counters=counter_values(books.counters),
        )
