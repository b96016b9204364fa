"""Random transfers, sound and broken: only what is sound is adopted, and what is broken is never."""

from __future__ import annotations

import random
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given, settings

from kvguard.transfer_manifest import PageLabel, Refusal, TransferManifest
from kvguard.violation import Proof
from tests.core.transfer_rig import KEY, TransferRig

DAMAGE = (
    "nothing",
    "source list",
    "source page moves on",
    "label",
    "lost label",
    "lost part",
    "repeated part",
    "manifest",
    "target list",
    "target page moves on",
)


def parts_of(rng: random.Random, columns: int, parts: int) -> list[list[int]]:
    """Which columns each part carries: all of them (a part is a layer), or a share each, in any order."""
    if rng.random() < 0.5:
        return [list(range(columns))] * parts
    order = rng.sample(range(columns), columns)
    return [sorted(order[start::parts]) for start in range(parts) if order[start::parts]]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 32),
    parts=st.integers(1, 4),
    damage=st.sampled_from(DAMAGE),
    quiet=st.booleans(),
)
def test_a_transfer_is_adopted_exactly_if_nothing_was_broken(
    seed: int, tokens: int, parts: int, damage: str, quiet: bool
) -> None:
    """One fault at a random place, with the other proofs on or off: some check on either side refuses it."""
    rng = random.Random(seed)
    rig = TransferRig(tokens, layers=parts, proofs=frozenset({Proof.TRANSFER}) if quiet else None)
    carried = parts_of(rng, rig.columns, parts)
    layer_by_layer = len(carried) == parts and all(len(columns) == rig.columns for columns in carried)
    victim, column = rng.randrange(len(carried)), rng.randrange(rig.columns)
    moved = False
    if damage == "source list":
        rig.read[column] = rng.choice([page for page in range(1, 32) if page != rig.read[column]])
    answer: Refusal | TransferManifest | None = rig.begin()
    arrived: list[tuple[int, list[PageLabel]]] = []
    for part, columns in enumerate(carried):
        if answer is not None:
            break
        if damage == "source page moves on" and part == victim:
            moved = bool(rig.source.guard.retire([rig.read[column]]).reusable)
        layers = [part] if layer_by_layer else range(parts)
        taken = rig.exporter.take("a", [rig.read[place] for place in columns], columns, layers=layers)
        if isinstance(taken, Refusal):
            answer = taken
        else:
            arrived.append((part, taken))
    manifest = answer or rig.exporter.finish("a")
    refused = isinstance(manifest, Refusal)
    if isinstance(manifest, TransferManifest):
        refused = not _deliver(rng, rig, arrived, manifest, damage, victim, column)
    at_source = damage == "source list" or (damage == "source page moves on" and moved)
    assert isinstance(manifest, Refusal) == at_source
    held = not quiet and damage in ("source page moves on", "target page moves on")
    sound = damage in ("nothing", "repeated part") or held
    assert refused != sound
    assert (rig.verified() == tokens) == sound
    if damage == "nothing":
        assert not rig.source.guard.violations and not rig.receiver.guard.violations


def _deliver(
    rng: random.Random,
    rig: TransferRig,
    arrived: list[tuple[int, list[PageLabel]]],
    manifest: TransferManifest,
    damage: str,
    victim: int,
    column: int,
) -> bool:
    """The receiving side, broken as `damage` says; whether the request may decode."""
    if damage == "label":
        labels = arrived[victim][1]
        place = rng.randrange(len(labels))
        labels[place] = labels[place]._replace(tag=labels[place].tag + rng.randrange(1, 1 << 40))
    elif damage == "lost label":
        del arrived[victim][1][rng.randrange(len(arrived[victim][1]))]
    elif damage == "lost part":
        del arrived[victim]
    elif damage == "repeated part":
        arrived.insert(rng.randrange(victim + 1, len(arrived) + 1), arrived[victim])
    elif damage == "target list":
        rig.written[column] = rng.choice([page for page in range(1, 32) if page != rig.written[column]])
    elif damage == "manifest":
        manifest = rng.choice(
            [
                replace(manifest, request="b").signed(KEY),
                replace(manifest, ticket="x").signed(KEY),
                replace(manifest, tokens=rig.tokens + 1).signed(KEY),
                replace(manifest, receiver="").signed(KEY),
                replace(manifest, tokens=rig.tokens + 1),
            ]
        )
    if rng.random() < 0.5 and damage != "repeated part":
        # A connector may deliver parts in any order.
        rng.shuffle(arrived)
    for number, (part, labels) in enumerate(arrived):
        if damage == "target page moves on" and number == min(victim, len(arrived) - 1):
            rig.receiver.guard.retire([rig.written[column]])
        answer = rig.place(part, labels)
        if isinstance(answer, Refusal) and answer.ends_request:
            return False
    return rig.finish(manifest) is None
