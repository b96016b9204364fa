"""Paged storage for keys and values, as a GPU engine keeps it: pages of slots, reached only through tables of ids.

Nothing here checks that an id belongs to the request that uses it; that is the property of real engines which kvguard
exists for. Ids and slots outside the pool wrap round instead of raising: unchecked pointer arithmetic on a GPU also
lands somewhere, in memory that is somebody else's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["KVDtype", "KVScales", "PagedKV"]

KVDtype = Literal["fp32", "bf16", "fp8_e4m3", "fp8_e5m2"]

_TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# An e4m3 byte moved into the bits of a float16 is 2**8 too small: the exponent biases are 7 and 15.
_E4M3_TO_FLOAT16 = 256.0
_E4M3_NAN = 0x7F
_MAGNITUDE_BITS = 0x7F


@dataclass(frozen=True, kw_only=True)
class KVScales:
    """One factor a layer for keys and for values: what is read back is the stored FP8 number times the factor."""

    keys: tuple[float, ...]
    """Length: layers; each > 0."""
    values: tuple[float, ...]
    """Length: layers; each > 0."""


class PagedKV:
    """The key and value pages of all layers.

    Attributes:
        keys, values: one storage tensor a layer, [num_pages, page_size, kv_heads, head_dim], in the dtype of `dtype`.
            Change their contents in place; a tensor put in their stead would not be read.
        key_scales, value_scales: one float a layer; 1.0 and unused unless the storage is FP8.
    """

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: KVDtype,
        scales: KVScales | None = None,
    ) -> None:
        """Allocate zeroed pages. `scales` matters for FP8 only; without it every factor is 1.0.

        Raises:
            ValueError: a size is not positive, `dtype` is unknown, or `scales` does not fit `layers`.
        """
        if min(layers, num_pages, page_size, kv_heads, head_dim) < 1:
            raise ValueError("layers, num_pages, page_size, kv_heads and head_dim must be positive")
        if dtype not in _TORCH_DTYPES:
            raise ValueError(f"KV dtype {dtype!r} is not one of {', '.join(_TORCH_DTYPES)}")
        self.dtype: KVDtype = dtype
        self.layers = layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        storage_dtype = _TORCH_DTYPES[dtype]
        self._is_fp8 = storage_dtype.itemsize == 1
        if scales is None or not self._is_fp8:
            scales = KVScales(keys=(1.0,) * layers, values=(1.0,) * layers)
        for name, factors in (("keys", scales.keys), ("values", scales.values)):
            if len(factors) != layers or not all(0.0 < factor < float("inf") for factor in factors):
                raise ValueError(f"scales.{name} must hold {layers} positive finite factors, got {factors}")
        self.key_scales = list(scales.keys)
        self.value_scales = list(scales.values)
        shape = (num_pages, page_size, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=storage_dtype) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=storage_dtype) for _ in range(layers)]
        # PyTorch cannot gather or scatter FP8 on a CPU, so the same memory is also seen as bytes, one row a slot.
        self._key_rows = [self._slot_rows(pages) for pages in self.keys]
        self._value_rows = [self._slot_rows(pages) for pages in self.values]
        self._page_offsets = torch.arange(page_size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, keys and values together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.keys[0].element_size()

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Store one key and one value a token.

        `key` and `value` are floating [tokens, kv_heads, head_dim]. `slot_mapping` is int64 [tokens], page *
        page_size + offset; a negative slot lands in slot 0 (the null page absorbs skipped writes, so that no shape
        depends on data) and a slot past the pool wraps round. FP8 storage saturates and stores NaN as 0.
        """
        slots = slot_mapping.clamp_min(0).remainder(self.num_pages * self.page_size)
        self._key_rows[layer].index_copy_(0, slots, self._encode(key, self.key_scales[layer]))
        self._value_rows[layer].index_copy_(0, slots, self._encode(value, self.value_scales[layer]))

    def slots(self, block_table: Tensor, columns: int) -> Tensor:
        """Return the slots behind the first `columns` table entries: int64 [rows, columns * page_size].

        `block_table` is int32 or int64 [rows, >= columns]; ids outside the pool wrap round.
        """
        pages = block_table[:, :columns].to(torch.int64).remainder(self.num_pages)
        return (pages.unsqueeze(2) * self.page_size + self._page_offsets).flatten(1)

    def gather(self, layer: int, slots: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return keys and values at int64 `slots` of any shape, each [*slots.shape, kv_heads, head_dim] in `dtype`.

        Slots must lie in the pool (as `slots()` makes them).
        """
        shape = (*slots.shape, self.kv_heads, self.head_dim)
        flat = slots.reshape(-1)
        key = self._decode(self._key_rows[layer].index_select(0, flat), self.key_scales[layer])
        value = self._decode(self._value_rows[layer].index_select(0, flat), self.value_scales[layer])
        return key.to(dtype).view(shape), value.to(dtype).view(shape)

    def read(
        self, layer: int, block_table: Tensor, columns: int, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values of the first `columns` pages of each row, whoever wrote them.

        `block_table` is int32 or int64 [rows, >= columns]; ids outside the pool wrap round. Each result is
        [rows, columns * page_size, kv_heads, head_dim] in `dtype`.
        """
        return self.gather(layer, self.slots(block_table, columns), dtype)

    def zero_pages(self, pages: Iterable[int]) -> None:
        """Zero the named pages in every layer.

        Raises:
            IndexError: a page id is outside [0, num_pages); the caller names pages it owns, so nothing wraps here.
        """
        ids = list(pages)
        for page in ids:
            if not 0 <= page < self.num_pages:
                raise IndexError(f"page {page} is outside the pool of {self.num_pages} pages")
        index = torch.tensor(ids, dtype=torch.int64)
        for rows in (*self._key_rows, *self._value_rows):
            rows.view(self.num_pages, -1).index_fill_(0, index, 0)

    def _slot_rows(self, pages: Tensor) -> Tensor:
        rows = pages.view(self.num_pages * self.page_size, self.kv_heads * self.head_dim)
        return rows.view(torch.uint8) if self._is_fp8 else rows

    def _encode(self, states: Tensor, scale: float) -> Tensor:
        """Return `states` as storage rows, [tokens, kv_heads * head_dim]; FP8 as the bytes of clamp(states / scale)."""
        storage_dtype = _TORCH_DTYPES[self.dtype]
        if not self._is_fp8:
            return states.flatten(1).to(storage_dtype)
        limit = torch.finfo(storage_dtype).max
        scaled = states.flatten(1).to(torch.float32) / scale
        return scaled.clamp_(-limit, limit).nan_to_num_(nan=0.0).to(storage_dtype).view(torch.uint8)

    def _decode(self, rows: Tensor, scale: float) -> Tensor:
        """Return gathered storage rows as numbers: float32 for FP8, else in the storage dtype.

        The FP8 conversion of PyTorch takes most of a decode step on a CPU; moving the bits into a float16 first is
        15 times faster and exact (tested over all 256 bytes).
        """
        if self.dtype == "fp8_e5m2":
            halves = rows.to(torch.int16).bitwise_left_shift_(8).view(torch.float16)
            return halves.to(torch.float32).mul_(scale)
        if self.dtype == "fp8_e4m3":
            # Sign-extended to 16 bits and shifted, the sign stands in bits 15 and 14; bit 14 must be cleared.
            bits = rows.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
            numbers = bits.view(torch.float16).to(torch.float32).mul_(_E4M3_TO_FLOAT16 * scale)
            magnitudes = rows & _MAGNITUDE_BITS
            # A flipped bit can make a NaN byte. It is rare, and finding none is cheaper than masking always.
            if rows.numel() and int(magnitudes.max()) == _E4M3_NAN:
                numbers.masked_fill_(magnitudes == _E4M3_NAN, float("nan"))
            return numbers
        return rows
