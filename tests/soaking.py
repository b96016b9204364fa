"""What every soak asks of a guard that ran at some level, whichever engine it watched."""

from __future__ import annotations

from typing import Any

from kvguard.guard import Guard
from kvguard.violation import Proof

PROOFS = {
    "tags": {Proof.TAG, Proof.WRITE_SLOT, Proof.CONTROL_PLANE, Proof.TRANSFER},
    "keys": {Proof.TAG, Proof.WRITE_SLOT, Proof.CONTROL_PLANE, Proof.TRANSFER, Proof.CONTENT_KEY},
}
"""Level -> what runs at it. A soak at `keys` is one at `tags` as well."""
HEALTHY = ("steps_seen", "steps_verified", "rows_seen", "rows_verified")
"""What a guard counts that has found nothing."""


def assert_found_nothing(guard: Guard | None, level: str) -> None:
    """It runs every proof of the level, and neither refused a hit nor reported anything else."""
    assert guard is not None and guard.armed
    assert_level(guard, level)
    assert [violation.message for violation in guard.violations] == []
    assert_counted_nothing(guard.health().counters)


def assert_level(guard: Guard, level: str) -> None:
    """The level's checks are on: pages and writes on the device, contents where the level has them."""
    assert guard.config.level == level and guard._books.proofs == PROOFS[level]
    assert guard.setup.check and guard.setup.check_writes and guard.wants_contents == (level == "keys")


def assert_counted_nothing(counters: dict[str, Any]) -> None:
    """No violation of any kind in these counters: `refused` ones are hits that were cut, or frees."""
    assert {name: count for name, count in counters.items() if count and name not in HEALTHY} == {}
