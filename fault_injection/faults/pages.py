"""Faults of the page bookkeeping: frees, free lists, block-table rows, cache entries.

A fault is a frozen record with `seed` and `target`. `inject()` runs between two steps and changes the engine's state;
it answers None while the engine offers no suitable victim, and is then asked again before the next step. Choices are
drawn from the seed among the candidates that the engine offers, and prefer a page whose content the victim still has to
recite, because a fault that nobody could notice shows little.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvguard.fault_injection.target import CacheKey, PageTarget, RunningRequest


@dataclass(frozen=True, kw_only=True)
class Injection:
    """What was done.

    victims      requests whose page or row was broken: every live sharer of the page at the moment of injection
    page         the page involved, column its place in the first victim's block table
    live_when    given the requests of a step about to run, whether its forward reads or writes the bad page
    affected     asked when the fault goes live: the requests that must not emit anything from then on
    description  one line for the report
    cache_key    the cache key that was pointed elsewhere, if any; until that is noticed, others may follow it too
    slots        token of the step -> (slot before, slot after), where writes were misled; pages: that they go to now
    """

    victims: tuple[str, ...]
    page: int
    column: int
    live_when: Callable[[frozenset[str]], bool]
    affected: Callable[[], frozenset[str]]
    description: str
    cache_key: CacheKey = None
    slots: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    pages: frozenset[int] = frozenset()


def _worth_reading(request: RunningRequest, target: PageTarget) -> list[int]:
    """Columns whose computed tokens the request has still to recite, nearest first; all computed ones if none recites.

    The recall model copies its prompt from the start: having generated g tokens, it reads prompt token g + 1 next.
    """
    page_size = target.page_size
    if not target.recites:
        return list(range(min(len(request.pages), -(-request.computed_tokens // page_size))))
    last = min(request.prompt_tokens, request.computed_tokens, request.total_tokens - request.prompt_tokens)
    ahead = range(request.generated_tokens + 2, last)
    columns = list(dict.fromkeys(position // page_size for position in ahead))
    return [column for column in columns if column < len(request.pages)]


def _victims(target: PageTarget, *, needs_column: bool = True) -> list[tuple[RunningRequest, list[int]]]:
    """Running requests that have computed their prompt and still have something to recite, with those columns."""
    found = []
    for request in target.running():
        if request.computed_tokens < request.prompt_tokens or request.total_tokens - request.generated_tokens < 4:
            continue
        columns = _worth_reading(request, target)
        if columns or not needs_column:
            found.append((request, columns))
    return found


def _pick(rng: random.Random, target: PageTarget) -> tuple[RunningRequest, int] | None:
    """A victim and one of its next few columns worth reading."""
    candidates = _victims(target)
    if not candidates:
        return None
    request, columns = rng.choice(candidates)
    near = columns[: max(1, 12 // target.page_size)] if target.recites else columns
    return request, rng.choice(near)


def readers_but_the_taker(target: PageTarget, page: int, victims: tuple[str, ...]) -> Callable[[], frozenset[str]]:
    """Everyone who lists the page, those who took it from the cache meanwhile too, but not its rightful new owner."""
    before, _ = target.handed_out(page)

    def affected() -> frozenset[str]:
        count, taker = target.handed_out(page)
        # A taker that lists the page twice had taken it from the cache as well: it would overwrite what it reads.
        uses = {request.id: request.pages.count(page) for request in target.running()}
        rightful = count > before and taker is not None and taker not in victims and uses.get(taker, 0) == 1
        return frozenset(name for name, times in uses.items() if times and not (rightful and name == taker))

    return affected


def _someone_takes_a_page(target: PageTarget, but: Sequence[str]) -> bool:
    """Whether the step about to be scheduled hands a page to a request outside `but` that will soon overwrite it.

    A prompt fills its pages at once. A generating request writes one token a step, which overwrites something that is
    still to be read only if pages are tiny.
    """
    if any(request.fits for request in target.waiting()):
        return True
    if target.page_size > 1:
        return False
    return any(request.needs_page and request.id not in but for request in target.running())


@dataclass(frozen=True, kw_only=True)
class PageFault:
    """Base of the faults below. `reaches_control_plane`: whether it passes through a call that an allocator makes."""

    seed: int
    target: PageTarget

    name: ClassVar[str]
    summary: ClassVar[str]
    reaches_control_plane: ClassVar[bool]
    needs_arrival: ClassVar[bool] = False
    """Whether a request must arrive after the injection for the fault to go live."""

    def inject(self) -> Injection | None:
        """Break something, or answer None if nothing suitable is there yet."""
        raise NotImplementedError

    def undo(self, injection: Injection) -> None:
        """Repair what can still be repaired, so that an engine can serve further trials."""
        raise NotImplementedError

    def _rng(self) -> random.Random:
        return random.Random(f"{self.name}-{self.seed}")


def free_early(target: PageTarget, page: int, *, reused: bool) -> bool:
    """The engine's own free path runs for a page in use. Whether it is free; `reused`: then next to be handed out."""
    target.free_under_users(page)
    freed = target.is_free(page)
    if freed and reused:
        target.make_next(page)
    return freed


@dataclass(frozen=True, kw_only=True)
class FreedUnderUsers(PageFault):
    """Base: the engine's own free path runs for a page in use. `reused`: somebody takes the page in this very step."""

    reaches_control_plane: ClassVar[bool] = True
    reused: ClassVar[bool]

    def inject(self) -> Injection | None:
        picked = _pick(self._rng(), self.target)
        if picked is None:
            return None
        request, column = picked
        page = request.pages[column]
        victims = self.target.users(page)
        if self.reused and not _someone_takes_a_page(self.target, victims):
            return None
        freed = free_early(self.target, page, reused=self.reused)
        return Injection(
            victims=victims,
            page=page,
            column=column,
            live_when=lambda scheduled: freed and bool(scheduled & set(victims)),
            affected=readers_but_the_taker(self.target, page, victims),
            description=f"page {page} freed under {', '.join(victims)}"
            + (" and next to be handed out" if self.reused else ""),
        )

    def undo(self, injection: Injection) -> None:
        self.target.unlist(injection.page)


@dataclass(frozen=True, kw_only=True)
class UseAfterFree(FreedUnderUsers):
    """A page is freed under a running request and is the next to be handed out, in this very step."""

    name: ClassVar[str] = "use-after-free"
    summary: ClassVar[str] = "page freed under a running request and handed to another"
    needs_arrival: ClassVar[bool] = True
    reused: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FreedNotReused(FreedUnderUsers):
    """A page is freed under a running request and stays at the end of the free list."""

    name: ClassVar[str] = "freed-not-reused"
    summary: ClassVar[str] = "page freed under a running request, not handed out yet"
    reused: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class DoubleAllocation(PageFault):
    """The free list holds a page that is in use, so the allocator hands it out a second time."""

    name: ClassVar[str] = "double-allocation"
    summary: ClassVar[str] = "page in use stands in the free list and is handed out again"
    reaches_control_plane: ClassVar[bool] = True
    needs_arrival: ClassVar[bool] = True

    def inject(self) -> Injection | None:
        picked = _pick(self._rng(), self.target)
        if picked is None:
            return None
        request, column = picked
        page = request.pages[column]
        victims = self.target.users(page)
        if not _someone_takes_a_page(self.target, victims):
            return None
        self.target.list_as_free(page)
        target, before = self.target, self.target.handed_out(page)[0]

        def live(scheduled: frozenset[str]) -> bool:
            # Live once it was handed out a second time and an earlier owner runs.
            return target.handed_out(page)[0] > before and bool(scheduled & set(victims))

        return Injection(
            victims=victims,
            page=page,
            column=column,
            live_when=live,
            affected=readers_but_the_taker(target, page, victims),
            description=f"page {page} of {', '.join(victims)} listed as free",
        )

    def undo(self, injection: Injection) -> None:
        self.target.unlist(injection.page)


@dataclass(frozen=True, kw_only=True)
class RowFault(PageFault):
    """Base of faults in the block table in device memory: no allocator call is involved."""

    reaches_control_plane: ClassVar[bool] = False

    def _damage(self, rng: random.Random, request: RunningRequest, column: int) -> dict[int, int] | None:
        """column -> entry to write; None if this victim will not do."""
        raise NotImplementedError

    def inject(self) -> Injection | None:
        rng = self._rng()
        picked = _pick(rng, self.target)
        if picked is None:
            return None
        request, column = picked
        damage = self._damage(rng, request, column)
        if not damage:
            return None
        for place, entry in damage.items():
            self.target.write_block_table(request.id, place, entry)
        victim = request.id
        return Injection(
            victims=(victim,),
            page=request.pages[column],
            column=column,
            live_when=lambda scheduled: victim in scheduled,
            affected=lambda: frozenset({victim}),
            description=f"block-table row of {victim}: " + ", ".join(f"[{c}]={e}" for c, e in damage.items()),
        )

    def undo(self, injection: Injection) -> None:
        for request in self.target.running():
            if request.id in injection.victims:
                for column, page in enumerate(request.pages):
                    self.target.write_block_table(request.id, column, page)


@dataclass(frozen=True, kw_only=True)
class StaleRow(RowFault):
    """A request's block-table row still holds another request's pages."""

    name: ClassVar[str] = "stale-row"
    summary: ClassVar[str] = "block-table row holds another request's pages"

    def _damage(self, rng: random.Random, request: RunningRequest, column: int) -> dict[int, int] | None:
        others = [other for other in self.target.running() if other.id != request.id and other.pages]
        if not others:
            return None
        source = rng.choice(others).pages
        damage = {c: source[c] for c in range(min(len(source), len(request.pages))) if source[c] != request.pages[c]}
        return damage or None


@dataclass(frozen=True, kw_only=True)
class NullEntry(RowFault):
    """An entry inside the live extent points to the null page."""

    name: ClassVar[str] = "null-entry"
    summary: ClassVar[str] = "null page inside the live extent of a row"

    def _damage(self, rng: random.Random, request: RunningRequest, column: int) -> dict[int, int]:
        return {column: self.target.null_page}


@dataclass(frozen=True, kw_only=True)
class OutOfRangeEntry(RowFault):
    """An entry inside the live extent lies outside the pool."""

    name: ClassVar[str] = "out-of-range-entry"
    summary: ClassVar[str] = "row entry outside the pool"

    def _damage(self, rng: random.Random, request: RunningRequest, column: int) -> dict[int, int]:
        beyond = self.target.num_pages + rng.randrange(1, self.target.num_pages)
        return {column: rng.choice([beyond, -rng.randrange(1, self.target.num_pages)])}


@dataclass(frozen=True, kw_only=True)
class StaleCacheEntry(PageFault):
    """The prefix cache still names a page for content that it no longer holds: it was republished for other content."""

    name: ClassVar[str] = "stale-cache-entry"
    summary: ClassVar[str] = "cache entry outlived its page, which was republished for other content"
    reaches_control_plane: ClassVar[bool] = True
    needs_arrival: ClassVar[bool] = True

    def inject(self) -> Injection | None:
        candidates = [w for w in self.target.waiting() if w.fits and w.prefix_keys]
        if not candidates:
            return None
        request = candidates[0]
        # The first column that the cache does not serve: everything before it is a sound hit.
        column = 0
        while column < len(request.prefix_keys) and self.target.cached_page(request.prefix_keys[column]) is not None:
            column += 1
        if column == len(request.prefix_keys):
            return None
        key = request.prefix_keys[column]
        pages = sorted(page for page, other in self.target.cached_pages().items() if other not in request.prefix_keys)
        if not pages:
            return None
        page = self._rng().choice(pages)
        self.target.point_cache_entry(key, page)
        victim, target = request.id, self.target

        def affected() -> frozenset[str]:
            # Whoever followed the stale entry; requests that hold the page for its true content are not.
            return frozenset(
                other.id
                for other in target.running()
                if other.pages[column : column + 1] == (page,) and other.prefix_keys[column : column + 1] == (key,)
            )

        return Injection(
            victims=(victim,),
            page=page,
            column=column,
            live_when=lambda scheduled: bool(scheduled & affected()),
            affected=affected,
            description=f"cache key of column {column} of {victim} still names page {page}",
            cache_key=key,
        )

    def undo(self, injection: Injection) -> None:
        if injection.cache_key is not None and self.target.cached_page(injection.cache_key) == injection.page:
            self.target.point_cache_entry(injection.cache_key, None)


PAGE_FAULTS: dict[str, type[PageFault]] = {
    fault.name: fault
    for fault in (
        UseAfterFree,
        DoubleAllocation,
        StaleRow,
        NullEntry,
        OutOfRangeEntry,
        FreedNotReused,
        StaleCacheEntry,
    )
}
"""Every fault of this module by name, in the order of the report."""
