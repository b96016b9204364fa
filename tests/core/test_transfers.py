"""KV transfers between two guards: each clause of the source's checks, broken once, and what policy makes of it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvguard.adapters.generic import PagedGuard
from kvguard.adapters.generic_transfer import TransferSource, TransferTarget
from kvguard.config import GuardConfig
from kvguard.guard import GuardHalt, UsageError
from kvguard.transfer_manifest import DISARMED, OBSERVED, TransferLink, TransferManifest
from kvguard.violation import Action, Kind, Proof
from tests.core.support import MAIN
from tests.core.transfer_rig import KEY, LAYOUT, TransferRig, refused


def test_a_sound_transfer_is_adopted_and_its_tokens_count_as_verified() -> None:
    """Nothing is flagged on either side, and the receiver may decode, publish and finish as ever."""
    rig = TransferRig()
    labels, manifest = rig.export()
    assert [(label.column, label.page) for label in labels[0]] == [(0, 1), (1, 2), (2, 3)]
    manifest = pickle.loads(pickle.dumps(manifest))
    assert rig.adopt(labels, manifest) is None
    assert rig.verified() == 10
    assert rig.receiver.guard.publish("a", 1, "k")
    assert rig.receiver.guard.page_state(12) == "complete"
    assert rig.receiver.run("a", ends={"a": 11}).clean
    rig.source.guard.finish("a")
    assert rig.source.guard.retire(rig.read).reusable == rig.read
    assert not rig.source.guard.violations and not rig.receiver.guard.violations


# -- the source ---------------------------------------------------------------------------------------------------


def test_pages_that_no_verified_step_has_written_do_not_leave() -> None:
    """One token more than the verdicts vouch for is one too many."""
    rig = TransferRig()
    found = refused(rig.begin(tokens=11), Kind.TRANSFER_UNVERIFIED)
    assert "11 tokens" in found.violation.detail and "written 10" in found.violation.detail
    with pytest.raises(UsageError, match="has begun"):
        rig.exporter.finish("a")


def test_a_step_in_flight_does_not_vouch_for_what_it_writes() -> None:
    """The verdict must be in before the copy begins."""
    rig = TransferRig()
    rig.source.allocate("a", 4)
    pending = rig.source.launch("a", ends={"a": 14})
    refused(rig.begin(tokens=14, pages=[1, 2, 3, 4]), Kind.TRANSFER_UNVERIFIED)
    assert rig.source.judge(pending).withheld == {"a"}


def test_a_request_that_a_violation_ended_hands_nothing_over() -> None:
    """The violation was reported already, so that the transfer is refused and not a second abort."""
    rig = TransferRig()
    rig.source.write("a", 2, 31)
    assert rig.source.run("a", ends={"a": 10}).aborts
    refused(rig.begin(), Kind.TRANSFER_UNVERIFIED, ends=False)


def test_a_page_that_is_not_the_requests_is_not_copied() -> None:
    """The connector's list is compared with the ledger; the foreign page is named, and not quarantined."""
    rig = TransferRig()
    rig.source.start("b")
    rig.source.allocate("b", 7)
    found = refused(rig.begin(pages=[1, 7, 3]), Kind.TRANSFER_FOREIGN_PAGE)
    assert found.foreign_pages == (7,)
    assert (found.violation.column, found.violation.page, found.violation.owner) == (1, 7, "b")
    assert not found.violation.quarantined and "prefill to decode" in found.violation.detail


def test_a_list_of_the_wrong_length_is_refused() -> None:
    """A page too few would leave a hole, one too many would carry somebody's bytes along."""
    for pages in ([1, 2], [1, 2, 3, 4]):
        refused(TransferRig().begin(pages=pages), Kind.TRANSFER_INCOMPLETE)


def test_a_page_that_changed_hands_before_the_copy_is_noticed() -> None:
    """Freed and handed on, with a control plane that let it pass."""
    rig = TransferRig(proofs=frozenset({Proof.TRANSFER}))
    rig.source.guard.retire([2])
    rig.source.start("b")
    rig.source.allocate("b", 2)
    found = refused(rig.begin(), Kind.TRANSFER_STALE_PAGE)
    assert found.violation.owner == "b" and found.foreign_pages == (2,)
    assert found.violation.quarantined and rig.source.guard.quarantined(2)


@pytest.mark.parametrize("after_parts", [1, 2])
def test_a_page_that_changed_hands_during_the_copy_is_noticed(after_parts: int) -> None:
    """At the next part, or, after the last one, before the manifest goes out."""
    rig = TransferRig(proofs=frozenset({Proof.TRANSFER}))
    assert rig.begin() is None
    for _ in range(after_parts):
        rig.take()
    rig.source.guard.retire([3])
    answer = rig.exporter.take("a", rig.read) if after_parts == 1 else rig.exporter.finish("a")
    found = refused(answer, Kind.TRANSFER_STALE_PAGE)
    assert found.violation.page == 3 and found.violation.found_tag == 0


def test_the_control_plane_refuses_the_free_of_a_page_that_is_copied() -> None:
    """The request is live until its copy is taken, so that its pages are held."""
    rig = TransferRig()
    assert rig.begin() is None
    assert rig.source.guard.retire([2]).refused == [2]
    rig.take(layers=[0, 1])
    assert isinstance(rig.exporter.finish("a"), TransferManifest)


def test_a_part_that_reads_another_page_is_noticed() -> None:
    """The list was right when the transfer began."""
    rig = TransferRig()
    assert rig.begin() is None
    refused(rig.exporter.take("a", [1, 2, 9]), Kind.TRANSFER_FOREIGN_PAGE)


def test_a_request_that_gave_its_pages_up_is_not_vouched_for() -> None:
    """Preempted in mid copy: the pages may be anybody's."""
    rig = TransferRig(proofs=frozenset({Proof.TRANSFER}))
    assert rig.begin() is None
    rig.take()
    rig.source.guard.preempt("a")
    refused(rig.exporter.finish("a"), Kind.TRANSFER_STALE_PAGE)


def test_a_copy_that_left_a_column_out_gets_no_manifest() -> None:
    """Parts may hold some columns each; together they must hold all."""
    rig = TransferRig()
    assert rig.begin() is None
    rig.take(pages=[1], columns=[0], layers=[0, 1])
    rig.take(pages=[2], columns=[1], layers=[1, 0])
    refused(rig.exporter.finish("a"), Kind.TRANSFER_INCOMPLETE)


def test_a_second_transfer_of_a_request_is_refused_and_the_first_goes_on() -> None:
    """Nobody is aborted for a retry that came too early."""
    rig = TransferRig()
    assert rig.begin() is None
    refused(rig.begin(), Kind.TRANSFER_REPEATED, ends=False)
    rig.take(layers=[0, 1])
    assert isinstance(rig.exporter.finish("a"), TransferManifest)


def test_calls_that_make_no_sense_are_usage_errors() -> None:
    """They are bugs of the adapter, and record no violation."""
    rig = TransferRig()
    for call in (
        lambda: rig.exporter.take("a", [1]),
        lambda: rig.exporter.finish("a"),
        lambda: rig.exporter.begin("b", ticket="", receiver="", tokens=1, pages=[1], layout=LAYOUT),
        lambda: rig.importer.expect("b", tokens=1),
    ):
        with pytest.raises(UsageError):
            call()
    assert rig.begin() is None
    for pages, columns in (([1], [5]), ([1, 2], [0])):
        with pytest.raises(UsageError):
            rig.exporter.take("a", pages, columns)
    assert not rig.source.guard.violations
    with pytest.raises(ValueError, match="16 to 64"):
        TransferLink(name="x", key=b"short")


# -- policy -------------------------------------------------------------------------------------------------------


def test_while_violations_are_only_observed_the_transfer_goes_on_and_says_so() -> None:
    """The source lets it pass, unvouched for; the receiver decides by its own policy."""
    for receiver, expected in (({}, Kind.TRANSFER_UNVERIFIED), ({"on_violation": "observe"}, None)):
        rig = TransferRig(source={"on_violation": "observe"}, receiver=receiver)
        rig.source.start("b")
        rig.source.allocate("b", 7)
        rig.read[1] = 7
        assert rig.begin() is None
        labels = rig.take(layers=[0, 1])
        manifest = rig.exporter.finish("a")
        assert isinstance(manifest, TransferManifest) and manifest.unverified == OBSERVED
        assert rig.source.guard.violations[0].action is Action.OBSERVED
        assert rig.place(0, labels) is None
        answer = rig.finish(manifest)
        if expected is None:
            assert answer is None and rig.receiver.guard.violations[-1].action is Action.OBSERVED
        else:
            refused(answer, expected)


def test_halt_stops_the_engine() -> None:
    """As with every other violation."""
    rig = TransferRig(source={"on_violation": "halt"})
    with pytest.raises(GuardHalt, match="was about to be handed over"):
        rig.begin(tokens=11)


def test_without_the_proof_everything_passes_and_is_adopted() -> None:
    """What a campaign compares with: the checks are what finds the faults."""
    rig = TransferRig(proofs=frozenset({Proof.TAG}))
    assert rig.begin(tokens=11, pages=[9, 9, 9]) is None
    assert rig.place(0, [], ticket="no", pages=[1]) is None
    assert rig.finish(None) is None and rig.verified() == 10
    assert not rig.source.guard.violations and not rig.receiver.guard.violations


def paged(**settings: Any) -> PagedGuard:
    return PagedGuard([MAIN], config=GuardConfig.load(seed=3, **settings), backend="numpy")


@pytest.mark.parametrize("policy,accepted", [("disarm", True), ("abort", False)])
def test_a_source_whose_guard_failed_says_so_and_the_receiver_decides(policy: str, accepted: bool) -> None:
    """`on_guard_error` = `disarm` serves on, loudly; `abort` takes nothing that nobody vouches for."""
    guard = paged()
    source = TransferSource(guard, TransferLink(name="prefill", key=KEY))
    guard.kept(None, lambda inner: inner.fault(RuntimeError("broken on purpose")))
    rig = TransferRig(receiver={"on_guard_error": policy})
    assert source.begin("a", ticket=rig.ticket, receiver="decode", tokens=10, pages=[1, 2, 3], layout=LAYOUT) is None
    assert source.take("a", [1, 2, 3]) == []
    manifest = source.finish("a")
    assert isinstance(manifest, TransferManifest) and manifest.unverified == DISARMED
    assert rig.place(0, []) is None
    answer = rig.finish(manifest)
    if accepted:
        assert answer is None and rig.verified() == 10
    else:
        refused(answer, Kind.TRANSFER_UNVERIFIED)


def test_without_a_guard_transfers_pass_unchecked() -> None:
    """Level off: every call answers as if there were no guard."""
    guard = paged(level="off")
    source = TransferSource(guard, TransferLink(name="prefill", key=KEY))
    target = TransferTarget(guard, TransferLink(name="decode", key=KEY), layout=LAYOUT)
    assert target.expect("a", tokens=10) == ""
    assert source.begin("a", ticket="", receiver="decode", tokens=10, pages=[1], layout=LAYOUT) is None
    assert source.take("a", [1]) == []
    manifest = source.finish("a")
    assert isinstance(manifest, TransferManifest)
    assert target.place("a", ticket="", part=0, labels=[], pages=[1]) is None
    assert target.finish("a", ticket="", manifest=manifest, pages=[1]) is None
    source.cancel("a")
    target.cancel("a")


def test_the_condemned_request_emits_nothing_of_a_step_in_flight() -> None:
    """A step that was launched before its transfer was refused is withheld."""
    rig = TransferRig(proofs=frozenset({Proof.TAG, Proof.TRANSFER}))
    pending = rig.source.launch("a", ends={"a": 10})
    refused(rig.begin(tokens=11), Kind.TRANSFER_UNVERIFIED)
    judgement = rig.source.judge(pending)
    assert judgement.withheld == {"a"} and not judgement.violations
