"""Where a step of vLLM writes: every step is checked, padding lanes too, and wrong slots end their writer alone.

Faults of the slot mapping are those of the campaign, one trial each, with all proofs and with this one alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvguard.adapters.vllm import layout
from kvguard.adapters.vllm.block_books import BlockBooks
from kvguard.adapters.vllm.plugin import register
from kvguard.adapters.vllm.ranks import RankVerdicts
from kvguard.adapters.vllm.verdicts import VerdictHandler
from kvguard.config import GuardConfig
from kvguard.fault_injection.plan import Cell, CleanPlan, TrialPlan
from kvguard.fault_injection.targets.vllm_engine import Answer, VllmEngine, VllmOptions
from kvguard.fault_injection.targets.vllm_writes import NOT_IN_VLLM, VLLM_WRITE_FAULTS
from kvguard.fault_injection.trial import run_clean, run_trial
from kvguard.guard import Guard
from kvguard.kernels.verify_slots.layout import FLAGS
from kvguard.messages import Verdicts
from kvguard.pools import PoolSpec
from kvguard.verifier import PendingVerdicts
from kvguard.violation import Kind, Proof
from tests.vllm.tiny import traffic, unguarded, write_checkpoint

STEP, VICTIM, BLOCK = 25, 2, 32
PADDING = {"padding-into-live-page", "skip-slot-wrapped"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(folder / name, architecture=name) for name in ("llama", "gemma3")}


@pytest.fixture
def start(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Start a guarded engine."""
    monkeypatch.setenv("KVGUARD_LEVEL", "tags")

    def start_engine(architecture: str, **options: Any) -> VllmEngine:
        register()
        return VllmEngine(VllmOptions(model=models[architecture], **options))

    return start_engine


def watch_writes(engine: VllmEngine) -> list[Any]:
    """What the device says of the writes of every step, as it is judged."""
    guard, seen = engine.guard_side.guard, []
    judge = guard.judge

    def watching(verdicts: Verdicts) -> Any:
        seen.append(verdicts.writes)
        return judge(verdicts)

    guard.judge = watching
    return seen


def mislead(engine: VllmEngine, group: int, slot_of: Callable[[int, Any], int]) -> list[str]:
    """In forward STEP, one token of a request goes elsewhere in one KV group: the slot of (its slot, slots)."""
    compute, count, misled = engine.runner.input_batch.block_table.compute_slot_mapping, 0, list[str]()

    def computing(requests: int, starts: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = compute(requests, starts, *args, **kwargs)
        count += 1
        if count == STEP:
            batch = engine.runner.input_batch
            slots = batch.block_table.block_tables[group].slot_mapping.gpu
            name = engine.scheduler.running[VICTIM].request_id
            index = int(starts[batch.req_id_to_index[name] + 1]) - 1
            slots[index] = slot_of(int(slots[index]), slots)
            misled.append(name)
        return result

    engine.runner.input_batch.block_table.compute_slot_mapping = computing
    return misled


def only_victim_ended(answers: list[Answer], golden: list[Answer]) -> bool:
    ended = [place for place, answer in enumerate(answers) if answer.finish_reason == "error"]
    others = [place for place in range(len(golden)) if place != VICTIM]
    kept = answers[VICTIM].token_ids
    return (
        ended == [VICTIM]
        and all(answers[place] == golden[place] for place in others)
        and kept == golden[VICTIM].token_ids[: len(kept)]
        and len(kept) < len(golden[VICTIM].token_ids)
    )


def test_groups_with_windows_and_without_are_both_checked(
    start: Callable[..., VllmEngine], models: dict[str, Path]
) -> None:
    """A hybrid model: its pools say which group has a window; each step of each group is checked, each fault found."""
    with unguarded():
        golden = VllmEngine(VllmOptions(model=models["gemma3"])).generate(*traffic(1))
    engine = start("gemma3")
    guard = engine.guard_side.guard
    specs = [group.kv_cache_spec for group in engine.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups]
    windowed = [pool.windowed for pool in guard.setup.pools]
    assert windowed == [type(spec).__name__ == "SlidingWindowSpec" for spec in specs]
    assert len(set(windowed)) == 2
    seen = watch_writes(engine)
    assert engine.generate(*traffic(1)) == golden
    assert len(seen) > 50
    assert all(writes is not None and (writes[:, :, FLAGS] == 0).all() for writes in seen)
    for number, group in enumerate((windowed.index(True), windowed.index(False))):
        assert engine.scheduler.reset_prefix_cache()
        misled = mislead(engine, group, lambda slot, slots: (slot + 5 * BLOCK) % (30 * BLOCK))
        assert only_victim_ended(engine.generate(*traffic(1)), golden)
        found = guard.violations[number]
        assert (found.pool, found.request) == (f"group{group}", misled[0]) and found.proof == "write_slot"
        assert len(guard.violations) == number + 1 and guard.health().ok


def test_padding_is_covered_to_the_last_lane_that_vllm_hands_over(start: Callable[..., VllmEngine]) -> None:
    """What lies behind a step's tokens is stale until vLLM fills it: healthy then, and never looked at before."""
    engine = start("llama")
    runner, get_slots = engine.runner, engine.runner._get_slot_mappings
    seen = watch_writes(engine)
    healthy = engine.generate(*traffic(2))
    slots = runner.input_batch.block_table.block_tables[0].slot_mapping.gpu
    assert (slots[:100] >= 0).any(), "a prompt has left its slots behind the tokens of the last step"
    padded = 0

    def padding(**kwargs: Any) -> Any:
        nonlocal padded
        padded += 1
        get_slots(**kwargs | {"num_tokens_padded": kwargs["num_tokens_unpadded"] + 7})
        return get_slots(**kwargs)

    # The guard's own function is called with padding lanes, then vLLM gets what it asked for.
    runner._get_slot_mappings = padding
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate(*traffic(2)) == healthy
    assert padded > 50 and engine.guard_side.guard.violations == ()
    assert all((writes[:, :, FLAGS] == 0).all() for writes in seen)


# -- the scheduler's half --------------------------------------------------------------------------------------------


def books(speculation: object) -> tuple[BlockBooks, Any, list[list[int] | None]]:
    """The books of a scheduler with one request; what its steps say of starts is noted."""
    guard: Any = Guard((PoolSpec(name="group0", num_pages=20, page_size=BLOCK),), GuardConfig.default(seed=1))
    starts: list[list[int] | None] = []
    step = guard.step

    def noted(*args: Any) -> Any:
        starts.append(args[3])
        return step(*args)

    guard.step = noted
    blocks = [SimpleNamespace(block_id=page, is_null=False, block_hash=None) for page in range(1, 4)]
    request = SimpleNamespace(request_id="r", num_computed_tokens=0, num_tokens=70, blocks=blocks)
    manager = SimpleNamespace(
        block_pool=SimpleNamespace(),
        coordinator=SimpleNamespace(
            single_type_managers=[SimpleNamespace(req_to_blocks={"r": blocks}, block_size=BLOCK)]
        ),
    )
    scheduler = SimpleNamespace(
        kv_cache_manager=manager,
        requests={"r": request},
        vllm_config=SimpleNamespace(speculative_config=speculation),
    )
    found = BlockBooks(guard, scheduler, guard.setup.pools)
    found._fresh.update(range(1, 20))
    return found, request, starts


def test_a_step_never_starts_later_than_the_device_may() -> None:
    """Drafts of a step in flight may be rejected: this one then starts right behind the last token that is known."""

    def step(computed: int, tokens: int, drafts: int = 0, *, another_block: bool = True) -> None:
        request.num_computed_tokens = computed
        if another_block:
            page = len(request.blocks) + 1
            request.blocks.append(SimpleNamespace(block_id=page, is_null=False, block_hash=None))
        drafted = {"r": [0] * drafts} if drafts else {}
        output = SimpleNamespace(
            num_scheduled_tokens={"r": tokens}, scheduled_spec_decode_tokens=drafted, total_num_scheduled_tokens=tokens
        )
        found._payload(output)

    for speculation, in_flight in ((None, 70), (object(), 69)):
        found, request, starts = books(speculation)
        step(48, 48)
        step(70, 22)
        # Its token is still in flight, and so are the drafts of the next step.
        step(74, 4, drafts=3)
        assert starts == [[0], [48], [in_flight]]
    # All three drafts are rejected while the next step has none: it starts before where that one would have.
    step(75, 1)
    request.num_tokens = 72
    step(73, 1)
    # Blocks come ahead for drafts: it is said in each step.
    step(74, 1, another_block=False)
    assert starts[3:] == [[69], [71], [71]]
    assert found.guard.health().counters["adapter_errors"] == 0 and found.guard.violations == ()


def test_where_a_step_starts_is_said_once_more_behind_a_prompt() -> None:
    """The last chunk came with its block, so that the next token takes none; what is before it is complete by then."""
    found, request, starts = books(None)
    for computed, tokens in ((48, 48), (70, 22), (71, 1), (72, 1), (73, 1)):
        request.num_computed_tokens = computed
        scheduled = {"r": tokens}
        found._payload(
            SimpleNamespace(
                num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens={}, total_num_scheduled_tokens=tokens
            )
        )
    assert starts == [[0], [48], [70], None, None]


@pytest.mark.parametrize("late_by", [33, 64])
def test_a_stale_length_does_not_write_into_what_others_read(late_by: int, start: Callable[..., VllmEngine]) -> None:
    """The worker falls behind by so many tokens in a decode step: slots and lengths agree, and are the request's own.

    What it would overwrite is a complete block, that others have taken as a prefix.
    """
    prompts = [[(7 * token) % 250 for token in range(70)] + [250 + place] for place in range(3)]
    with unguarded():
        golden = start("llama").generate(prompts, [30] * 3)
    engine = start("llama")
    runner, update, counts = engine.runner, engine.runner._update_states, [0]

    def falling_behind(output: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(output, *args, **kwargs)
        counts[0] += bool(output.num_scheduled_tokens)
        if counts[0] == 10:
            counts[0] += 1
            batch = runner.input_batch
            batch.num_computed_tokens_cpu[batch.req_id_to_index[engine.scheduler.running[0].request_id]] -= late_by
        return result

    runner._update_states = falling_behind
    answers = engine.generate(prompts, [30] * 3)
    assert counts[0] > 11 and [answer.finish_reason for answer in answers] == ["error", "length", "length"]
    assert answers[1:] == golden[1:] and answers[0].token_ids == golden[0].token_ids[: len(answers[0].token_ids)]
    (found,) = engine.guard_side.guard.violations
    assert (found.kind, found.proof) == (Kind.WRITE_COMPLETE, Proof.WRITE_SLOT)


# -- the verdicts' way -----------------------------------------------------------------------------------------------


def two_rows() -> Guard:
    guard = Guard((PoolSpec(num_pages=20, page_size=BLOCK),), GuardConfig.default(seed=1))
    for place, name in enumerate(("a", "b")):
        guard.start(name)
        guard.allocate(name, [place + 1])
    return guard


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_failed_takes_part_with_records_of_both_kinds(failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records have the shape of the others', or nobody would get an answer; they say "not checked" and win."""
    guard = two_rows()
    delta = guard.step(["a", "b"], [0, 1], [5, 5], [4, 4])
    sent: list[Any] = []

    def gather(gathered: Any, record: Any, group: Any) -> None:
        sent.append(record)
        gathered.copy_(torch.cat(sent[-2:] if len(sent) > 1 else [record, record]))

    monkeypatch.setattr(
        "vllm.distributed.get_tp_group", lambda: SimpleNamespace(world_size=2, device_group=None, rank_in_group=0)
    )
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    ranks = RankVerdicts("cpu", guard.setup)
    record = torch.zeros((1, 5, 4), dtype=torch.int64)
    record[0, 3, FLAGS] = 1
    checked = PendingVerdicts(step=1, record=record, reads=2)
    for rank in range(2):
        combined = ranks.combine(None if rank == failed else checked, delta)
    assert [tuple(each.shape) for each in sent] == [(1, 5, 4)] * 2
    assert combined is not None and combined.reads == 2
    assert (combined.record[0, :, FLAGS] == -1).all()
    # Without a failure the flag of a write comes through.
    sent.clear()
    for _ in range(2):
        combined = ranks.combine(checked, delta)
    assert combined is not None and combined.flagged_rows() == [1]


def test_a_wrong_write_that_was_found_while_the_guard_failed_ends_its_writer() -> None:
    """The verdicts of a step that nobody judges any more: a row that wrote elsewhere is ended, padding ends nobody."""
    guard = two_rows()
    delta = guard.step(["a", "b"], [0, 1], [5, 5], [4, 4])
    handler: Any = VerdictHandler.__new__(VerdictHandler)
    running = {name: SimpleNamespace(is_finished=lambda: False) for name in "ab"}
    handler._guard, handler._scheduler = guard, SimpleNamespace(requests=running)
    handler._end = sorted
    records, writes = torch.zeros((1, 2, 4), dtype=torch.int64).numpy(), torch.zeros((1, 3, 4), dtype=torch.int64)
    writes[0, 1:, FLAGS] = 1
    for given in (records, None):
        output = SimpleNamespace(_kvguard=Verdicts(step=1, records=given, writes=writes.numpy()))
        assert handler.flagged_without_books(delta, output) == ["b"]


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_plugin() -> Iterator[None]:
    """Engines of the harness start without the plug-in, whatever an earlier test registered."""
    environment = dict(os.environ)
    with unguarded():
        yield
    os.environ.clear()
    os.environ.update(environment)


def cell(fault: str, scheduling: str, proofs: str) -> Cell:
    setup = {"engine": "vllm", "kv_dtype": "fp32", "weights": "fp32", "page_size": BLOCK, "runner": "v1"}
    return Cell(fault=fault, scheduling=scheduling, proofs=proofs, **setup)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheduling,proofs", [("async", "write_slot"), ("sync", "all")])
@pytest.mark.parametrize("fault", VLLM_WRITE_FAULTS)
def test_a_wrong_slot_is_redirected_and_its_writer_ended(
    fault: str, scheduling: str, proofs: str, without_plugin: None
) -> None:
    """The writer is aborted in that very step, everybody else has golden tokens; padding lanes abort nobody."""
    plan = TrialPlan(index=0, cell=cell(fault, scheduling, proofs), traffic_seed=3, fault_seed=4)
    result = run_trial(plan, model="tiny", backend="torch")
    assert result.proven and result.detected_by == ("write_slot",) and result.detection_steps == 0, result
    assert set(result.aborted) == set(result.affected)
    assert bool(result.affected) == (fault not in PADDING)


@pytest.mark.parametrize("fault", ["slots-swapped", "padding-into-live-page"])
def test_with_this_proof_off_nothing_is_found(fault: str, without_plugin: None) -> None:
    """Detections come from the proof, not from the harness; what is overwritten changes somebody's answer."""
    plan = TrialPlan(index=0, cell=cell(fault, "sync", "tag"), traffic_seed=3, fault_seed=4)
    result = run_trial(plan, model="tiny", backend="torch")
    assert result.detected_by == () and not result.proven and result.potent, result


def test_healthy_padded_batches_are_clean(without_plugin: None) -> None:
    """In a tight pool with preemptions, evictions, hits and client aborts."""
    setup = {"kv_dtype": "fp32", "weights": "fp32", "page_size": BLOCK, "runner": "v1"}
    plan = CleanPlan(index=0, engine="vllm", scheduling="async", traffic_seed=5, **setup)  # type: ignore[arg-type]
    result = run_clean(plan, model="tiny", backend="torch")
    assert result.clean and result.preemptions and result.prefix_hits, result


def test_faults_that_a_campaign_does_not_have_are_listed_with_the_reason() -> None:
    """None of them is one that it has."""
    assert not NOT_IN_VLLM.keys() & VLLM_WRITE_FAULTS.keys() and all(NOT_IN_VLLM.values())
    assert len(VLLM_WRITE_FAULTS) >= 7
    assert layout.WINDOWED_SPECS == ("SlidingWindowSpec",)
