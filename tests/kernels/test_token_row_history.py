"""What the four operations are for: healthy use is never flagged, and a stolen page is, for whoever relies on it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvguard.kernels.events import ANYBODY, CODE, CONTENT, DOUBLE_ALLOCATION, PAGE
from tests.kernels.token_row_cases import PAGE_SIZES
from tests.kernels.token_row_history import Engine

BACKENDS = ("numpy", "torch")


@pytest.mark.parametrize("contents", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_healthy_histories_are_never_flagged(backend: str, contents: bool) -> None:
    """Prompts, decode, publications, prefixes, evictions and ends in any order: no event, no flag."""

    @given(st.integers(0, 2**32 - 1), st.sampled_from(PAGE_SIZES))
    @settings(max_examples=40, deadline=None)
    def check(seed: int, page_size: int) -> None:
        engine = Engine(backend=backend, page_size=page_size, seed=seed, contents=contents)
        for _ in range(40):
            engine.step()
            assert not engine.event.any()
            assert not engine.flagged() if engine.live else True

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hit_on_a_sound_path_of_other_content_is_flagged_for_whoever_has_it(backend: str) -> None:
    """After any history: another path of the same length, all of whose pages are alive, current and the tree's."""

    @given(st.integers(0, 2**32 - 1), st.sampled_from(PAGE_SIZES), st.integers(0, 2**32 - 1))
    @settings(max_examples=40, deadline=None)
    def check(seed: int, page_size: int, flipped: int) -> None:
        engine = Engine(backend=backend, page_size=page_size, seed=seed, contents=True)
        for _ in range(25):
            engine.step()
        paths = [path for path in engine.tree if len(path) < engine.pages_max]
        assume(paths)
        path = engine.random.choice(paths)
        if len(engine.live) == len(engine.table):
            engine.finish(engine.random.choice(list(engine.live)))
        row = next(row for row in range(len(engine.table)) if row not in engine.live)
        assume(engine.tree.get(path) is not None and len(engine.free) > 1)
        own = list(path)
        own[flipped % len(own)] ^= 1
        engine.admit(row, path, 1, says=tuple(own))
        assert engine.event.tolist() == [CONTENT, engine.tree[path], 0, 0]
        assert engine.flagged() == {row}

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_record_that_is_put_on_pages_of_other_content_is_flagged_and_so_is_who_adopts_from_it(backend: str) -> None:
    """The tree takes the row's second page for one that it has, and the third for new; the others have done nothing."""
    engine = Engine(backend=backend, page_size=2, seed=1, contents=True)
    engine.admit(0, (), 4)
    engine.publish(0)
    (path,) = [path for path in engine.tree if len(path) == 2]
    engine.admit(1, (), 0, says=(path[0], 1 - path[1], 0))
    engine.extend({1: 6}, {})
    wrong = engine.tree[path]
    engine.tree[path[0], 1 - path[1]] = wrong
    engine.publish(1)
    assert engine.event.tolist() == [CONTENT, wrong, 1, 0]
    engine.event[:] = 0
    engine.admit(2, (path[0], 1 - path[1], 0), 1)
    engine.admit(3, path, 1)
    assert engine.flagged() == {1, 2}
    assert not engine.event.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_which_nothing_was_said_are_nobodys(backend: str) -> None:
    """A publisher that said nothing of itself shares nothing."""
    engine = Engine(backend=backend, page_size=2, seed=1, contents=True)
    engine.admit(0, (), 4)
    engine.publish(0)
    (path,) = [path for path in engine.tree if len(path) == 2]
    engine.books["page_content"][engine.tree[path]] = 0
    engine.admit(1, path[:1], 1)
    engine.admit(2, path, 1)
    assert engine.event.tolist() == [CONTENT, engine.tree[path], 0, 0]
    assert engine.flagged() == {2}


@pytest.mark.parametrize("theft", ["retired", "restamped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stolen_page_is_flagged_for_its_owner_and_for_all_who_adopt_from_it_later(backend: str, theft: str) -> None:
    """Any page that a row has of its own; the row publishes unaware, and each prefix it added is poisoned."""

    @given(st.integers(0, 2**32 - 1), st.sampled_from(PAGE_SIZES), st.booleans())
    @settings(max_examples=40, deadline=None)
    def check(seed: int, page_size: int, judged_before: bool) -> None:
        engine = Engine(backend=backend, page_size=page_size, seed=seed)
        for _ in range(15):
            engine.step()
        own = [row for row, request in engine.live.items() if len(request.pages) > request.shared]
        assume(own)
        victim = engine.random.choice(own)
        request = engine.live[victim]
        page = engine.random.choice(request.pages[request.shared :])
        if len(engine.live) == len(engine.table):
            engine.finish(engine.random.choice([row for row in engine.live if row != victim]))
        thief = next(row for row in range(len(engine.table)) if row not in engine.live)
        if theft == "retired":
            engine.retire([page], ANYBODY)
            engine.free.remove(page)
            assert not engine.event.any()
        else:
            free, engine.free = engine.free, [page]
            engine.admit(thief, (), 1)
            engine.free = free
            assert engine.event[[CODE, PAGE]].tolist() == [DOUBLE_ALLOCATION, page]
        if judged_before:
            assert engine.flagged() == {victim}
        known = set(engine.tree)
        engine.publish(victim)
        # Where the tree has the same already, the victim may give back what is the thief's by now, and nobody asks.
        gone = page not in request.pages and not engine.books["page_owner"][page]
        robbed = {thief} & set(engine.live) if gone else set()
        assert engine.flagged() == {victim} | robbed
        for path in set(engine.tree) - known:
            engine.live.pop(thief, None)
            engine.admit(thief, path)
            assert engine.flagged() == {victim, thief}

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_of_the_tree_that_is_stolen_is_flagged_for_every_reader(backend: str) -> None:
    """Those who have adopted it and those who are going to."""
    engine = Engine(backend=backend, page_size=2, seed=1)
    engine.admit(0, (), 6)
    engine.publish(0)
    (path,) = [path for path in engine.tree if len(path) == 3]
    engine.admit(1, path, 3)
    engine.admit(2, path[:1], 3)
    assert not engine.flagged()
    engine.retire([engine.tree[path[:2]]], ANYBODY)
    engine.admit(3, path, 1)
    assert engine.flagged() == {0, 1, 3}


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_page_that_the_tree_names_twice_satisfies_neither_node(backend: str, freed: bool) -> None:
    """Freed under the tree, or given out though it was not free; then filled and published behind the same prefix.

    By tags alone the two nodes are the same path.
    """
    engine = Engine(backend=backend, page_size=2, seed=1)
    engine.admit(0, (), 4)
    engine.publish(0)
    (path,) = [path for path in engine.tree if len(path) == 2]
    engine.finish(0)
    page = engine.tree[path]
    if freed:
        engine.retire([page], ANYBODY)
    free, engine.free = engine.free, [page]
    engine.admit(1, path[:1], 2)
    engine.free = free
    engine.live[1].says[-1] = 1 - path[-1]
    engine.publish(1)
    assert not engine.flagged()
    (other,) = [other for other in engine.tree if other != path and engine.tree[other] == page]
    engine.admit(2, path, 1)
    engine.admit(3, other, 1)
    assert engine.flagged() == {2, 3}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_flagged_row_computed_is_adopted_by_nobody_even_if_its_table_is_right_again(backend: str) -> None:
    """Its step wrote nowhere: the pages that it publishes hold what was there before."""
    engine = Engine(backend=backend, page_size=2, seed=1)
    engine.admit(0, (), 6)
    entry = engine.table[0, 2]
    engine.table[0, 2] += 2
    assert engine.flagged(enforce=True) == {0}
    engine.table[0, 2] = entry
    assert engine.flagged() == {0}
    engine.publish(0)
    (path,) = [path for path in engine.tree if len(path) == 3]
    engine.admit(1, path, 1)
    engine.finish(0)
    engine.admit(0, (), 3)
    assert engine.flagged() == {1}, "the next request in the row has a digest of its own"
