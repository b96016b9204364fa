"""What a mutation is: one check that is taken out of the guard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One exact replacement in one file, and the test files of which one must go red."""

    name: str
    path: str
    tests: tuple[str, ...]
    old: str
    new: str


def of_file(path: str, *rows: tuple[str, str, str, str]) -> tuple[Mutation, ...]:
    """Rows of (name, test file, old, new) for one file."""
    return tuple(Mutation(name=name, path=path, tests=(test,), old=old, new=new) for name, test, old, new in rows)
