"""Every check of the guard is held by a test: taken out, something goes red."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvguard.kernels.host_check import is_built
from tools.mutate import (
    MutationError,
    Outcome,
    check_tree,
    mutated_text,
    run_all,
    source_tree,
    try_mutation,
    usable_hints,
)
from tools.mutation import Mutation
from tools.mutations import MUTATIONS, TAGS

pytestmark = pytest.mark.mutation

ROOT = Path(__file__).resolve().parents[2]
HARMLESS = Mutation(
    name="harmless",
    path="kvguard/tags.py",
    tests=(TAGS,),
    old="    return random.Random(f\"kvguard-digest-{seed}\").getrandbits(64)",
    new="    return random.Random(f\"kvguard-digest-{seed}\").getrandbits(64)  # as before",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """All mutations, run once; the unmutated copy was green."""
    return {outcome.name: outcome for outcome in run_all()}


@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS])
def test_a_guard_without_this_check_turns_a_test_red(outcomes: dict[str, Outcome], name: str) -> None:
    """One of the named tests fails once this is taken out of the guard."""
    if name.startswith("cuda: ") and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("CUDA SOURCE NOT RUN: no C++ compiler here")
    if name.startswith(("native: ", "c: ", "further: ")) and not is_built():
        pytest.skip("NATIVE CHECK NOT RUN: kvguard was installed without a C compiler")
    assert outcomes[name].error is None
    assert outcomes[name].red is not None, "no test noticed"


def test_every_mutation_matches_the_source_and_has_a_name_of_its_own() -> None:
    """At least twenty mutations, each found exactly once in its file, in all the floors that check something."""
    for mutation in MUTATIONS:
        assert mutated_text((ROOT / mutation.path).read_text(), mutation)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
    floors = {"kvguard", "kernels", "adapters", "fault_injection"}
    assert {Path(mutation.path).parts[0] for mutation in MUTATIONS} == floors


def test_a_mutation_that_nobody_notices_is_not_a_pass() -> None:
    """A harmless change leaves the tests green, and the outcome says that it survived; the copy is restored."""
    with source_tree() as tree:
        before = (tree / HARMLESS.path).read_text()
        assert try_mutation(tree, HARMLESS) == Outcome(name="harmless")
        assert (tree / HARMLESS.path).read_text() == before


def test_a_mutation_that_says_nothing_is_an_error() -> None:
    """Text that is missing or there twice, code that does not import or parse: errors, neither red nor green."""
    with source_tree() as tree:
        for changed in (
            {"old": "not in the file"},
            {"old": "seed"},
            {"new": HARMLESS.old},
            {"new": "    return ("},
            {"old": "import secrets\n", "new": "import secrets_that_do_not_exist as secrets\n"},
        ):
            outcome = try_mutation(tree, replace(HARMLESS, **changed))  # type: ignore[arg-type]
            assert outcome.red is None and outcome.error is not None, changed


def test_a_copy_that_is_red_already_is_refused() -> None:
    """Red tests prove nothing about mutations if they are red without any."""
    with source_tree() as tree:
        path = tree / "kvguard" / "tags.py"
        path.write_text(path.read_text().replace("self._next = tag + 1", "self._next = tag"))
        with pytest.raises(MutationError, match="not green"):
            check_tree(tree, [TAGS])
        outcome = try_mutation(tree, HARMLESS)
        assert outcome.red is None and "not green without a mutation" in str(outcome.error)


def test_a_hint_is_tried_first_and_decides_nothing() -> None:
    """One that does not go red any more, or is not there: the tests that the mutation names are all run."""
    same_tag = replace(HARMLESS, old="self._next = tag + 1", new="self._next = tag")
    with source_tree() as tree:
        green = f"{TAGS}::test_tags_and_key_of_one_seed_are_not_derived_from_each_other"
        found = try_mutation(tree, same_tag)
        assert found.red is not None and found.red != green
        for hint in (green, found.red, f"{TAGS}::test_that_is_gone"):
            assert try_mutation(tree, same_tag, hint=hint).red == found.red
        assert try_mutation(tree, HARMLESS, hint=green) == Outcome(name="harmless")
        hints = usable_hints(tree, MUTATIONS)
        assert len(hints) > 0.9 * len(MUTATIONS), "bring them up to date: python tools/mutate.py --remember"
