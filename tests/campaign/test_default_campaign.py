"""The default campaign: what `make campaign` runs, held to what the README claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.campaign.test_command import campaign

ZEROS = ("missed", "not_injected", "false_positives", "tokens_after_fault", "bystanders_changed")
COUNTS = (
    "trials",
    "detected",
    *ZEROS,
    "unsupported",
    "potent",
    "clean_runs",
    "detection_steps_max",
    "miss_rate_upper_95",
)


@pytest.mark.slow
def test_the_default_campaign_proves_everything(tmp_path: Path) -> None:
    """At the default seed every fault is found in time, nobody else is touched, and nothing healthy is flagged."""
    result = campaign("--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    data = json.loads(result.stdout)
    assert data["trials"] >= 200 and data["clean_runs"] >= 50
    assert {name: data[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert data["detected"] == data["trials"] and data["potent"] >= 0.6 * data["trials"]
    assert data["miss_rate_upper_95"] == pytest.approx(3 / data["trials"])
    assert all(count > 0 for count in data["clean_runs_contained"].values())
    for name in COUNTS:
        assert name in data
        assert all(name in cell for cell in data["cells"])
    for field in ("engine", "fault", "kv_dtype", "weights", "page_size", "level"):
        assert all(field in cell for cell in data["cells"])
    seen = {field: {cell[field] for cell in data["cells"]} for field in ("kv_dtype", "weights", "page_size", "fault")}
    assert seen["kv_dtype"] == {"fp32", "bf16", "fp8_e4m3", "fp8_e5m2"}
    assert seen["weights"] == {"fp32", "bf16", "int4"}
    assert seen["page_size"] == {1, 16, 64}
    assert len(seen["fault"]) == 7 + 7, "faults of pages, and of a hand-over"
    assert sum(cell["trials"] for cell in data["cells"]) == data["trials"]
    assert set(data["by_proofs"]) == {"all", "tag", "control_plane", "transfer"}
    phases = data["by_phases"]
    assert set(phases) == {"single", "pd_after", "pd_during"}
    assert phases["pd_after"]["trials"] >= 40 and phases["pd_during"]["trials"] >= 30
    assert all(counts["potent"] >= 0.6 * counts["trials"] for counts in phases.values())
    assert data["by_proofs"]["tag"]["aborted"] > 0 and data["by_proofs"]["control_plane"]["aborted"] == 0
