"""vLLM's entry point (`vllm.general_plugins`): decides whether to guard, and attaches when vLLM builds its parts.

Without any kvguard configuration, or at level `off`, it returns at once: nothing is imported, nothing is patched. vLLM
calls it in the front end, the engine core and every worker, sometimes twice.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from kvguard.adapters.activation import asked_for

SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
CORE_MODULE = "vllm.v1.engine.core"
RUNNER_V1_MODULE = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2_MODULE = "vllm.v1.worker.gpu.model_runner"
ATTACHED = "_kvguard_attached"


def register() -> None:
    """Guard every scheduler and model runner that this process builds from now on."""
    if not asked_for():
        return
    from kvguard.adapters.vllm import frontend
    from kvguard.config import GuardConfig

    config = GuardConfig.load()
    if config.is_off:
        return
    frontend.attach(when_imported)
    when_imported(SCHEDULER_MODULE, lambda module: _patch_init(module.Scheduler, _attach_scheduler))
    if config.level == "keys":
        when_imported(CORE_MODULE, lambda module: _patch_init(module.EngineCore, _attach_core))
    when_imported(RUNNER_V1_MODULE, lambda module: _patch_init(module.GPUModelRunner, _attach_runner_v1))
    when_imported(RUNNER_V2_MODULE, lambda module: _patch_init(module.GPUModelRunner, _attach_runner_v2))


def _patch_init(owner: Any, attach: Callable[[Any], None]) -> None:
    """Call `attach(object)` once each object of the class is built."""
    original = owner.__init__
    if getattr(original, ATTACHED, False):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        attach(self)

    guarded.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(guarded, ATTACHED, True)
    owner.__init__ = guarded


def _attach_scheduler(scheduler: Any) -> None:
    from kvguard.adapters.vllm.layout import Unsupported, describe_scheduler, limits_of, vllm_version
    from kvguard.adapters.vllm.scheduler_side import SchedulerSide
    from kvguard.config import GuardConfig
    from kvguard.telemetry import emit

    if getattr(scheduler, ATTACHED, None) is not None:
        return
    config = GuardConfig.load()
    try:
        scheduler._kvguard_attached = SchedulerSide(scheduler, describe_scheduler(scheduler), config)
        limits = limits_of(getattr(scheduler, "vllm_config", None), config.level)
        emit("vllm_attached", severity="warning" if limits else "info", version=vllm_version(), not_covered=limits)
    except Unsupported as error:
        emit("not_attached", severity="critical", reason=str(error), on_guard_error=config.on_guard_error)
        if config.on_guard_error == "abort":
            raise


def _attach_core(core: Any) -> None:
    # Built after its scheduler; its subclasses call this constructor too.
    side = getattr(core.scheduler, ATTACHED, None)
    if side is not None and not hasattr(core, ATTACHED):
        side.watch_weights(core)
        setattr(core, ATTACHED, True)


def _attach_runner_v1(runner: Any) -> None:
    from kvguard.adapters.vllm.worker_side import WorkerSideV1

    _attach_worker(runner, WorkerSideV1)


def _attach_runner_v2(runner: Any) -> None:
    from kvguard.adapters.vllm.worker_side import WorkerSideV2

    _attach_worker(runner, WorkerSideV2)


def _attach_worker(runner: Any, side: Callable[[Any], Any]) -> None:
    from kvguard.config import GuardConfig
    from kvguard.telemetry import emit

    if getattr(runner, ATTACHED, None) is not None:
        return
    try:
        runner._kvguard_attached = side(runner)
    except AttributeError as error:
        config = GuardConfig.load()
        emit("not_attached", severity="critical", reason=str(error), on_guard_error=config.on_guard_error)
        if config.on_guard_error == "abort":
            raise


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Run `action(module)` now if the module is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module the usual way, once, and runs an action after it was executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
