"""Two guards by hand with a transfer between them: source `prefill`, receiver `decode`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvguard.transfer_export import KVExporter
from kvguard.transfer_import import KVImporter
from kvguard.transfer_manifest import KVLayout, PageLabel, Refusal, TransferLink, TransferManifest, Wait
from kvguard.violation import Action, Kind, Proof
from tests.core.support import MAIN, Rig

KEY = bytes(range(32))
LAYOUT = KVLayout(model="m", dtype="fp8_e4m3", page_size=4, shape=(2, 3, 16), scales=(0.5, 0.25))


def refused(answer: Any, kind: Kind, *, ends: bool = True) -> Refusal:
    """The answer is a refusal of this kind."""
    assert isinstance(answer, Refusal), answer
    assert answer.violation.kind is kind and answer.violation.proof is Proof.TRANSFER
    assert answer.ends_request is ends
    assert answer.violation.action is (Action.ABORTED if ends else Action.REFUSED)
    assert answer.violation.request == "a"
    return answer


class TransferRig:
    """Request `a` with `tokens` tokens, computed and verified at the source, expected and allocated at the receiver."""

    def __init__(
        self,
        tokens: int = 10,
        *,
        layers: int = 2,
        proofs: frozenset[Proof] | None = None,
        source: dict[str, Any] | None = None,
        receiver: dict[str, Any] | None = None,
    ) -> None:
        self.tokens = tokens
        self.layout = replace(LAYOUT, shape=(layers, *LAYOUT.shape[1:]))
        self.source = Rig(replace(MAIN, name="there"), proofs=proofs, **(source or {}))
        self.receiver = Rig(replace(MAIN, name="here"), proofs=proofs, **{"seed": 8, **(receiver or {})})
        self.exporter = KVExporter(self.source.guard, TransferLink(name="prefill", key=KEY))
        self.importer = KVImporter(self.receiver.guard, TransferLink(name="decode", key=KEY), layout=self.layout)
        self.columns = -(-tokens // 4)
        self.read = list(range(1, self.columns + 1))
        self.written = list(range(11, self.columns + 11))
        self.source.start("a")
        self.source.allocate("a", *self.read)
        assert self.source.run("a", ends={"a": tokens}).clean
        self.receiver.start("a")
        self.ticket = self.importer.expect("a", tokens=tokens)
        self.receiver.allocate("a", *self.written)

    def begin(self, **options: Any) -> Refusal | None:
        """The source begins."""
        chosen = {"ticket": self.ticket, "receiver": "decode", "tokens": self.tokens, "pages": self.read}
        return self.exporter.begin("a", **{**chosen, "layout": self.layout, **options})

    def take(self, **options: Any) -> list[PageLabel]:
        """A part of all columns, the next layer of them; it must not be refused."""
        labels = self.exporter.take("a", **{"pages": self.read, **options})
        assert isinstance(labels, list), labels
        return labels

    def export(self, parts: int = 2) -> tuple[list[list[PageLabel]], TransferManifest]:
        """The whole source side; nothing may be refused."""
        assert self.begin() is None
        labels = [self.take() for _ in range(parts)]
        manifest = self.exporter.finish("a")
        assert isinstance(manifest, TransferManifest), manifest
        return labels, manifest

    def place(self, part: int, labels: list[PageLabel], **options: Any) -> Refusal | Wait | None:
        """The receiver is about to write a part."""
        return self.importer.place(
            "a", **{"ticket": self.ticket, "part": part, "labels": labels, "pages": self.written, **options}
        )

    def finish(self, manifest: TransferManifest | None, **options: Any) -> Refusal | None:
        """The receiver has written all parts."""
        chosen = {"ticket": self.ticket, "manifest": manifest, "pages": self.written}
        return self.importer.finish("a", **{**chosen, **options})

    def adopt(self, labels: list[list[PageLabel]], manifest: TransferManifest | None) -> Refusal | None:
        """The whole receiving side; no part may be refused."""
        for part, one in enumerate(labels):
            assert self.place(part, one) is None
        return self.finish(manifest)

    def verified(self) -> int:
        """Tokens of the request that count as verified at the receiver."""
        return self.receiver.guard.scheduled_tokens("a")
