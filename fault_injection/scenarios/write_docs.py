"""Writes the table of docs/scenarios.md: `python -m kvguard.fault_injection.scenarios.write_docs`, at the root."""

from __future__ import annotations

from pathlib import Path

from kvguard.fault_injection.scenarios.table import docs_table

PAGE = Path("docs/scenarios.md")
MARK = "<!-- generated: python -m kvguard.fault_injection.scenarios.write_docs -->\n"


def with_table(page: str) -> str:
    """The page with what stands behind its mark made anew. ValueError if it has no mark."""
    head, mark, _ = page.partition(MARK)
    if not mark:
        raise ValueError(f"no line {MARK!r}")
    return f"{head}{MARK}\n{docs_table()}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
