"""KV transfers with calls that make no sense, and messages that cannot be read: each costs its own transfer only."""


from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from kvguard.adapters.generic import PagedGuard
from kvguard.adapters.generic_transfer import TransferSource, TransferTarget
from kvguard.config import GuardConfig
from kvguard.transfer_manifest import (
    DISARMED,
    MISUSED,
    Refusal,
    TransferLink,
    TransferManifest,
)
from kvguard.verifier import PoolInputs
from kvguard.violation import Kind
from tests.core.support import MAIN
from tests.core.transfer_rig import KEY, LAYOUT, TransferRig, refused

LINK, HERE = TransferLink(name="prefill", key=KEY), TransferLink(name="decode", key=KEY)


class Pair:
    """A source and a receiver as an engine sees them; `a` is computed at the source, expected at the receiver."""

    def __init__(self, **settings: Any) -> None:
        guards = [
            PagedGuard([MAIN], config=GuardConfig.load(seed=seed, **settings), backend="numpy") for seed in (1, 2)
        ]
        self.there, self.here = guards
        self.source, self.target = TransferSource(self.there, LINK), TransferTarget(self.here, HERE, layout=LAYOUT)
        self.start("a", 0)
        self.here.start("a")
        self.ticket = self.target.expect("a", tokens=8)
        self.here.allocate("a", [11, 12])

    def start(self, request: str, row: int) -> None:
        """A request of eight tokens in pages 1 and 2 of the source."""
        self.there.start(request)
        self.there.allocate(request, [1, 2])
        table = np.zeros((2, 4), np.int32)
        table[row, :2] = [1, 2]
        pending = self.there.before_forward([request], [row], [8], PoolInputs(table=table))
        assert self.there.after_forward(pending).clean

    def begin(self, **options: Any) -> Refusal | None:
        chosen = {"ticket": self.ticket, "receiver": "decode", "tokens": 8, "pages": [1, 2], "layout": LAYOUT}
        return self.source.begin("a", **{**chosen, **options})

    def finish(self, manifest: Any, **options: Any) -> Refusal | None:
        return self.target.finish("a", **{"ticket": self.ticket, "manifest": manifest, "pages": [11, 12], **options})

    def errors(self) -> tuple[int, int]:
        """Adapter errors on either side; both guards must have survived."""
        assert self.there.armed and self.here.armed
        return tuple(guard.health().counters["adapter_errors"] for guard in (self.there, self.here))  # type: ignore


# -- calls that make no sense -----------------------------------------------------------------------------------------


def test_a_transfer_that_the_source_has_no_books_of_is_never_taken() -> None:
    """The request ended and another one has its pages: no word of an armed guard may read like that of a failed one."""
    pair = Pair()
    pair.there.finish("a")
    pair.there.retire([1, 2])
    pair.start("b", 1)
    refused(pair.begin(), Kind.TRANSFER_UNVERIFIED, ends=False)
    refused(pair.source.take("a", [1, 2]), Kind.TRANSFER_UNVERIFIED, ends=False)
    refused(pair.source.finish("a"), Kind.TRANSFER_UNVERIFIED, ends=False)
    assert pair.errors() == (3, 0)


@pytest.mark.parametrize(
    "what,options",
    [
        ("page ids", {"pages": ["1", "2"]}),
        ("pool", {"pages": {"other": [1, 2]}}),
        ("tokens", {"tokens": 8.0}),
        ("ticket", {"ticket": None}),
        ("layout", {"layout": replace(LAYOUT, scales=(np.float32(1),))}),  # type: ignore[arg-type]
    ],
)
def test_a_begin_that_makes_no_sense_ends_its_transfer(what: str, options: dict[str, Any]) -> None:
    """Nothing of kvguard is raised in the engine, nothing disarms, and nothing is signed that anybody takes."""
    pair = Pair()
    found = refused(pair.begin(**options), Kind.TRANSFER_UNVERIFIED)
    assert found.violation.detail.startswith("prefill: ") and pair.errors()[0] == 1
    assert isinstance(pair.source.finish("a"), Refusal)


def test_a_part_that_makes_no_sense_ends_its_transfer() -> None:
    """An unknown column, a page too few, and a layer that came before."""
    for pages, columns, layers in (([1], [7], [0]), ([1], [0, 1], [0]), ([1, 2], None, [1, 1]), ([1, 2], None, [2])):
        pair = Pair()
        assert pair.begin() is None
        refused(pair.source.take("a", pages, columns, layers=layers), Kind.TRANSFER_UNVERIFIED)
        assert isinstance(pair.source.finish("a"), Refusal) and pair.errors()[0] == 2
    pair = Pair()
    assert pair.begin() is None and isinstance(pair.source.take("a", [1, 2], layers=[0]), list)
    refused(pair.source.take("a", [1, 2], layers=[0]), Kind.TRANSFER_UNVERIFIED)


def test_a_source_that_only_observes_signs_that_it_does_not_know() -> None:
    """It goes on as without a guard; a receiver that does not only observe refuses."""
    pair = Pair(on_violation="observe")
    assert pair.begin(pages=["1"]) is None and pair.source.take("a", [1, 2]) == []
    manifest = pair.source.finish("a")
    assert isinstance(manifest, TransferManifest) and manifest.unverified == MISUSED
    rig = TransferRig(8)
    assert rig.place(0, []) is None
    refused(rig.finish(replace(manifest, ticket=rig.ticket).signed(KEY)), Kind.TRANSFER_UNVERIFIED)


def test_a_manifest_of_a_transfer_that_never_began_is_never_taken() -> None:
    """Not while there is a guard, and not without one: nothing is known of it, not even for whom it is."""
    for level in ("off", "lite"):
        source = TransferSource(
            PagedGuard([MAIN], config=GuardConfig.load(level="off", seed=1), backend="numpy")
            if level == "off"
            else Pair().there,
            LINK,
        )
        word = source.finish("zz")
        assert isinstance(word, Refusal) or (word.unverified == MISUSED and word.is_signed(KEY))


def test_a_guard_that_failed_since_a_call_that_made_no_sense_is_no_excuse() -> None:
    """Only a transfer that was sound so far may go out as that of a failed guard."""
    for broken, word in ((True, MISUSED), (False, DISARMED)):
        pair = Pair(on_violation="observe")
        assert pair.begin(pages=["1"] if broken else [1, 2]) is None
        pair.there.kept(None, lambda guard: guard.fault(RuntimeError("on purpose")))
        manifest = pair.source.finish("a", first_token=5)
        assert isinstance(manifest, TransferManifest) and (manifest.unverified, manifest.first_token) == (word, 5)


def test_a_receivers_call_that_makes_no_sense_ends_its_transfer() -> None:
    """The pages were not compared, so that nothing may be written or decoded; without a guard it would go on."""
    pair = Pair()
    pages: Any = ["11", "12"]
    refused(
        pair.target.place("a", ticket=pair.ticket, part=0, labels=[], pages=pages), Kind.TRANSFER_TARGET_PAGE
    )
    pair = Pair()
    refused(pair.finish(None, pages={"other": [11, 12]}), Kind.TRANSFER_MANIFEST)
    pair = Pair()
    assert pair.begin() is None
    labels = pair.source.take("a", [1, 2], layers=[0, 1])
    assert isinstance(labels, list)
    assert pair.target.place("a", ticket=pair.ticket, part=0, labels=labels, pages=[11, 12]) is None
    refused(pair.finish(pair.source.finish("a"), pages={"other": [11, 12]}), Kind.TRANSFER_TARGET_PAGE)
    assert pair.errors() == (0, 1)


def test_numpy_integers_are_integers() -> None:
    """Token counts and columns come from arrays in many engines."""
    pair = Pair()
    assert pair.begin(tokens=np.int64(8), pages=np.array([1, 2])) is None
    labels = pair.source.take("a", np.array([1, 2]), np.array([0, 1]), layers=np.array([0, 1]))  # type: ignore
    assert isinstance(labels, list)
    assert pair.target.place("a", ticket=pair.ticket, part=0, labels=labels, pages=[11, 12]) is None
    assert pair.finish(pair.source.finish("a", first_token=np.int64(3)), first_token=3) is None  # type: ignore
    assert pair.errors() == (0, 0)


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        lambda sound: replace(sound, digest=None),
        lambda sound: asdict(sound),
        lambda sound: replace(sound, layout=None),
        lambda sound: replace(sound, entries=7).signed(KEY),
        lambda sound: replace(sound, parts=((99,),), layers=((0,),)).signed(KEY),
        lambda sound: replace(sound, layers=()).signed(KEY),
        lambda sound: b"manifest",
    ],
)
def test_a_malformed_manifest_costs_its_own_transfer_only(broken: Callable[[TransferManifest], Any]) -> None:
    """The receiver's guard lives, and so does everybody else."""
    pair = Pair()
    assert pair.begin() is None
    labels = pair.source.take("a", [1, 2], layers=[0, 1])
    sound = pair.source.finish("a")
    assert isinstance(labels, list) and isinstance(sound, TransferManifest)
    assert pair.target.place("a", ticket=pair.ticket, part=0, labels=labels, pages=[11, 12]) is None
    refused(pair.finish(broken(sound)), Kind.TRANSFER_MANIFEST)
    assert pair.errors() == (0, 0)


@pytest.mark.parametrize("labels", [None, [3], [(1, 2, 3, 4)], [("main", 0)], [("main", "0", 1, 2)], {"x": 1}])
def test_malformed_labels_cost_their_own_transfer_only(labels: Any) -> None:
    """As a manifest does."""
    pair = Pair()
    refused(
        pair.target.place("a", ticket=pair.ticket, part=0, labels=labels, pages=[11, 12]), Kind.TRANSFER_MANIFEST
    )
    wrong: Any = ["no", "ticket"]
    refused(pair.target.place("a", ticket=wrong, part=0, labels=[], pages=[1]), Kind.TRANSFER_REPEATED, ends=False)
    assert pair.errors() == (0, 0)


def test_what_a_transport_without_tuples_made_of_it_is_read_all_the_same() -> None:
    """JSON and msgpack know lists only; the digest is the same."""
    rig = TransferRig()
    labels, manifest = rig.export()
    lists: Any = [[list(label) for label in part] for part in labels]
    content = {**asdict(manifest), "layout": asdict(rig.layout) | {"shape": list(rig.layout.shape)}}
    content |= {"entries": lists[0], "parts": [[0, 1, 2]] * 2, "layers": [[0], [1]]}
    assert rig.adopt(lists, TransferManifest(**content)) is None and rig.verified() == 10


def test_two_transfers_cannot_swap_their_first_tokens() -> None:
    """It is signed; what came beside the manifest is compared with it."""
    for came, kind in ((5, None), (6, Kind.TRANSFER_MANIFEST)):
        rig = TransferRig()
        assert rig.begin() is None
        labels = [rig.take(), rig.take()]
        manifest = rig.exporter.finish("a", first_token=5)
        assert isinstance(manifest, TransferManifest)
        for part, one in enumerate(labels):
            assert rig.place(part, one) is None
        answer = rig.finish(manifest, first_token=came)
        assert answer is None if kind is None else refused(answer, kind)
