"""KV transfers between two guards: each clause of the receiver's checks, broken once."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kvguard.transfer_manifest import OBSERVED, KVLayout, PageLabel, Refusal, TransferManifest
from kvguard.violation import Kind, Proof
from tests.core.transfer_rig import KEY, LAYOUT, TransferRig, refused

WRONG_LAYOUTS: dict[str, Any] = {
    "model": "n",
    "epoch": 1,
    "dtype": "fp8_e5m2",
    "order": "HND",
    "page_size": 8,
    "shape": (2, 3, 8),
    "scales": (0.5, 0.5),
}
WRONG_MANIFESTS: list[tuple[str, dict[str, Any], Kind]] = [
    ("another request's", {"request": "b"}, Kind.TRANSFER_MANIFEST),
    ("another receiver's", {"receiver": "decode-2"}, Kind.TRANSFER_MANIFEST),
    ("another transfer's", {"ticket": "decode/seed-8/9"}, Kind.TRANSFER_MANIFEST),
    ("fewer tokens", {"tokens": 9}, Kind.TRANSFER_INCOMPLETE),
    ("nobody vouches", {"unverified": OBSERVED}, Kind.TRANSFER_UNVERIFIED),
    ("more parts", {"parts": ((0, 1, 2),) * 3}, Kind.TRANSFER_INCOMPLETE),
    ("fewer parts", {"parts": ((0, 1, 2),)}, Kind.TRANSFER_MANIFEST),
    ("other columns in a part", {"parts": ((0, 1, 2), (0, 1))}, Kind.TRANSFER_FOREIGN_PAGE),
    ("other pages", {"entries": tuple(PageLabel("there", c, 5 + c, 99) for c in range(3))}, Kind.TRANSFER_FOREIGN_PAGE),
    *(
        (f"layout {name}", {"layout": replace(LAYOUT, **{name: value})}, Kind.TRANSFER_LAYOUT)
        for name, value in WRONG_LAYOUTS.items()
    ),
]


@pytest.mark.parametrize("what,change,kind", WRONG_MANIFESTS, ids=[what for what, _, _ in WRONG_MANIFESTS])
def test_a_manifest_that_says_something_else_ends_the_request(what: str, change: dict[str, Any], kind: Kind) -> None:
    """Signed by the source all the same: it is the wrong word, not a forged one."""
    rig = TransferRig()
    labels, manifest = rig.export()
    found = refused(rig.adopt(labels, replace(manifest, **change).signed(KEY)), kind)
    assert "prefill" in found.violation.detail and rig.verified() == 0
    refused(rig.finish(manifest), Kind.TRANSFER_REPEATED, ends=False)


def test_a_manifest_that_was_altered_or_lost_ends_the_request() -> None:
    """Another key, a changed field under the old digest, and none at all."""
    rig = TransferRig()
    labels, manifest = rig.export()
    for wrong in (manifest.signed(bytes(32)), replace(manifest, entries=manifest.entries[:2]), None):
        fresh = TransferRig()
        assert isinstance(fresh.export()[1], TransferManifest)
        refused(fresh.adopt(labels, wrong), Kind.TRANSFER_MANIFEST)


def test_the_digest_covers_every_field_of_a_manifest() -> None:
    """A changed field under the old digest is no word of the source, whichever it is; nor is it under another key."""
    manifest = TransferRig().export()[1]
    assert isinstance(manifest, TransferManifest) and manifest.is_signed(KEY) and not manifest.is_signed(bytes(32))
    others: dict[str, Any] = {
        "source": "x", "receiver": "x", "request": "x", "ticket": "x", "tokens": 1, "layout": replace(LAYOUT, epoch=9),
        "entries": manifest.entries[:2], "parts": (), "layers": ((0,),), "first_token": 7, "unverified": OBSERVED,
        "digest": "0" * 32,
    }  # fmt: skip
    assert set(others) == {field.name for field in fields(TransferManifest)}
    for name, value in others.items():
        assert getattr(manifest, name) != value
        assert not replace(manifest, **{name: value}).is_signed(KEY), name


def test_layouts_say_where_they_differ() -> None:
    """The report names the field and both values."""
    other = KVLayout(model="m", dtype="fp8_e5m2", page_size=4, shape=(2, 3, 16), scales=(0.5, 0.25))
    assert other.difference(LAYOUT) == "dtype fp8_e5m2, not fp8_e4m3"
    assert LAYOUT.difference(replace(LAYOUT)) == ""


def test_a_page_whose_label_is_missing_or_foreign_ends_the_request() -> None:
    """What came is compared with what the source copied, page by page."""
    for change, kind in (
        (lambda labels: labels[:1] + labels[2:], Kind.TRANSFER_INCOMPLETE),
        (lambda labels: [labels[0], labels[1]._replace(tag=5), labels[2]], Kind.TRANSFER_FOREIGN_PAGE),
        (lambda labels: [*labels, labels[0]], Kind.TRANSFER_FOREIGN_PAGE),
    ):
        rig = TransferRig()
        labels, manifest = rig.export()
        refused(rig.adopt([change(labels[0]), labels[1]], manifest), kind)


def test_a_part_that_never_came_ends_the_request() -> None:
    """All layers but one are not the request's KV."""
    rig = TransferRig()
    labels, manifest = rig.export()
    assert rig.place(1, labels[1]) is None
    refused(rig.finish(manifest), Kind.TRANSFER_INCOMPLETE)


def test_nothing_is_written_into_a_page_that_changed_hands() -> None:
    """The page's new owner keeps its bytes; the page is quarantined and not given back with the request's."""
    rig = TransferRig(proofs=frozenset({Proof.TRANSFER}))
    labels, manifest = rig.export()
    assert rig.place(0, labels[0]) is None
    rig.receiver.guard.retire([12])
    rig.receiver.start("b")
    rig.receiver.allocate("b", 12)
    found = refused(rig.place(1, labels[1]), Kind.TRANSFER_TARGET_PAGE)
    assert (found.violation.owner, found.foreign_pages, found.violation.column) == ("b", (12,), 1)
    assert "source's page 2" in found.violation.detail
    refused(rig.finish(manifest), Kind.TRANSFER_REPEATED, ends=False)


def test_nothing_is_written_into_a_page_that_is_not_the_requests() -> None:
    """The connector's list of targets is compared with the ledger, and checked once more when all is written."""
    rig = TransferRig()
    labels, manifest = rig.export()
    refused(rig.place(0, labels[0], pages=[11, 20, 13]), Kind.TRANSFER_TARGET_PAGE)
    for pages, kind in (([11, 20, 13], Kind.TRANSFER_TARGET_PAGE), ([11, 12], Kind.TRANSFER_INCOMPLETE)):
        rig = TransferRig()
        labels, manifest = rig.export()
        for part, one in enumerate(labels):
            assert rig.place(part, one) is None
        refused(rig.finish(manifest, pages=pages), kind)
        assert rig.verified() == 0


def test_pages_that_the_ledger_lacks_are_not_written_to() -> None:
    """A transfer longer than what was allocated for it."""
    rig = TransferRig()
    labels, _ = rig.export()
    rig.receiver.guard.truncate("a", 2)
    refused(rig.place(0, labels[0]), Kind.TRANSFER_INCOMPLETE)


def test_a_repeated_part_or_transfer_is_dropped_and_the_request_goes_on() -> None:
    """A retry must not write into pages that decode by now, whoever has them."""
    rig = TransferRig()
    labels, manifest = rig.export()
    assert rig.place(0, labels[0]) is None
    refused(rig.place(0, labels[0]), Kind.TRANSFER_REPEATED, ends=False)
    assert rig.place(1, labels[1]) is None and rig.finish(manifest) is None
    found = refused(rig.place(0, labels[0]), Kind.TRANSFER_REPEATED, ends=False)
    assert found.violation.page == 11
    refused(rig.finish(manifest), Kind.TRANSFER_REPEATED, ends=False)
    assert rig.receiver.run("a", ends={"a": 11}).clean


def test_a_ticket_fits_one_transfer_of_one_request() -> None:
    """Not the request's next life, not somebody else, not an expectation that was withdrawn."""
    rig = TransferRig()
    labels, manifest = rig.export()
    rig.receiver.start("b")
    other = rig.importer.expect("b", tokens=10)
    assert other != rig.ticket
    refused(rig.place(0, labels[0], ticket=other), Kind.TRANSFER_REPEATED, ends=False)
    rig.receiver.guard.finish("a")
    refused(rig.place(0, labels[0]), Kind.TRANSFER_REPEATED, ends=False)
    rig.receiver.guard.start("a")
    assert rig.importer.expect("a", tokens=10) not in (other, rig.ticket)
    refused(rig.finish(manifest), Kind.TRANSFER_REPEATED, ends=False)
    rig.importer.cancel("b")
    assert isinstance(rig.importer.place("b", ticket=other, part=0, labels=[], pages=[1]), Refusal)


def test_a_window_with_gaps_crosses_as_its_live_columns() -> None:
    """Columns that a sliding window dropped have no pages on either side."""
    rig = TransferRig(16)
    rig.source.guard.drop("a", 0, 2)
    rig.receiver.guard.drop("a", 0, 2)
    rig.read, rig.written = rig.read[2:], rig.written[2:]
    labels, manifest = rig.export()
    assert [label.column for label in manifest.entries] == [2, 3]
    assert rig.adopt(labels, manifest) is None and rig.verified() == 16


def test_a_request_that_decodes_before_its_transfer_is_complete_is_flagged() -> None:
    """Its own pages, under its own tags, with a former owner's bytes in them."""
    rig = TransferRig()
    labels, manifest = rig.export()
    assert rig.place(0, labels[0]) is None
    judgement = rig.receiver.run("a", ends={"a": 11})
    assert judgement.withheld == {"a"} and [abort.request for abort in judgement.aborts] == ["a"]
    assert judgement.violations[0].kind is Kind.WRITER_NEVER_RAN and rig.ticket in judgement.violations[0].detail
    assert not judgement.clean and rig.receiver.row("a")[:3] == [0, 0, 0]


def test_a_request_whose_transfer_was_refused_or_given_up_decodes_on_what_it_computes_itself() -> None:
    """Refused: never. Preempted or cancelled: its prompt is computed here, and nothing is awaited any more."""
    rig = TransferRig()
    labels, _ = rig.export()
    refused(rig.place(0, labels[0], pages=[11, 20, 13]), Kind.TRANSFER_TARGET_PAGE)
    assert rig.receiver.run("a", ends={"a": 11}).withheld == {"a"}
    for give_up in ("preempt", "cancel"):
        rig = TransferRig()
        if give_up == "cancel":
            rig.importer.cancel("a")
        else:
            rig.receiver.guard.preempt("a")
            rig.receiver.guard.resume("a")
            rig.receiver.columns.clear()
            rig.receiver.allocate("a", *rig.written)
        assert rig.receiver.run("a", ends={"a": 11}).clean
