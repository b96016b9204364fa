"""A prefill worker and a decode worker in two processes: the same tokens, healthy for long, and a death in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvguard.adapters.generic_transfer import TransferTarget
from kvguard.fault_injection.engine.decode import DecodeEngine
from kvguard.fault_injection.engine.engine import Engine
from kvguard.fault_injection.engine.kv_cache import KVDtype, KVScales, PagedKV
from kvguard.fault_injection.engine.kv_wire import PageBytes, WireFormat, pack, unpack
from kvguard.fault_injection.engine.prefill_process import PrefillProcess
from kvguard.fault_injection.engine.scheduler import Request
from kvguard.fault_injection.targets.embedded_runs import engine_config, load_model, make_guard
from kvguard.fault_injection.targets.pd_runs import PhasesSetup, run_phases, serve_run
from kvguard.fault_injection.traffic import endless_traffic, trial_traffic
from kvguard.transfer_manifest import TransferLink
from tests.soaking import assert_counted_nothing

SCALES = KVScales(keys=(0.05, 0.1), values=(0.02, 0.03))
KEY = bytes(32)
WHOSE = (("northwind", ""), ("lakeside", "red"), ("", ""), ("", "red"))
"""Tenant and adapter of a request."""


@pytest.fixture(scope="module")
def process() -> Iterator[PrefillProcess]:
    """One prefill worker for all tests here that do not kill theirs."""
    torch.set_num_threads(1)
    worker = PrefillProcess(serve_run)
    yield worker
    worker.close()


def pages(dtype: KVDtype, seed: int = 0, *, num_pages: int = 6, page_size: int = 4) -> PagedKV:
    """Two layers, every slot written with random numbers."""
    kv = PagedKV(layers=2, num_pages=num_pages, page_size=page_size, kv_heads=2, head_dim=8, dtype=dtype, scales=SCALES)
    torch.manual_seed(seed)
    for layer in range(2):
        slots = torch.arange(num_pages * page_size)
        kv.write(layer, torch.randn(len(slots), 2, 8), torch.randn(len(slots), 2, 8), slots)
    return kv


def payload(content: list[tuple[bytes, bytes]]) -> list[PageBytes]:
    return [PageBytes(column, keys, values, None) for column, (keys, values) in enumerate(content)]


@pytest.mark.parametrize("source", ["bf16", "fp32"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_what_is_unpacked_is_what_the_decode_worker_would_have_stored(source: KVDtype, wire: KVDtype) -> None:
    """Byte for byte, in the pages named and in no other; slots behind the last token are empty on the wire."""
    there, here, expected = pages(source), pages(wire, 1), pages(wire, 1)
    format_ = WireFormat.of(here, "m")
    read, written, tokens = [5, 2, 3], [1, 4, 2], 10
    for layer in range(2):
        content = payload(pack(there, layer, read, tokens, format_))
        unpack(here, layer, written, content)
        slots = there.slots(torch.tensor([read]), 3)[0, :tokens]
        key, value = there.gather(layer, slots)
        for stored in (expected.keys[layer], expected.values[layer]):
            stored.view(torch.uint8).view(6, -1)[written] = 0
        expected.write(layer, key, value, expected.slots(torch.tensor([written]), 3)[0, :tokens])
        for got, wanted in ((here.keys, expected.keys), (here.values, expected.values)):
            assert torch.equal(got[layer].view(torch.uint8), wanted[layer].view(torch.uint8))
    sizes = {len(page.keys) for page in content}
    assert sizes == {4 * 2 * 8 * here.keys[0].element_size()}


def test_a_page_of_another_size_is_refused() -> None:
    """Copying it would spill into the next page."""
    here = pages("fp8_e4m3")
    content = payload(pack(pages("bf16"), 0, [1], 4, WireFormat.of(pages("bf16"), "m")))
    with pytest.raises(ValueError, match="bytes came"):
        unpack(here, 0, [1], content)
    unpack(here, 0, [], [])


def test_layouts_tell_formats_apart() -> None:
    """Scales count where they are used: in FP8."""
    fp8, bf16 = WireFormat.of(pages("fp8_e4m3"), "m"), WireFormat.of(pages("bf16"), "m")
    assert fp8.layout().scales == (0.05, 0.1, 0.02, 0.03) and bf16.layout().scales == ()
    assert replace(fp8, order="HND").layout() != fp8.layout() != replace(fp8, dtype="fp8_e5m2").layout()


@pytest.mark.parametrize("page_size", [1, 16])
def test_two_processes_give_the_tokens_of_one_engine(process: PrefillProcess, page_size: int) -> None:
    """In float32 on both sides the arithmetic is the same, with the guards on and off."""
    arrivals = trial_traffic(7)
    setup = PhasesSetup(model="recall", weights="fp32", kv_dtype="fp32", page_size=page_size, tight=False)
    single = Engine(load_model("recall", "fp32"), setup.decode_config())
    for arrival in arrivals:
        single.submit(arrival.request)
    single.run()
    for proofs in (None, "all"):
        run = run_phases(setup, arrivals, proofs=proofs, process=process)
        assert run.hand_overs == len(arrivals) and not run.violations and not run.guard_trouble
        assert run.outputs == {name: (output.token_ids, None) for name, output in single.outputs.items()}


def test_phases_differ_in_precision_and_the_guards_change_nothing(process: PrefillProcess) -> None:
    """BF16 prefill, FP8 KV and INT4 weights in decode: half the bytes on the wire, the same tokens guarded or not."""
    setup = PhasesSetup(model="recall", weights="int4", kv_dtype="fp8_e4m3", page_size=16, tight=True)
    spec = setup.prefill_spec(proofs=None, seed=0, key=KEY)
    assert (spec.weights, spec.config.kv_dtype, spec.wire.dtype) == ("bf16", "bf16", "fp8_e4m3")
    arrivals = trial_traffic(8, client_aborts=True)
    off, on = (run_phases(setup, arrivals, proofs=proofs, process=process) for proofs in (None, "all"))
    assert on.outputs == off.outputs and on.counts == off.counts and on.hand_overs > 4
    assert not on.violations and not on.guard_trouble and on.counts.client_aborts > 0


def guarded(
    process: PrefillProcess, setup: PhasesSetup, seed: int, proofs: str | None = "all"
) -> tuple[DecodeEngine, Any]:
    """A guarded decode worker beside a fresh guarded prefill worker, and its guard; both bare if `proofs` is None."""
    process.begin(setup.prefill_spec(proofs=proofs, seed=seed, key=KEY))
    config = setup.decode_config()
    if proofs is None:
        return DecodeEngine(setup.decode_model(), config, process), None
    guard = make_guard(config, proofs=proofs, backend="torch", seed=seed)
    target = TransferTarget(guard, TransferLink(name="decode", key=KEY), layout=setup.wire().layout())
    return DecodeEngine(setup.decode_model(), config, process, guard, target), guard


def test_the_death_of_the_prefill_worker_costs_its_requests_and_nobody_else() -> None:
    """Killed in mid transfer: what it had not handed over ends with a clear error, the rest decodes to its end."""
    torch.set_num_threads(1)
    worker = PrefillProcess(serve_run)
    setup = PhasesSetup(model="recall", weights="fp32", kv_dtype="fp32", page_size=16, tight=False)
    engine, guard = guarded(worker, setup, seed=4)
    first, second, third = (arrival.request for arrival in trial_traffic(9)[2:5])
    engine.submit(first)
    while not engine.hand_overs:
        engine.step()
    engine.submit(second)
    while not engine.incoming[second.id].arrived:
        engine.step()
    assert engine.incoming[second.id].pages, "the transfer is under way"
    os.kill(worker.pid, signal.SIGKILL)
    engine.submit(third)
    engine.run()
    for name in (second.id, third.id):
        error = engine.outputs[name].error
        assert error is not None and "prefill worker died" in error and engine.outputs[name].tokens == []
    single = Engine(load_model("recall", "fp32"), setup.decode_config())
    single.submit(first)
    single.run()
    assert engine.outputs[first.id].token_ids == single.outputs[first.id].token_ids
    engine.submit(replace(third, id="late"))
    assert "no prefill worker" in str(engine.outputs["late"].error)
    assert not guard.violations and guard.health().ok and not guard.health().counters["adapter_errors"]
    assert engine.pool.available == setup.decode_config().num_pages - 1, "no page is lost"
    worker.close()
    assert not worker.alive


def test_a_worker_that_falls_over_says_why(process: PrefillProcess) -> None:
    """An error in the other process is raised here, with its text, and the next run is served all the same."""
    setup = PhasesSetup(model="recall", weights="fp32", kv_dtype="fp32", page_size=16, tight=False)
    spec = setup.prefill_spec(proofs=None, seed=0, key=KEY)
    process.begin(spec)
    with pytest.raises(RuntimeError, match="the engine has room for"):
        process.tick([(Request(id="x", prompt=(1,) * 4000, max_new_tokens=1), "t")], [])
    with pytest.raises(RuntimeError, match="No such file|does not exist"):
        process.begin(replace(spec, model="/no/such/checkpoint"))
    process.begin(spec)
    assert process.tick([], []) == ([], [])


def soak(process: PrefillProcess, setup: PhasesSetup, seed: int, proofs: str | None) -> tuple[DecodeEngine, Any]:
    """500 steps of arrivals and what is left then, through both workers; the decode worker, and the other's report."""
    engine, guard = guarded(process, setup, seed, proofs)
    traffic = endless_traffic(seed)
    for _ in range(500):
        for name, request in next(traffic) if len(engine.incoming) < 8 else []:
            if request is None:
                engine.abort(name)
            else:
                tenant, lora = WHOSE[len(request.prompt) % len(WHOSE)]
                engine.submit(replace(request, tenant=tenant, lora=lora))
        engine.step()
        assert guard is None or not guard.violations, guard.violations[0].message
    while engine.busy:
        engine.step()
    return engine, process.end()


def test_healthy_traffic_over_two_phases_is_clean(process: PrefillProcess) -> None:
    """A small soak in tight pools: preemptions, evictions, hits and client aborts; nothing is flagged or changed."""
    torch.set_num_threads(1)
    seed = int(os.environ.get("KVGUARD_TEST_SEED", "12"))
    print(f"soak seed {seed} (KVGUARD_TEST_SEED)")
    setup = PhasesSetup(model="recall", weights="fp32", kv_dtype="fp32", page_size=8, tight=True)
    (plain, plain_report), (engine, report) = (soak(process, setup, seed, proofs) for proofs in (None, "keys"))
    counts, there = engine.scheduler.counts, report.counts
    print(counts, there, f"{engine.hand_overs} hand-overs")
    assert engine.guard is not None and engine.guard.wants_contents
    assert not report.violations and not report.guard_trouble and engine.guard.health().ok
    assert_counted_nothing(engine.guard.health().counters)
    assert engine.hand_overs > 40
    assert min(counts.preemptions, counts.evictions, counts.prefix_hits, counts.client_aborts) > 0
    assert min(there.evictions, there.prefix_hits, there.tenant_hits, there.cached_tokens, counts.cached_tokens) > 0
    assert (counts, there) == (plain.scheduler.counts, plain_report.counts)
    assert answers(engine) == answers(plain)
    single = Engine(load_model("recall", "fp32"), engine_config(kv_dtype="fp32", page_size=8, tight=False))
    for request in [output.request for output in engine.outputs.values() if output.error is None][:25]:
        single.submit(request)
        single.run()
        assert single.outputs[request.id].token_ids == engine.outputs[request.id].token_ids


def answers(engine: Engine) -> dict[str, tuple[tuple[int, ...], str | None]]:
    """What clients saw."""
    return {name: (output.token_ids, output.error) for name, output in engine.outputs.items()}
