"""The base of the faults in `writes.py`: how a token is misled, and how what that needs is made more likely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvguard.fault_injection.faults.live_slots import LiveSlot, live_slots, soonest
from kvguard.fault_injection.faults.pages import Injection, PageFault
from kvguard.fault_injection.target import StepToken, WriteTarget

WRITE_PROOF_SETS = ("all", "write_slot")
"""With which proofs misled writes are tried, in every engine."""
PATIENCE_STEPS = 20
"""For how long a fault waits for a slot that somebody reads closely."""


@dataclass(frozen=True, kw_only=True)
class WriteFault(PageFault):
    """Base of the faults below. `prepare` runs before each step, `inject` before its forward.

    patient      wait for a slot that somebody reads closely; else any live one will do
    """

    target: WriteTarget
    patient: bool = False

    reaches_control_plane: ClassVar[bool] = False
    before_forward: ClassVar[bool] = True
    """Whether `inject` runs right before a forward; else before a step is scheduled."""

    def prepare(self) -> None:
        """Make what is needed more likely, by nothing that an engine may not do."""

    def took(self, injection: Injection) -> bool:
        """Whether it has had its effect on the step that was scheduled since; else it is undone and tried again."""
        return True

    def undo(self, injection: Injection) -> None:
        self.target.write_slots({index: before for index, (before, _) in injection.slots.items()})

    def _choose(self, candidates: Sequence[tuple[StepToken, LiveSlot]]) -> tuple[StepToken, LiveSlot] | None:
        return soonest([(pair, pair[1].ahead) for pair in candidates], self._rng(), patient=self.patient)

    def _mislead(
        self,
        slots: Mapping[int, int],
        *,
        what: str,
        offenders: Sequence[str] = (),
        live: Sequence[LiveSlot] = (),
    ) -> Injection:
        """Point tokens elsewhere. `offenders`: whose they are; `live`: what is overwritten."""
        before = {token.index: token.slot for token in self.target.tokens()}
        self.target.write_slots(slots)
        blamed = frozenset(offenders)
        victims = tuple(dict.fromkeys(slot.owner for slot in live if slot.owner not in blamed))
        first = live[0] if live else None
        return Injection(
            victims=victims or tuple(offenders),
            page=first.page if first else next(iter(slots.values())) // self.target.page_size,
            pages=frozenset(slot // self.target.page_size for slot in slots.values()),
            column=first.column if first else -1,
            live_when=lambda scheduled: True,
            affected=lambda: blamed,
            description=f"{what}: " + ", ".join(f"slot {before[i]} -> {slot}" for i, slot in list(slots.items())[:4]),
            slots={index: (before[index], slot) for index, slot in slots.items()},
        )

    def _redirect(self, candidates: Sequence[tuple[StepToken, LiveSlot]], what: str) -> Injection | None:
        """Point one token of a request to a live slot."""
        chosen = self._choose(candidates)
        if chosen is None:
            return None
        token, live = chosen
        assert token.request is not None
        owners = [other for other in live_slots(self.target) if other.slot == live.slot]
        return self._mislead({token.index: live.slot}, what=what, offenders=[token.request], live=owners)


def put_behind(target: WriteTarget, page: int, count: int) -> None:
    """A free page is handed out after `count` others, or as the last one."""
    others = [other for other in range(1, target.num_pages) if other != page and target.is_free(other)]
    target.make_next(page)
    for other in others[:count]:
        target.make_next(other)


def reuse_soon(target: WriteTarget, seed: int) -> None:
    """A free page that somebody has had is the next to be handed out."""
    used = [page for page in range(target.num_pages) if target.is_free(page) and target.handed_out(page)[0]]
    if used:
        target.make_next(used[seed % len(used)])
