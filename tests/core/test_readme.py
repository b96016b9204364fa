"""The README's lines run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvguard.config import GuardConfig

ROOT = Path(__file__).resolve().parents[2]


class Allocator:
    """The reader's own allocator, as small as it gets."""

    def __init__(self) -> None:
        self.free_pages = list(range(1, 4096))

    def alloc(self, count: int) -> list[int]:
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    def free(self, pages: list[int]) -> None:
        self.free_pages = pages + self.free_pages


def run_readme(**extra: Any) -> dict[str, Any]:
    """Execute the Python block of the README with the names that it leaves to the reader."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    ended: list[tuple[str, str]] = []
    names: dict[str, Any] = {
        "my_allocator": Allocator(),
        "block_table": np.zeros((4, 8), np.int32),
        "row": 2,
        "tokens": 40,
        "forward": lambda table: [7],
        "end_with_error": lambda request, message: ended.append((request, message)),
        "ended": ended,
        **extra,
    }
    exec(blocks[0], names)  # noqa: S102
    return names


def test_the_readme_guards_an_allocator() -> None:
    """The ten lines run clean on a sound allocator and give every page back."""
    names = run_readme()
    assert names["judgement"].clean and names["ended"] == []
    assert len(names["my_allocator"].free_pages) == 4095
    assert len([line for line in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
                .splitlines() if line.strip() and not line.startswith(("from ", "import "))]) <= 10


def test_the_readme_aborts_a_request_whose_row_is_wrong() -> None:
    """The same lines end the request when its block-table row does not hold its pages."""

    class Crossed(np.ndarray[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, [page + 5 for page in value] if isinstance(value, list) else value)

    names = run_readme(block_table=np.zeros((4, 8), np.int32).view(Crossed))
    assert [request for request, _ in names["ended"]] == ["req-1"]
    assert "kvguard kvg-" in names["ended"][0][1]


@pytest.mark.parametrize("page", ["configuration.md"])
def test_the_documentation_names_every_setting(page: str) -> None:
    """docs/configuration.md has a row for each field of GuardConfig, with its default."""
    text = (ROOT / "docs" / page).read_text()
    for row in GuardConfig().explain():
        assert f"| `{row.name}` |" in text, row.name


def test_every_link_of_the_documentation_resolves() -> None:
    """Relative links in README and docs point to files that exist."""
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), (document.name, target)
