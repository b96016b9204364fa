"""Who watches a world: SGLang's kv_canary, by its own kernels, or kvguard at a level, by its SGLang adapter.

How kv_canary is set up, and why that is how SGLang runs it
- Its settings go through `CanaryConfig.from_env` from published server arguments and SGLANG_KV_CANARY_* variables.
- `attach_canary_buffers` puts the sidecar on the pool and `build_endpoints_from_group` makes its endpoints, as
  `install_canary` does. On a CPU `install_canary` itself fails (it wants a stream of a device for the copies to the
  host), so this module builds its parts: `CanaryDeviceState`, `SingleForwardManager`, `SweepOrchestrator`.
- Around each forward `pre_ops_maybe_inside_graph` and `post_ops_maybe_inside_graph` of the `SingleForwardManager` run,
  where `install_canary` wraps model.forward. They plan, verify and write by `launch_canary_*_kernel`, which on a CPU
  are SGLang's own torch references, pinned byte for byte to the CUDA kernels.
- Token assert: `populate_req_to_expected_token_ids` pins memory and launches Triton; its tensors are made here without
  pinning and scattered by the reference that SGLang's tests hold that kernel against.
- Left out is what only reports: phase assertions, counters of health, statistics and the copy of the counter to the
  host. SGLang stages that copy after step n and acts on it after step n + 1 (`DelayedDeviceHostHandler`); the tables
  say when a violation is *recorded on the device*, which flatters kv_canary by a step.

How kvguard is set up: the hooks that its plugin registers with SGLang, on SGLang's own allocator, prefix tree and
allocation calls, and `SchedulerGuard.check` before each forward, in observe so that nothing of the history changes.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from bench.canary_world import PAGE, World


@dataclass(frozen=True)
class Hit:
    """Something was flagged: in which forward, before or after its attention, by what, whom it names."""

    step: int
    phase: str
    what: str
    whom: str


@dataclass(frozen=True)
class Setting:
    """One way to run kv_canary."""

    key: str
    title: str
    real_data: str = "none"
    with_v: bool = False
    token_assert: bool = False
    sweep_interval: int = 0


SETTINGS = (
    Setting("D", "--kv-canary log, everything else at its default"),
    Setting("B", "--kv-canary-real-data all, SGLANG_KV_CANARY_ENABLE_MHA_V=1", "all", True),
    Setting("T", "B and SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT=1", "all", True, True),
    Setting("S", "T and --kv-canary-sweep-interval 1", "all", True, True, 1),
)


def publish_arguments(setting: Setting | None = None) -> None:
    """Server arguments as a scheduler process publishes them."""
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    arguments: dict[str, Any] = {}
    if setting is not None:
        arguments = {"kv_canary": "log", "kv_canary_real_data": setting.real_data}
        arguments["kv_canary_sweep_interval"] = setting.sweep_interval
    set_global_server_args_for_scheduler(
        ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native", page_size=PAGE, **arguments)
    )


class _NoPhases:
    """Instead of the phase checker, whose assertion is a Triton kernel: it checks the order of the calls made here."""

    def update(self, **_: Any) -> None:
        """Nothing."""


class CanaryWatch:
    """kv_canary under one setting; see the module."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.arguments = setting, (setting,)
        self.hits: list[Hit] = []

    def attach(self, world: World) -> None:
        """As install_canary."""
        from sglang.kernels.ops.kv_canary.verify import CanaryLaunchTag
        from sglang.srt.kv_canary.config import CanaryConfig
        from sglang.srt.kv_canary.endpoint import build_endpoints_from_group
        from sglang.srt.kv_canary.pool_patcher.api import attach_canary_buffers
        from sglang.srt.kv_canary.runner.sweep import SweepOrchestrator
        from sglang.srt.kv_canary.single_forward_manager.manager import SingleForwardManager
        from sglang.srt.kv_canary.state import CanaryDeviceState

        self._world = world
        device = torch.device("cpu")
        with self._environment():
            publish_arguments(self.setting)
            self.config = CanaryConfig.from_env(None)
        self.groups = attach_canary_buffers(
            pool=world.pool, config=self.config, device=device, kv_token_id_vs_position_offset=0
        )
        rows = world.rows
        self.state = CanaryDeviceState.allocate(
            config=self.config,
            device=device,
            num_tags=len(CanaryLaunchTag),
            req_to_token_alloc_size=rows.req_to_token.shape[0],
            max_context_len=rows.max_context_len,
        )
        self.endpoints = tuple(
            endpoint
            for group in self.groups
            for endpoint in build_endpoints_from_group(group=group, device_state=self.state)
        )
        self.manager = SingleForwardManager(
            config=self.config,
            device=device,
            device_state=self.state,
            buffer_groups=self.groups,
            endpoints=self.endpoints,
            req_to_token_pool=rows,
            swa_window_size=0,
            # Three times the pool and the largest batch, as CanaryLaunchCapacities.from_args.
            per_forward_verify_capacity=3 * world.pages * PAGE,
            per_forward_write_req_capacity=rows.size,
            per_forward_write_entry_capacity=world.pages * PAGE,
            d2h_stream=None,
            token_oracle_manager=None,
            swa_divergence_report=None,
            is_eagle_draft_decode=False,
        )
        self.manager._phase_checker = _NoPhases()
        self._sweeper = SweepOrchestrator(
            config=self.config,
            device_state=self.state,
            buffer_groups=self.groups,
            endpoints=self.endpoints,
            swa_window_size=0,
            outer_step_counter_getter=lambda: world.step,
        )
        self._sweeper.attach_radix_cache(world.tree)
        self._seen = 0

    def _environment(self) -> ExitStack:
        from sglang.srt.environ import envs

        stack = ExitStack()
        stack.enter_context(envs.SGLANG_KV_CANARY_ENABLE_MHA_V.override(self.setting.with_v))
        stack.enter_context(envs.SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT.override(self.setting.token_assert))
        return stack

    def before(self, batch: Any, forward: Any) -> None:
        """Head: verify what is stored, then write the sidecar of this step's tokens."""
        if self.config.enable_verify_token_assert:
            from sglang.test.kernels.kv_canary.scatter_req_token_ids_reference import (
                scatter_req_token_ids_torch_reference,
            )

            scatter_req_token_ids_torch_reference(
                flat_in=forward.req_all_ids_flat,
                offsets=torch.nn.functional.pad(torch.cumsum(forward.req_all_ids_lens, 0), (1, 0)),
                req_pool_indices=forward.req_pool_indices,
                pool_out=self.state.req_to_verify_expected_tokens,
            )
        with self._environment():
            self._output = self.manager.pre_ops_maybe_inside_graph(forward)
        self._collect("before")

    def after(self, batch: Any, forward: Any) -> None:
        """Tail: verify again, with the hash of the bytes if asked, and write; then the sweep of the tree."""
        with self._environment():
            self.manager.post_ops_maybe_inside_graph(forward, self._output)
            self._collect("after")
            self._sweeper.maybe_run_sweep()
        self._collect("sweep")

    def _collect(self, phase: str) -> None:
        from sglang.kernels.ops.kv_canary import consts
        from sglang.kernels.ops.kv_canary.verify import CanaryLaunchTag

        log = self.state.violation_log
        count = int(log.violation_write_index[0])
        for row in log.violation_ring[self._seen : count].tolist():
            reason = consts.FailReason(row[consts.VIOLATION_FIELD_FAIL_REASON_BITS])
            tag = CanaryLaunchTag(row[consts.VIOLATION_FIELD_KERNEL_KIND])
            names = " ".join(bit.name.lower().removesuffix("_mismatch") for bit in reason)
            self.hits.append(
                Hit(self._world.step, phase, f"{tag.name}: {names}", f"slot {row[consts.VIOLATION_FIELD_SLOT_IDX]}")
            )
        self._seen = count


_HOOKED = False


def _hook_allocation() -> None:
    """Register kvguard's hooks where pages change hands; those on Scheduler and ModelRunner have no place here."""
    global _HOOKED
    if _HOOKED:
        return
    _HOOKED = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvguard.adapters.sglang.plugin import hooks

    for target, function, kind in hooks():
        if target.startswith("sglang.srt.mem_cache.") or target.endswith(".Req.__init__"):
            HookRegistry.register(target, function, HookType(kind))
    HookRegistry.apply_hooks()


class GuardWatch:
    """kvguard at a level, `tags` or `keys`; see the module."""

    def __init__(self, level: Literal["tags", "keys"]) -> None:
        self.level, self.arguments = level, (level,)
        self.hits: list[Hit] = []

    def attach(self, world: World) -> None:
        """As the plugin does when a Scheduler is built."""
        from kvguard.adapters.sglang.layout import PoolLayout
        from kvguard.adapters.sglang.plugin import ATTACHED
        from kvguard.adapters.sglang.scheduler_guard import SchedulerGuard
        from kvguard.config import GuardConfig

        _hook_allocation()
        publish_arguments()
        self._world = world
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(tp_size=1),
            req_to_token_pool=world.rows,
            token_to_kv_pool_allocator=world.allocator,
            tree_cache=world.tree,
        )
        layout = PoolLayout(world.pages + 1, PAGE, world.table.shape[0], "cpu")
        self.guard = SchedulerGuard(scheduler, layout, GuardConfig(level=self.level, on_violation="observe", seed=1))
        for owner in (world.allocator, world.tree):
            setattr(owner, ATTACHED, self.guard)

    def before(self, batch: Any, forward: Any) -> None:
        """The check, and its words as the scheduler gets them with the tokens."""
        from kvguard.adapters.sglang.books import EVENT_KINDS
        from kvguard.adapters.sglang.reports import FLAG_KINDS
        from kvguard.kernels.verify_pages import layout
        from kvguard.write_verdicts import KINDS

        self.guard.begin(batch)
        self.guard.check(forward)
        pending = self.guard.end()
        if pending is None or not self.guard.armed:
            raise RuntimeError("kvguard did not check this forward")
        words = pending.words.host
        self.guard._in_flight -= 1
        writes = words[pending.rows : pending.words.verdicts]
        for req, record, written in zip(batch.reqs, words, writes, strict=False):
            flags = int(record[0])
            if flags < 0:
                raise RuntimeError(f"row of {req.rid} was not checked")
            if flags:
                kinds = [kind.value for flag, kind in FLAG_KINDS if flags & flag]
                kinds += ["digest"] if flags & layout.FLAG_DIGEST else []
                kinds += [kind.value for flag, kind in KINDS if int(written[0]) & flag]
                self.hits.append(Hit(self._world.step, "before", " ".join(kinds), str(req.rid)))
        for event in words[pending.words.verdicts :]:
            if event[0]:
                kind = EVENT_KINDS[int(event[0])].value
                self.hits.append(Hit(self._world.step, "event", kind, f"page {int(event[1])}"))

    def after(self, batch: Any, forward: Any) -> None:
        """Nothing: kvguard has looked."""
