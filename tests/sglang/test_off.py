"""Off is off: without a level SGLang's functions are its own. A guard that cannot hook says so, or stops SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from tests.sglang.apart import Child
from tests.sglang.engine import ENVIRONMENT, Engine

ROOT = Path(__file__).resolve().parents[2]
OURS = "kvguard.adapters.sglang."


def run(function: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """function(kept, *args) in a process of its own, forked before any plug-in was loaded."""
    child = Child(environment)
    try:
        return child.call(function, *args)
    finally:
        child.stop()


def snapshot() -> dict[tuple[str, ...], Any]:
    """Everything that SGLang's modules and classes hold by name: the objects themselves, so that none is recycled."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith("sglang"):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found.update({(name, key, attribute): held for attribute, held in vars(value).items()})
    return found


def what_load_plugins_changes(kept: dict[str, Any]) -> dict[str, Any]:
    """Names that SGLang's own modules hold another object under afterwards, the log, and what was imported."""
    from sglang.srt import plugins

    assert not plugins._plugins_loaded
    before, imported = snapshot(), set(sys.modules)
    with structlog.testing.capture_logs() as logs:
        plugins.load_plugins()
    after = snapshot()
    changed = [key for key, held in before.items() if after.get(key) is not held and key[0] != "sglang.srt.plugins"]
    return {
        "changed": sorted(".".join(key) for key in changed),
        "logs": logs,
        "imported": sorted(name for name in set(sys.modules) - imported if name.startswith("kvguard")),
        "loaded": plugins._plugins_loaded,
    }


def targets(kept: dict[str, Any]) -> list[str]:
    from kvguard.adapters.sglang.plugin import hooks

    return sorted(target for target, _, _ in hooks())


@pytest.mark.parametrize("environment", [{}, {"KVGUARD_LEVEL": "off"}], ids=["unset", "off"])
def test_nothing_is_touched_without_a_level(environment: dict[str, str]) -> None:
    """Identity: every function and class attribute of SGLang is the object that it was."""
    found = run(what_load_plugins_changes, **environment)
    assert found["loaded"] and found["changed"] == [] and found["logs"] == []
    assert [name for name in found["imported"] if name.startswith((OURS, "kvguard.kernels", "kvguard.guard"))] == []


def test_with_a_level_all_hooks_are_in_place_and_nothing_else() -> None:
    """What changed is what is hooked, wherever SGLang has imported it to."""
    found = run(what_load_plugins_changes, KVGUARD_LEVEL="tags")
    wanted = run(targets)
    assert found["logs"] == []
    hooked = {tuple(target.split(".")[-2:]) for target in wanted}
    assert {tuple(name.split(".")[-2:]) for name in found["changed"]} >= hooked
    last_names = {target.rsplit(".", 1)[1] for target in wanted}
    assert {name.rsplit(".", 1)[1] for name in found["changed"]} <= last_names


def without_a_hook_point(kept: dict[str, Any]) -> dict[str, Any]:
    """One function that the guard hooks has another parameter, as in an SGLang that nobody has tried."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    def free_kv_row(self: Any, record: Any, ranges: Any) -> None:
        return original(self, record, ranges)  # type: ignore[no-any-return]

    original = BasePrefixCache.free_kv_row
    BasePrefixCache.free_kv_row = free_kv_row
    found = what_load_plugins_changes(kept)
    try:
        engine = Engine()
    except Exception as error:
        return found | {"refused": f"{type(error).__name__}: {error}"}
    assert engine.guard is None
    engine.add("r0", range(3, 60), 5)
    engine.run()
    return found | {"refused": "", "tokens": engine.tokens}


@pytest.mark.parametrize("on_guard_error", ["disarm", "abort"])
def test_a_missing_hook_point_leaves_sglang_alone_or_stops_it(on_guard_error: str) -> None:
    """A critical line that names the function and the version; then unguarded, or no scheduler at all."""
    found = run(without_a_hook_point, KVGUARD_LEVEL="tags", KVGUARD_ON_GUARD_ERROR=on_guard_error)
    (line,) = found["logs"]
    assert line["event"] == "not_attached" and line["log_level"] == "critical"
    assert "free_kv_row takes ['record', 'ranges']" in line["reason"] and "0.5.23" in line["reason"]
    if on_guard_error == "abort":
        assert found["changed"] == ["sglang.srt.managers.scheduler.Scheduler.__init__"]
        assert found["refused"].startswith("Unsupported: kvguard cannot guard this SGLang")
    else:
        assert found["changed"] == [] and found["refused"] == ""
        assert len(found["tokens"]["r0"]) == 5


def with_a_hook_that_cannot_be_put(kept: dict[str, Any]) -> dict[str, Any]:
    """SGLang's registry fails on one target, logs it, and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    put = HookRegistry._apply_target

    def failing(target: str, hooks: Any) -> None:
        if target.endswith(".free_kv_row"):
            raise TypeError("made to fail")
        put(target, hooks)

    HookRegistry._apply_target = failing
    with structlog.testing.capture_logs() as logs:
        try:
            engine = Engine()
        except Exception as error:
            return {"logs": logs, "refused": f"{type(error).__name__}: {error}"}
    assert engine.guard is None
    engine.add("r0", range(3, 60), 5)
    engine.run()
    return {"logs": logs, "refused": "", "tokens": engine.tokens}


@pytest.mark.parametrize("on_guard_error", ["disarm", "abort"])
def test_a_guard_is_not_attached_with_a_hook_missing(on_guard_error: str) -> None:
    """What it does not see it would take for a fault, or not see at all."""
    found = run(with_a_hook_that_cannot_be_put, KVGUARD_LEVEL="tags", KVGUARD_ON_GUARD_ERROR=on_guard_error)
    line = next(entry for entry in found["logs"] if entry["event"] == "not_attached")
    assert line["log_level"] == "critical" and "free_kv_row" in line["reason"]
    if on_guard_error == "abort":
        assert found["refused"].startswith("Unsupported")
    else:
        assert found["refused"] == "" and len(found["tokens"]["r0"]) == 5


def with_a_refused_argument(kept: dict[str, Any]) -> dict[str, Any]:
    """An SGLang whose functions are known, in a configuration that is not covered."""
    from kvguard.adapters.sglang import layout

    layout.COVERED_ALLOCATORS = ("TokenToKVPoolAllocator",)  # type: ignore[assignment]
    with structlog.testing.capture_logs() as logs:
        try:
            engine = Engine(page_size=16)
        except Exception as error:
            return {"logs": logs, "refused": f"{type(error).__name__}: {error}"}
    assert engine.guard is None
    engine.add("r0", range(3, 60), 5)
    engine.run()
    return {"logs": logs, "refused": "", "tokens": engine.tokens}


@pytest.mark.parametrize("on_guard_error", ["disarm", "abort"])
def test_a_configuration_that_is_not_covered_is_left_alone_or_not_started(on_guard_error: str) -> None:
    """The functions are hooked by then: the hooks find no guard, and do nothing."""
    found = run(with_a_refused_argument, KVGUARD_LEVEL="tags", KVGUARD_ON_GUARD_ERROR=on_guard_error)
    line = next(entry for entry in found["logs"] if entry["event"] == "not_attached")
    assert line["log_level"] == "critical" and "PagedTokenToKVPoolAllocator is not covered" in line["reason"]
    if on_guard_error == "abort":
        assert found["refused"].startswith("Unsupported")
    else:
        assert found["refused"] == "" and len(found["tokens"]["r0"]) == 5


def test_a_process_without_a_scheduler_imports_nothing() -> None:
    """Tokenizer and detokenizer processes load plug-ins as well."""
    code = (
        "import json, sys\n"
        "from sglang.srt.plugins import load_plugins\n"
        "before = set(sys.modules)\n"
        "load_plugins()\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGUARD_")}
    environment |= ENVIRONMENT | {"KVGUARD_LEVEL": "tags", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    imported = json.loads(done.stdout.splitlines()[-1])
    assert "kvguard.adapters.sglang.plugin" in imported
    heavy = [name for name in imported if name.startswith(("sglang.srt.managers", "torch", "kvguard.kernels"))]
    assert heavy == [] and f"{OURS}pages" not in imported and "kvguard.guard" not in imported
