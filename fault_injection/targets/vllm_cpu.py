"""What vLLM cannot run on this machine's CPU, known before an engine is started."""

from __future__ import annotations

AVX512 = "on an x86 CPU without AVX-512 or AMX"


def cannot_run() -> dict[str, str]:
    """KV dtype or weight format -> why vLLM refuses it here; empty on a CPU that runs everything.

    vLLM 0.32.0 itself: its CPU attention refuses FP8 KV there, and its build for such CPUs has no INT4 kernel.
    """
    import platform

    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {}
    cpu = torch.cpu
    if cpu._is_avx512_supported() or cpu._is_amx_tile_supported():
        return {}
    return {
        "fp8_e4m3": f"vLLM refuses FP8 KV {AVX512}",
        "fp8_e5m2": f"vLLM refuses FP8 KV {AVX512}",
        "int4": f"vLLM has no INT4 kernel {AVX512}",
    }
