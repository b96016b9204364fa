"""Both workers of the embedded engine as targets of faults: the pages of each, and the connector between them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import get_args

from kvguard.fault_injection.engine.decode import DecodeEngine, Incoming
from kvguard.fault_injection.engine.kv_cache import KVDtype
from kvguard.fault_injection.engine.pool import chain_keys
from kvguard.fault_injection.engine.prefill import PrefillEngine
from kvguard.fault_injection.engine.scheduler import Sequence
from kvguard.fault_injection.target import RunningRequest, WaitingRequest
from kvguard.fault_injection.targets.embedded import EmbeddedTarget
from kvguard.fault_injection.transfer_target import TransferView


def _worth(prompt_tokens: int, page_size: int, new_tokens: int = 20) -> tuple[int, ...]:
    """Columns that a request which decodes next has still to recite; see `pages._worth_reading`."""
    ahead = range(2, min(prompt_tokens, new_tokens))
    return tuple(dict.fromkeys(position // page_size for position in ahead))


class PrefillTarget(EmbeddedTarget):
    """Implements `SourceTarget` on a PrefillEngine."""

    def __init__(self, engine: PrefillEngine) -> None:
        super().__init__(engine)
        self._prefill = engine

    def running(self) -> list[RunningRequest]:
        """Requests that compute, and those whose pages are still copied."""
        parked = [self._view(one.sequence) for one in self._prefill.outgoing.values()]
        return [*parked, *super().running()]

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(request.id for request in self.running() if page in request.pages)

    def outgoing(self) -> list[TransferView]:
        return [
            TransferView(
                request=name,
                pages=tuple(one.pages),
                first_column=0,
                done_parts=one.next_part,
                parts=self._prefill.kv.layers,
                waiting_parts=0,
                worth=_worth(one.tokens, self.page_size),
            )
            for name, one in self._prefill.outgoing.items()
        ]

    def used_pages(self) -> dict[int, tuple[str, ...]]:
        counts = self._prefill.pool.handed_out
        return {page: self.users(page) for page in range(1, self.num_pages) if counts[page]}

    def read_from(self, request: str, column: int, page: int) -> None:
        self._prefill.outgoing[request].pages[column] = page

    def change_format(self, request: str, rng: random.Random) -> str:
        one = self._prefill.outgoing[request]
        fp8 = [dtype for dtype in get_args(KVDtype) if dtype.startswith("fp8")]
        if one.wire.dtype in fp8 and rng.random() < 0.5:
            other = next(dtype for dtype in fp8 if dtype != one.wire.dtype)
            one.wire = replace(one.wire, dtype=other)
            return f"{other} instead of {self._prefill.wire.dtype}"
        one.wire = replace(one.wire, order="HND")
        return "HND instead of NHD"


class DecodeTarget(EmbeddedTarget):
    """Implements `PageTarget` and `SinkTarget` on a DecodeEngine."""

    def __init__(self, engine: DecodeEngine) -> None:
        super().__init__(engine)
        self._decode = engine

    def _landing(self) -> list[Incoming]:
        return [one for one in self._decode.incoming.values() if one.pages]

    def running(self) -> list[RunningRequest]:
        """Requests that decode, and those that have pages for a transfer under way."""
        landing = [one.sequence for one in self._landing() if one.sequence not in self._decode.scheduler.running]
        return [*super().running(), *(self._view(sequence) for sequence in landing)]

    def users(self, page: int) -> tuple[str, ...]:
        return tuple(request.id for request in self.running() if page in request.pages)

    def waiting(self) -> list[WaitingRequest]:
        """Transfers that wait for pages, then what was preempted."""
        pool, free_rows = self._decode.pool, self._decode.scheduler.free_rows
        coming = [one for one in self._decode.incoming.values() if one.parts and not one.pages]
        transfers = [
            WaitingRequest(
                id=one.sequence.id,
                prefix_keys=tuple(chain_keys(one.sequence.tokens, self.page_size, one.sequence.request.tenant)),
                fits=index == 0
                and bool(free_rows)
                and pool.available * self.page_size > len(one.sequence.tokens) + self.page_size,
            )
            for index, one in enumerate(coming)
        ]
        return [*transfers, *([] if transfers else super().waiting())]

    def block_table_row(self, request: str) -> tuple[int, ...]:
        return super().block_table_row(request)

    def _transfer(self, one: Incoming) -> TransferView:
        sequence = one.sequence
        return TransferView(
            request=sequence.id,
            pages=tuple(one.pages),
            first_column=one.shared,
            done_parts=len(one.arrived) - len(one.parts),
            parts=self._decode.kv.layers,
            waiting_parts=len(one.parts),
            worth=_worth(len(sequence.request.prompt), self.page_size),
        )

    def incoming(self) -> list[TransferView]:
        return [self._transfer(one) for one in self._decode.incoming.values() if one.arrived]

    def write_to(self, request: str, column: int, page: int) -> None:
        self._decode.incoming[request].pages[column] = page

    def _change_waiting(self, request: str, column: int, *, keep_label: bool) -> None:
        one = self._decode.incoming[request]
        changed = []
        for part in one.parts:
            pages = []
            for page in part.pages:
                if page.column != column:
                    pages.append(page)
                elif keep_label:
                    pages.append(page._replace(keys=bytes(len(page.keys)), values=bytes(len(page.values))))
            changed.append(replace(part, pages=tuple(pages)))
        one.parts.clear()
        one.parts.extend(changed)

    def lose_page(self, request: str, column: int) -> None:
        self._change_waiting(request, column, keep_label=False)

    def blank_page(self, request: str, column: int) -> None:
        self._change_waiting(request, column, keep_label=True)

    def finished(self) -> list[tuple[TransferView, tuple[str, ...]]]:
        running = self._decode.scheduler.running
        return [(self._transfer(one), self._users_now(one, running)) for one in self._decode.recent]

    def _users_now(self, one: Incoming, running: Items[Sequence]) -> tuple[str, ...]:
        written = set(one.pages[one.shared :])
        return tuple(sequence.id for sequence in running if written & set(sequence.pages))

    def repeat(self, request: str) -> None:
        one = next(one for one in self._decode.recent if one.sequence.id == request)
        again = Incoming(one.sequence, one.ticket, list(one.pages), one.shared)
        again.parts.extend(one.arrived)
        again.arrived.extend(one.arrived)
        self._decode.incoming[request] = again
