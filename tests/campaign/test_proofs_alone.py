"""Each proof alone, and neither: what the campaign's `proofs` column rests on."""

from __future__ import annotations

import itertools

import pytest

from kvguard.fault_injection.faults.pages import PAGE_FAULTS
from kvguard.fault_injection.plan import UNSUPPORTED, Cell, TrialPlan
from kvguard.fault_injection.results import DETECTED, MISSED, TrialResult
from kvguard.fault_injection.trial import run_trial

STORAGE = (("fp32", "fp32", 16), ("fp8_e4m3", "int4", 16), ("bf16", "bf16", 64), ("fp8_e5m2", "fp32", 1))


def trial(fault: str, kv_dtype: str, weights: str, page_size: int, proofs: str, *, seed: int = 3) -> TrialResult:
    cell = Cell(engine="embedded", fault=fault, kv_dtype=kv_dtype, weights=weights, page_size=page_size)
    plan = TrialPlan(index=0, cell=cell, traffic_seed=seed, fault_seed=seed)
    return run_trial(plan, model="recall", backend="torch", proofs=proofs)


@pytest.mark.parametrize("fault,storage", list(itertools.product(PAGE_FAULTS, STORAGE)))
def test_the_tag_proof_alone_finds_every_fault(fault: str, storage: tuple[str, str, int]) -> None:
    """With the control plane off, each fault reaches the device and aborts exactly the affected requests."""
    result = trial(fault, *storage, proofs="tag")
    assert result.outcome == DETECTED, result
    assert result.detected_by == ("tag",)
    assert result.affected and set(result.aborted) == set(result.affected)
    assert result.detection_steps == 0
    assert (result.tokens_after_fault, result.bystanders_changed, result.false_positives) == (0, (), ())


@pytest.mark.parametrize("fault,storage", list(itertools.product(PAGE_FAULTS, STORAGE)))
def test_the_control_plane_alone_finds_every_fault_that_passes_it(fault: str, storage: tuple[str, str, int]) -> None:
    """With the tag proof off, operations are refused and nobody is aborted; row faults pass no allocator call."""
    result = trial(fault, *storage, proofs="control_plane")
    if (fault, "control_plane") in UNSUPPORTED:
        assert result.outcome == MISSED and result.detected_by == ()
        return
    assert result.outcome == DETECTED, result
    assert result.detected_by == ("control_plane",)
    assert result.aborted == () and result.affected == ()
    assert (result.tokens_after_fault, result.bystanders_changed) == (0, ())


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_with_both_proofs_off_nothing_is_found(fault: str) -> None:
    """A guard without proofs detects nothing: detections come from the proofs, not from the harness."""
    result = trial(fault, "fp32", "fp32", 16, proofs="none")
    assert result.outcome == MISSED, result
    assert result.detected_by == () and result.aborted == ()


def test_some_faults_change_output_without_the_guard() -> None:
    """The faults are real: with the guard off most of them change what somebody gets."""
    results = [trial(fault, "fp32", "fp32", 16, proofs="all", seed=seed) for fault in PAGE_FAULTS for seed in (3, 4)]
    assert sum(result.potent for result in results) >= 0.6 * len(results)
