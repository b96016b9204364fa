"""What clients of a server send, through a real vLLM: tenants, talks, drafts, A-B-A; clean, and not a token changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvguard.fault_injection.served_traffic import TENANTS
from tests.vllm.served import serve_apart
from tests.vllm.test_setups import NGRAM
from tests.vllm.tiny import write_checkpoint

SEED = int(os.environ.get("KVGUARD_TEST_SEED", "11"))
SOAKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "drafts": ("llama", {"extra": {"speculative_config": NGRAM}}, 400),
    "async": ("llama", {"asynchronous": True}, 1500),
    "windows-and-drafts": ("gemma3", {"num_blocks": 36, "extra": {"speculative_config": NGRAM}}, 300),
}
"""Name -> architecture, options, steps; at level `keys`."""
HAPPENED = (
    "preemptions", "evictions", "client_aborts", "twins", "long", "short", "desk", "talk", "foreign",
    "hit desk", "hit talk", "cached tokens", "returned after eviction", *(f"hit of {tenant}" for tenant in TENANTS),
)  # fmt: skip
DRAFTS = ("drafts", "accepted drafts", "rejected drafts")


@pytest.mark.parametrize("name", SOAKS)
def test_served_traffic_is_clean_and_changes_no_token(name: str, tmp_path: Path) -> None:
    """Everything in HAPPENED did happen, nobody was served another tenant's pages, and nothing was flagged."""
    architecture, settings, steps = SOAKS[name]
    print(f"seed {SEED}, {steps} steps (KVGUARD_TEST_SEED)")
    order: dict[str, Any] = {
        "model": str(write_checkpoint(tmp_path / "model", architecture=architecture)),
        "options": {"num_blocks": 24, "max_num_batched_tokens": 128} | settings,
        "steps": steps,
        "seed": SEED,
    }
    plain, found = (serve_apart(tmp_path, guarded=guarded, **order) for guarded in (False, True))
    counts, guard = found["counts"], found["guard"]
    print(counts, f"{len(found['answers'])} requests compared")
    assert plain["guard"] is None and guard["violations"] == []
    assert (found["answers"], counts) == (plain["answers"], plain["counts"])
    wanted = HAPPENED + (DRAFTS if "extra" in settings else ())
    assert [what for what in wanted if not counts.get(what)] == [] and len(found["answers"]) > steps / 25
    assert "hit foreign" not in counts, "one tenant was given what another has cached"
    counters = guard["counters"]
    assert guard["ok"] and counters["guard_faults"] == counters["adapter_errors"] == 0
    assert counters["steps_verified"] + guard["in_flight"] == counters["steps_seen"] > steps * 0.9
