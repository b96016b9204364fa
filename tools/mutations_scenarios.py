"""Mutations of the replays of public bugs, and of checks without which they are missed: see tools/mutations.py."""
# ruff: noqa: E501 -- a table whose rows are exact text

from __future__ import annotations

from typing import Final

from tools.mutation import Mutation, of_file

JUDGING: Final = "tests/campaign/test_scenario_judging.py"

SCENARIO_MUTATIONS: Final[tuple[Mutation, ...]] = (
    *of_file(
        "fault_injection/scenarios/judging.py",
        ("scenario: harm without the guard", JUDGING, "    elif not harm:\n", "    elif False:\n"),
        ("scenario: the input without the bug", JUDGING, "    if golden.misread or golden.crash:\n", "    if False:\n"),
        ("scenario: who has to be ended", JUDGING, "    elif wanted - set(aborted):\n", "    elif False:\n"),
        ("scenario: who need not be ended", JUDGING, "false_positives=tuple(sorted(set(aborted) - wanted))", "false_positives=()"),
        ("scenario: tokens that slip out", JUDGING, "    late = sum(slipped.values())\n", "    late = 0\n"),
        ("scenario: tokens of bystanders", JUDGING, "    others = [name for name in on.outputs if name not in aborted]\n", "    others: list[str] = []\n"),
        ("scenario: a guard in trouble", JUDGING, "    elif on.guard_trouble or on.crash:\n", "    elif on.crash:\n"),
    ),
    *of_file(
        "fault_injection/scenarios/provenance.py",
        ("scenario: reads of windowed layers", JUDGING, "                first = max(0, positions[starts[place]] - window + 1) if window else 0\n", "                first = lengths[place] if window else 0\n"),
        ("scenario: reads of other layers", JUDGING, "                first = max(0, positions[starts[place]] - window + 1) if window else 0\n", "                first = max(0, positions[starts[place]] - window + 1) if window else lengths[place]\n"),
        ("scenario: what is computed from wrong KV", JUDGING, "                    self._marks[pool][max(slot, 0) % (num_pages * size)] = 0\n", "                    pass\n"),
        ("scenario: copies of a store", JUDGING, "                marks.update({page * size + offset: mark for offset, mark in enumerate(self._stored[key])})\n", "                pass\n"),
    ),
    *of_file("fault_injection/scenarios/scenario.py", ("scenario: tokens after a wrong read", JUDGING, "sum(step >= min(steps) for step in", "sum(step < min(steps) for step in")),
    *of_file("kvguard/content_calls.py", ("scenario: contents of hits", JUDGING, "        if binding.key == own:\n", "        if True:\n")),
    *of_file("kvguard/page_table.py", ("scenario: frees of pages that are held", JUDGING, "        return Kind.FREE_WHILE_HELD if record.holders - {by} else None\n", "        return None\n")),
    *of_file("kvguard/judge.py", ("scenario: rows that the device flagged", JUDGING, "            flagged = np.flatnonzero(flags.any(axis=0)).tolist()\n", "            flagged = []\n"), ("scenario: padding that the device flagged", JUDGING, "        padding = padding_flagged(writes)\n", "        padding = []\n")),
)  # fmt: skip
