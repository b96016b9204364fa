"""What a fault of a KV transfer may touch: the connectors' own lists and messages on either side, and the page pools.

As with `target.py`, nothing here knows of a guard.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvguard.fault_injection.target import PageTarget


@dataclass(frozen=True, kw_only=True)
class TransferView:
    """A transfer under way, on either side.

    pages         the connector's list: what it reads from, or writes to, in column order; empty: not allocated yet
    first_column  the first column whose bytes matter: earlier ones are shared with the receiver's prefix cache
    done_parts    parts that were copied or written; parts: of how many
    waiting_parts parts that came and are about to be written
    worth         columns that the request has still to recite once it decodes, nearest first
    """

    request: str
    pages: tuple[int, ...]
    first_column: int
    done_parts: int
    parts: int
    waiting_parts: int
    worth: tuple[int, ...]


class SourceTarget(PageTarget, Protocol):
    """The prefill side, between two ticks."""

    def outgoing(self) -> Sequence[TransferView]:
        """Transfers under way, oldest first."""

    def used_pages(self) -> dict[int, tuple[str, ...]]:
        """page -> requests, for every page that was ever handed out; nobody's now: an empty tuple."""

    def read_from(self, request: str, column: int, page: int) -> None:
        """The connector reads the column from another page."""

    def change_format(self, request: str, rng: random.Random) -> str:
        """The connector sends this transfer in another format of the same size; says which."""


class SinkTarget(PageTarget, Protocol):
    """The decode side, between two ticks."""

    def incoming(self) -> Sequence[TransferView]:
        """Transfers that have begun to come, oldest first."""

    def write_to(self, request: str, column: int, page: int) -> None:
        """The connector writes the column to another page."""

    def lose_page(self, request: str, column: int) -> None:
        """The column's page is missing from every part that waits to be written."""

    def blank_page(self, request: str, column: int) -> None:
        """The column's page comes under its own label in every waiting part, but its bytes were never copied."""

    def finished(self) -> Sequence[tuple[TransferView, tuple[str, ...]]]:
        """Recent transfers that ended well, with the requests that use any of their written pages now."""

    def repeat(self, request: str) -> None:
        """Every part of a finished transfer comes once more."""
