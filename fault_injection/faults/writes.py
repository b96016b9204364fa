"""Faults of where a step writes: the slot mapping names a slot that is not the token's.

They go in right before a forward, when its tensors are final (after padding), and are live in that very forward. The
writer is the offender: its own token is lost, and it has to be aborted. Padding lanes and dummy batches are nobody:
there the write must go nowhere and be reported. The victim, whose slot it would have been, did nothing wrong and must
get what it would have got anyway.

Choices prefer a slot whose token its owner has still to read closely, and wait for one while the fault is `patient`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvguard.fault_injection.faults.live_slots import (
    LiveSlot,
    at_same_offset,
    is_dummy,
    live_slots,
    new_tokens,
    padding_lanes,
    real_tokens,
    soonest,
)
from kvguard.fault_injection.faults.pages import Injection, readers_but_the_taker
from kvguard.fault_injection.faults.write_fault import WriteFault, put_behind, reuse_soon
from kvguard.fault_injection.target import StepToken

__all__ = ["WRITE_FAULTS", "WriteFault"]


@dataclass(frozen=True, kw_only=True)
class StaleSlotMapping(WriteFault):
    """A token's slot lies in a page that was freed and has been somebody else's since."""

    name: ClassVar[str] = "stale-slot-mapping"
    summary: ClassVar[str] = "slot of a page that was freed and handed to another"

    def prepare(self) -> None:
        reuse_soon(self.target, self.seed)

    def inject(self) -> Injection | None:
        def stale(token: StepToken, live: LiveSlot) -> bool:
            return token.request not in self.target.users(live.page) and self.target.handed_out(live.page)[0] > 1

        pairs = at_same_offset(self.target, real_tokens(self.target))
        return self._redirect([pair for pair in pairs if stale(*pair)], "write into a page that changed hands")


@dataclass(frozen=True, kw_only=True)
class PaddingIntoLivePage(WriteFault):
    """A padding lane's slot, left over in the buffer, is somebody's."""

    name: ClassVar[str] = "padding-into-live-page"
    summary: ClassVar[str] = "padding lane writes into a live page"

    def inject(self) -> Injection | None:
        if is_dummy(self.target):
            return None
        chosen = self._choose([(lane, live) for lane in padding_lanes(self.target) for live in live_slots(self.target)])
        if chosen is None:
            return None
        lane, live = chosen
        return self._mislead({lane.index: live.slot}, what="padding lane", live=[live])


@dataclass(frozen=True, kw_only=True)
class WrappedSkipSlot(WriteFault):
    """Slot -1, which says "write nothing", is taken as the last slot of the pool, which is in use."""

    name: ClassVar[str] = "skip-slot-wrapped"
    summary: ClassVar[str] = "slot -1 wraps round to the last slot of the pool, which is live"
    needs_arrival: ClassVar[bool] = True

    def prepare(self) -> None:
        # A prompt that arrives gets it, where the last slot is one that will be read.
        last = self.target.num_pages - 1
        if self.target.is_free(last) and any(request.fits for request in self.target.waiting()):
            put_behind(self.target, last, (20 + self.seed % 20) // self.target.page_size)

    def inject(self) -> Injection | None:
        slot = self.target.num_pages * self.target.page_size - 1
        skipped = [token for token in padding_lanes(self.target) if token.slot < 0]
        live = [one for one in live_slots(self.target) if one.slot == slot]
        if not skipped or self._choose([(skipped[0], one) for one in live]) is None:
            return None
        slots = dict.fromkeys((token.index for token in skipped), slot)
        return self._mislead(slots, what="slot -1 wrapped", live=live)


@dataclass(frozen=True, kw_only=True)
class DummyBatchWrites(WriteFault):
    """A forward without requests runs with slots that were captured while somebody's pages stood there."""

    name: ClassVar[str] = "dummy-batch-writes"
    summary: ClassVar[str] = "dummy batch writes into live pages"

    def inject(self) -> Injection | None:
        lanes = padding_lanes(self.target)
        if not lanes or not is_dummy(self.target):
            return None
        slots, hit = {}, []
        taken: set[int] = set()
        for lane in lanes:
            chosen = self._choose([(lane, live) for live in live_slots(self.target) if live.slot not in taken])
            if chosen is None:
                break
            slots[lane.index] = chosen[1].slot
            taken.add(chosen[1].slot)
            hit.append(chosen[1])
        return self._mislead(slots, what="dummy batch", live=hit) if slots else None


@dataclass(frozen=True, kw_only=True)
class WriteToCompletePage(WriteFault):
    """A token goes to a page of its own request that is full, and that nobody else uses."""

    name: ClassVar[str] = "write-to-complete-page"
    summary: ClassVar[str] = "write into a page that is complete"

    def inject(self) -> Injection | None:
        def complete(token: StepToken, live: LiveSlot) -> bool:
            return live.owner == token.request and live.column < token.position // self.target.page_size

        pairs = at_same_offset(self.target, real_tokens(self.target))
        alone = [(t, live) for t, live in pairs if complete(t, live) and len(self.target.users(live.page)) == 1]
        return self._redirect(alone, "write into a complete page")


@dataclass(frozen=True, kw_only=True)
class WriteToSharedPage(WriteFault):
    """A token goes to a page that its request shares with others."""

    name: ClassVar[str] = "write-to-shared-page"
    summary: ClassVar[str] = "write into a page that others read too"

    def inject(self) -> Injection | None:
        def shared(token: StepToken, live: LiveSlot) -> bool:
            return live.owner != token.request and token.request in self.target.users(live.page)

        pairs = at_same_offset(self.target, real_tokens(self.target))
        return self._redirect([pair for pair in pairs if shared(*pair)], "write into a shared page")


@dataclass(frozen=True, kw_only=True)
class ShiftedOffset(WriteFault):
    """The page is right, the offset in it is not."""

    name: ClassVar[str] = "offset-shifted"
    summary: ClassVar[str] = "slot shifted inside the right page"

    def inject(self) -> Injection | None:
        size, rng = self.target.page_size, self._rng()
        # What was at a lower offset is destroyed, and what should be here is missing: either may be read.
        places = {live.slot: live.ahead for live in live_slots(self.target)}
        pairs = [
            ((token, token.slot - shift), max(ahead, places.get(token.slot - shift, -1)))
            for token, ahead in new_tokens(self.target)
            for shift in range(1, token.position % size + 1)
        ]
        chosen = soonest(pairs, rng, patient=self.patient)
        if chosen is None:
            return None
        token, slot = chosen
        assert token.request is not None
        live = [one for one in live_slots(self.target) if one.slot == slot]
        return self._mislead({token.index: slot}, what="offset shifted", offenders=[token.request], live=live)


@dataclass(frozen=True, kw_only=True)
class SwappedSlots(WriteFault):
    """Two requests' tokens are written to each other's slots."""

    name: ClassVar[str] = "slots-swapped"
    summary: ClassVar[str] = "slots of two requests swapped"

    def inject(self) -> Injection | None:
        tokens = new_tokens(self.target)
        pairs = [
            ((one, other), max(ahead, later))
            for one, ahead in tokens
            for other, later in tokens
            if one.index < other.index and one.request != other.request
        ]
        chosen = soonest(pairs, self._rng(), patient=self.patient)
        if chosen is None:
            return None
        one, other = chosen
        assert one.request is not None and other.request is not None
        slots = {one.index: other.slot, other.index: one.slot}
        return self._mislead(slots, what="slots swapped", offenders=[one.request, other.request])


@dataclass(frozen=True, kw_only=True)
class WritePastTheEnd(WriteFault):
    """A token goes one slot past its request's last page: the first slot of the page behind it in memory, in use."""

    name: ClassVar[str] = "write-past-the-end"
    summary: ClassVar[str] = "write one past the end of the request's pages"

    def inject(self) -> Injection | None:
        size, last = self.target.page_size, {r.id: r.pages[-1] for r in self.target.running() if r.pages}
        live = live_slots(self.target)
        pairs = [
            (token, one)
            for token in real_tokens(self.target)
            for one in live
            if token.request and one.slot == (last[token.request] + 1) * size and one.owner != token.request
        ]
        if pairs or self.patient:
            return self._redirect(pairs, "write past the last page")
        # Nobody is there: it must not be written all the same.
        beyond = [(token, (last[token.request] + 1) * size) for token in real_tokens(self.target) if token.request]
        inside = [(token, slot) for token, slot in beyond if slot < self.target.num_pages * size]
        if not inside:
            return None
        token, slot = self._rng().choice(inside)
        assert token.request is not None
        return self._mislead({token.index: slot}, what="write past the last page", offenders=[token.request])


@dataclass(frozen=True, kw_only=True)
class ReplayedSlots(WriteFault):
    """The slot mapping was not updated: a forward of the same shape writes where the one before it wrote."""

    name: ClassVar[str] = "slots-replayed"
    summary: ClassVar[str] = "slot mapping of the last step used again"

    def inject(self) -> Injection | None:
        tokens, last = self.target.tokens(), self.target.last_slots()
        if len(tokens) != len(last) or is_dummy(self.target):
            return None
        slots = {t.index: slot for t, slot in zip(tokens, last, strict=True) if slot != t.slot}
        blamed = {t.request: None for t in tokens if t.index in slots and t.request is not None}
        if not blamed:
            return None
        hit = set(slots.values())
        live = [one for one in live_slots(self.target) if one.slot in hit]
        return self._mislead(slots, what="last step's slots", offenders=list(blamed), live=live)


@dataclass(frozen=True, kw_only=True)
class StaleWindowEntry(WriteFault):
    """Inside the window a row still names a page that was given back and is somebody else's; slots follow the row."""

    name: ClassVar[str] = "stale-window-entry"
    summary: ClassVar[str] = "windowed row names a page of another, and is written through"

    def prepare(self) -> None:
        target = self.target.windowed()
        if target is not None:
            reuse_soon(target, self.seed)

    def inject(self) -> Injection | None:
        target = self.target.windowed()
        if target is None:
            return None

        def stale(token: StepToken, live: LiveSlot) -> bool:
            return token.request not in target.users(live.page) and target.handed_out(live.page)[0] > 1

        fault = type(self)(seed=self.seed, target=target, patient=self.patient)
        chosen = fault._choose([pair for pair in at_same_offset(target, real_tokens(target)) if stale(*pair)])
        if chosen is None:
            return None
        token, live = chosen
        assert token.request is not None
        column = token.position // target.page_size
        target.write_block_table(token.request, column, live.page)
        slots = {
            other.index: live.page * target.page_size + other.position % target.page_size
            for other in target.tokens()
            if other.request == token.request and other.position // target.page_size == column
        }
        hit = [one for one in live_slots(target) if one.slot in slots.values()]
        return fault._mislead(slots, what="stale entry in a windowed row", offenders=[token.request], live=hit)

    def undo(self, injection: Injection) -> None:
        target = self.target.windowed()
        assert target is not None
        target.write_slots({index: before for index, (before, _) in injection.slots.items()})
        for request in target.running():
            for column, page in enumerate(request.pages):
                target.write_block_table(request.id, column, page)


@dataclass(frozen=True, kw_only=True)
class DoubleFree(WriteFault):
    """A free page was given back twice: it stands in the free list as [b, b], and is handed out twice in one step."""

    name: ClassVar[str] = "double-free"
    summary: ClassVar[str] = "free list holds a page twice, and it is handed out twice in one step"
    reaches_control_plane: ClassVar[bool] = True
    needs_arrival: ClassVar[bool] = True
    before_forward: ClassVar[bool] = False

    def inject(self) -> Injection | None:
        target = self.target
        free = [page for page in range(target.num_pages) if target.is_free(page)]
        taking = sum(request.needs_page for request in target.running())
        arriving = any(request.fits for request in target.waiting())
        # What two generating requests write into it is hardly read again. A prompt alone takes it twice, too.
        if not free or (not arriving and (self.patient or taking < 2)):
            return None
        if self.patient and bool(taking) != bool(self.seed % 2):
            return None
        page = self._rng().choice(free)
        target.make_next(page)
        target.list_as_free(page)
        before = target.handed_out(page)[0]
        return Injection(
            victims=(),
            page=page,
            column=-1,
            live_when=lambda scheduled: (
                target.handed_out(page)[0] > before + 1 and bool(scheduled & set(target.users(page)))
            ),
            affected=readers_but_the_taker(target, page, ()),
            description=f"page {page} stands in the free list twice",
        )

    def took(self, injection: Injection) -> bool:
        # Taken in two steps, its first taker might have nothing more to write into it.
        return not self.target.is_free(injection.page)

    def undo(self, injection: Injection) -> None:
        self.target.unlist(injection.page)


WRITE_FAULTS: dict[str, type[WriteFault]] = {
    fault.name: fault
    for fault in (
        StaleSlotMapping,
        PaddingIntoLivePage,
        WrappedSkipSlot,
        DummyBatchWrites,
        WriteToCompletePage,
        WriteToSharedPage,
        ShiftedOffset,
        SwappedSlots,
        WritePastTheEnd,
        ReplayedSlots,
        StaleWindowEntry,
        DoubleFree,
    )
}
"""Every fault of this module by name, in the order of the report."""
