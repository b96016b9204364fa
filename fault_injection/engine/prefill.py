"""The prefill worker: computes prompts, and hands each request's KV over to a decode worker, a layer a tick.

A request whose prompt is computed computes nothing any more, but keeps its pages until the last layer was copied. The
copy runs beside later steps of the worker, as a copy engine would: nothing orders it after their forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvguard.fault_injection.engine.engine import Engine, EngineConfig
from kvguard.fault_injection.engine.kv_wire import PageBytes, Part, WireFormat, pack
from kvguard.fault_injection.engine.model import LlamaModel
from kvguard.fault_injection.engine.scheduler import Request, Sequence

if TYPE_CHECKING:
    from kvguard.adapters.generic import PagedGuard
    from kvguard.adapters.generic_transfer import TransferSource
    from kvguard.transfer_manifest import Refusal

DECODE_WORKER = "decode"


@dataclass(eq=False)
class Outgoing:
    """A transfer under way.

    pages  the connector's own list of the pages to copy, in column order; wire: how they are to look
    next_part  the layer that is copied next
    """

    sequence: Sequence
    ticket: str
    pages: list[int]
    tokens: int
    first_token: int
    wire: WireFormat
    next_part: int = 0


class PrefillEngine(Engine):
    """An engine that ends requests by handing them over.

    `at_copy` runs in every tick before copies are taken, with the names of the requests concerned.
    """

    def __init__(
        self,
        model: LlamaModel,
        config: EngineConfig,
        wire: WireFormat,
        guard: PagedGuard | None = None,
        source: TransferSource | None = None,
    ) -> None:
        """`wire`: what the decode worker stores. `source`: the guard's half of transfers, with `guard`.

        ValueError for a model with windowed layers.
        """
        if model.config.window is not None:
            raise ValueError("a hand-over carries the pages of one pool: no windowed layers")
        super().__init__(model, config, guard)
        self.wire = wire
        self.source = source
        self.outgoing: dict[str, Outgoing] = {}
        self.tickets: dict[str, str] = {}
        self.at_copy: list[Callable[[PrefillEngine, frozenset[str]], None]] = []

    def prefill(self, request: Request, ticket: str) -> None:
        """Queue a request whose KV goes to the decode worker under this ticket. ValueError as `submit`."""
        self.submit(replace(request, max_new_tokens=1))
        self.tickets[request.id] = ticket

    def tick(self) -> list[Part]:
        """One forward, and one layer of every transfer that was waiting before it."""
        waiting = list(self.outgoing)
        self.step()
        names = [name for name in waiting if name in self.outgoing]
        for hook in self.at_copy:
            hook(self, frozenset(names))
        parts = [self._copy(self.outgoing[name]) for name in names]
        return [part for part in parts if part is not None]

    def _end(self, sequence: Sequence, error: str | None, foreign_pages: tuple[int, ...] = ()) -> None:
        if error is None and sequence.id not in self.outgoing:
            self.scheduler.park(sequence)
            self.outgoing[sequence.id] = Outgoing(
                sequence=sequence,
                ticket=self.tickets[sequence.id],
                pages=list(sequence.pages),
                tokens=len(sequence.request.prompt),
                first_token=sequence.tokens[-1],
                wire=self.wire,
            )
            return
        self.outgoing.pop(sequence.id, None)
        self.tickets.pop(sequence.id, None)
        if self.source is not None:
            self.source.cancel(sequence.id)
        super()._end(sequence, error, foreign_pages)

    def _copy(self, outgoing: Outgoing) -> Part | None:
        """Copy the next layer; None if the guard ended the request instead."""
        from kvguard.transfer_manifest import Refusal

        name, layer, pages = outgoing.sequence.id, outgoing.next_part, outgoing.pages
        labels = []
        if self.source is not None:
            refusal = None
            if layer == 0:
                refusal = self.source.begin(
                    name,
                    ticket=outgoing.ticket,
                    receiver=DECODE_WORKER,
                    tokens=outgoing.tokens,
                    pages=pages,
                    layout=outgoing.wire.layout(),
                )
            taken = refusal or self.source.take(name, pages, layers=[layer])
            if not isinstance(taken, list):
                self._refuse(outgoing, taken)
                return None
            labels = taken
        content = pack(self.kv, layer, pages, outgoing.tokens, outgoing.wire)
        outgoing.next_part += 1
        is_last = outgoing.next_part == self.kv.layers
        manifest = None
        if is_last:
            if self.source is not None:
                word = self.source.finish(name, first_token=outgoing.first_token)
                if isinstance(word, Refusal):
                    self._refuse(outgoing, word)
                    return None
                manifest = word
            self._end(outgoing.sequence, None)
        return Part(
            request=name,
            ticket=outgoing.ticket,
            index=layer,
            parts=self.kv.layers,
            tokens=outgoing.tokens,
            pages=tuple(
                PageBytes(column, keys, values, labels[column] if labels else None)
                for column, (keys, values) in enumerate(content)
            ),
            first_token=outgoing.first_token if is_last else -1,
            manifest=manifest,
        )

    def _refuse(self, outgoing: Outgoing, refusal: Refusal) -> None:
        self._end(outgoing.sequence, refusal.violation.message, refusal.foreign_pages)
