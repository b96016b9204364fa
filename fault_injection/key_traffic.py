"""Traffic in which a wrong cache key has something to confuse: one text under several salts, adapters and prefixes.

Seeded as in `traffic.py`: the same seed gives the same requests at the same steps.
"""

from __future__ import annotations

import random
from dataclasses import replace

from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.traffic import Arrival, PromptMaker, recall_prompt, secret

__all__ = ["TENANTS", "TOKENS_MAX", "UPDATE_STEP", "cut", "key_traffic", "tiny_prompt"]

TOKENS_MAX = 192
TENANTS = ("red", "blue", "green")
"""And the names of adapters."""
START_TOKEN = 256
"""Of the tiny model."""
UPDATE_STEP = 14
"""Before which the weights change, where they do."""
COMMON_CHARACTERS = 63
"""With the start token they fill pages of 64, 16 and 1, so that what follows starts a page, whatever stands before."""


def tiny_prompt(rng: random.Random, text: str) -> tuple[int, ...]:
    """For the tiny model: a token for each character behind a start token, so that what two texts share fills whole
    pages."""
    del rng
    return (START_TOKEN, *text.encode("ascii"))


def cut(arrival: Arrival) -> Arrival:
    """A prompt of which the last tokens are kept is sent as it is after that."""
    request = arrival.request
    if not request.keep_last:
        return arrival
    return replace(
        arrival, request=replace(request, prompt=request.prompt[-request.keep_last :], untruncated=request.prompt)
    )


def key_traffic(
    seed: int,
    make_prompt: PromptMaker = recall_prompt,
    *,
    client_aborts: bool = False,
    new_tokens: range = range(12, 22),
    spacing: range = range(2, 5),
) -> list[Arrival]:
    """Two texts with two endings, crossed; one of them for several tenants and adapters; one cut to its last tokens;
    then new texts until pages are evicted, and the first ones again.

    new_tokens, spacing: what the tokens that a request asks for, and the steps between arrivals, are drawn from.
    """
    rng = random.Random(f"key-traffic-{seed}")
    heads = [f"{secret(rng)} {secret(rng)}"[:COMMON_CHARACTERS] for _ in range(2)]
    tails = [f"{secret(rng)} {secret(rng)}"[: COMMON_CHARACTERS + 12] for _ in range(2)]
    tenants = rng.sample(TENANTS, 3)
    first = heads[0] + tails[0]
    # (text, tenant, adapter, tokens of the prompt that are kept)
    wanted = [
        (first, tenants[0], "", 0),
        (first, tenants[0], "", 0),
        (heads[1] + tails[1], tenants[0], "", 0),
        (heads[1] + tails[0], tenants[0], "", 0),
    ]
    led = [
        (first, tenants[1], "", 0),
        (first, tenants[0], tenants[2], 0),
        (first, "", tenants[0], 0),
        (first, tenants[0], "", 100),
    ]
    rng.shuffle(led)
    wanted += led
    wanted += [(f"{secret(rng)} {secret(rng)}"[:120], rng.choice(tenants), "", 0) for _ in range(5)]
    again = [(first, tenants[0], "", 0), (first, tenants[1], "", 0), (heads[1] + tails[1], tenants[0], "", 0)]
    rng.shuffle(again)
    wanted += again
    arrivals: list[Arrival] = []
    step = 0
    for number, (text, tenant, lora, keep_last) in enumerate(wanted):
        request = Request(
            id=f"r{number}",
            prompt=make_prompt(rng, text),
            max_new_tokens=rng.choice(new_tokens),
            tenant=tenant,
            lora=lora,
            keep_last=keep_last,
        )
        leaves = step + rng.randrange(3, 12) if client_aborts and number and rng.random() < 0.25 else None
        arrivals.append(Arrival(step=step, request=request, abort_step=leaves))
        step += rng.choice(spacing)
    if client_aborts and all(arrival.abort_step is None for arrival in arrivals):
        last = arrivals[-1]
        arrivals[-1] = Arrival(step=last.step, request=last.request, abort_step=last.step + 5)
    return arrivals
