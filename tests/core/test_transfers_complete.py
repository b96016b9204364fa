"""KV transfers that were adopted although something was missing, or was somebody else's: found by attack, once each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvguard.transfer_export import KVExporter
from kvguard.transfer_import import KVImporter
from kvguard.transfer_manifest import (
    UNCHECKED,
    UNEXAMINED,
    KVLayout,
    Refusal,
    TransferLink,
    TransferManifest,
    Wait,
)
from kvguard.violation import Kind, Proof
from tests.core.support import MAIN, Rig
from tests.core.transfer_rig import KEY, LAYOUT, TransferRig, refused

LINK, HERE = TransferLink(name="prefill", key=KEY), TransferLink(name="decode", key=KEY)


# -- the receiver's pages ---------------------------------------------------------------------------------------------


def test_kv_in_pages_that_the_request_lost_does_not_count() -> None:
    """Another page came in the place of one that was written: at the next part, or at the end."""
    for parts in (1, 2):
        rig = TransferRig()
        labels, manifest = rig.export()
        for part in range(parts):
            assert rig.place(part, labels[part]) is None
        rig.receiver.guard.retire(rig.receiver.guard.truncate("a", 1))
        rig.receiver.guard.allocate("a", [22, 23])
        pages = [11, 22, 23]
        answer = rig.place(1, labels[1], pages=pages) if parts == 1 else rig.finish(manifest, pages=pages)
        found = refused(answer, Kind.TRANSFER_TARGET_PAGE)
        assert "went to page 12" in found.violation.detail and found.foreign_pages == () and rig.verified() == 0


def test_a_preempted_request_waits_for_nothing_and_is_not_ended_by_what_still_comes() -> None:
    """Its ticket is closed, for parts and for the manifest; it computes its prompt itself."""
    rig = TransferRig()
    labels, manifest = rig.export()
    assert rig.place(0, labels[0]) is None
    rig.receiver.guard.preempt("a")
    rig.receiver.guard.retire(rig.written)
    refused(rig.place(1, labels[1]), Kind.TRANSFER_REPEATED, ends=False)
    rig.receiver.guard.resume("a")
    rig.receiver.columns.clear()
    rig.receiver.allocate("a", 21, 22, 23)
    refused(rig.place(1, labels[1], pages=[21, 22, 23]), Kind.TRANSFER_REPEATED, ends=False)
    refused(rig.finish(manifest, pages=[21, 22, 23]), Kind.TRANSFER_REPEATED, ends=False)
    assert rig.verified() == 0 and rig.receiver.run("a", ends={"a": 10}).clean
    assert rig.importer.expect("a", tokens=10) != rig.ticket


def test_a_request_may_give_its_pages_back_before_the_first_part_and_still_wait() -> None:
    """An allocation that fell short is no preemption: nobody decodes before, on the next pages either."""
    rig = TransferRig()
    labels, manifest = rig.export()
    rig.receiver.guard.retire(rig.receiver.guard.truncate("a", 0))
    rig.receiver.columns.clear()
    rig.receiver.allocate("a", 21, 22, 23)
    rig.written = [21, 22, 23]
    assert rig.receiver.row("a")[:3] == rig.written
    assert rig.place(0, labels[0]) is None and rig.place(1, labels[1]) is None
    assert rig.finish(manifest) is None and rig.receiver.run("a", ends={"a": 11}).clean
    rig = TransferRig()
    rig.receiver.guard.truncate("a", 0)
    rig.receiver.columns.clear()
    rig.receiver.allocate("a", 21, 22, 23)
    assert rig.receiver.run("a", ends={"a": 10}).withheld == {"a"}


def test_a_manifest_under_anothers_ticket_does_not_cost_the_other_its_transfer() -> None:
    """The ticket stays open for the request that waits for it."""
    rig = TransferRig()
    labels, manifest = rig.export()
    rig.receiver.start("b")
    answer = rig.importer.finish("b", ticket=rig.ticket, manifest=manifest, pages=[1])
    assert isinstance(answer, Refusal) and not answer.ends_request
    assert rig.adopt(labels, manifest) is None


def test_a_part_waits_for_the_steps_that_may_still_use_its_pages() -> None:
    """A page that left a window while a step that reads it is in flight: not to be written before that is judged."""
    rig = TransferRig(8)
    labels, manifest = rig.export()
    receiver = rig.receiver
    receiver.guard.retire(receiver.guard.truncate("a", 0))
    receiver.start("w")
    receiver.columns.clear()
    receiver.allocate("w", 1, 2, 3)
    assert receiver.run("w", ends={"w": 12}).clean
    early, late = receiver.launch("w", ends={"w": 12}), receiver.launch("w", ends={"w": 12})
    receiver.guard.retire(receiver.guard.drop("w", 0, 1), by="w")
    receiver.allocate("a", 1, 12)
    after = receiver.launch("w", ends={"w": 12})
    for pending in (early, late):
        assert rig.place(0, labels[0], pages=[1, 12]) == Wait(step=late.step)
        assert receiver.judge(pending).clean
    # The step behind knows that the page is no longer the window's.
    assert rig.place(0, labels[0], pages=[1, 12]) is None
    assert receiver.judge(after).clean
    assert rig.place(1, labels[1], pages=[1, 12]) is None and rig.finish(manifest, pages=[1, 12]) is None
    assert not receiver.guard.violations and receiver.run("a", "w", ends={"a": 8, "w": 12}).clean


def test_pages_may_change_while_the_first_part_waits() -> None:
    """Nothing was written yet; an abandoned step ends the wait as a judged one does."""
    rig = TransferRig(8)
    labels, manifest = rig.export()
    rig.receiver.start("w")
    rig.receiver.columns.clear()
    rig.receiver.allocate("w", 1)
    rig.receiver.guard.retire(rig.receiver.guard.truncate("a", 0))
    pending = rig.receiver.launch("w", ends={"w": 4})
    rig.receiver.guard.allocate("a", [11, 12])
    assert isinstance(rig.place(0, labels[0]), Wait)
    rig.receiver.guard.retire(rig.receiver.guard.truncate("a", 1))
    rig.receiver.guard.allocate("a", [22])
    rig.written = [11, 22]
    assert isinstance(rig.place(0, labels[0]), Wait)
    rig.receiver.guard.abandon(pending.step)
    assert rig.adopt(labels, manifest) is None


# -- everything must have come ----------------------------------------------------------------------------------------


def two_pools(layout: KVLayout) -> tuple[Rig, Rig, KVExporter, KVImporter, str]:
    """`a` with eight tokens in a full and in a window pool, on both sides."""
    pools = replace(MAIN, name="full"), replace(MAIN, name="win")
    there, here = Rig(*pools), Rig(*pools, seed=8)
    exporter, importer = KVExporter(there.guard, LINK), KVImporter(here.guard, HERE, layout=layout)
    here.start("a")
    ticket = importer.expect("a", tokens=8)
    there.start("a")
    for rig, first in ((there, 1), (here, 11)):
        rig.allocate("a", first, first + 1, pool="full")
        rig.allocate("a", first + 2, first + 3, pool="win")
    assert there.run("a", ends={"a": 8}).clean
    return there, here, exporter, importer, ticket


@pytest.mark.parametrize("lost", ["nothing", "pool at the source", "layer", "pool at the end"])
def test_every_pool_and_every_layer_in_it_must_come(lost: str) -> None:
    """A hybrid model: two layers in one pool, one in the other, copied pool by pool."""
    layout = replace(LAYOUT, layers=(2, 1))
    _, here, exporter, importer, ticket = two_pools(layout)
    pages: dict[str, list[int]] = {"full": [1, 2], "win": [3, 4]}
    written: dict[str, list[int]] = {"full": [11, 12], "win": [13, 14]}
    read = {"full": pages["full"]} if lost == "pool at the source" else pages
    begun = exporter.begin("a", ticket=ticket, receiver="decode", tokens=8, pages=read, layout=layout)
    if lost == "pool at the source":
        assert "pool win" in refused(begun, Kind.TRANSFER_INCOMPLETE).violation.detail
        return
    parts = [("full", 0), ("full", 1), ("win", 0)][: 2 if lost == "layer" else 3]
    for part, (pool, layer) in enumerate(parts):
        labels = exporter.take("a", {pool: pages[pool]}, layers=[layer])
        assert isinstance(labels, list)
        given = {pool: written[pool]}
        assert importer.place("a", ticket=ticket, part=part, labels=labels, pages=given, layers=[layer]) is None
    manifest = exporter.finish("a")
    if lost == "layer":
        refused(manifest, Kind.TRANSFER_INCOMPLETE)
        return
    assert isinstance(manifest, TransferManifest)
    given = {"full": written["full"]} if lost == "pool at the end" else written
    answer = importer.finish("a", ticket=ticket, manifest=manifest, pages=given)
    if lost == "nothing":
        assert answer is None and here.run("a", ends={"a": 8}).clean
    else:
        refused(answer, Kind.TRANSFER_INCOMPLETE)


def test_a_layer_that_was_not_copied_is_missed_at_the_source() -> None:
    """Of all columns, or of one: other parts that hold other columns do not make up for it."""
    rig = TransferRig(8)
    assert rig.begin() is None
    rig.take()
    refused(rig.exporter.finish("a"), Kind.TRANSFER_INCOMPLETE)
    rig = TransferRig(8)
    assert rig.begin() is None
    rig.take()
    rig.take(pages=[1], columns=[0])
    found = refused(rig.exporter.finish("a"), Kind.TRANSFER_INCOMPLETE)
    assert "1 of 2 layers of column 1" in found.violation.detail


@pytest.mark.parametrize("layers", [((0,), (0,)), ((1,), (1,)), ((0,), ())])
def test_a_layer_that_did_not_come_is_missed_at_the_receiver(layers: tuple[tuple[int, ...], ...]) -> None:
    """Whatever the source makes of it: its word names the layers of each part."""
    rig = TransferRig(8)
    labels, manifest = rig.export()
    found = refused(rig.adopt(labels, replace(manifest, layers=layers).signed(KEY)), Kind.TRANSFER_INCOMPLETE)
    assert "without layers" in found.violation.detail


def test_a_layer_that_is_written_as_another_is_noticed() -> None:
    """The engine says which one it writes."""
    for written, kind in (([0], None), ([1], Kind.TRANSFER_MANIFEST)):
        rig = TransferRig(8)
        labels, manifest = rig.export()
        assert rig.place(0, labels[0], layers=written) is None and rig.place(1, labels[1], layers=[1]) is None
        answer = rig.finish(manifest)
        assert answer is None if kind is None else refused(answer, kind)


def test_a_column_that_the_source_dropped_is_missed_where_it_is_live() -> None:
    """Its window was smaller; what the receiver has adopted from its own cache need not come."""
    for cached in (False, True):
        rig = TransferRig(8)
        rig.source.guard.drop("a", 0, 1)
        rig.read = [2]
        if cached:
            receiver = rig.receiver
            receiver.guard.truncate("a", 0)
            receiver.start("w")
            receiver.columns.clear()
            receiver.allocate("w", 5)
            assert receiver.guard.publish("w", 0, "k") and receiver.run("w", ends={"w": 4}).clean
            receiver.adopt("a", ("k", 5))
            receiver.allocate("a", 12)
            rig.written = [5, 12]
        labels, manifest = rig.export()
        answer = rig.adopt(labels, manifest)
        if cached:
            assert answer is None and rig.verified() == 8
        else:
            assert "column 0" in refused(answer, Kind.TRANSFER_INCOMPLETE).violation.detail


# -- the source -------------------------------------------------------------------------------------------------------


def test_a_request_id_is_free_again_when_its_transfer_ended_with_it() -> None:
    """Without `cancel`: ended or preempted, it copies nothing any more."""
    for preempted in (False, True):
        rig = TransferRig(8)
        assert rig.begin() is None
        rig.take()
        if preempted:
            rig.source.guard.preempt("a")
            rig.source.guard.resume("a")
        else:
            rig.source.guard.finish("a")
            rig.source.guard.start("a")
        rig.source.guard.retire([1, 2])
        rig.source.columns.clear()
        rig.source.allocate("a", 5, 6)
        assert rig.source.run("a", ends={"a": 8}).clean
        rig.read = [5, 6]
        labels, manifest = rig.export()
        assert rig.adopt(labels, manifest) is None and not rig.source.guard.violations


@pytest.mark.parametrize(
    "proofs,word",
    [({Proof.TRANSFER}, UNCHECKED), ({Proof.TAG}, UNEXAMINED), ({Proof.TAG, Proof.TRANSFER}, "")],
)
def test_a_source_says_what_it_does_not_check(proofs: set[Proof], word: str) -> None:
    """A receiver takes it that checks no more itself: without the device check, never without transfer checks."""
    for own in (None, frozenset({Proof.TRANSFER})):
        there, rig = TransferRig(8, proofs=frozenset(proofs)), TransferRig(8, proofs=own)
        there.ticket = rig.ticket
        labels, manifest = there.export()
        assert manifest.unverified == word
        answer = rig.adopt(labels, manifest)
        if word == "" or (word == UNCHECKED and own is not None):
            assert answer is None and rig.verified() == 8
        else:
            refused(answer, Kind.TRANSFER_UNVERIFIED)
