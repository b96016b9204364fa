"""One real vLLM engine in this process, on the CPU, for campaigns, tests and benchmarks.

vLLM has no switch for two of the set-ups that are wanted here: its CPU platform turns asynchronous scheduling off, and
model runner V2 wants Triton kernels, which a CPU runs through Triton's interpreter. Both are arranged here, outside of
what the guard sees. Which runner a process uses is fixed by its first engine: Triton decides at its import.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Runner = Literal["v1", "v2"]

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """How to start the engine. `extra`: further arguments of vLLM's LLM, as they are."""

    model: Path
    runner: Runner = "v1"
    asynchronous: bool = False
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    num_blocks: int = 40
    block_size: int = 32
    max_num_seqs: int = 8
    max_model_len: int = 384
    max_num_batched_tokens: int | None = None
    tokenizer: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client of the library sees."""

    finish_reason: str | None
    stop_reason: str | None
    token_ids: tuple[int, ...]


def prepare_process(runner: Runner) -> None:
    """Set the environment that vLLM reads at its import. RuntimeError if this process runs the other runner already."""
    wanted = "1" if runner == "v2" else "0"
    current = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if "vllm" in sys.modules and current not in (None, wanted):
        raise RuntimeError(f"this process has started vLLM with VLLM_USE_V2_MODEL_RUNNER={current}; use another one")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = wanted
    if runner == "v2":
        _interpret_triton()


def _interpret_triton() -> None:
    """Triton kernels run in its interpreter, here and in processes started from here, and vLLM finds a driver."""
    os.environ["TRITON_INTERPRET"] = "1"
    # What vLLM compiles on its own (tensor parallel embeddings) would go to a Triton that cannot compile here.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    folder = str(Path(__file__).parent / "interpreter")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    runpy.run_path(str(Path(folder) / "sitecustomize.py"))


class VllmEngine:
    """A vLLM LLM in this process; `scheduler`, `runner` and `pool` are its own objects."""

    def __init__(self, options: VllmOptions) -> None:
        prepare_process(options.runner)
        from vllm import LLM

        self.options = options
        arguments: dict[str, Any] = {
            "skip_tokenizer_init": not options.tokenizer,
            "max_model_len": options.max_model_len,
            "enforce_eager": True,
            "seed": 0,
            "num_gpu_blocks_override": options.num_blocks,
            "block_size": options.block_size,
            "dtype": options.dtype,
            "kv_cache_dtype": options.kv_cache_dtype,
            "max_num_seqs": options.max_num_seqs,
            **options.extra,
        }
        if options.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
        with _Asynchronous(options.asynchronous):
            self.llm = LLM(str(options.model), **arguments)
        self.llm_engine: Any = self.llm.llm_engine
        # None where the engine core has a process of its own, as `runner` is where workers have.
        self.core: Any = getattr(self.llm_engine.engine_core, "engine_core", None)
        self.scheduler: Any = getattr(self.core, "scheduler", None)
        worker = getattr(getattr(self.core, "model_executor", None), "driver_worker", None)
        self.runner: Any = worker.worker.model_runner if worker is not None else None
        self.pool: Any = self.scheduler.kv_cache_manager.block_pool if self.scheduler is not None else None

    def generate(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Answer]:
        """Greedy answers, in the order of the prompts."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False) for count in tokens
        ]
        inputs: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [
            Answer(
                finish_reason=output.outputs[0].finish_reason,
                stop_reason=output.outputs[0].stop_reason,
                token_ids=tuple(output.outputs[0].token_ids),
            )
            for output in self.llm.generate(inputs, parameters, use_tqdm=False)
        ]

    @property
    def guard_side(self) -> Any:
        """The scheduler side of the guard, None where the engine is not guarded."""
        return getattr(self.scheduler, "_kvguard_attached", None)

    def close(self) -> None:
        """Give the engine's memory back; other engines of this process go on."""
        self.core.shutdown()


class _Asynchronous:
    """While it is entered, vLLM's CPU platform leaves asynchronous scheduling on."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        if not self._wanted:
            return
        from vllm.platforms.cpu import CpuPlatform

        self._original = CpuPlatform.__dict__["check_and_update_config"]
        update = self._original.__func__

        def keeping_asynchronous(platform: Any, config: Any) -> None:
            update(platform, config)
            config.scheduler_config.async_scheduling = True

        CpuPlatform.check_and_update_config = classmethod(keeping_asynchronous)

    def __exit__(self, *error: object) -> None:
        if self._wanted:
            from vllm.platforms.cpu import CpuPlatform

            CpuPlatform.check_and_update_config = self._original
