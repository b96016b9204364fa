"""What an aborted request gives back to vLLM: what was counted for it, and nothing that others hold."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvguard.adapters.vllm.plugin import register
from kvguard.adapters.vllm.verdicts import VerdictHandler
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from tests.vllm.test_contents import BLOCK, OTHER, PROMPT
from tests.vllm.tiny import unguarded, write_checkpoint

LONG = [(13 * token + 5) % 241 for token in range(2 * BLOCK)]


def alone(checkpoint: Path) -> Answer:
    """The long request in an unguarded engine, which is gone afterwards."""
    with unguarded():
        (answer,) = VllmEngine(VllmOptions(model=checkpoint)).generate([LONG], [60])
    return answer


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_page_that_several_took_from_a_stale_entry_is_free_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int, asynchronous: bool
) -> None:
    """vLLM has counted it for each of them, beside who holds it; that one goes on, and the reset afterwards succeeds.

    Without the control plane, which would have refused the hit: the device finds the page, and all of them end.
    """
    checkpoint = write_checkpoint(tmp_path)
    golden = alone(checkpoint)
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")
    monkeypatch.setenv("KVGUARD_CONTROL_PLANE", "false")
    register()
    engine = VllmEngine(VllmOptions(model=checkpoint, asynchronous=asynchronous))
    engine.generate([PROMPT, OTHER], [4, 4])
    pool, manager = engine.pool, engine.scheduler.kv_cache_manager
    look_up = manager.get_computed_blocks
    free_before = pool.get_num_free_blocks()

    def pointing(request: Any, *args: Any, **kwargs: Any) -> Any:
        """The entry of the prompt's first page names the first page of who is running."""
        if request.num_prompt_tokens == len(PROMPT):
            (holder,) = [running for running in engine.scheduler.running if running.num_prompt_tokens == len(LONG)]
            blocks = manager.coordinator.single_type_managers[0].req_to_blocks[holder.request_id]
            entries = pool.cached_block_hash_to_block._cache
            (key,) = [key for key in entries if key.startswith(bytes(request.block_hashes[0]))]
            entries[key] = blocks[0]
        return look_up(request, *args, **kwargs)

    manager.get_computed_blocks = pointing
    answers = engine.generate([LONG, *[PROMPT] * readers], [60, *[8] * readers])
    assert answers[0] == golden
    assert [answer.finish_reason for answer in answers[1:]] == ["error"] * readers
    assert len(engine.guard_side.guard.violations) == readers
    assert engine.scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == free_before
    assert [block.ref_cnt for block in pool.blocks if not block.is_null and block.ref_cnt] == []
    assert engine.guard_side.guard.health().ok


def test_of_several_lists_as_many_keep_a_page_as_vllm_has_counted() -> None:
    """It was freed under one reader, handed to another, and taken from the cache by a third: two are counted."""
    page, null = SimpleNamespace(block_id=7, ref_cnt=2), SimpleNamespace(block_id=0, ref_cnt=0)
    lists = {name: [page] for name in ("freed", "new owner", "reader")}
    single = SimpleNamespace(req_to_blocks=lists)
    manager = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[single]), block_pool=SimpleNamespace(null_block=null)
    )
    handler: Any = VerdictHandler(
        SimpleNamespace(), SimpleNamespace(kv_cache_manager=manager), (SimpleNamespace(name="group0"),)  # type: ignore[arg-type]
    )
    aborts = [SimpleNamespace(request=name, foreign_pages={"group0": (7,)}) for name in ("freed", "reader")]
    handler._leave_to_others(SimpleNamespace(aborts=aborts))
    assert [blocks[0] is page for blocks in lists.values()].count(True) == page.ref_cnt
    assert lists["new owner"] == [page]
