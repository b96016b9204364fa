"""The write-slot proof through both halves: wrong slots are redirected in the same step, their writer is ended.

A rig writes what its tables and lengths say, as engines do; a test then breaks one slot.
"""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvguard.config import GuardConfig
from kvguard.guard import Judgement
from kvguard.messages import NO_WRITER, StepDelta
from kvguard.pools import GuardSetup, PoolSpec
from kvguard.verifier import PendingVerdicts, PoolInputs, Verifier
from kvguard.violation import Action, Kind, Proof, Violation
from tests.core.support import MAIN, Rig, aborted, kinds
from tests.kernels.interpreted import interpreting

SIZE = 4
BACKENDS = pytest.mark.parametrize("backend", ["numpy", "torch", "triton"])
ALONE = frozenset({Proof.WRITE_SLOT})
PROOFS = pytest.mark.parametrize("proofs", [None, ALONE], ids=["all", "alone"])


class WriteRig(Rig):
    """A rig whose steps say where they write: tokens [start, stop) of each request, then `padding` lanes.

    `slots` int64 [tokens + padding] is what the last step was about to write, as the check has left it.
    """

    def __init__(self, *pools: PoolSpec, **settings: Any) -> None:
        with self._interpreted(settings.get("backend")):
            super().__init__(*pools, **settings)
        self.slots: Any = None
        self.padding = 0

    @staticmethod
    def _interpreted(backend: str | None) -> AbstractContextManager[Any]:
        return interpreting() if backend == "triton" else nullcontext()

    def checked(self, delta: StepDelta, **arrays: Any) -> PendingVerdicts:
        """The device half of a step, given `slots` and these arrays."""
        given = {"slot_mapping": self.slots, **arrays}
        if self.backend != "numpy":
            given = {name: torch.from_numpy(array) for name, array in given.items()}
        table = self._wrap(self.tables)["main"]
        with self._interpreted(self.backend):
            return self.verifier.check(delta, {"main": PoolInputs(table=table, **given)})

    def mapping(self, spans: dict[str, tuple[int, int]], pool: str | None = None) -> list[int]:
        """The right slots of these tokens."""
        spec = self._pool(pool)
        size = spec.page_size or 1
        slots = []
        for request, (start, stop) in spans.items():
            row = self.tables[spec.name][self.rows[request]]
            slots += [int(row[position // size]) * size + position % size for position in range(start, stop)]
        return slots

    def start_step(
        self, spans: dict[str, tuple[int, int]], slots: list[int] | None = None, *, starts: bool = True
    ) -> PendingVerdicts:
        """A step in which request r writes positions spans[r], `slots` instead of the right ones."""
        given = self.mapping(spans) if slots is None else slots
        counts = [stop - start for start, stop in spans.values()]
        self.slots = np.array([*given, *([-1] * self.padding)], np.int64)
        ends = [stop for _, stop in spans.values()]
        delta = self.guard.step(
            list(spans),
            [self.rows[request] for request in spans],
            ends,
            [start for start, _ in spans.values()] if starts else None,
        )
        bounds = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        return self.checked(delta, query_start=bounds, lengths=np.array(ends, np.int64))

    def write_step(
        self, spans: dict[str, tuple[int, int]], slots: list[int] | None = None, *, starts: bool = True
    ) -> Judgement:
        """The same, judged."""
        return self.judge(self.start_step(spans, slots, starts=starts))


def two(**settings: Any) -> WriteRig:
    """Requests a and b with two pages each, 5 tokens of which are written."""
    rig = WriteRig(**settings)
    rig.start("a", "b")
    rig.allocate("a", 1, 2)
    rig.allocate("b", 3, 4)
    assert rig.write_step({"a": (0, 5), "b": (0, 5)}).clean
    return rig


def only(judgement: Judgement) -> Violation:
    """The one violation."""
    assert len(judgement.violations) == 1, judgement
    return judgement.violations[0]


@BACKENDS
@PROOFS
def test_healthy_steps_are_clean(backend: str, proofs: frozenset[Proof] | None) -> None:
    """Prefill, decode across pages, chunks, padding lanes and a drafted token that is written again."""
    rig = WriteRig(backend=backend, proofs=proofs)
    rig.start("a", "b")
    rig.allocate("a", 1)
    assert rig.write_step({"a": (0, 3)}).clean
    rig.padding = 5
    assert rig.write_step({"a": (3, 4)}).clean
    assert rig.slots.tolist() == [7, -1, -1, -1, -1, -1]
    rig.allocate("a", 2)
    rig.allocate("b", 3, 4, 5)
    assert rig.write_step({"b": (0, 7), "a": (4, 7)}).clean
    # Two of the three drafted tokens were rejected.
    assert rig.write_step({"a": (5, 8), "b": (7, 9)}).clean
    assert rig.write_step({"b": (9, 12), "a": (7, 8)}).clean
    # A page is taken in the middle of another: what lies before in that one is written again, too.
    rig.allocate("a", 6)
    assert rig.write_step({"a": (7, 10)}).clean
    rig.allocate("a", 7)
    assert rig.write_step({"a": (10, 13)}).clean and rig.write_step({"a": (9, 11)}).clean
    assert rig.guard.violations == ()


@BACKENDS
@PROOFS
@pytest.mark.parametrize(
    ("slots", "kind"),
    [
        ([9 + 4, 17], Kind.WRITE_FOREIGN),
        ([10, 17], Kind.WRITE_SHIFTED),
        ([4, 17], Kind.WRITE_FOREIGN),
        ([28 * 4 + 1, 17], Kind.WRITE_FOREIGN),
        ([32 * 4 + 1, 17], Kind.WRITE_OUT_OF_RANGE),
        ([-2, 17], Kind.WRITE_OUT_OF_RANGE),
        ([-1, 17], Kind.WRITE_LOST),
        ([0, 17], Kind.WRITE_LOST),
        ([17, 9], Kind.WRITE_FOREIGN),
    ],
    ids=["other", "shifted", "own-first", "vacant", "past-the-pool", "minus-two", "skip", "null", "swapped"],
)
def test_a_wrong_slot_is_redirected_and_its_writer_ended(
    backend: str, proofs: frozenset[Proof] | None, slots: list[int], kind: Kind
) -> None:
    """The victim goes on, the writer's token is withheld, and the report says what would have been written where."""
    rig = two(backend=backend, proofs=proofs)
    right = rig.mapping({"a": (5, 6), "b": (5, 6)})
    assert right == [9, 17]
    wrong = [request for request, slot, wanted in zip("ab", slots, right, strict=True) if slot != wanted]
    judgement = rig.write_step({"a": (5, 6), "b": (5, 6)}, slots)
    assert kinds(judgement) == dict.fromkeys(wrong, kind)
    assert aborted(judgement) == judgement.withheld == set(wrong)
    assert rig.slots.tolist() == [-1 if slot != wanted else slot for slot, wanted in zip(slots, right, strict=True)]
    first = judgement.violations[0]
    assert first.proof is Proof.WRITE_SLOT and first.action is Action.ABORTED and not first.quarantined
    assert first.column == 1 and f"from position 5 on, the first to slot {slots[0]}" in first.detail
    if kind is Kind.WRITE_FOREIGN and slots[0] in (13, 17):
        assert first.owner == "b" and first.history is not None and first.history.events
    assert rig.guard.health().counters["writes_redirected"] == len(wrong)
    for request in wrong:
        rig.guard.finish(request)
    if wrong == ["a"]:
        assert rig.write_step({"b": (6, 7)}).clean


@BACKENDS
def test_padding_and_dummy_batches_write_nowhere(backend: str) -> None:
    """A lane without a request is redirected and reported; nobody is aborted for it, also where nobody runs."""
    rig = two(backend=backend)
    rig.padding = 3
    right = rig.mapping({"a": (5, 6), "b": (5, 6)})
    pending = rig.start_step({"a": (5, 6), "b": (5, 6)})
    assert rig.judge(pending).clean
    judgement = _with_padding(rig, {"a": (6, 7), "b": (6, 7)}, [-1, 6, 14])
    found = only(judgement)
    assert (found.kind, found.action, found.request) == (Kind.WRITE_OF_PADDING, Action.REFUSED, None)
    assert found.page == 1 and found.owner == "a" and "2 tokens without a request from lane 3 on" in found.detail
    assert "a padding lane was about to write" in found.message
    assert not judgement.aborts and not judgement.withheld and not judgement.clean
    assert rig.slots.tolist() == [right[0] + 1, right[1] + 1, -1, -1, -1]
    dummy = only(_with_padding(rig, {}, [-1, 9, -1]))
    assert dummy.kind is Kind.WRITE_OF_PADDING and dummy.page == 2
    assert rig.guard.health().counters["writes_redirected"] == 3
    assert rig.slots.tolist() == [-1, -1, -1]
    assert rig.write_step({}).clean and rig.write_step({"a": (7, 8), "b": (7, 8)}).clean


def _with_padding(rig: WriteRig, spans: dict[str, tuple[int, int]], lanes: list[int]) -> Judgement:
    rig.padding = 0
    tokens = rig.mapping(spans)
    rig.slots = np.array([*tokens, *lanes], np.int64)
    ends = [stop for _, stop in spans.values()]
    delta = rig.guard.step(list(spans), [rig.rows[name] for name in spans], ends)
    return rig.judge(rig.checked(delta, query_start=np.arange(len(spans) + 1), lengths=np.array(ends, np.int64)))


@PROOFS
def test_a_page_that_was_handed_on_is_not_written_by_who_had_it(proofs: frozenset[Proof] | None) -> None:
    """A-B-A: the page went to b and back to a's name under another incarnation; the old mapping of a hits nothing."""
    rig = WriteRig(proofs=proofs)
    rig.start("a", "b")
    rig.allocate("a", 1)
    assert rig.write_step({"a": (0, 2)}).clean
    rig.guard.finish("a")
    rig.guard.retire([1])
    rig.guard.start("a")
    rig.columns.clear()
    rig.allocate("a", 2)
    rig.allocate("b", 1)
    assert rig.write_step({"b": (0, 2), "a": (0, 1)}).clean
    assert kinds(rig.write_step({"a": (1, 2), "b": (2, 3)}, [5, 6])) == {"a": Kind.WRITE_FOREIGN}
    assert rig.slots.tolist() == [-1, 6]


@pytest.mark.parametrize("starts", [True, False])
def test_an_adopted_page_is_nobodys_to_write_but_its_writers(starts: bool) -> None:
    """A shared prefix is read by its adopters; the writer alone may still fill its last, partial page."""
    rig = WriteRig()
    rig.start("w", "r")
    rig.allocate("w", 1, 2)
    assert rig.write_step({"w": (0, 6)}).clean
    for column, key in ((0, "k0"), (1, "k1")):
        assert rig.guard.publish("w", column, key, tokens=4 + 2 * column)
    rig.adopt("r", ("k0", 1), ("k1", 2))
    rig.allocate("r", 3)
    # The designated writer goes on in the shared, partial page; the adopter goes on behind it.
    assert rig.write_step({"w": (6, 7), "r": (8, 9)}, starts=starts).clean
    slots = rig.mapping({"w": (7, 8), "r": (6, 7)})
    judgement = rig.judge(rig.start_step({"w": (7, 8), "r": (6, 7)}, slots, starts=False))
    assert kinds(judgement) == {"r": Kind.WRITE_FOREIGN} and only(judgement).owner == "w"


@PROOFS
@BACKENDS
def test_a_complete_page_is_not_written_again(backend: str, proofs: frozenset[Proof] | None) -> None:
    """Positions that the engine says it starts behind are complete, though the page is the request's own."""
    rig = two(backend=backend, proofs=proofs)
    rig.allocate("a", 5)
    assert rig.write_step({"a": (5, 9), "b": (5, 6)}).clean
    rig.allocate("a", 6)
    # Crossing a page says where the request stands; its runner then writes two positions that lie before.
    delta = rig.guard.step(["a"], [rig.rows["a"]], [13], [12])
    rig.slots = np.array(rig.mapping({"a": (6, 8)}), np.int64)
    judgement = rig.judge(rig.checked(delta, query_start=np.array([0, 2]), lengths=np.array([8])))
    assert only(judgement).kind is Kind.WRITE_COMPLETE and rig.slots.tolist() == [-1, -1]


@PROOFS
def test_going_back_is_fine_where_nobody_reads_and_not_where_somebody_does(proofs: frozenset[Proof] | None) -> None:
    """A failed load is computed again in place; a page that others hold by now is not."""
    rig = two(proofs=proofs)
    rig.allocate("a", 5)
    assert rig.write_step({"a": (5, 8), "b": (5, 6)}).clean
    rig.allocate("a", 6)
    assert rig.write_step({"a": (8, 12), "b": (6, 7)}).clean
    assert rig.write_step({"a": (2, 12), "b": (7, 8)}).clean
    assert rig.guard.publish("a", 0, "k0")
    rig.start("c")
    rig.adopt("c", ("k0", 1))
    rig.allocate("c", 7)
    rig.allocate("a", 8)
    assert rig.write_step({"a": (12, 13), "c": (4, 5)}).clean
    judgement = rig.write_step({"a": (3, 13), "c": (5, 6)})
    found = only(judgement)
    assert (found.kind, found.proof, found.request) == (Kind.WRITE_COMPLETE, Proof.WRITE_SLOT, "a")
    assert "that c holds, too" in found.detail
    # Nothing of it was written.
    assert rig.slots.tolist() == [-1] * 10 + rig.mapping({"c": (5, 6)})


@PROOFS
def test_what_the_engine_takes_back_is_computed_again_though_others_hold_it(proofs: frozenset[Proof] | None) -> None:
    """A load failed after somebody had taken the page: the engine rewinds the request, which writes it once more."""
    rig = two(proofs=proofs)
    rig.allocate("a", 5)
    assert rig.write_step({"a": (5, 9), "b": (5, 6)}).clean
    assert rig.guard.publish("a", 0, "k0")
    rig.start("c")
    rig.adopt("c", ("k0", 1))
    rig.allocate("c", 7)
    assert rig.write_step({"a": (9, 10), "c": (4, 5)}).clean
    assert rig.write_step({"a": (10, 11), "c": (5, 6)}).clean
    rig.guard.rewind("a", 2)
    assert rig.guard.publish("a", 0, "k0")
    assert rig.write_step({"a": (2, 11), "c": (6, 7)}).clean
    # Nothing is taken back the next time.
    rig.allocate("a", 9)
    assert rig.write_step({"a": (11, 12), "c": (7, 8)}).clean
    assert kinds(rig.write_step({"a": (2, 13), "c": (8, 8)})) == {"a": Kind.WRITE_COMPLETE}


def test_without_starts_nothing_is_said_of_complete_pages() -> None:
    """An engine that does not say where its requests start is checked for everything else."""
    rig = two()
    rig.allocate("a", 5)
    assert rig.write_step({"a": (5, 9), "b": (5, 6)}, starts=False).clean
    assert rig.write_step({"a": (2, 9)}, starts=False).clean
    assert kinds(rig.write_step({"a": (9, 10)}, [9], starts=False)) == {"a": Kind.WRITE_FOREIGN}


def test_preempted_and_resumed_it_writes_its_new_pages_and_not_its_old_ones() -> None:
    """The incarnation is part of the writer's word."""
    rig = two()
    rig.guard.preempt("a")
    rig.guard.retire([1, 2])
    rig.guard.resume("a")
    rig.columns["a", "main"] = 0
    rig.allocate("a", 2, 1)
    assert rig.write_step({"a": (0, 6), "b": (5, 6)}).clean
    assert kinds(rig.write_step({"a": (6, 7), "b": (6, 7)}, [10, 18])) == {"a": Kind.WRITE_FOREIGN}


def test_a_page_that_changed_hands_in_an_odd_way_has_its_last_taker_for_a_writer() -> None:
    """Handed out under a holder: the later claimant writes it. Revoked (new weights): nobody does."""
    rig = WriteRig(proofs=ALONE)
    rig.start("a", "b")
    rig.allocate("a", 1)
    assert rig.write_step({"a": (0, 1)}).clean
    assert rig.guard.allocate("b", [1], refusable=False) == [1]
    rig.write("b", 0, 1)
    assert kinds(rig.write_step({"b": (0, 1), "a": (1, 2)})) == {"a": Kind.WRITE_FOREIGN}
    assert rig.slots.tolist() == [4, -1]
    rig = WriteRig(proofs=ALONE)
    rig.start("a")
    rig.allocate("a", 1)
    rig.guard.reset(revoke_held=True)
    assert kinds(rig.write_step({"a": (0, 1)})) == {"a": Kind.WRITE_FOREIGN}


def test_pages_of_an_ended_writer_that_changed_hands_leave_the_cache() -> None:
    """One page for two columns: whatever the engine has published it under is not to be found any more."""
    rig = WriteRig(proofs=ALONE)
    rig.start("a")
    rig.allocate("a", 1)
    assert rig.guard.allocate("a", [1], refusable=False) == [1]
    rig.write("a", 1, 1)
    # Without the control plane the engine may publish what the books know to be another column's by now.
    assert rig.guard.publish("a", 0, "k0")
    judgement = rig.write_step({"a": (0, 5)})
    assert kinds(judgement) == {"a": Kind.WRITE_FOREIGN} and ("main", 1) in judgement.evict


@pytest.mark.parametrize("proofs", [None, ALONE], ids=["all", "alone"])
def test_dependents_of_a_writer_that_wrote_elsewhere_go_with_it(proofs: frozenset[Proof] | None) -> None:
    """The promised page keeps a former owner's bytes: what was written went to the skip slot."""
    rig = WriteRig(proofs=proofs)
    rig.start("w", "r", "o")
    rig.allocate("w", 1, 2)
    rig.allocate("o", 9)
    assert rig.guard.publish("w", 0, "k0")
    rig.adopt("r", ("k0", 1))
    rig.allocate("r", 3)
    right = rig.mapping({"w": (0, 5), "r": (4, 5), "o": (0, 1)})
    judgement = rig.write_step({"w": (0, 5), "r": (4, 5), "o": (0, 1)}, [right[0], 37, *right[2:]])
    assert kinds(judgement) == {"w": Kind.WRITE_FOREIGN, "r": Kind.WRITER_FLAGGED}
    assert judgement.withheld == {"w", "r"} and ("main", 1) in judgement.evict


def test_observed_writes_are_left_alone() -> None:
    """`observe` counts and reports; the engine writes where it wanted to."""
    rig = two(on_violation="observe")
    judgement = rig.write_step({"a": (5, 6), "b": (5, 6)}, [17, 17])
    assert only(judgement).action is Action.OBSERVED and not judgement.withheld
    assert rig.slots.tolist() == [17, 17]
    assert rig.guard.health().counters["writes_redirected"] == 0
    halting = two(on_violation="halt")
    assert halting.write_step({"a": (5, 6), "b": (5, 6)}, [17, 17]).halt
    halting = two(on_violation="halt")
    assert _with_padding(halting, {"a": (5, 6), "b": (5, 6)}, [9]).halt


def test_a_request_that_is_being_ended_writes_nowhere() -> None:
    """Until the engine has ended it, each later step of it is redirected as a whole, without another report."""
    rig = two(proofs=ALONE)
    assert aborted(rig.write_step({"a": (5, 6), "b": (5, 6)}, [17, 17])) == {"a"}
    judgement = rig.write_step({"a": (6, 7), "b": (6, 7)})
    assert judgement.withheld == {"a"} and not judgement.violations
    assert rig.slots.tolist() == [-1, 18]


@BACKENDS
def test_windows_may_send_a_token_nowhere(backend: str) -> None:
    """In a pool with windows a column may be null: the token's KV is nobody's loss there, and elsewhere it is."""
    for windowed in (True, False):
        rig = WriteRig(PoolSpec(name="main", num_pages=32, page_size=SIZE, windowed=windowed), backend=backend)
        rig.start("a")
        rig.guard.skip("a", 1)
        rig.columns["a", "main"] = 1
        rig.allocate("a", 3)
        judgement = rig.write_step({"a": (3, 5)})
        assert judgement.clean is windowed
        if not windowed:
            assert kinds(judgement) == {"a": Kind.WRITE_LOST}


def test_what_is_not_given_is_not_checked_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Without lengths or slots there is a warning, once per pool; the tag proof goes on."""
    rig = two()
    table = rig.tables["main"]
    for step in range(2):
        delta = rig.guard.step(["a"], [0], [6 + step])
        pending = rig.verifier.check(delta, {"main": PoolInputs(table=table)})
        verdicts = pending.resolve()
        assert verdicts.writes is None and verdicts.clean and rig.guard.judge(verdicts).clean
    assert capsys.readouterr().out.count("writes_not_checked") == 1
    off = two(write_check=False)
    assert not off.guard.setup.check_writes
    assert off.write_step({"a": (5, 6)}, [17]).clean
    assert not two(device_check=False).guard.setup.check_writes


def test_a_step_that_was_checked_late_still_has_both_kinds_of_records() -> None:
    """A failed guard salvages what the device flagged, be it read or write; messages pickle."""
    rig = two()
    pending = rig.start_step({"a": (5, 6), "b": (5, 6)}, [17, 17])
    assert pending.flagged_rows() == [0]
    verdicts = pickle.loads(pickle.dumps(pending.resolve()))
    assert verdicts.records.shape == (1, 2, 4) and verdicts.writes.shape == (1, 3, 4) and not verdicts.clean
    assert aborted(rig.guard.judge(verdicts)) == {"a"}
    assert GuardSetup(pools=(MAIN,), digest_key=1).check_writes
    with pytest.raises(ValueError, match="one each"):
        rig.guard.step(["b"], [1], [6], [5, 5])


def test_what_a_delta_says_of_writers() -> None:
    """A changed page comes with its tag and its writer; both are 0 once it is vacant. A suspect may write nowhere."""
    rig = two()
    state = rig.guard._books.state("a")
    rig.allocate("a", 7, 8)
    rig.guard.retire([5])
    rig.guard._books.tables[0].retire(8, None)
    delta = rig.guard.step(["a"], [0], [6], [5])
    section = delta.sections[0]
    pages = delta.array(section.tag_pages).tolist()
    writers = dict(zip(pages, delta.array(section.tag_writers).tolist(), strict=True))
    assert writers[7] == state.writer + 2 and writers[8] == 0
    assert delta.array(section.writer).tolist() == [state.writer] and delta.array(section.floor).tolist() == [4]
    assert NO_WRITER + (1 << 40) < 0
    assert GuardConfig(seed=1).write_check
    Verifier(rig.guard.setup, backend="numpy")
