"""Put on PYTHONPATH by `vllm_engine`, so that vLLM's worker processes interpret Triton kernels as their parent does."""

import os
import types

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends

    class Driver:
        """What vLLM and Triton ask of a driver before they use it."""

        @staticmethod
        def is_active() -> bool:
            """There is no device to find."""
            return True

        def get_current_device(self) -> int:
            """The only one."""
            return 0

        def get_device_interface(self) -> object:
            """Torch's functions for the CPU in the place of those for a GPU."""
            import torch

            return torch.cpu

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
