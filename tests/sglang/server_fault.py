"""An SGLang plugin of the tests: a null entry in one request's row inside the scheduler process, on a client's order.

The order is a file, named by KVGUARD_TEST_ORDER: JSON with `request`, the victim's request id, and `tokens`, how much
KV the victim must have before. The file is removed when the fault is in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ORDER_VARIABLE = "KVGUARD_TEST_ORDER"
ENTRY_POINTS = "[sglang.srt.plugins]\nkvguard_test_fault = tests.sglang.server_fault:register\n"
NAME = "kvguard_test_fault"
SCHEDULER = "sglang.srt.managers.scheduler"


def install(folder: Path) -> None:
    """Make the folder one that SGLang finds this plugin in, once it stands on the path."""
    metadata = folder / f"{NAME}-0.0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvguard-test-fault\nVersion: 0.0.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """Called by SGLang in every process; without an order file's name, or without a scheduler, it does nothing."""
    if not os.environ.get(ORDER_VARIABLE) or SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.Scheduler.run_batch", obey, HookType.BEFORE)


def obey(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Before the forward of a batch in which the victim is: the middle of its row names the null page."""
    order = Path(os.environ[ORDER_VARIABLE])
    if not order.exists():
        return
    given = json.loads(order.read_text())
    victim = next((req for req in batch.reqs if req.rid == given["request"]), None)
    if victim is None or victim.kv.kv_allocated_len < given["tokens"]:
        return
    scheduler.req_to_token_pool.req_to_token[victim.kv.req_pool_idx, victim.kv.kv_allocated_len // 2] = 0
    order.unlink()
