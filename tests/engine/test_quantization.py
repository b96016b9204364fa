"""Packed INT4: the format, its error, and the kernel against the reference."""

import pytest
import torch

from kvguard.fault_injection.engine.quantization import int4_linear, int4_linear_reference, quantize_int4


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_error_is_at_most_half_a_level(group_size: int) -> None:
    """Each weight comes back within half a step of its group's scale (and bfloat16's rounding of the scale)."""
    weight = _random(48, 128)
    packed = quantize_int4(weight, group_size)
    assert packed.nibbles.shape == (48, 64)
    assert packed.nibbles.dtype == torch.uint8
    assert packed.scales.shape == (48, 128 // group_size)
    error = (packed.dequantize(torch.float32) - weight).abs().view(48, -1, group_size)
    assert (error <= packed.scales.unsqueeze(2) * (0.5 + 7 * 2**-8)).all()


def test_nibbles_are_packed_low_first() -> None:
    """Input 0 sits in the low nibble of byte 0, input 1 in its high nibble, each offset by 8."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1] = 7.0, -7.0
    packed = quantize_int4(weight, 32)
    assert packed.nibbles[0, 0].item() == (7 + 8) | ((-7 + 8) << 4)
    assert packed.dequantize(torch.float32)[0, :3].tolist() == [7.0, -7.0, 0.0]


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 96), (512, 96), (96, 256), (16, 32)])
@pytest.mark.parametrize("tokens", [1, 6, 128])
def test_kernel_agrees_with_reference(tokens: int, outputs: int, inputs: int) -> None:
    """The 4-bit kernel and dequantise-then-multiply differ by no more than bfloat16 rounding."""
    packed = quantize_int4(_random(outputs, inputs), 32)
    assert packed.kernel_weight is not None
    x = _random(tokens, inputs, seed=1).to(torch.bfloat16)
    exact = x.float() @ packed.dequantize(torch.float32).T
    fast, reference = int4_linear(x, packed), int4_linear_reference(x, packed)
    assert fast.dtype == torch.bfloat16
    torch.testing.assert_close(fast.float(), exact, rtol=2**-7, atol=2**-7 * inputs**0.5)
    torch.testing.assert_close(reference.float(), exact, rtol=2**-7, atol=2**-7 * inputs**0.5)


@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(10, 96, 32), (32, 48, 16)])
def test_odd_shapes_take_the_reference(outputs: int, inputs: int, group_size: int) -> None:
    """Shapes that the kernel does not take are computed by the reference."""
    packed = quantize_int4(_random(outputs, inputs), group_size)
    assert packed.kernel_weight is None
    x = _random(5, inputs, seed=1).to(torch.bfloat16)
    assert torch.equal(int4_linear(x, packed), int4_linear_reference(x, packed))


def test_zero_groups_stay_zero_and_finite() -> None:
    """An all-zero group has a finite scale and dequantises to zeros."""
    packed = quantize_int4(torch.zeros(16, 64), 32)
    assert torch.isfinite(packed.scales).all()
    assert not packed.dequantize(torch.float32).any()
    assert not int4_linear(torch.ones(2, 64, dtype=torch.bfloat16), packed).any()


def test_unpackable_weights_are_refused() -> None:
    """NaN, a wrong rank and inputs that do not fill groups raise ValueError."""
    with pytest.raises(ValueError, match="NaN"):
        quantize_int4(torch.full((16, 32), float("nan")), 32)
    with pytest.raises(ValueError, match="shape"):
        quantize_int4(torch.zeros(32), 32)
    with pytest.raises(ValueError, match="groups of 32"):
        quantize_int4(torch.zeros(16, 40), 32)
