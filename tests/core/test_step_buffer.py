"""The one buffer for a step's arrays: what is sent again, what is not, and that it always shows the last delta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from kvguard import step_buffer
from kvguard.step_buffer import StepBuffer
from kvguard.verifier import PoolInputs
from tests.core.support import Rig, aborted
from tests.core.test_short_ways import steady


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """No log lines."""

    def drop(*_: Any) -> Any:
        raise structlog.DropEvent

    structlog.configure(processors=[drop])
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_device_half_uses_an_upload_again_only_for_the_same_delta(backend: str) -> None:
    """Table rows, expectations, layout and tag changes: whatever differs is uploaded; what does not is not."""
    rig = Rig(backend=backend)
    rig.start("a", "b")
    rig.allocate("a", 1, 2, 3)
    rig.allocate("b", 4, 5, 6)
    verifier, tables = rig.verifier, rig._wrap(rig.tables)
    given = {"main": PoolInputs(table=tables["main"])}
    uploads: list[int] = []
    arrays: Any = verifier._arrays
    send = arrays.send

    def counted(device: Any, host: Any, words: int) -> None:
        uploads.append(words)
        send(device, host, words)

    arrays.send = counted

    def clean(rows: list[int], **inputs: PoolInputs) -> bool:
        rig.tables["main"][rows[0], :3], rig.tables["main"][rows[1], :3] = [1, 2, 3], [4, 5, 6]
        delta = rig.guard.step(["a", "b"], [0, 0], [12, 12])
        return rig.judge(verifier.check(delta, inputs or given, table_rows=rows)).clean

    assert clean([0, 1]) and len(uploads) == 1
    assert clean([0, 1]) and clean([0, 1]) and len(uploads) == 1
    rig.tables["main"][:] = 0
    assert clean([5, 2]) and len(uploads) == 2
    rig.guard.retire([9])
    rig.guard.drop("a", 1, 2)
    assert clean([5, 2]) and len(uploads) == 3, "another layout"
    rig.guard.drop("b", 0, 1)
    assert clean([5, 2]) and len(uploads) == 4, "other expectations"
    rig.start("c")
    rig.guard.allocate("c", [7])
    assert clean([5, 2]) and len(uploads) == 5, "tag changes alone"
    assert verifier.tags("main")[7] == rig.guard._books.tables[0].tag(7) != 0
    assert clean([5, 2]) and len(uploads) == 5
    other = rig.tables["main"].copy()
    other[5, 0] = 31
    wrapped = rig._wrap({"main": other})["main"]
    assert not clean([5, 2], main=PoolInputs(table=wrapped)), "another table is another table"


def test_a_layout_that_moved_is_read_where_it_lies_though_it_has_the_same_words() -> None:
    """A delta with the bytes of the last one, and other spans."""
    rig = steady()
    first = rig.delta("a", "b")
    assert rig.judge(rig.check(first)).clean
    second = rig.delta("a", "b")
    section = second.sections[0]
    swapped = section._replace(extent_start=section.extent_stop, extent_stop=section.extent_start)
    assert aborted(rig.judge(rig.check(second._replace(sections=(swapped,))))) == {"a", "b"}, "nothing is live"
    view = rig.verifier._buffer.view
    assert [view(span).tolist() for span in (swapped.extent_start, swapped.extent_stop)] == [[2, 2], [0, 0]]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_table_rows_are_filled_in_where_this_delta_has_them(backend: str) -> None:
    """The bytes of the last delta, and another place for the table rows."""
    buffer = StepBuffer(Rig(backend=backend).verifier._arrays)
    delta = steady().delta("a", "b")
    (section,) = delta.sections
    buffer.load(delta, [5, 2])
    assert buffer.view(section.table_row).tolist() == [5, 2]
    moved = section._replace(table_row=section.expected, expected=section.table_row)
    buffer.load(delta._replace(sections=(moved,)), [5, 2])
    assert buffer.view(moved.table_row).tolist() == [5, 2]
    assert buffer.view(moved.expected).tolist() == delta.array(section.table_row).tolist()
    buffer.load(delta, None)
    assert buffer.view((0, len(delta.packed))).tolist() == delta.packed.tolist()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_list_of_table_rows_that_is_changed_in_place_is_another_list(backend: str) -> None:
    """The caller's list is its own; one of another length is refused before anything is sent."""
    rig = Rig(backend=backend)
    rig.start("a")
    rig.allocate("a", 5)
    rig.tables["main"][3, 0] = 7
    given, rows = {"main": PoolInputs(table=rig._wrap(rig.tables)["main"])}, [0]

    def check() -> bool:
        return rig.judge(rig.verifier.check(rig.guard.step(["a"], [0], [4]), given, table_rows=rows)).clean

    assert check() and check()
    rows[0] = 3
    assert not check(), "row 3 reads page 7"
    delta = rig.guard.step(["a"], [0], [4])
    with pytest.raises(ValueError, match="2 table rows for 1 requests"):
        rig.verifier.check(delta, given, table_rows=[0, 1])


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_buffer_that_could_not_be_filled_keeps_nothing(backend: str, monkeypatch: Any) -> None:
    """What it held before is overwritten in part: the same words are sent again."""
    buffer, delta = StepBuffer(Rig(backend=backend).verifier._arrays), steady().delta("a", "b")
    buffer.load(delta, [5, 2])
    other = delta._replace(packed=delta.packed + 1)
    with monkeypatch.context() as broken:
        broken.setattr(buffer._arrays, "send", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            buffer.load(other, [5, 2])
    buffer.load(delta._replace(packed=delta.packed.copy()), [5, 2])
    (section,) = delta.sections
    assert buffer.view(section.expected).tolist() == delta.array(section.expected).tolist()


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_buffer_that_grew_or_met_many_layouts_shows_the_last_delta(backend: str, monkeypatch: Any) -> None:
    """Views of an outgrown buffer, and views that were thrown away, are made anew."""
    monkeypatch.setattr(step_buffer, "VIEWS_MAX", 3)
    rig, buffer = Rig(backend=backend), StepBuffer(Rig(backend=backend).verifier._arrays)
    for count in range(1, 40):
        rig.start(f"r{count}")
        rig.guard.allocate(f"r{count}", [count % 30 + 1])
        delta = rig.guard.step([f"r{row}" for row in range(1, count + 1)], [0] * count, [0] * count)
        buffer.load(delta, list(range(count, 0, -1)))
        (section,) = delta.sections
        assert buffer.view(section.table_row).tolist() == list(range(count, 0, -1))
        changes = (section.tag_pages, section.tag_values)
        for span in (section.expected, section.extent_start, section.extent_stop, *changes):
            assert buffer.view(span).tolist() == delta.array(span).tolist()
        assert len(buffer._views) <= 3


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_view_of_an_outgrown_buffer_is_made_anew(backend: str) -> None:
    """The same span shows what was loaded into the larger one."""
    rig, buffer = Rig(backend=backend), StepBuffer(Rig(backend=backend).verifier._arrays)
    names = [f"r{count}" for count in range(20)]
    rig.start(*names)
    buffer.load(rig.guard.step(names[:2], [0, 0], [0, 0]), [5, 2])
    assert buffer.view((0, 2)).tolist() == [5, 2]
    buffer.load(rig.guard.step(names, [0] * 20, [0] * 20), list(range(20, 40)))
    assert buffer.view((0, 2)).tolist() == [20, 21]
