"""Traffic that misled writes have something to hit in: several tenants, shared desks, long and short answers, pairs.

Seeded as in `traffic.py`: the same seed gives the same requests at the same steps.
"""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.traffic import Arrival, PromptMaker, recall_prompt, secret

__all__ = ["CLEAN_ANSWERS", "clean_traffic", "mixed_traffic", "returning"]

TENANTS = ("northwind", "lakeside", "")
DESKS = (
    "Desk of Northwind Bank: keep answers short, never guess, log all.",
    "You sort hospital notes; quote them word for word; add no advice.",
)
LONG, MEDIUM, SHORT = range(66, 90), range(18, 30), range(3, 9)
"""Tokens that requests ask for."""
CLEAN_ANSWERS = (range(34, 56), range(16, 26), SHORT)
"""The same in clean runs of engines that take a step for each token."""
RETURNS_AFTER_STEPS = 12
TOKENS_MAX = 192
"""Of a prompt and its answer together."""


def mixed_traffic(
    seed: int,
    make_prompt: PromptMaker = recall_prompt,
    *,
    client_aborts: bool = False,
    requests: int = 10,
    answers: tuple[range, range, range] = (LONG, MEDIUM, SHORT),
) -> list[Arrival]:
    """Two clients with one prompt at once and a long answer each, then singles and pairs every few steps.

    What a request says is new, starts with its tenant's desk, goes on from an early one (a common prefix), or repeats
    an early one, of its own tenant (a hit) or of another (none, and its pages have been in other hands: A-B-A).
    `answers`: tokens that long, medium and short requests ask for.
    """
    rng = random.Random(f"mixed-traffic-{seed}")
    said = [(secret(rng), TENANTS[0])]
    arrivals: list[Arrival] = []
    step = 0

    def arrive(text: str, tenant: str, new_tokens: range) -> None:
        prompt = make_prompt(rng, text)
        # What is asked for must be there to be recited, and must fit.
        count = min(rng.choice(new_tokens), max(3, len(prompt) - 3), TOKENS_MAX - len(prompt))
        name = f"r{len(arrivals)}"
        leaves = step + rng.randrange(2, 9) if client_aborts and arrivals and rng.random() < 0.3 else None
        request = Request(id=name, prompt=prompt, max_new_tokens=count, tenant=tenant)
        arrivals.append(Arrival(step=step, request=request, abort_step=leaves))

    for _ in range(2):
        arrive(*said[0], answers[0])
    while len(arrivals) < requests:
        step += rng.randrange(1, 4)
        for _ in range(2 if rng.random() < 0.35 else 1):
            tenant, kind = rng.choice(TENANTS), rng.random()
            old, owner = rng.choice(said[:4])
            if kind < 0.25:
                text, tenant = old, owner if rng.random() < 0.7 else tenant
            elif kind < 0.45:
                text, tenant = f"{old[:40]} {secret(rng)[:40]}", owner
            elif kind < 0.65:
                text = f"{DESKS[TENANTS.index(tenant) % 2]} {secret(rng)[:36]}"
            else:
                text = secret(rng)
            said.append((text, tenant))
            arrive(text, tenant, rng.choices(answers, (4, 4, 2))[0])
    return arrivals


def clean_traffic(
    seed: int, make_prompt: PromptMaker, *, requests: int = 14, answers: tuple[range, range, range] = CLEAN_ANSWERS
) -> list[Arrival]:
    """For clean runs of other engines: mixed traffic with client aborts, and at its end the first prompt again.

    In a tight pool nothing of that is cached by then.
    """
    arrivals = mixed_traffic(seed, make_prompt, client_aborts=True, requests=requests, answers=answers)
    again = replace(arrivals[0].request, id=f"r{len(arrivals)}", max_new_tokens=answers[1].start)
    return [*arrivals, Arrival(step=arrivals[-1].step + RETURNS_AFTER_STEPS, request=again)]


def returning(arrivals: list[Arrival]) -> frozenset[str]:
    """Requests that say what an earlier one of their tenant has said."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    again = set()
    for arrival in arrivals:
        said = arrival.request.tenant, arrival.request.prompt
        if said in seen:
            again.add(arrival.request.id)
        seen.add(said)
    return frozenset(again)
