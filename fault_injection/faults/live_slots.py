"""What a misled write can hit, and which tokens can be misled: seen through a `WriteTarget`, before a forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from kvguard.fault_injection.target import RunningRequest, StepToken, WriteTarget

T = TypeVar("T")
SOON_TOKENS = 12


class LiveSlot(NamedTuple):
    """A slot with a token that somebody has computed and goes on reading.

    ahead  how many tokens later its owner reads it closely; -1: it does not, or nobody knows
    """

    owner: str
    page: int
    column: int
    slot: int
    ahead: int


def live_slots(target: WriteTarget) -> list[LiveSlot]:
    """Every slot that holds a computed token of a running request that will read it again, once for each owner."""
    found, size = [], target.page_size
    for request in target.running():
        left = request.total_tokens - request.prompt_tokens - request.generated_tokens
        if request.computed_tokens < request.prompt_tokens or left < 4:
            continue
        start = 0 if target.window is None else max(0, request.computed_tokens - target.window + 4)
        for position in range(start, request.computed_tokens):
            page = request.pages[position // size]
            slot = page * size + position % size
            found.append(LiveSlot(request.id, page, position // size, slot, tokens_ahead(target, request, position)))
    return found


def tokens_ahead(target: WriteTarget, request: RunningRequest, position: int) -> int:
    """How many tokens later a request reads one of its positions closely, -1: see LiveSlot.

    The recall model reads prompt token g + 1 next when it has generated g: see `pages`.
    """
    if not target.recites or target.window is not None:
        return 0
    last = min(request.prompt_tokens, request.total_tokens - request.prompt_tokens)
    return position - request.generated_tokens - 2 if request.generated_tokens + 2 <= position < last else -1


def real_tokens(target: WriteTarget) -> list[StepToken]:
    """Tokens of generating requests that are no guesses: what they write is read from the next step on."""
    generating = {r.id for r in target.running() if r.computed_tokens >= r.prompt_tokens}
    return [token for token in target.tokens() if token.request in generating and not token.is_draft]


def new_tokens(target: WriteTarget) -> list[tuple[StepToken, int]]:
    """Tokens of prompts and of generating requests, no guesses, with how soon they are read: see `tokens_ahead`."""
    requests = {request.id: request for request in target.running()}
    return [
        (token, tokens_ahead(target, requests[token.request], token.position))
        for token in target.tokens()
        if token.request in requests and not token.is_draft
    ]


def padding_lanes(target: WriteTarget) -> list[StepToken]:
    """Tokens of nobody."""
    return [token for token in target.tokens() if token.request is None]


def is_dummy(target: WriteTarget) -> bool:
    """Whether the forward about to run serves no request."""
    return all(token.request is None for token in target.tokens())


def at_same_offset(target: WriteTarget, tokens: Sequence[StepToken]) -> list[tuple[StepToken, LiveSlot]]:
    """Tokens with live slots at the very offset in a page that is theirs: only the page is wrong."""
    size = target.page_size
    by_offset: dict[int, list[LiveSlot]] = {}
    for live in live_slots(target):
        by_offset.setdefault(live.slot % size, []).append(live)
    return [(token, live) for token in tokens for live in by_offset.get(token.position % size, [])]


def soonest(candidates: Sequence[tuple[T, int]], rng: random.Random, *, patient: bool) -> T | None:
    """One of those that are read soonest, as (candidate, tokens ahead); if none is read, any, or None if `patient`."""
    read = [ahead for _, ahead in candidates if ahead >= 0]
    if not read and (patient or not candidates):
        return None
    until = min(read) + SOON_TOKENS if read else 0
    return rng.choice([each for each, ahead in candidates if not read or 0 <= ahead <= until])
