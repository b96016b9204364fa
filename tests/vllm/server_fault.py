"""A vLLM plugin of the tests: a fault in one request's KV inside the engine-core process, on a client's order.

The order is a file, named by KVGUARD_TEST_ORDER: JSON with `fault`, "row" (its table row names another request's
block) or "free" (its last full block is freed under it), `request`, a part of the victim's request id, and `tokens`,
how much KV the victim must have computed before. The file is removed when the fault is in. What `reset_prefix_cache`
found is written beside it, with the suffix `.reset`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kvguard.adapters.vllm.plugin import RUNNER_V1_MODULE, SCHEDULER_MODULE, when_imported

ORDER_VARIABLE = "KVGUARD_TEST_ORDER"
ENTRY_POINTS = "[vllm.general_plugins]\nkvguard_test_fault = tests.vllm.server_fault:register\n"


def install(folder: Path) -> None:
    """Make the folder one that vLLM finds this plugin in, once it stands on PYTHONPATH."""
    metadata = folder / "kvguard_test_fault-0.0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvguard-test-fault\nVersion: 0.0.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """Called by vLLM in every process, perhaps twice; without an order file's name it does nothing."""
    name = os.environ.get(ORDER_VARIABLE)
    if name:
        when_imported(RUNNER_V1_MODULE, lambda module: _obey(module, Path(name)))
        when_imported(SCHEDULER_MODULE, lambda module: _obey_early(module, Path(name)))
        when_imported(SCHEDULER_MODULE, lambda module: _report_resets(module, Path(name)))


def _given(order: Path, fault: str) -> dict[str, Any] | None:
    """The order, if there is one for this fault."""
    given = json.loads(order.read_text()) if order.exists() else {}
    return given if given.get("fault") == fault else None


def _obey_early(module: ModuleType, order: Path) -> None:
    """Before a step is scheduled."""
    original = module.Scheduler.schedule
    if getattr(original, "_obeys", False):
        return

    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if (given := _given(order, "free")) and _free_block(scheduler, given):
            order.unlink()
        return original(scheduler, *args, **kwargs)

    schedule._obeys = True  # type: ignore[attr-defined]
    module.Scheduler.schedule = schedule


def _free_block(scheduler: Any, order: Mapping[str, Any]) -> bool:
    """The victim's last full block goes to the free queue while the victim still uses it."""
    victim = next((request for request in scheduler.running if order["request"] in request.request_id), None)
    if victim is None or victim.num_computed_tokens < order["tokens"]:
        return False
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    block = manager.req_to_blocks[victim.request_id][victim.num_computed_tokens // manager.block_size - 1]
    pool = scheduler.kv_cache_manager.block_pool
    pool._maybe_evict_cached_block(block)
    block.ref_cnt = 1
    pool.free_blocks([block])
    return True


def _obey(module: ModuleType, order: Path) -> None:
    """Before the inputs of a step are prepared, so that the device gets the broken row."""
    original = module.GPUModelRunner._prepare_inputs
    if getattr(original, "_obeys", False):
        return

    def prepare(runner: Any, *args: Any, **kwargs: Any) -> Any:
        if (given := _given(order, "row")) and _break_row(runner, given):
            order.unlink()
        return original(runner, *args, **kwargs)

    prepare._obeys = True  # type: ignore[attr-defined]
    module.GPUModelRunner._prepare_inputs = prepare


def _break_row(runner: Any, order: Mapping[str, Any]) -> bool:
    """The victim's first block becomes another request's, or the null block where nobody has another one."""
    batch = runner.input_batch
    rows: dict[str, int] = batch.req_id_to_index
    victim = next((row for request, row in rows.items() if order["request"] in request), None)
    if victim is None or batch.num_computed_tokens_cpu[victim] < order["tokens"]:
        return False
    table = batch.block_table.block_tables[0].block_table.np
    # Requests with one prefix share their first block: that one would be no fault.
    other = next((row for row in rows.values() if table[row, 0] != table[victim, 0]), None)
    table[victim, 0] = 0 if other is None else table[other, 0]
    return True


def _report_resets(module: ModuleType, order: Path) -> None:
    """Write down how many pages were in quarantine when the prefix cache was reset."""
    original = module.Scheduler.reset_prefix_cache
    if getattr(original, "_reports", False):
        return

    def reset(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        side = getattr(scheduler, "_kvguard_attached", None)
        before = side.guard.health() if side is not None else None
        done = original(scheduler, *args, **kwargs)
        if side is not None and before is not None:
            found = {"before": before.quarantined_pages, "after": side.guard.health().quarantined_pages, "done": done}
            order.with_suffix(".reset").write_text(json.dumps(found | before.counters))
        return done

    reset._reports = True  # type: ignore[attr-defined]
    module.Scheduler.reset_prefix_cache = reset
