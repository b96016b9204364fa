"""Counters, the heartbeat and structured log events.

Events go through structlog under the logger name `kvguard`; nothing here configures structlog, which is the
application's business. Counters may be read from any thread: each is a plain integer that one thread writes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any


@cache
def _logger() -> Any:
    import structlog

    return structlog.get_logger("kvguard")


def emit(event: str, *, severity: str = "info", **fields: Any) -> None:
    """Log one structured event, for example `emit("violation", severity="error", id=...)`.

    A log pipeline that raises is reported on standard error and costs nothing else: least of all an abort.
    """
    try:
        getattr(_logger(), severity)(event, **fields)
    except Exception as error:
        print(f"kvguard: cannot log {event}: {type(error).__name__}: {error}", file=sys.stderr)


@dataclass
class Counters:
    """What the guard has seen since it was made.

    writes_redirected counts tokens and padding lanes that would have been written to a wrong slot.
    steps_seen - steps_verified is the number of steps in flight, plus those whose verdict never came.
    """

    steps_seen: int = 0
    steps_verified: int = 0
    rows_seen: int = 0
    rows_verified: int = 0
    violations: int = 0
    aborted: int = 0
    refused: int = 0
    observed: int = 0
    writes_redirected: int = 0
    quarantined: int = 0
    quarantine_refused: int = 0
    guard_faults: int = 0
    adapter_errors: int = 0


@dataclass(frozen=True, kw_only=True)
class Health:
    """A snapshot for a health endpoint.

    armed      the guard checks; False after a fault of its own with on_guard_error = disarm
    fit        no storm of violations: the breaker has not tripped
    alive      no more than the configured number of steps wait for a verdict
    in_flight  steps seen and not yet judged
    """

    armed: bool
    fit: bool
    alive: bool
    in_flight: int
    quarantined_pages: int
    counters: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether this replica should keep getting traffic."""
        return self.armed and self.fit and self.alive


def counter_values(counters: Counters) -> dict[str, int]:
    """The counters as a plain dictionary."""
    return asdict(counters)
