"""What `kvguard doctor` says of the vLLM that is installed here; no engine is started."""

from __future__ import annotations

import importlib
import os
from typing import Any

from kvguard.adapters.findings import Finding, Verdict, plugin_finding, version_finding
from kvguard.adapters.vllm import layout, plugin

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_TARGET = "kvguard.adapters.vllm.plugin:register"


def examine() -> list[Finding]:
    """Version, plug-in, hook points, and what is not covered."""
    version = version_finding("vllm", layout.vllm_version(), layout.TESTED_RELEASES)
    return [version, _plugin(), *_hook_points(), *_limits()]


def _finding(topic: str, verdict: Verdict, text: str) -> Finding:
    return Finding(topic=f"vllm {topic}", verdict=verdict, text=text)


def _plugin() -> Finding:
    allowed = os.environ.get("VLLM_PLUGINS")

    def loads(plugin: str) -> bool:
        return allowed is None or plugin in allowed.split(",")

    return plugin_finding("vllm", "vLLM", PLUGIN_GROUP, PLUGIN_TARGET, "VLLM_PLUGINS", allowed, loads)


def _hook_points() -> list[Finding]:
    findings = []
    for what, check in (
        ("scheduler", _check_scheduler),
        ("runner v1", lambda: _check_runner(plugin.RUNNER_V1_MODULE, "_get_slot_mappings")),
        ("runner v2", lambda: _check_runner(plugin.RUNNER_V2_MODULE, "prepare_attn")),
    ):
        try:
            check()
        except layout.Unsupported as error:
            findings.append(_finding(what, Verdict.FAILED, str(error)))
        except ImportError as error:
            # Runner V2 needs Triton; where that is missing vLLM does not use it either.
            verdict = Verdict.LIMIT if what == "runner v2" else Verdict.FAILED
            findings.append(_finding(what, verdict, f"cannot be imported here: {error}"))
        else:
            findings.append(_finding(what, Verdict.OK, "its functions are what kvguard expects"))
    return findings


def _load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _check_scheduler() -> None:
    layout.check_scheduler_shape(
        _load(plugin.SCHEDULER_MODULE, "Scheduler"),
        _load("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
        _load("vllm.v1.core.block_pool", "BlockPool"),
        _load("vllm.v1.core.single_type_kv_cache_manager", "FullAttentionManager"),
    )


def _check_runner(module: str, hook: str) -> None:
    layout.require(_load(module, "GPUModelRunner"), "execute_model", "sample_tokens", hook)


def _limits() -> list[Finding]:
    backends = layout.COVERED_BACKENDS
    run = ", ".join(name for name, how in backends.items() if how == "run")
    read = ", ".join(name for name, how in backends.items() if how == "read")
    texts = [
        f"refused: {', '.join(kind.replace('_', ' ') for kind in layout.PARALLEL_KINDS)} parallel",
        f"refused: speculation with a drafter; covered: {', '.join(layout.COVERED_SPECULATION)}",
        f"refused: KV cache groups other than {', '.join(layout.COVERED_SPECS)} (recurrent state, cross attention)",
        f"attention backends run under test: {run}; known from their source only: {read}; others are refused",
        *layout.STANDING_LIMITS,
    ]
    return [_finding("limits", Verdict.LIMIT, text) for text in texts]
