"""Faults of where a step of vLLM writes: the slot mapping names a slot that is not the token's.

They go in when vLLM has computed the slot mapping of a forward, and are live in that very forward. Whose token it was
is the offender, whose own KV is lost: it has to be aborted. A padding lane is nobody's. Whoever owns the slot that
would have been overwritten did nothing wrong and must get what it would have got anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from kvguard.fault_injection.faults.pages import Injection, PageFault
from kvguard.fault_injection.target import PageTarget, StepToken
from kvguard.fault_injection.targets.vllm_step import PreparedStep

TOKENS_LEFT_MIN = 3
"""A victim has so many tokens to go, so that what was overwritten is read again."""


class LiveSlot(NamedTuple):
    """A slot with a token of a request that goes on reading it."""

    owner: str
    page: int
    column: int
    slot: int


@dataclass(frozen=True, kw_only=True)
class VllmWriteFault(PageFault):
    """Base of the faults below. `step`: the forward about to run."""

    step: PreparedStep

    reaches_control_plane: ClassVar[bool] = False

    @staticmethod
    def prepare(target: PageTarget) -> None:
        """Called before each step is scheduled: make what is needed more likely, by nothing that vLLM may not do."""

    def undo(self, injection: Injection) -> None:
        """The next step computes its slots anew."""

    def _tokens(self) -> list[StepToken]:
        """The last token of each request of the step."""
        return [token for token in self.step.tokens() if token.index + 1 in self.step.query_start and token.request]

    def _lanes(self) -> list[StepToken]:
        return [token for token in self.step.tokens() if token.request is None]

    def _live(self) -> list[LiveSlot]:
        """Slots that hold what requests of the step have computed before it."""
        found, size, computed = [], self.target.page_size, self.step.computed()
        for request in self.target.running():
            left = request.total_tokens - request.prompt_tokens - request.generated_tokens
            if left < TOKENS_LEFT_MIN or computed.get(request.id, 0) < request.prompt_tokens:
                continue
            for position in range(computed[request.id]):
                column, page = position // size, request.pages[position // size]
                found.append(LiveSlot(request.id, page, column, page * size + position % size))
        return found

    def _at_same_offset(self) -> list[tuple[StepToken, LiveSlot]]:
        """Tokens with live slots at the very offset in a page that is theirs: only the page is wrong."""
        size, by_offset = self.target.page_size, dict[int, list[LiveSlot]]()
        for live in self._live():
            by_offset.setdefault(live.slot % size, []).append(live)
        return [(token, live) for token in self._tokens() for live in by_offset.get(token.position % size, ())]

    def _mislead(self, slots: Mapping[int, int], what: str, offenders: Iterable[str] = ()) -> Injection:
        """Send tokens, by index, to other slots. `offenders`: whose they are."""
        blamed = frozenset(offenders)
        before = self.step.slots.tolist()
        for index, slot in slots.items():
            self.step.slots[index] = slot
        hit = set(slots.values())
        victims = dict.fromkeys(live.owner for live in self._live() if live.slot in hit and live.owner not in blamed)
        first = next(iter(slots.values()))
        return Injection(
            victims=tuple(victims) or tuple(sorted(blamed)),
            page=first // self.target.page_size if first >= 0 else -1,
            column=-1,
            live_when=lambda scheduled: True,
            affected=lambda: blamed,
            description=f"{what}: " + ", ".join(f"slot {before[i]} -> {slot}" for i, slot in list(slots.items())[:4]),
        )

    def _redirect(self, pairs: Sequence[tuple[StepToken, LiveSlot]], what: str) -> Injection | None:
        """One of the tokens to the live slot beside it; None if there is no such pair."""
        if not pairs:
            return None
        token, live = self._rng().choice(list(pairs))
        assert token.request is not None
        return self._mislead({token.index: live.slot}, what, [token.request])


@dataclass(frozen=True, kw_only=True)
class StaleSlotMapping(VllmWriteFault):
    """A token's slot lies in another request's page, as if it came from a table row of before."""

    name: ClassVar[str] = "stale-slot-mapping"
    summary: ClassVar[str] = "slot of a page that was freed and handed to another"

    def inject(self) -> Injection | None:
        pairs = [
            (token, live) for token, live in self._at_same_offset() if token.request not in self.target.users(live.page)
        ]
        # One that changed hands, where there is one.
        stale = [pair for pair in pairs if self.target.handed_out(pair[1].page)[0] > 1]
        return self._redirect(stale or pairs, "write into a page of another")


@dataclass(frozen=True, kw_only=True)
class PaddingIntoLivePage(VllmWriteFault):
    """A padding lane's slot, left over in the buffer, is somebody's."""

    name: ClassVar[str] = "padding-into-live-page"
    summary: ClassVar[str] = "padding lane writes into a live page"

    def inject(self) -> Injection | None:
        lanes, live = self._lanes(), self._live()
        if not lanes or not live:
            return None
        rng = self._rng()
        return self._mislead({rng.choice(lanes).index: rng.choice(live).slot}, "padding lane")


@dataclass(frozen=True, kw_only=True)
class WrappedSkipSlot(VllmWriteFault):
    """Slot -1, which says "write nothing", is taken as an index from the end: padding goes to the pool's last slot."""

    name: ClassVar[str] = "skip-slot-wrapped"
    summary: ClassVar[str] = "slot -1 wraps round to the last slot of the pool, which is live"
    needs_arrival: ClassVar[bool] = True

    @staticmethod
    def prepare(target: PageTarget) -> None:
        last = target.num_pages - 1
        # A prompt that arrives gets the last page, while that has not been anybody's.
        if target.handed_out(last)[0] == 0 and any(request.fits for request in target.waiting()):
            target.make_next(last)

    def inject(self) -> Injection | None:
        lanes = self._lanes()
        last = self.target.num_pages * self.target.page_size - 1
        if not lanes or all(live.slot != last for live in self._live()):
            return None
        return self._mislead({lane.index: last for lane in lanes}, "slot -1 wrapped")


@dataclass(frozen=True, kw_only=True)
class TokenToNowhere(VllmWriteFault):
    """A request's token is taken for padding: it goes to slot -1, and its KV is missing from then on."""

    name: ClassVar[str] = "token-to-skip-slot"
    summary: ClassVar[str] = "a request's token is written nowhere"

    def inject(self) -> Injection | None:
        alive = {live.owner for live in self._live()}
        tokens = [token for token in self._tokens() if token.request in alive]
        if not tokens:
            return None
        token = self._rng().choice(tokens)
        assert token.request is not None
        return self._mislead({token.index: -1}, "written nowhere", [token.request])


@dataclass(frozen=True, kw_only=True)
class WriteToCompletePage(VllmWriteFault):
    """A token goes to a page of its own request that is full."""

    name: ClassVar[str] = "write-to-complete-page"
    summary: ClassVar[str] = "write into a page that is complete"

    def inject(self) -> Injection | None:
        size = self.target.page_size
        pairs = [
            (token, live)
            for token, live in self._at_same_offset()
            if live.owner == token.request and live.column < token.position // size
            if self.target.users(live.page) == (token.request,)
        ]
        return self._redirect(pairs, "write into a complete page")


@dataclass(frozen=True, kw_only=True)
class WriteToSharedPage(VllmWriteFault):
    """A token goes to a page that its request shares with others."""

    name: ClassVar[str] = "write-to-shared-page"
    summary: ClassVar[str] = "write into a page that others read too"

    def inject(self) -> Injection | None:
        pairs = [
            (token, live)
            for token, live in self._at_same_offset()
            if live.owner != token.request and token.request in self.target.users(live.page)
        ]
        return self._redirect(pairs, "write into a shared page")


@dataclass(frozen=True, kw_only=True)
class ShiftedOffset(VllmWriteFault):
    """The page is right, the offset in it is not: an earlier token is overwritten, and this one is missing."""

    name: ClassVar[str] = "offset-shifted"
    summary: ClassVar[str] = "slot shifted inside the right page"

    def inject(self) -> Injection | None:
        size, alive = self.target.page_size, {live.owner for live in self._live()}
        tokens = [token for token in self._tokens() if token.request in alive and token.position % size]
        if not tokens:
            return None
        rng = self._rng()
        token = rng.choice(tokens)
        assert token.request is not None
        shift = rng.randrange(1, token.position % size + 1)
        return self._mislead({token.index: token.slot - shift}, "offset shifted", [token.request])


@dataclass(frozen=True, kw_only=True)
class SwappedSlots(VllmWriteFault):
    """Two requests' tokens are written to each other's slots."""

    name: ClassVar[str] = "slots-swapped"
    summary: ClassVar[str] = "slots of two requests swapped"

    def inject(self) -> Injection | None:
        alive = {live.owner for live in self._live()}
        tokens = [token for token in self._tokens() if token.request in alive]
        if len(tokens) < 2:
            return None
        one, other = self._rng().sample(tokens, 2)
        assert one.request is not None and other.request is not None
        return self._mislead({one.index: other.slot, other.index: one.slot}, "swapped", [one.request, other.request])


@dataclass(frozen=True, kw_only=True)
class WritePastTheEnd(VllmWriteFault):
    """A token goes one slot past its request's last page: to the first slot of the page behind it in memory."""

    name: ClassVar[str] = "write-past-the-end"
    summary: ClassVar[str] = "write one past the end of the request's pages"

    def inject(self) -> Injection | None:
        size = self.target.page_size
        past = {request.id: (request.pages[-1] + 1) * size for request in self.target.running() if request.pages}
        live = self._live()
        pairs = [
            (token, one)
            for token in self._tokens()
            for one in live
            if one.slot == past.get(token.request or "") and one.owner != token.request
        ]
        return self._redirect(pairs, "write past the last page")


@dataclass(frozen=True, kw_only=True)
class ReplayedSlots(VllmWriteFault):
    """The slot mapping was not brought up to date: the step writes where the one before it wrote."""

    name: ClassVar[str] = "slots-replayed"
    summary: ClassVar[str] = "slot mapping of the last step used again"

    def inject(self) -> Injection | None:
        step = self.step
        if step.last_layout != (step.requests, step.query_start) or not self._live():
            return None
        pairs = [(token, step.last_slots[token.index]) for token in step.tokens() if token.request]
        moved = [(token, slot) for token, slot in pairs if slot != token.slot]
        if not moved:
            return None
        offenders = [token.request for token, _ in moved if token.request]
        return self._mislead({token.index: slot for token, slot in moved}, "last step's slots", offenders)


VLLM_WRITE_FAULTS: dict[str, type[VllmWriteFault]] = {
    fault.name: fault
    for fault in (
        StaleSlotMapping,
        PaddingIntoLivePage,
        WrappedSkipSlot,
        TokenToNowhere,
        WriteToCompletePage,
        WriteToSharedPage,
        ShiftedOffset,
        SwappedSlots,
        WritePastTheEnd,
        ReplayedSlots,
    )
}
"""Every fault of this module by name, in the order of the report."""

NOT_IN_VLLM = {
    "dummy-batch-writes": "vLLM runs forwards without requests when it starts, before any page is anybody's, and under "
    "data parallel, which is refused",
    "stale-window-entry": "the campaign's models have full attention alone; tests/vllm/test_write_slots.py breaks the "
    "slots of a model with windows",
    "double-free": "vLLM's free list links the blocks themselves, so that none can stand in it twice; a page that is "
    "handed out twice is the page fault double-allocation",
}
"""Write faults of other engines -> why a campaign in vLLM has none of that name."""
