"""What `kvguard doctor` says of the SGLang that is installed here; no engine is started."""

from __future__ import annotations

import os

from kvguard.adapters.findings import Finding, Verdict, plugin_finding, version_finding
from kvguard.adapters.sglang import layout

PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_TARGET = "kvguard.adapters.sglang.plugin:register"


def examine() -> list[Finding]:
    """Version, plug-in, hook points, and what is not covered."""
    version = version_finding("sglang", layout.sglang_version(), layout.TESTED_RELEASES)
    return [version, _plugin(), *_hook_points(), *_limits()]


def _finding(topic: str, verdict: Verdict, text: str) -> Finding:
    return Finding(topic=f"sglang {topic}", verdict=verdict, text=text)


def _plugin() -> Finding:
    allowed = os.environ.get("SGLANG_PLUGINS")

    def loads(plugin: str) -> bool:
        return not allowed or plugin in [entry.strip() for entry in allowed.split(",")]

    return plugin_finding("sglang", "SGLang", PLUGIN_GROUP, PLUGIN_TARGET, "SGLANG_PLUGINS", allowed, loads)


def _hook_points() -> list[Finding]:
    try:
        layout.check_hook_points()
    except layout.Unsupported as error:
        return [_finding("hooks", Verdict.FAILED, str(error))]
    except ImportError as error:
        return [_finding("hooks", Verdict.FAILED, f"SGLang cannot be imported here: {error}")]
    return [_finding("hooks", Verdict.OK, "the functions that are hooked are what kvguard expects")]


def _limits() -> list[Finding]:
    texts = [f"refused: {what}" for _, _, what in layout.REFUSED]
    covered = ", ".join((*layout.COVERED_ALLOCATORS, layout.WINDOW_ALLOCATOR))
    texts.append(f"refused: KV allocators other than {covered}, and sliding windows in a ring per request")
    texts.append("refused: prefix caches other than UnifiedRadixCache, or with recurrent-state parts")
    texts.append("refused: encoder-decoder models; with tensor parallel, breaker_action = observe")
    return [_finding("limits", Verdict.LIMIT, text) for text in (*texts, *layout.STANDING_LIMITS)]
