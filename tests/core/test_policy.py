"""Policy: a bound on quarantine, a breaker against storms, and how the guard uses both."""

from __future__ import annotations

import pytest
import structlog

from kvguard.policy import Breaker, Quarantine
from kvguard.pools import PoolSpec
from kvguard.violation import Action, Kind
from tests.core.support import MAIN, TAG_ONLY, Rig, kinds


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_quarantine_takes_pages_up_to_its_bound() -> None:
    """Pages past the bound are refused and counted; a page that is in already costs nothing."""
    quarantine = Quarantine(2)
    assert quarantine.mark("main", 1) and quarantine.mark("main", 1)
    assert not quarantine.full
    assert quarantine.mark("other", 1)
    assert quarantine.full and len(quarantine) == 2
    assert not quarantine.mark("main", 2)
    assert quarantine.mark("main", 1)
    assert quarantine.refused == 1
    assert ("main", 2) not in quarantine and ("other", 1) in quarantine


def test_quarantine_lets_go_of_one_pool_at_a_time() -> None:
    """Release returns the pool's pages in order and makes room; the other pool's stay."""
    quarantine = Quarantine(3)
    for pool, page in (("main", 9), ("main", 2), ("other", 5)):
        quarantine.mark(pool, page)
    assert quarantine.release("main") == [2, 9]
    assert quarantine.release("main") == []
    assert len(quarantine) == 1 and ("other", 5) in quarantine
    assert quarantine.mark("main", 3)


def test_a_quarantine_of_nothing_refuses_everything() -> None:
    """A bound of 0 switches quarantine off, and says how often it would have acted."""
    quarantine = Quarantine(0)
    assert not quarantine.mark("main", 1)
    assert quarantine.refused == 1


def test_the_breaker_trips_on_the_last_violation_of_a_window() -> None:
    """Three within ten seconds trip it, exactly once; it stays tripped however long nothing happens."""
    clock = FakeClock()
    breaker = Breaker(3, 10.0, clock)
    assert not breaker.count()
    clock.now_s += 5.0
    assert not breaker.count()
    clock.now_s += 5.0
    assert breaker.count() and breaker.tripped
    assert not breaker.count()
    clock.now_s += 1e6
    assert not breaker.count()
    assert breaker.tripped


def test_violations_older_than_the_window_do_not_count() -> None:
    """Two and one with more than the window between them never trip."""
    clock = FakeClock()
    breaker = Breaker(3, 10.0, clock)
    for pause_s in (0.0, 1.0, 9.5, 8.0, 9.0):
        clock.now_s += pause_s
        assert not breaker.count()
    assert not breaker.tripped


def test_a_reset_forgets_the_storm() -> None:
    """After reset it takes a whole storm again."""
    clock = FakeClock()
    breaker = Breaker(2, 10.0, clock)
    breaker.count()
    assert breaker.count()
    breaker.reset()
    assert not breaker.tripped
    assert not breaker.count()
    assert breaker.count()


def test_a_breaker_of_zero_never_trips() -> None:
    """0 violations means no breaker."""
    breaker = Breaker(0, 10.0, FakeClock())
    assert not any(breaker.count() for _ in range(100))
    assert not breaker.tripped


def storm(rig: Rig, pages: int) -> None:
    """One request loses this many pages."""
    rig.start("a")
    rig.allocate("a", *range(1, pages + 1))
    rig.guard.retire(range(1, pages + 1))
    rig.run("a")


def test_pages_past_the_quarantine_bound_are_reported_and_stay_in_use() -> None:
    """Two of four lost pages are quarantined, the others are counted as refused, logged, and may be handed out."""
    rig = Rig(proofs=TAG_ONLY, quarantine_pages_max=2)
    with structlog.testing.capture_logs() as logs:
        storm(rig, 4)
    full = [entry for entry in logs if entry["event"] == "quarantine_full"]
    assert [(entry["page"], entry["bound"]) for entry in full] == [(3, 2), (4, 2)]
    health = rig.guard.health()
    assert health.quarantined_pages == 2
    assert (health.counters["quarantined"], health.counters["quarantine_refused"]) == (2, 2)
    rig.start("b")
    assert rig.allocate("b", 1, 2, 3, 4) == [3, 4]


def test_a_page_that_could_not_be_quarantined_is_not_said_to_be() -> None:
    """The report of a violation past the bound does not claim a quarantine."""
    rig = Rig(proofs=TAG_ONLY, quarantine_pages_max=0)
    storm(rig, 1)
    assert not rig.guard.violations[0].quarantined


def test_a_storm_makes_the_replica_unfit_and_goes_on_enforcing() -> None:
    """breaker_action = unfit: health says so, the log says so once, and violations still abort."""
    rig = Rig(breaker_violations=2)
    rig.start("a", "b")
    rig.allocate("a", 1)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert rig.allocate("b", 1) == []
    assert [entry["event"] for entry in logs].count("breaker_tripped") == 1
    health = rig.guard.health()
    assert not health.fit and not health.ok and health.armed
    assert rig.guard.health().counters["refused"] == 3
    rig.write("a", 0, 9)
    assert rig.run("a").withheld == {"a"}


def test_a_storm_can_make_the_guard_fall_back_to_observing() -> None:
    """breaker_action = observe: after the storm operations pass and nothing is withheld, until a reset."""
    rig = Rig(breaker_violations=2, breaker_action="observe")
    rig.start("a", "b", "c")
    rig.allocate("a", 1)
    assert rig.allocate("b", 1, 1) == []
    assert not rig.guard.health().fit
    assert rig.allocate("b", 1) == [1]
    assert rig.guard.violations[-1].action is Action.OBSERVED
    judgement = rig.run("a", "b")
    assert kinds(judgement) == {"a": Kind.STALE_PAGE} and not judgement.withheld
    assert rig.row("a")[0] == 1
    rig.guard.reset()
    assert rig.guard.health().fit
    assert rig.allocate("c", 1) == []


def test_what_a_step_enforces_is_fixed_when_it_is_built() -> None:
    """A breaker that trips while a step is in flight does not let that step's flagged token out."""
    rig = Rig(breaker_violations=1, breaker_action="observe")
    rig.start("a", "b")
    rig.allocate("a", 1)
    rig.allocate("b", 2)
    rig.write("a", 0, 9)
    pending = rig.launch("a", "b")
    rig.allocate("b", 1)
    assert not rig.guard.health().fit
    assert rig.judge(pending).withheld == {"a"}
    rig.write("b", 0, 9)
    assert not rig.run("b").withheld


@pytest.mark.parametrize(
    "fields",
    [
        {"num_pages": 0},
        {"num_pages": 4, "page_size": 0},
        {"num_pages": 4, "null_page": 4},
        {"num_pages": 4, "null_page": -1},
        {"num_pages": 4, "page_size": 6, "split": 4},
        {"num_pages": 4, "split": 0},
    ],
)
def test_an_impossible_pool_is_refused(fields: dict[str, int]) -> None:
    """A pool that cannot exist is an error when it is named, not a wrong verdict later."""
    with pytest.raises(ValueError, match="pool 'main'"):
        PoolSpec(**fields)  # type: ignore[arg-type]


def test_a_guard_needs_pools_with_names_of_their_own() -> None:
    """No pool at all, or two of one name, and a level of off, are refused."""
    with pytest.raises(ValueError, match="names must differ"):
        Rig(MAIN, MAIN)
    with pytest.raises(ValueError, match="level is off"):
        Rig(level="off")
