"""Violation reports: what they say, what they never say, and that losing one loses nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvguard.recorder import PageEvent, PageHistory
from kvguard.report import format_tag, report_json, report_text, write_report
from kvguard.violation import ADVICE, MEANING, Action, Kind, Proof
from tests.core.support import Rig, sample_violation

HISTORY = PageHistory(
    pool="main",
    page=9,
    events=(PageEvent(3, "allocated", 0x1111, "alice"), PageEvent(7, "violation", 0x2222, None, "double-free")),
)


def test_the_text_says_what_where_who_and_what_to_do() -> None:
    """Each part of a violation is in the report, and the last but one line is a summary to grep for."""
    text = report_text(sample_violation(history=HISTORY))
    for part in (
        "VIOLATION kvg-1-1: stale-page",
        "request alice was about to read a page that has been handed to someone else",
        "pool main, step 12, block-table row 3",
        "column 2 (tokens 32 to 47)",
        "page      9, held now by bob",
        "promised  tag 0x0000000000001111",
        "found     tag 0x0000000000002222",
        "row       column 1: 5 instead of 6",
        "detail    one more thing",
        "follows   violation kvg-1-0",
        "history of page 9, oldest first:",
        "step      3  allocated   tag 0x0000000000001111 by alice",
        "step      7  violation   tag 0x0000000000002222 (double-free)",
        "withheld its token of the step; everyone else goes on; page 9 is quarantined",
        f"next      {ADVICE[Kind.STALE_PAGE]}",
    ):
        assert part in text
    assert text.splitlines()[-2] == (
        "SUMMARY: kvguard: stale-page pool=main page=9 request=alice owner=bob id=kvg-1-1"
    )
    assert text.index("step      3") < text.index("step      7")


def test_what_is_not_known_is_left_out() -> None:
    """An unlocated violation of no request names the allocator and shows no column, page, row, cause or history."""
    text = report_text(
        sample_violation(
            kind=Kind.DOUBLE_FREE, action=Action.REFUSED, request=None, row=-1, column=-1, page=-1, expected_tag=0,
            found_tag=0, owner=None, row_entries=(), promised_pages=(), cause=None, quarantined=False, detail="",
        )
    )  # fmt: skip
    assert "the allocator freed a page that is free already" in text
    for part in ("column", "page      ", "promised  ", "row  ", "follows", "history", "quarantined", "detail"):
        assert part not in text


def test_long_differences_are_cut() -> None:
    """Of a row that is wrong everywhere the first eight columns are shown, and how many more there are."""
    text = report_text(sample_violation(row_entries=tuple(range(20)), promised_pages=tuple(range(1, 21))))
    assert "column 7: 7 instead of 8; and 12 more" in text and "column 8:" not in text


@pytest.mark.parametrize("action", list(Action))
def test_every_action_is_told_apart(action: Action) -> None:
    """The report says what the guard did."""
    texts = {report_text(sample_violation(action=other)) for other in Action}
    assert len(texts) == len(Action)
    assert str(action) in sample_violation(action=action).message


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_meaning_and_an_advice(kind: Kind) -> None:
    """No kind is reported without words for it."""
    text = report_text(sample_violation(kind=kind))
    assert MEANING[kind] in text and ADVICE[kind] in text
    assert MEANING[kind] in sample_violation(kind=kind).message


def test_the_json_is_the_same_as_data() -> None:
    """Every field of a violation is in the JSON, tags as strings, and it survives a round trip."""
    violation = sample_violation(history=HISTORY)
    data = json.loads(json.dumps(report_json(violation)))
    for name in ("id", "pool", "request", "step", "row", "column", "page", "owner", "cause", "quarantined", "detail"):
        assert data[name] == getattr(violation, name)
    assert (data["proof"], data["kind"], data["action"]) == ("tag", "stale-page", "aborted")
    assert (data["expected_tag"], data["found_tag"]) == ("0x0000000000001111", "0x0000000000002222")
    assert (data["row_entries"], data["promised_pages"]) == ([4, 5, 9], [4, 6, 9])
    assert data["message"] == violation.message and data["time_s"] == 1.5
    assert data["history"][0] == {
        "step": 3, "what": "allocated", "tag": "0x0000000000001111", "request": "alice", "detail": "",
    }  # fmt: skip
    assert len(data["history"]) == 2 and "content" not in data
    assert format_tag(0) == "vacant"


def test_both_files_are_written_whole(tmp_path: Path) -> None:
    """Text and JSON lie in the folder, which is made, and no partial file is left."""
    folder = tmp_path / "a" / "b"
    path = write_report(folder, sample_violation(), content="secret")
    assert path.read_text() == report_text(sample_violation(), content="secret") + "\n"
    assert json.loads((folder / "kvg-1-1.json").read_text()) == report_json(sample_violation(), content="secret")
    assert sorted(entry.name for entry in folder.iterdir()) == ["kvg-1-1.json", "kvg-1-1.txt"]


def broken(**settings: Any) -> Rig:
    """A rig whose request a is about to read a page that was freed."""
    rig = Rig(proofs=frozenset({Proof.TAG}), **settings)
    rig.start("a")
    rig.allocate("a", 1)
    rig.guard.retire([1])
    return rig


@pytest.mark.parametrize("asked", [False, True])
def test_content_is_shown_only_to_those_who_asked_for_it(tmp_path: Path, asked: bool) -> None:
    """Without report_content nothing of a request's text is in any file, even if an adapter offers it."""
    rig = broken(report_dir=tmp_path, report_content=asked)
    rig.guard.show_content(lambda request: f"the prompt of {request}")
    rig.run("a")
    files = sorted(tmp_path.iterdir())
    assert [path.suffix for path in files] == [".json", ".txt"]
    assert files[0].stem == rig.guard.violations[0].id
    assert all(("the prompt of a" in path.read_text()) is asked for path in files)


def test_asking_for_content_that_no_adapter_offers_is_fine(tmp_path: Path) -> None:
    """report_content without an adapter's help gives a report without content."""
    rig = broken(report_dir=tmp_path, report_content=True)
    assert rig.run("a").withheld == {"a"}
    assert "content" not in json.loads(next(tmp_path.glob("*.json")).read_text())


def test_control_plane_violations_are_written_too(tmp_path: Path) -> None:
    """A refused operation leaves a report as well, each violation under its own id."""
    rig = Rig(report_dir=tmp_path)
    rig.guard.retire([5])
    rig.guard.retire([6])
    assert {path.stem for path in tmp_path.glob("*.txt")} == {violation.id for violation in rig.guard.violations}
    assert len(rig.guard.violations) == 2


def test_without_a_folder_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """report_dir unset means no files, wherever the process runs."""
    monkeypatch.chdir(tmp_path)
    broken().run("a")
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_does_not_lose_the_abort(tmp_path: Path) -> None:
    """The disk says no: the request is aborted all the same, and the log has both."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    rig = broken(report_dir=blocked)
    with structlog.testing.capture_logs() as logs:
        assert rig.run("a").withheld == {"a"}
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["violation", "report_not_written"]


def test_an_adapter_that_fails_to_show_content_does_not_lose_the_abort(tmp_path: Path) -> None:
    """content_of raises, or returns what no file can hold: the request is aborted all the same."""

    def fails(request: str) -> str:
        raise KeyError(request)

    for content_of in (fails, lambda request: "\ud800"):
        rig = broken(report_dir=tmp_path, report_content=True)
        rig.guard.show_content(content_of)
        assert rig.run("a").withheld == {"a"}


def test_the_client_message_names_the_report_and_no_content() -> None:
    """The one line for a client holds the violation's id, which is the name of the report."""
    message = sample_violation().message
    assert message.startswith("kvguard kvg-1-1: request alice") and message.endswith("; aborted")
