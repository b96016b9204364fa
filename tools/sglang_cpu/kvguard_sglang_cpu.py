"""An out-of-tree platform for SGLang: plain PyTorch on a CPU, without sgl_kernel. SGLANG_PLATFORM=kvguard_cpu picks it.

SGLang's own CPU platform takes its kernels from sgl_kernel, which needs AMX. This one says "native" where SGLang asks
which forward of a layer to call, so that Llama architectures run as they are written in PyTorch. With
SGLANG_CPU_PACK_INT4=1 the linear layers are packed to 4 bits when the model is loaded, in groups of 32, for PyTorch's
own CPU kernel: none of SGLang's INT4 schemes runs on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

GROUP = 32


def activate() -> str:
    """What SGLang imports when this platform is picked."""
    return "kvguard_sglang_cpu.Platform"


def __getattr__(name: str) -> Any:
    # SGLang resolves the platform in the middle of its own imports: its classes can be had only then.
    if name != "Platform":
        raise AttributeError(name)
    globals()["Platform"] = made = _platform()
    return made


def _platform() -> type:
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities

    class Platform(CpuSRTPlatform):
        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def post_load_model(self, model: Any) -> None:
            if os.environ.get("SGLANG_CPU_PACK_INT4"):
                pack_linear_layers(model)

    return Platform


def pack_linear_layers(model: Any) -> int:
    """Replace the weight of every linear layer by a 4-bit one; returns how many bytes they have now."""
    import torch
    from sglang.srt.layers.linear import LinearBase

    packed = 0
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method = Packed(module.weight.data)
            packed += module.quant_method.nbytes
            module.weight = torch.nn.Parameter(module.weight.data[:0], requires_grad=False)
    return packed


class Packed:
    """One linear layer's weight: 4 bits, round to nearest, with scale and zero point for each group of 32 inputs."""

    def __init__(self, weight: Any) -> None:
        import torch

        rows, columns = weight.shape
        groups = weight.float().view(rows, columns // GROUP, GROUP)
        high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-6)
        values = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).view(rows, columns)
        self.values = torch._convert_weight_to_int4pack_for_cpu(values, 1)
        # The kernel computes (value - 8) * scale + zero.
        pairs = torch.stack([scale[..., 0], (low + scale * 8)[..., 0]], dim=-1)
        self.pairs = pairs.transpose(0, 1).contiguous().to(weight.dtype)
        self.nbytes = int(self.values.numel())

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        """What SGLang's linear layers call."""
        import torch

        flat = x.reshape(-1, x.shape[-1])
        y = torch._weight_int4pack_mm_for_cpu(flat, self.values, GROUP, self.pairs).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias
