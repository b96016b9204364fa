"""What clients of a server send for long: tenants, shared desks, talks that go on, long and short, and A-B-A.

For engines of other people; token ids, no text. Everything is drawn from the seed and from what has ended, so that two
runs of engines that give the same answers are alike.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

__all__ = ["TENANTS", "Arrives", "Leaves", "ServedTraffic"]

TENANTS = ("northwind", "lakeside", "")
"""Whose request it is: vLLM's cache_salt, SGLang's extra_key; "" is nobody's in particular."""
LONG, SHORT = range(40, 81), range(2, 16)
"""Tokens that requests ask for."""
OF_OLD = 12
"""So many requests at least lie between a prompt and its return: in a tight pool its pages have been in other hands."""

Kind = Literal["desk", "talk", "return", "foreign", "new"]


@dataclass(frozen=True, kw_only=True)
class Arrives:
    """A client's request. kind: `desk` starts with a prompt of the system's, which every tenant has; `talk` goes on
    from an earlier one of its tenant; `return` is an early one of its tenant again; `foreign` is what another tenant
    said and this one never did; `new` is none of these."""

    name: str
    prompt: tuple[int, ...]
    tokens: int
    tenant: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """The client of this request goes away."""

    name: str


class ServedTraffic:
    """See the module. counts: of each kind and each tenant's requests, of twins, of clients that left."""

    def __init__(self, seed: int, *, live_max: int, prompt_max: int, vocabulary: range = range(3, 250)) -> None:
        """`live_max`: requests at once; `prompt_max`: tokens of a prompt."""
        self._rng = random.Random(f"served-traffic-{seed}")
        self._live_max, self._prompt_max, self._vocabulary = live_max, prompt_max, vocabulary
        self._desks = [self._tokens(range(64, 97)) for _ in range(2)]
        self._said: dict[str, list[tuple[int, ...]]] = {tenant: [] for tenant in TENANTS}
        self._live: list[str] = []
        self.counts: Counter[str] = Counter()

    def _tokens(self, lengths: range) -> tuple[int, ...]:
        rng = self._rng
        # Half of a text repeats itself, as texts do: drafts that look back find something.
        words = [rng.choice(self._vocabulary) for _ in range(rng.choice(lengths))]
        middle = len(words) // 2
        return tuple(words[:middle] + (words[:middle] if rng.random() < 0.5 else words[middle:]))

    def turn(self, ended: Container[str]) -> list[Arrives | Leaves]:
        """What clients do before the engine's next step. `ended`: names that have their answer, and maybe others."""
        rng, events = self._rng, list[Arrives | Leaves]()
        self._live = [name for name in self._live if name not in ended]
        while len(self._live) < self._live_max and rng.random() < 0.4:
            tenant = rng.choice(TENANTS)
            kind, prompt = self._prompt(tenant)
            self._said[tenant].append(prompt)
            # The second of two foreign ones would find what the first has left.
            twins = 2 if rng.random() < 0.2 and kind != "foreign" else 1
            self.counts["twins"] += twins - 1
            for _ in range(twins):
                name = f"{kind}{self.counts['requests']:05d}"
                tokens = rng.choice(rng.choice((LONG, SHORT)))
                self.counts.update(("requests", kind, f"tenant {tenant}", "long" if tokens in LONG else "short"))
                events.append(Arrives(name=name, prompt=prompt, tokens=tokens, tenant=tenant, kind=kind))
                self._live.append(name)
        if self._live and rng.random() < 0.03:
            self.counts["client_aborts"] += 1
            events.append(Leaves(name=self._live.pop(rng.randrange(len(self._live)))))
        return events

    def _prompt(self, tenant: str) -> tuple[Kind, tuple[int, ...]]:
        rng, said, draw = self._rng, self._said[tenant], self._rng.random()
        if draw < 0.3:
            return "desk", (*rng.choice(self._desks), *self._tokens(range(2, 40)))[: self._prompt_max]
        if draw < 0.5 and said:
            return "talk", (*rng.choice(said[-6:]), *self._tokens(range(2, 30)))[: self._prompt_max]
        if draw < 0.6 and len(said) > OF_OLD:
            return "return", rng.choice(said[:-OF_OLD])
        if draw < 0.7:
            known = {text[:32] for text in said}
            others = [text for other in TENANTS if other != tenant for text in self._said[other][-4:]]
            others = [text for text in others if text[:32] not in known]
            if others:
                return "foreign", rng.choice(others)
        lengths = range(100, self._prompt_max - 10) if rng.random() < 0.25 else range(2, 60)
        return "new", self._tokens(lengths)
