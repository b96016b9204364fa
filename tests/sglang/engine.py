"""A real SGLang scheduler in this process, run by its own loops; requests come from a function, no sockets.

One process can hold one scheduler: see `apart`.
"""

from __future__ import annotations

import array
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvguard.adapters.sglang.plugin import ATTACHED, guard_of
from kvguard.fault_injection.models import write_checkpoint

ENVIRONMENT = {
    "SGLANG_PLATFORM": "kvguard_cpu",
    "SGLANG_PLUGINS": "kvguard",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # A page that is lost is an exception, at idle and between steps.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
    "context_length": 512,
    "max_running_requests": 16,
    "max_total_tokens": 2048,
    "chunked_prefill_size": 64,
    "page_size": 16,
}
os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})

Client = Callable[["Engine"], bool | None]
"""Called in every turn of the loop, before SGLang takes its requests; True: do not leave, even if all is idle."""


class Leave(BaseException):
    """Ends a loop that SGLang itself never leaves."""


@lru_cache(maxsize=1)
def checkpoint() -> Path:
    """A tiny random Llama whose greedy tokens vary; drawn once per process, the same everywhere."""
    return write_checkpoint(Path(tempfile.mkdtemp(prefix="tiny-llama-")))


class Engine:
    """See the module.

    tokens    request id -> tokens that were sent, as a stream's client sees them
    ends      request id -> finish reason
    late      requests that got a token after their end
    """

    def __init__(self, *, overlap: bool = False, rank: int = 0, ports: Any = None, **arguments: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        load_plugins()
        given = ARGUMENTS | {"model_path": str(checkpoint()), "disable_overlap_schedule": not overlap} | arguments
        server = ServerArgs(**given)
        server.resolve_once()
        server.check_server_args()
        ports = ports or PortArgs.init_new(server)
        publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
        self.scheduler = Scheduler(server, ports)
        self.overlap = overlap
        # There is no stream to wait for on a CPU.
        self.scheduler.schedule_stream.synchronize = lambda: None
        self.scheduler._war_barrier_enabled = False
        self.scheduler.ipc_channels.send_to_detokenizer.send_output = self._sent
        self.scheduler.ipc_channels.send_to_tokenizer.send_output = self._sent
        self.scheduler.output_streamer.send_to_detokenizer = SimpleNamespace(send_output=self._sent)
        self.scheduler.request_receiver = SimpleNamespace(recv_requests=self._receive)
        self.scheduler.metrics_reporter.start_scheduler_time_accounting()
        idle = self.scheduler.on_idle

        def on_idle() -> None:
            idle()
            self._idle = True

        self.scheduler.on_idle = on_idle
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self.late: list[str] = []
        self.control: list[Any] = []
        self.turn = 0
        self._inbox: list[Any] = []
        self._client: Client | None = None
        self._idle = False
        self._turns_left = 0

    @property
    def guard(self) -> Any:
        """The SchedulerGuard, or None."""
        return guard_of(self.scheduler)

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def table(self) -> Any:
        """int32 [rows, context]: slots."""
        return self.scheduler.req_to_token_pool.req_to_token

    @property
    def steps(self) -> int:
        """Forwards since the start."""
        return int(self.scheduler.forward_ct)

    # -- the client's side ----------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int = 16,
        priority: int | None = None,
        exact: bool = True,
        tenant: str = "",
    ) -> None:
        """A request, greedy; SGLang gets it in the next turn.

        `exact`: so many tokens. Otherwise it may end sooner, and SGLang takes in more requests than may fit. `tenant`:
        its extra_key, under which alone it finds what is cached.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=exact)
        sampling.normalize(None)
        self.send(
            TokenizedGenerateReqInput(
                rid=name,
                input_text=None,
                input_ids=array.array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=True,
                priority=priority,
                extra_key=tenant or None,
            )
        )

    def abort(self, name: str) -> None:
        """The client of this request went away."""
        from sglang.srt.managers.io_struct import AbortReq

        self.send(AbortReq(rid=name))

    def send(self, message: Any) -> None:
        """Any message of SGLang's front end."""
        self._inbox.append(message)

    def running(self) -> list[Any]:
        """Requests of the running batch."""
        return list(self.scheduler.running_batch.reqs)

    def request(self, name: str) -> Any:
        """A request that SGLang runs, prefills in chunks or has waiting; None when it knows no such."""
        scheduler = self.scheduler
        known = [*scheduler.running_batch.reqs, *scheduler.waiting_queue]
        if scheduler.last_batch is not None:
            known += scheduler.last_batch.reqs
        if scheduler.chunked_req is not None:
            known.append(scheduler.chunked_req)
        return next((req for req in known if req.rid == name and not req.finished()), None)

    def slots(self, req: Any) -> Any:
        """The live part of a request's row, a view."""
        return self.table[req.kv.req_pool_idx, : req.kv.kv_allocated_len]

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, client: Client | None = None, turns: int = 20000) -> Engine:
        """SGLang's loop until all is done and its idle checks have passed, or for `turns` turns; returns itself."""
        self._client, self._idle, self._turns_left = client, False, turns
        loop = self.scheduler.event_loop_overlap if self.overlap else self.scheduler.event_loop_normal
        try:
            loop()
        except Leave:
            pass
        finally:
            self._client = None
        return self

    def flush(self) -> None:
        """Empty the prefix cache, as SGLang does on request, and forget what was sent."""
        assert self.scheduler.flush_cache()
        self.tokens, self.ends, self.late = {}, {}, []

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """As if no guard had been attached. The cache must be empty before, and is empty afterwards."""
        guard, scheduler = self.guard, self.scheduler
        owners = (scheduler, self.allocator, scheduler.tree_cache, scheduler.tp_worker.model_runner)
        for owner in owners:
            delattr(owner, ATTACHED)
        try:
            yield
        finally:
            for owner in owners:
                setattr(owner, ATTACHED, guard)
            self.flush()

    def _receive(self, local_reqs: Any = None) -> list[Any]:
        self.turn += 1
        self._turns_left -= 1
        wants_more = self._client is not None and self._client(self)
        inbox, self._inbox = self._inbox, []
        if not inbox and not wants_more and self._idle and self.scheduler.is_fully_idle():
            raise Leave
        if self._turns_left < 0:
            raise AssertionError(f"not done after {self.turn} turns: {self.scheduler.waiting_queue}")
        self._idle = False
        return [*(local_reqs or ()), *inbox]

    def _sent(self, output: Any, request: Any = None) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        if isinstance(output, AbortReq):
            self.ends[output.rid] = output.finished_reason or {"type": "abort", "message": "queued"}
        elif hasattr(output, "rids") and getattr(output, "output_ids", None) is not None:
            for name, tokens, end in zip(output.rids, output.output_ids, output.finished_reasons, strict=True):
                if tokens and name in self.ends:
                    self.late.append(name)
                self.tokens.setdefault(name, []).extend(tokens)
                if end:
                    self.ends[name] = end
        else:
            self.control.append(output)
