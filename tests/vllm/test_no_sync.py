"""Nothing that the worker side does in a step waits for the device.

Three ways to look. On the `meta` device a tensor has no values, so that whoever asks for one gets an exception: the
whole path of a step is driven over it for both runners. In a real engine every torch call of the worker side is
recorded, with the short way for tensors in host memory closed. Where there is a GPU, torch's sync debug mode watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvguard.adapters.vllm import worker_side
from kvguard.adapters.vllm.block_books import StepPayload
from kvguard.adapters.vllm.plugin import register
from kvguard.adapters.vllm.ranks import RankVerdicts, worst_of
from kvguard.adapters.vllm.worker_side import WorkerSide, WorkerSideV1, WorkerSideV2
from kvguard.config import GuardConfig
from kvguard.fault_injection.targets.vllm_engine import VllmEngine, VllmOptions
from kvguard.guard import Guard
from kvguard.kernels.verify_pages import torch_op as pages_torch
from kvguard.kernels.verify_slots import torch_op as slots_torch
from kvguard.pools import PoolSpec
from kvguard.verifier import PendingVerdicts
from tests.vllm.tiny import traffic, write_checkpoint
from tests.waiting import Recorder

DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]
ROWS, COLUMNS, BLOCK, TOKENS = 4, 6, 16, 8


class TwoRanks:
    """In the place of RankVerdicts: two ranks with the same verdicts, no group."""

    answers = True
    here_already = False

    def __init__(self, device: Any, setup: Any) -> None:
        pass

    def combine(self, pending: Any, delta: Any) -> Any:
        return pending._replace(record=worst_of(torch.stack([pending.record, pending.record])))


def payloads(groups: int) -> Iterator[StepPayload]:
    """Three steps of four requests: a first one, one that crosses pages, one that changes nothing."""
    pools = [PoolSpec(name=f"group{index}", num_pages=200, page_size=BLOCK) for index in range(groups)]
    guard = Guard(pools, GuardConfig.default(seed=1))
    names, page = [f"r{row}" for row in range(ROWS)], 1
    for name in names:
        guard.start(name)
    for step, columns in enumerate((COLUMNS - 2, 1, 0)):
        for pool in pools:
            for name in names:
                guard.allocate(name, list(range(page, page + columns)), pool=pool.name)
                page += columns
        starts = [0 if step == 0 else BLOCK * 3 - 1] * ROWS
        delta = guard.step(names, [0] * ROWS, [BLOCK * 3] * ROWS, starts)
        yield StepPayload(setup=guard.setup if step == 0 else None, delta=delta)


def fake_runner(device: str, groups: int) -> Any:
    """What the worker sides look at of a runner, V1's and V2's, with every tensor on the device."""

    def table() -> torch.Tensor:
        return torch.zeros((ROWS + 2, COLUMNS), dtype=torch.int32, device=device)

    slots = torch.zeros((groups, 64), dtype=torch.int64, device=device)
    start = torch.zeros(ROWS + 3, dtype=torch.int32, device=device)
    lengths = torch.zeros(ROWS + 2, dtype=torch.int32, device=device)
    tables = [table() for _ in range(groups)]
    places = {f"r{row}": ROWS - 1 - row for row in range(ROWS)}
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    batch = SimpleNamespace(
        num_reqs=ROWS,
        req_ids=list(places),
        query_start_loc=start,
        seq_lens=lengths,
        req_id_to_index=places,
        block_table=SimpleNamespace(
            block_tables=[
                SimpleNamespace(
                    block_table=SimpleNamespace(gpu=one),
                    slot_mapping=SimpleNamespace(gpu=slots[group]),
                    block_size=BLOCK,
                )
                for group, one in enumerate(tables)
            ]
        ),
    )
    runner = SimpleNamespace(
        device=device,
        attn_groups=[[SimpleNamespace(backend=backend)]],
        input_batch=batch,
        query_start_loc=SimpleNamespace(gpu=start),
        seq_lens=lengths,
        input_buffers=SimpleNamespace(seq_lens=lengths),
        block_tables=SimpleNamespace(input_block_tables=tables, slot_mappings=slots, block_sizes=[BLOCK] * groups),
        _get_slot_mappings=lambda: ({group: slots[group, :TOKENS] for group in range(groups)}, {}),
        prepare_attn=lambda batch: (tuple(tables), slots[:, :TOKENS]),
        sample_tokens=lambda: None,
    )
    runner.execute_model = lambda output: (runner._get_slot_mappings(), runner.prepare_attn(batch))[1] and None
    return runner


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("side", [WorkerSideV1, WorkerSideV2])
def test_no_value_is_read_in_a_step(
    side: Callable[[Any], WorkerSide], groups: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a step over tensors without values, and under the sync debug mode of a GPU."""
    monkeypatch.setattr(worker_side, "RankVerdicts", TwoRanks)
    runner = fake_runner(device, groups)
    attached = side(runner)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for payload in payloads(groups):
            runner.execute_model(SimpleNamespace(_kvguard=payload))
            assert attached._trouble == ""
            pending = attached._pending
            assert pending is not None and pending.record.shape == (groups, 2 * ROWS + 1, 4)
            assert pending.reads == ROWS and attached._setup is not None and attached._setup.check_writes
            assert pending.record.device.type == device
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_a_reader_of_values_is_caught_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: one glance at the table, and the worker side is in trouble."""
    monkeypatch.setattr(worker_side, "RankVerdicts", TwoRanks)
    for glance in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero, bool, lambda t: t[t > 0]):
        runner = fake_runner("meta", 1)
        attached = WorkerSideV1(runner)
        check = attached._check

        def glancing(payload: Any, places: Any, batch: Any, glance: Any = glance, check: Any = check) -> Any:
            glance(batch.tables[0][0, 0:1])
            return check(payload, places, batch)

        monkeypatch.setattr(attached, "_check", glancing)
        runner.execute_model(SimpleNamespace(_kvguard=next(payloads(1))))
        assert attached._trouble != "", glance


def test_a_real_engine_is_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every torch call of the worker side, in every step of healthy and faulty traffic on the path for devices."""
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    for module in (pages_torch, slots_torch):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    register()
    recorder = Recorder()
    verify = WorkerSide._verify

    def recorded(self: WorkerSide, *args: Any) -> None:
        with recorder:
            verify(self, *args)

    monkeypatch.setattr(WorkerSide, "_verify", recorded)
    engine = VllmEngine(VllmOptions(model=write_checkpoint(tmp_path)))
    engine.generate(*traffic(1))
    with recorder:
        assert torch.ones(1).item() == 1
    assert recorder.waits == ["item"], "the recorder sees what it is there for"
    health = engine.guard_side.guard.health()
    assert health.ok and health.counters["steps_verified"] > 50
    assert recorder.calls > 50 * health.counters["steps_verified"]


def test_the_worst_rank_speaks_for_all() -> None:
    """A rank that did not check counts more than one that flagged, and that more than a clean one."""
    clean, flagged = torch.tensor([[[0, 7, -1, -1]]]), torch.tensor([[[2, 8, 1, 0]]])
    unchecked = torch.full((1, 1, 4), -1)
    for order in ([clean, flagged], [flagged, clean], [clean, clean, flagged]):
        assert torch.equal(worst_of(torch.stack(order)), flagged)
    for order in ([unchecked, flagged], [clean, unchecked], [flagged, unchecked, clean]):
        assert torch.equal(worst_of(torch.stack(order)), unchecked)
    # Row by row: each row's record comes from the rank that found most in it.
    first = torch.cat([clean, flagged], dim=1)
    second = torch.cat([flagged, clean], dim=1)
    assert torch.equal(worst_of(torch.stack([first, second])), torch.cat([flagged, flagged], dim=1))


def test_what_one_rank_found_clean_is_not_what_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own host said "clean": with another rank's flags the step is flagged, in every way that it is read."""
    delta = next(payloads(1)).delta
    own = torch.zeros((1, 2 * ROWS + 1, 4), dtype=torch.int64)
    theirs = own.clone()
    theirs[0, 1, 0] = 2

    def gather(gathered: torch.Tensor, record: torch.Tensor, group: Any) -> None:
        gathered.view(2, *record.shape)[:] = torch.stack([record, theirs])

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    ranks = object.__new__(RankVerdicts)
    vars(ranks).update(_device="cpu", _world=2, _group=None, _setup=SimpleNamespace(check=True, check_writes=True))
    pending = PendingVerdicts(delta.step, own, reads=ROWS, view=own.numpy(), clean=True)
    assert pending.resolve().clean and pending.flagged_rows() == []
    together = ranks.combine(pending, delta)
    assert together is not None and not together.resolve().clean and together.flagged_rows() == [1]
    assert together.view is None and not together.clean
