"""One real SGLang scheduler in this process, on the CPU: no tokenizer, no sockets, its own loop.

SGLang has no switch for that. The scheduler gets its requests from an object that stands in for its request receiver,
and what it sends goes to a function. `serve` runs the scheduler's own loop, normal or overlapping, until the receiver
raises `Done`. The platform is kvguard's (tools/sglang_cpu), which runs Llama architectures in plain PyTorch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "SGLANG_PLATFORM": "kvguard_cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """How to start the scheduler. pool_tokens: slots of the pool; chunk_tokens: most prompt tokens of a step;
    conservativeness: how much SGLang keeps free for tokens to come, below 1 it has to retract sooner.

    int4  linear layers are packed to 4 bits when the model is loaded
    adapters  (name, folder) of LoRA adapters that requests may name
    """

    model: Path
    overlap: bool = False
    dtype: str = "float32"
    int4: bool = False
    kv_cache_dtype: str = "auto"
    page_size: int = 16
    pool_tokens: int = 1472
    chunk_tokens: int = 64
    max_running: int = 6
    context_tokens: int = 256
    conservativeness: float = 1.0
    adapters: tuple[tuple[str, Path], ...] = ()


class Done(Exception):
    """Raised by a receiver to leave the scheduler's loop."""


def import_sglang() -> None:
    """What takes long, once per process: SGLang and its list of models. Starts nothing and applies no plug-in."""
    os.environ.update(ENVIRONMENT)
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  (imports every model: two seconds of each engine's start otherwise)


class SglangEngine:
    """A scheduler in this process. One per process: SGLang keeps much of its state in globals.

    guarded  whether SGLang's plug-ins are loaded with the guard's configuration in the environment. RuntimeError if the
             guard is then not there, or if it is there although nobody asked for it.
    """

    def __init__(self, options: SglangOptions, *, guarded: bool) -> None:
        import_sglang()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        if options.int4:
            _pack_at_load()
        if options.adapters:
            without_pinning()
        arguments = ServerArgs(
            model_path=str(options.model),
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_overlap_schedule=not options.overlap,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            page_size=options.page_size,
            max_total_tokens=options.pool_tokens,
            chunked_prefill_size=options.chunk_tokens,
            context_length=options.context_tokens,
            max_running_requests=options.max_running,
            schedule_conservativeness=options.conservativeness,
            skip_tokenizer_init=True,
            random_seed=0,
            log_level="error",
            # Two processes that look for a free port at the same time would find the same one.
            nccl_port=_free_port(),
            **lora_arguments(options.adapters),
        )
        arguments.resolve_once()
        arguments.check_server_args()
        ports = PortArgs.init_new(arguments)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.options = options
        self.scheduler: Any = Scheduler(arguments, ports)
        # There is one stream, and what is run on it has run.
        self.scheduler.schedule_stream.synchronize = lambda: None
        self.scheduler._war_barrier_enabled = False
        self.scheduler.metrics_reporter.start_scheduler_time_accounting()
        self.lora_ids = lora_ids(self.scheduler)
        self.guard: Any = _guard_of(self.scheduler) if guarded else None
        if guarded and self.guard is None:
            raise RuntimeError("SGLang started unguarded: a guarded run would prove nothing")

    @property
    def pool_slots(self) -> int:
        """Slots in the KV tensors: the pool's and those of page 0."""
        return int(self.scheduler.token_to_kv_pool_allocator.size) + self.options.page_size

    def serve(self, receive: Callable[[], list[Any]], send: Callable[[Any], None]) -> None:
        """Run the scheduler's loop. `receive` is called in each iteration and raises Done; `send` gets every output."""
        scheduler = self.scheduler
        scheduler.request_receiver = _Receiver(receive)
        for channel in (scheduler.ipc_channels.send_to_detokenizer, scheduler.ipc_channels.send_to_tokenizer):
            channel.send_output = lambda output, source=None: send(output)
        try:
            if self.options.overlap:
                scheduler.event_loop_overlap()
            else:
                scheduler.event_loop_normal()
        except Done:
            return


class _Receiver:
    """In place of SGLang's: what is received is what the harness gives."""

    def __init__(self, receive: Callable[[], list[Any]]) -> None:
        self._receive = receive

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        return [*(local_reqs or ()), *self._receive()]


def lora_arguments(adapters: tuple[tuple[str, Path], ...]) -> dict[str, Any]:
    """Server arguments under which requests may name these adapters of the tiny model; none without any."""
    if not adapters:
        return {}
    return {
        "enable_lora": True,
        "lora_paths": [f"{name}={folder}" for name, folder in adapters],
        "lora_backend": "torch_native",
        "max_loras_per_batch": len(adapters) + 1,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def lora_ids(scheduler: Any) -> dict[str, str]:
    """Name of an adapter -> the id by which requests name it to the scheduler."""
    manager = scheduler.tp_worker.model_runner.lora_manager
    return {} if manager is None else {ref.lora_name: ref.lora_id for ref in manager.lora_refs.values()}


def without_pinning() -> None:
    """From now on this process makes ordinary memory where SGLang's LoRA layers ask for pinned memory, which PyTorch
    refuses on a machine without an accelerator."""
    import torch

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda memory, *_: memory  # type: ignore[method-assign]


def generate_request(
    name: str,
    prompt: tuple[int, ...],
    new_tokens: int,
    *,
    ignore_eos: bool = True,
    tenant: str = "",
    salt: str = "",
    lora_id: str = "",
) -> Any:
    """A greedy request as the tokenizer process would send it; every token is sent back as it comes.

    `tenant`: its extra_key, `salt`: its cache_salt, under which alone it finds what is cached; `lora_id`: its adapter.

    SGLang keeps room for all tokens of a request that ignores the end of text, and never retracts for it.
    """
    from array import array

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=ignore_eos)
    parameters.normalize(None)
    return TokenizedGenerateReqInput(
        rid=name,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=parameters,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
        extra_key=tenant or None,
        cache_salt=salt or None,
        lora_id=lora_id or None,
    )


def abort_request(name: str) -> Any:
    """What the tokenizer process sends when a client goes away."""
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=name)


def _guard_of(scheduler: Any) -> Any:
    from kvguard.adapters.sglang.plugin import guard_of

    return guard_of(scheduler)


def _pack_at_load() -> None:
    """The platform's INT4 packing; its own switch is an environment variable that the guard's configuration refuses."""
    from kvguard_sglang_cpu import pack_linear_layers
    from sglang.srt.platforms import current_platform

    current_platform.post_load_model = pack_linear_layers


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
