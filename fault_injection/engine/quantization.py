"""Weights in 4 bits: symmetric, one scale for each group of inputs, two weights a byte.

`PackedInt4` is the format; `int4_linear_reference` says what it means (dequantise, then multiply); `int4_linear` gives
the same within rounding through PyTorch's CPU kernel where that exists for the shapes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["PackedInt4", "int4_linear", "int4_linear_reference", "pack_int4", "quantize_int4"]

_ZERO_POINT = 8
"""Nibbles are unsigned; nibble n stands for n - 8."""
_LARGEST = 7
# The kernel takes weights in strips of 16 outputs and one of these group sizes; it computes from bfloat16.
_KERNEL_OUTPUTS = 16
_KERNEL_GROUP_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedInt4:
    """A quantised [out, in] weight."""

    nibbles: Tensor
    """uint8 [out, in / 2]; input 2 i in the low nibble of byte i, input 2 i + 1 in the high one; nibble - 8."""
    scales: Tensor
    """float32 [out, in / group_size], holding bfloat16 numbers; all finite, > 0."""
    group_size: int
    """Inputs that share a scale."""
    kernel_weight: Tensor | None
    """The nibbles once more in the order of PyTorch's CPU kernel; None where the kernel does not take the shapes."""
    kernel_scales: Tensor
    """bfloat16 [in / group_size, out, 2]: scale and (zero) offset, the kernel's order."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as [out, in] in `dtype`."""
        low, high = self.nibbles & 0xF, self.nibbles >> 4
        levels = torch.stack((low, high), dim=2).flatten(1).to(torch.float32) - _ZERO_POINT
        grouped = levels.view(*self.scales.shape, self.group_size) * self.scales.unsqueeze(2)
        return grouped.flatten(1).to(dtype)


def quantize_int4(weight: Tensor, group_size: int = 32) -> PackedInt4:
    """Round a floating [out, in] weight to 15 levels (-7 to 7) times the scale of its group of `group_size` inputs.

    Raises:
        ValueError: not two-dimensional, `in` not a multiple of `group_size` or odd, or a weight is NaN or infinite.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must be [out, in], got shape {tuple(weight.shape)}")
    outputs, inputs = weight.shape
    if group_size < 1 or inputs % group_size or inputs % 2:
        raise ValueError(f"{inputs} inputs cannot be packed in groups of {group_size}")
    exact = weight.detach().to(torch.float32)
    if not bool(torch.isfinite(exact).all()):
        raise ValueError("weight holds NaN or infinity")
    grouped = exact.reshape(outputs, inputs // group_size, group_size)
    # The scale is rounded to bfloat16 before it is used, so that kernel and reference share one number. The floor
    # keeps an all-zero group from dividing by zero.
    scales = (grouped.abs().amax(dim=2) / _LARGEST).clamp_min(1e-20).to(torch.bfloat16).to(torch.float32)
    levels = (grouped / scales.unsqueeze(2)).round().clamp(-_LARGEST, _LARGEST).flatten(1).to(torch.int32) + _ZERO_POINT
    unsigned = levels.to(torch.uint8)
    return pack_int4(unsigned[:, 0::2] | (unsigned[:, 1::2] << 4), scales)


def pack_int4(nibbles: Tensor, scales: Tensor) -> PackedInt4:
    """Make a weight of what a checkpoint holds: `nibbles` and `scales` as `PackedInt4` has them, scales in any float.

    Raises:
        ValueError: the shapes do not fit each other, or a scale is not bfloat16's, not finite or not positive.
    """
    outputs, inputs = nibbles.shape[0], 2 * nibbles.shape[1]
    if scales.dim() != 2 or scales.shape[0] != outputs or scales.shape[1] < 1 or inputs % scales.shape[1]:
        raise ValueError(f"scales of shape {tuple(scales.shape)} do not fit [{outputs}, {inputs}] weights")
    scales = scales.to(torch.float32)
    if not bool((torch.isfinite(scales) & (scales > 0) & (scales == scales.to(torch.bfloat16))).all()):
        raise ValueError("scales must be positive, finite numbers of bfloat16")
    group_size = inputs // scales.shape[1]
    kernel_weight = None
    if outputs % _KERNEL_OUTPUTS == 0 and group_size in _KERNEL_GROUP_SIZES:
        levels = torch.stack((nibbles & 0xF, nibbles >> 4), dim=2).flatten(1).to(torch.int32)
        kernel_weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    kernel_scales = torch.stack((scales, torch.zeros_like(scales)), dim=2).transpose(0, 1)
    return PackedInt4(
        nibbles=nibbles,
        scales=scales,
        group_size=group_size,
        kernel_weight=kernel_weight,
        kernel_scales=kernel_scales.to(torch.bfloat16).contiguous(),
    )


def int4_linear_reference(x: Tensor, packed: PackedInt4) -> Tensor:
    """Return x @ weight.T, [tokens, out] in the dtype of `x`, for floating `x` [tokens, in]: dequantise, multiply."""
    return functional.linear(x, packed.dequantize(x.dtype))


def int4_linear(x: Tensor, packed: PackedInt4) -> Tensor:
    """Return what `int4_linear_reference` does, within rounding, by the 4-bit kernel when `x` is bfloat16."""
    if packed.kernel_weight is None or x.dtype != torch.bfloat16:
        return int4_linear_reference(x, packed)
    product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, packed.kernel_weight, packed.group_size, packed.kernel_scales
    )
    return product
