"""Traffic that misled writes have something to hit in: several tenants, shared desks, long and short answers, pairs.

Seeded as in `traffic.py`: the same seed gives the same requests at the same steps.
"""

from __future__ import annotations

import random

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.traffic import Arrival, PromptMaker, recall_prompt, secret

__all__ = ["mixed_traffic"]

TENANTS = ("northwind", "lakeside", "")
DESKS = (
    "Desk of Northwind Bank: keep answers short, never guess, log all.",
    "You sort hospital notes; quote them word for word; add no advice.",
)
LONG, MEDIUM, SHORT = range(66, 90), range(18, 30), range(3, 9)
"""Tokens that requests ask for."""
TOKENS_MAX = 192
"""Of a prompt and its answer together."""


def mixed_traffic(
    seed: int, make_prompt: PromptMaker = recall_prompt, *, client_aborts: bool = False, requests: int = 10
) -> list[Arrival]:
    """Two clients with one prompt at once and a long answer each, then singles and pairs every few steps.

    What a request says is new, starts with its tenant's desk, goes on from an early one (a common prefix), or repeats
    an early one, of its own tenant (a hit) or of another (none, and its pages have been in other hands: A-B-A).
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
        arrive(*said[0], LONG)
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
            arrive(text, tenant, rng.choices((LONG, MEDIUM, SHORT), (4, 4, 2))[0])
    return arrivals
