"""The Python of docs/integration.md runs as it stands, healthy and broken."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvguard.adapters.generic import PagedGuard
from kvguard.pools import PoolSpec
from kvguard.verifier import PoolInputs
from kvguard.violation import Kind

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "toy_engine")]


def block(number: int) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "integration.md").read_text(), re.DOTALL)
    assert len(blocks) == 4, "a new example needs a test here"
    text: str = blocks[number]
    return text


def lines_of_use(text: str) -> int:
    return len([line for line in text.splitlines() if line.strip() and not line.startswith(("from ", "import "))])


def run(text: str, **names: Any) -> dict[str, Any]:
    exec(text, names)  # noqa: S102
    return names


def test_the_block_manager_of_the_example_is_guarded_in_under_ten_lines() -> None:
    """Pages handed out twice are refused, frees of shared pages too, the cache asks before it shares."""
    assert lines_of_use(block(0)) < 10
    names = run(block(0))
    manager, guard = names["manager"], names["guard"]
    from toy_engine.block_manager import Seq

    first, second = Seq("a", list(range(40)), 40, 1), Seq("b", list(range(33)), 33, 1)
    guard.start("a")
    assert manager.allocate(first) and guard.pages("a") == first.block_table
    inputs = PoolInputs(table=np.array([first.block_table], np.int32))
    manager.publish_full(first)
    assert guard.after_forward(guard.before_forward(["a"], [0], [40], inputs)).clean
    guard.start("b")
    assert manager.allocate(second) and second.cached_tokens == 32 and guard.pages("b") == second.block_table
    manager.free_blocks.appendleft(first.block_table[0])
    taken = manager.take("b")
    assert taken not in first.block_table
    manager.give_back(first.block_table[0])
    assert first.block_table[0] not in manager.free_blocks
    assert [violation.kind for violation in guard.violations] == [Kind.DOUBLE_ALLOCATION, Kind.FREE_WHILE_HELD]
    guard.finish("a")
    manager.deallocate(first)
    assert guard.health().ok and guard.health().counters["adapter_errors"] == 0


def test_a_manager_by_sequence_is_guarded_in_under_ten_lines() -> None:
    """The second example, on a manager that fills `seq.block_table` and has a cache inside."""
    from tests.core.test_guard_allocator import Caching, Seq

    class Sequences(Caching):
        def allocate(self, seq: Any) -> None:
            super().allocate(seq)
            seq.num_cached_blocks = self.hits

    assert lines_of_use(block(1)) < 10
    sequences, sequence = Sequences(), Seq(7, tokens=9)
    names = run(block(0) + block(1), sequences=sequences, sequence=sequence)
    assert "allocate" not in vars(sequences), "detached"
    assert names["guard"].violations == () and names["guard"].health().counters["adapter_errors"] == 0


@pytest.mark.parametrize("broken", [False, True])
def test_the_example_with_page_numbers_on_the_device_runs(broken: bool) -> None:
    """Clean on a sound table; a row that is not its own ends that request alone."""
    torch = pytest.importorskip("torch")
    ended: list[tuple[str, str]] = []
    table = torch.zeros((4, 8), dtype=torch.int32)
    text = block(2)
    if broken:
        text = text.replace("pending = ", "block_table[1, 0] = block_table[0, 0]\npending = ")
    names = run(
        text, device="cpu", block_table=table, forward=lambda table: [7, 7],
        end_with_error=lambda request, message: ended.append((request, message)),
    )  # fmt: skip
    assert [request for request, _ in ended] == (["req-2"] if broken else [])
    assert len(names["allocator"].free_pages) == 4095 - 2
    health = names["guard"].health()
    assert health.ok and health.counters["adapter_errors"] == 0 and health.counters["steps_verified"] == 1
    assert names["judgement"].clean is not broken


def test_the_transfer_of_the_example_runs() -> None:
    """Each worker's part with its own guard; the receiver may decode, and nothing was refused on the way."""
    pages, my_pages = [1, 2, 3], [11, 12, 13]
    pool = PoolSpec(num_pages=64, page_size=16)
    guards = {side: PagedGuard([pool], backend="numpy") for side in ("decode", "prefill")}
    for side, held in (("prefill", pages), ("decode", my_pages)):
        guards[side].start("req-1")
        guards[side].allocate("req-1", held)
    table = np.array([pages], np.int32)
    pending = guards["prefill"].before_forward(["req-1"], [0], [40], {"main": PoolInputs(table=table)})
    assert guards["prefill"].after_forward(pending).clean
    names: dict[str, Any] = {"key": bytes(32), "scales": (1.0,), "prompt": range(40), "first": 7}
    names |= {"pages": pages, "my_pages": my_pages}
    parts = re.split(r"^# (decode|prefill) worker.*\n", block(3), flags=re.MULTILINE)
    exec(parts[0], names)  # noqa: S102
    refusals = []
    for side, text in zip(parts[1::2], parts[2::2], strict=True):
        exec(text, names | {"guard": guards[side]}, names)  # noqa: S102
        refusals.append(names.get("refusal"))
    assert len(refusals) == 3 and refusals == [None] * 3
    assert names["labels"] and names["manifest"].tokens == 40
    table = np.array([my_pages], np.int32)
    pending = guards["decode"].before_forward(["req-1"], [0], [41], {"main": PoolInputs(table=table)})
    assert guards["decode"].after_forward(pending).clean
    assert not guards["prefill"].violations and not guards["decode"].violations


def test_the_ci_page_names_every_property_and_member() -> None:
    """docs/ci.md lists the totals of the JUnit file, the members of the protocol, and the sample's own test."""
    from kvguard.fault_injection.pytest_report import CampaignReport
    from kvguard.fault_injection.targets.own import _NEEDS, CampaignEngine

    text = (ROOT / "docs" / "ci.md").read_text()
    report = CampaignReport(SimpleNamespace(getoption=lambda name: 1, stash={}))  # type: ignore[arg-type]
    for name in report.totals():
        assert f"`kvguard_{name}`" in text, name
    members = {*CampaignEngine.__annotations__, *(name for name in vars(CampaignEngine) if not name.startswith("_"))}
    for name in {*members, *(need for needs in _NEEDS.values() for need in needs)}:
        assert re.search(rf"`{name}\b", text), name
    (shown,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert shown in (EXAMPLES / "toy_engine" / "tests" / "test_campaign.py").read_text()
