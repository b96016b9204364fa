"""KV on the wire between a prefill and a decode worker: pages of one layer, as the decode worker stores them.

The prefill worker converts. On the wire an FP8 page then has half the bytes of a BF16 one, and the decode worker, whose
steps are what clients wait for, only copies. The factors by which FP8 is read back travel along, in the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from kvguard.fault_injection.engine.kv_cache import KVDtype, KVScales, PagedKV

if TYPE_CHECKING:
    from kvguard.transfer_manifest import KVLayout, PageLabel, TransferManifest

__all__ = ["PageBytes", "Part", "WireFormat", "pack", "unpack"]

Order = Literal["NHD", "HND"]


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How pages look on the wire; a decode worker stores `NHD`: slot, KV head, dimension.

    model   names the weights whose KV it is
    scales  one factor a layer for keys and values; used where `dtype` is FP8
    """

    model: str
    dtype: KVDtype
    page_size: int
    shape: tuple[int, int, int]
    scales: KVScales
    order: Order = "NHD"

    @classmethod
    def of(cls, kv: PagedKV, model: str) -> WireFormat:
        """What an engine with these pages stores."""
        scales = KVScales(keys=tuple(kv.key_scales), values=tuple(kv.value_scales))
        shape = (kv.layers, kv.kv_heads, kv.head_dim)
        return cls(model=model, dtype=kv.dtype, page_size=kv.page_size, shape=shape, scales=scales)

    def layout(self) -> KVLayout:
        """The same in the words of a guard."""
        from kvguard.transfer_manifest import KVLayout

        scales = (*self.scales.keys, *self.scales.values) if self.dtype.startswith("fp8") else ()
        return KVLayout(
            model=self.model,
            dtype=self.dtype,
            order=self.order,
            page_size=self.page_size,
            shape=self.shape,
            scales=scales,
        )


class PageBytes(NamedTuple):
    """One page of one layer: the column it is for, the bytes of its keys and values, and the guard's label, if any."""

    column: int
    keys: bytes
    values: bytes
    label: PageLabel | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One layer of a request's pages: the unit in which a transfer is copied.

    index, parts  which layer it is, of how many
    tokens        tokens of the request that the pages hold
    first_token   in the last part: the token that the prefill worker sampled; manifest: what its guard says
    """

    request: str
    ticket: str
    index: int
    parts: int
    tokens: int
    pages: tuple[PageBytes, ...]
    first_token: int = -1
    manifest: TransferManifest | None = None

    @property
    def is_last(self) -> bool:
        return self.index == self.parts - 1


def pack(kv: PagedKV, layer: int, pages: Sequence[int], tokens: int, wire: WireFormat) -> list[tuple[bytes, bytes]]:
    """Keys and values of the first `tokens` tokens in `pages`, a pair of byte strings a page, converted for the wire.

    Slots behind the last token are zero: what a former owner left there is nobody's business.
    """
    slots = kv.slots(torch.tensor([list(pages)]), len(pages))[0, :tokens]
    key, value = kv.gather(layer, slots)
    scales = KVScales(keys=(wire.scales.keys[layer],), values=(wire.scales.values[layer],))
    staging = PagedKV(
        layers=1,
        num_pages=len(pages),
        page_size=kv.page_size,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        dtype=wire.dtype,
        scales=scales,
    )
    staging.write(0, key, value, torch.arange(tokens))
    keys, values = (_rows(pages_of[0], wire.order) for pages_of in (staging.keys, staging.values))
    return [(k.tobytes(), v.tobytes()) for k, v in zip(keys.numpy(), values.numpy(), strict=True)]


def unpack(kv: PagedKV, layer: int, pages: Sequence[int], payload: Sequence[PageBytes]) -> None:
    """Store each page of `payload` in the page beside it, byte for byte: nothing here checks whose page that is.

    Raises ValueError if a page on the wire has another size than one of `kv`.
    """
    if not payload:
        return
    index = torch.tensor(list(pages), dtype=torch.int64)
    for stored, rows in ((kv.keys[layer], [p.keys for p in payload]), (kv.values[layer], [p.values for p in payload])):
        target = stored.view(torch.uint8).view(kv.num_pages, -1)
        content = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        if content.numel() != len(rows) * target.shape[1]:
            raise ValueError(f"{content.numel()} bytes came for {len(rows)} pages of {target.shape[1]} bytes")
        target.index_copy_(0, index, content.view(len(rows), -1))


def _rows(pages: Tensor, order: Order) -> Tensor:
    """uint8 [pages, bytes of a page]."""
    rows = pages.view(torch.uint8)
    return (rows.transpose(1, 2).contiguous() if order == "HND" else rows).flatten(1)
