"""SGLang's kv_canary and kvguard over the same faults: what the matrix must say, measured again.

kv_canary at its defaults everywhere; with the token assert where that is what finds a fault. The committed tables in
bench/results hold all settings.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from bench.canary_faults import CASES  # noqa: E402
from bench.canary_matrix import LEVELS, markdown, measure  # noqa: E402
from tests.sglang.apart import Child  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
ONLY_A_TAG_SEES = ("not_rewritten", "not_reused", "zeroed")
NOT_AT_DEFAULTS = ("tail_freed", "tail_twice", "stale_row")


def measured(kept: dict[str, Any]) -> list[dict[str, Any]]:
    """The matrix with kv_canary at its defaults."""
    logging.disable(logging.WARNING)
    return list(measure(keys="D"))


def weighed(kept: dict[str, Any]) -> dict[str, float]:
    """Bytes that are touched per context token and step."""
    from bench.canary_bytes import all_bytes

    return {line["who"]: line["touched"] for line in all_bytes()}


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """It, from a process of its own: the hooks stay in SGLang's functions, and other tests look at those."""
    child = Child()
    try:
        return {row["name"]: row for row in child.call(measured)}
    finally:
        child.hang_up()


def verdict(row: dict[str, Any], column: str) -> str:
    return str(row["columns"][column]["verdict"])


def test_a_tag_sees_in_time_all_that_kv_canary_sees_at_its_defaults(rows: dict[str, Any]) -> None:
    """Where a tag can see the fault at all; and it names the victims and nobody else."""
    both = 0
    for case in CASES:
        if case.healthy or case.needs:
            continue
        row = rows[case.name]
        assert verdict(row, "kvguard") == "before", case.name
        assert row["columns"]["kvguard"]["flagged besides the victims"] == [], case.name
        both += verdict(row, "D") == "before"
    assert both >= 5


@pytest.mark.parametrize("name", [*ONLY_A_TAG_SEES, *NOT_AT_DEFAULTS])
def test_what_kv_canary_misses_at_its_defaults_a_tag_sees_in_time(rows: dict[str, Any], name: str) -> None:
    assert verdict(rows[name], "D") == "never"
    assert verdict(rows[name], "kvguard") == "before"


@pytest.mark.parametrize(("column", "level"), LEVELS.items())
def test_what_needs_more_is_never_called_caught(rows: dict[str, Any], column: str, level: str) -> None:
    for case in CASES:
        if needs := case.needed_beyond(level):
            assert verdict(rows[case.name], column) == f"later: {needs}"
            assert rows[case.name]["columns"][column]["measured"] == "never", case.name


def test_what_needs_content_keys_is_seen_in_time_by_them(rows: dict[str, Any]) -> None:
    """And what tags see, they see at level `keys` as well; nobody but the victims is flagged."""
    by_keys = [case.name for case in CASES if case.needs == "keys"]
    assert by_keys == ["phantom", "other_tenant"]
    for case in CASES:
        if case.needs in (None, "keys") and not case.healthy:
            assert verdict(rows[case.name], "kvguard keys") == "before", case.name
            assert rows[case.name]["columns"]["kvguard keys"]["flagged besides the victims"] == [], case.name


def test_healthy_histories_are_clean_for_kvguard(rows: dict[str, Any]) -> None:
    healthy = [case.name for case in CASES if case.healthy]
    assert {"clean", "loaded_back", "handed_over"} == set(healthy)
    for name in healthy:
        assert {verdict(rows[name], column) for column in LEVELS} == {"clean"}, rows[name]
    # The history would prove little without these.
    assert all(rows["clean"]["counts"].values()), rows["clean"]["counts"]
    assert verdict(rows["clean"], "D") == "clean"
    assert verdict(rows["loaded_back"], "D") == "false hit"


def test_the_committed_tables_are_what_is_measured(rows: dict[str, Any]) -> None:
    """For the columns that are measured here, and the Markdown is that of the JSON."""
    folder = ROOT / "bench" / "results"
    report = json.loads((folder / "canary_matrix.json").read_text())
    assert [row["name"] for row in report["rows"]] == [case.name for case in CASES]
    for row in report["rows"]:
        for column in ("D", *LEVELS):
            assert row["columns"][column] == rows[row["name"]]["columns"][column], row["name"]
    table = markdown(report)
    assert (folder / "canary_matrix.md").read_text().endswith(table)
    assert table in (ROOT / "docs" / "sglang.md").read_text()


def test_the_plan_of_kv_canary_weighs_152_bytes_a_token() -> None:
    """And kvguard's check 4 and a tag per page."""
    child = Child()
    try:
        lines = child.call(weighed)
    finally:
        child.hang_up()
    assert lines["kv_canary D"] == 152
    assert lines["kvguard tags, pages of 1"] == 12
    assert lines["kvguard tags, pages of 16"] == 4.5
