"""Seeded traffic for trials and soaks: readable secrets, shared system prompts, A-B-A reuse of pages, client aborts.

Every request carries a secret of its own, so that a leak can be read: whatever one request recites of another's secret
came through a page that it should not have read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvguard.fault_injection.engine.recall.tokenizer import encode
from kvguard.fault_injection.engine.scheduler import Request

if TYPE_CHECKING:
    # Traffic goes to engines of other people too, which need not have PyTorch.
    from kvguard.fault_injection.engine.engine import Engine

_NAMES = ("Vera Okafor", "Jon Aaltonen", "Mia Castellan", "Ravi Deshpande", "Lena Fuchs", "Omar Haddad", "Zoe Quirke")
_THINGS = ("insulin 40 units", "a blue bicycle", "the spare vault key", "two first-class seats", "a refund of 310 EUR")
_PLACES = ("Ward 7", "Pier 23", "Kiosk B", "the north gate", "room 118", "flat 9C")
_SYSTEM_PROMPTS = (
    "Desk of Northwind Bank: keep answers short, never guess, log all.",
    "You sort hospital notes; quote them word for word; add no advice.",
)


def secret(rng: random.Random) -> str:
    """One line of text that belongs to one client, 60 to 100 characters."""
    code = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(8))
    return (
        f"{rng.choice(_NAMES)}, PIN {rng.randrange(1000, 9999)}, code {code}: {rng.choice(_THINGS)} at "
        f"{rng.choice(_PLACES)}, {rng.randrange(1, 28)} {rng.choice(('May', 'July', 'October'))}"
    )


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, the step before which it arrives, and the step before which its client leaves (None: never)."""

    step: int
    request: Request
    abort_step: int | None = None


def token_prompts(vocab_size: int) -> Callable[[random.Random, str], tuple[int, ...]]:
    """For a model without the recall tokenizer: random token ids in place of each text, the same for the same text."""

    def prompt(rng: random.Random, text: str) -> tuple[int, ...]:
        del rng
        return tuple(random.Random(f"{text[i : i + 8]}").randrange(vocab_size) for i in range(len(text)))

    return prompt


def recall_prompt(rng: random.Random, text: str) -> tuple[int, ...]:
    """The recall model's prompt: start token, text, newline; it then recites the text from its start."""
    del rng
    return tuple(encode(text + "\n"))


PromptMaker = Callable[[random.Random, str], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How traffic becomes token ids, and back where that can be read. `recites` as in PageTarget."""

    make: PromptMaker
    text: Callable[[tuple[int, ...]], str] | None = None
    recites: bool = False


def smollm2_prompts(folder: Path) -> Prompts:
    """For SmolLM2, whose tokenizer lies in `folder` too: it is made to recite a secret that its prompt holds."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def make(rng: random.Random, text: str) -> tuple[int, ...]:
        del rng
        # What stands there twice, even a model of this size says a third time, with INT4 weights too.
        ids = tokenizer.encode(f"Note: {text}\nNote: {text}\nNote:", add_special_tokens=False).ids
        return tuple(int(token) for token in ids)

    def text(tokens: tuple[int, ...]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return Prompts(make=make, text=text)


def trial_traffic(
    seed: int,
    make_prompt: PromptMaker = recall_prompt,
    *,
    client_aborts: bool = False,
    requests: int = 7,
    new_tokens: range = range(18, 27),
) -> list[Arrival]:
    """A short burst: two clients with the same prompt at once, then arrivals every few steps while others generate.

    Late arrivals repeat an early prompt (A-B-A): their pages may have been in other hands meanwhile. `new_tokens`: what
    the number of tokens that a request asks for is drawn from.
    """
    rng = random.Random(f"trial-traffic-{seed}")
    texts = [secret(rng) for _ in range(requests)]
    for index in range(requests):
        if rng.random() < 0.4:
            texts[index] = f"{_SYSTEM_PROMPTS[rng.randrange(2)]} {texts[index][:40]}"
    texts[1] = texts[0]
    texts[-2] = texts[rng.randrange(0, 3)]
    step, arrivals = 0, []
    for index, text in enumerate(texts):
        step += 0 if index < 2 else rng.randrange(1, 4) if index < 4 else rng.randrange(1, 3)
        request = Request(id=f"r{index}", prompt=make_prompt(rng, text), max_new_tokens=rng.choice(new_tokens))
        leaves = step + rng.randrange(3, 15) if client_aborts and index > 0 and rng.random() < 0.25 else None
        arrivals.append(Arrival(step=step, request=request, abort_step=leaves))
    if client_aborts and all(arrival.abort_step is None for arrival in arrivals):
        last = arrivals[-1]
        arrivals[-1] = Arrival(step=last.step, request=last.request, abort_step=last.step + 5)
    return arrivals


def endless_traffic(
    seed: int, make_prompt: PromptMaker = recall_prompt, *, max_tokens: int = 160
) -> Iterator[list[tuple[str, Request | None]]]:
    """For soaks: per step, what clients do: ("r17", request) arrives, ("r12", None) leaves. Never ends."""
    rng = random.Random(f"soak-traffic-{seed}")
    recent: list[str] = []
    live: list[str] = []
    number = 0
    while True:
        events: list[tuple[str, Request | None]] = []
        for _ in range(rng.choices((0, 1, 2, 3), (12, 3, 1, 1))[0]):
            text = rng.choice(recent) if recent and rng.random() < 0.35 else secret(rng)
            if rng.random() < 0.3:
                text = f"{rng.choice(_SYSTEM_PROMPTS)} {text[:30]}"
            recent = [*recent[-11:], text]
            for _ in range(2 if rng.random() < 0.2 else 1):
                name = f"r{number}"
                number += 1
                prompt = make_prompt(rng, text)
                room = max_tokens - len(prompt)
                events.append((name, Request(id=name, prompt=prompt, max_new_tokens=rng.randrange(1, max(2, room)))))
                live.append(name)
        if live and rng.random() < 0.04:
            events.append((live.pop(rng.randrange(len(live))), None))
        live = live[-24:]
        yield events


def drive(
    engine: Engine,
    arrivals: list[Arrival],
    *,
    max_steps: int,
    after_step: Sequence[Callable[[Engine], None]] = (),
) -> bool:
    """Feed the arrivals to the engine, step by step; False if it is not done after `max_steps` (a stalled engine)."""
    queue = sorted(arrivals, key=lambda arrival: (arrival.step, arrival.request.id))
    position = 0
    while position < len(queue) or engine.busy:
        now = engine.step_index
        while position < len(queue) and queue[position].step <= now:
            engine.submit(queue[position].request)
            position += 1
        for arrival in queue:
            if arrival.abort_step == now:
                engine.abort(arrival.request.id)
        if now >= max_steps:
            return False
        engine.step()
        for hook in after_step:
            hook(engine)
    return True
