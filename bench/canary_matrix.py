"""SGLang's kv_canary and kvguard side by side, over the same small pool, the same histories and the same faults.

    .venv-sglang/bin/python bench/canary_matrix.py [--json FILE] [--markdown FILE] [--only NAME ...]

Every verdict comes from running the check on the state: kv_canary by its own kernels (their PyTorch references, which
SGLang runs where there is no CUDA) and kvguard by its SGLang adapter. See bench/canary_watch.py for how each is set
up, bench/canary_world.py for the engine, bench/canary_faults.py for the histories.

before     flagged before the attention of the first forward that reads what is wrong
late       flagged, but after that attention
never      not flagged
fires too  flagged, but so is the same history without the fault
false hit  a healthy history is flagged; clean: it is not
later: x   kvguard at this level cannot see it (this is measured as well); x will
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.canary_bytes import all_bytes  # noqa: E402
from bench.canary_faults import CASES, Case  # noqa: E402
from bench.canary_watch import SETTINGS, CanaryWatch, GuardWatch, Hit  # noqa: E402
from bench.canary_world import World  # noqa: E402

KEYS = [setting.key for setting in SETTINGS]
LEVELS: dict[str, Literal["tags", "keys"]] = {"kvguard": "tags", "kvguard keys": "keys"}
"""Column -> kvguard's level."""
TABLE_WORDS = {"before": "yes", "late": "late", "never": "no", "false hit": "false hit"}
CLEAN_PAGES = 30
"""Few enough for the clean history to evict."""

NOTES = (
    "When: kv_canary's violations are taken as seen when its kernels record them on the device. Its host reads the "
    "counter one step later and then logs or raises; kvguard's verdict comes with the tokens of the same step.",
    "S is not in the prior table: the sweep of the prefix tree finds a tree-owned page that was refilled before any "
    "request has a hit on it, at the price of reading every cached token.",
    "P/D hand-over: kv_canary's tail hashes the bytes after the first forward that reads them: late, where the prior "
    "table says yes.",
    "Host load-back: kv_canary's sidecar does not go to the host with the pages, so it flags correct copies just as "
    "wrong ones. The prior table says yes for wrong ones in layer 0 and no in other layers; neither tells them apart.",
    "The copies are SGLang's get_cpu_copy and load_cpu_copy of the pool (what retraction to the host uses), into slots "
    "from alloc_for_extend; HiCache's own transfer kernels need a GPU. kvguard's adapter refuses HiCache and P/D in a "
    "server at this level: here it is told of the pages by the ordinary allocation call.",
    "Not rewritten and not reused: the bytes that are read are still the request's own; what is wrong is that they "
    "can change at any time. kv_canary checks content, so never is right for it.",
    "Slot mapping: the victim's page is read in the step after the write, and kv_canary flags it before that; the "
    "writer reads a slot that was never written in the same step, which makes it late.",
    "Bytes: what a check of the context reads, and what kv_canary's plan writes for it. kv_canary also writes its "
    "sidecar for each new token, 32 bytes a launch, and S reads the whole prefix tree as well; kvguard also stamps "
    "pages when they are handed out; at level keys it compares 16 bytes more for each request that gets a row, and "
    "none in a decode step.",
    "A cached page that is freed, refilled behind the same prefix and published again: the two nodes of the tree are "
    "one path by tags, so kvguard marks the page when it goes without the tree's doing, and neither node adds up.",
)


def play(case: Case, watch: Any) -> World:
    """One history under one watch."""
    world = World(watch, pages=CLEAN_PAGES if case.name == "clean" else 40)
    case.play(world)
    if not case.healthy and not world.live_step:
        raise RuntimeError(f"{case.name} never came to the step in which it is read")
    return world


def verdict(case: Case, world: World, hits: list[Hit], control: list[Hit] | None) -> str:
    """What the hits say of the history."""
    if case.healthy:
        return "false hit" if hits else "clean"
    if not hits:
        return "never"
    first = hits[0]
    if control and (first.step, first.phase) == (control[0].step, control[0].phase):
        return "fires too"
    early = first.step < world.live_step or (first.step == world.live_step and first.phase == "before")
    return "before" if early else "late"


def shown(hits: list[Hit]) -> list[str]:
    """The first hits in words."""
    return [f"step {hit.step}, {hit.phase}: {hit.what} ({hit.whom})" for hit in hits[:3]]


def measure(only: list[str] | None = None, keys: str = "DBTS") -> list[dict[str, Any]]:
    """Every row, under these settings of kv_canary; every column runs the same history, which is checked."""
    cases = {case.name: case for case in CASES}
    wanted = [case for case in CASES if not only or case.name in only]
    known: dict[tuple[str, str], tuple[World, list[Hit]]] = {}

    def run(case: Case, key: str, watch: Any) -> tuple[World, list[Hit]]:
        if (case.name, key) not in known:
            world = play(case, watch)
            known[case.name, key] = world, watch.hits
        return known[case.name, key]

    rows = []
    for case in wanted:
        row: dict[str, Any] = {"name": case.name, "title": case.title, "what": (case.play.__doc__ or "").strip()}
        columns: dict[str, dict[str, Any]] = {}
        prints: set[str] = set()
        for setting in SETTINGS:
            if setting.key not in keys:
                continue
            world, hits = run(case, setting.key, CanaryWatch(setting))
            control = None
            if case.control:
                control = run(cases[case.control], setting.key, CanaryWatch(setting))[1]
            columns[setting.key] = {"verdict": verdict(case, world, hits, control), "hits": shown(hits)}
            prints.add(world.fingerprint())
        for column, level in LEVELS.items():
            world, hits = run(case, column, GuardWatch(level))
            prints.add(world.fingerprint())
            rows_hit = [hit for hit in hits if hit.phase != "event"]
            measured = verdict(case, world, hits if case.healthy else rows_hit, None)
            strangers = sorted({hit.whom for hit in rows_hit} - set(world.victims))
            needs = case.needed_beyond(level)
            columns[column] = {
                "verdict": f"later: {needs}" if needs else measured,
                "measured": measured,
                "hits": shown(hits),
                "flagged besides the victims": [] if case.healthy else strangers,
            }
        if len(prints) != 1:
            raise RuntimeError(f"{case.name}: the watches did not see the same history")
        row["columns"], row["victims"], row["counts"] = columns, list(world.victims), world.counts
        prior = dict(zip("DBT", case.prior, strict=True)) if case.prior else {}
        found = {key: TABLE_WORDS.get(columns[key]["verdict"], "") for key in "DBT" if key in keys}
        row["prior"], row["differs"] = prior, [key for key, word in found.items() if prior and word != prior[key]]
        rows.append(row)
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The tables as they stand in docs/sglang.md."""
    lines = [f"SGLang {report['sglang']}; " + "; ".join(f"{key}: {what}" for key, what in report["settings"].items())]
    lines += ["", "| fault | kv_canary D | B | T | S | kvguard tags | keys |", "|---|---|---|---|---|---|---|"]
    for row in report["rows"]:
        cells = [row["columns"][key]["verdict"] for key in (*KEYS, *LEVELS)]
        mark = f" (*{' '.join(row['differs'])})" if row["differs"] else ""
        lines.append(
            f"| {row['title']}{mark} | " + " | ".join(f"**{c}**" if c == "false hit" else c for c in cells) + " |"
        )
    lines += ["", "(*) these settings differ from the table of prior art.", ""]
    lines += ["| check | bytes touched per context token and step | 256 x 4096 tokens | from |", "|---|---|---|---|"]
    for line in report["bytes"]:
        large = line.get("of that KV bytes") and line["touched with KV rows of 2048 bytes"]
        touched = f"{line['touched']:g}" + (f" ({large} with rows of 2048 bytes)" if large else "")
        lines.append(f"| {line['who']} | {touched} | {line['MB a step']:g} MB | {line['formula']} |")
    lines += ["", *(f"- {note}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def build(only: list[str] | None = None) -> dict[str, Any]:
    """The whole report."""
    logging.disable(logging.WARNING)
    settings = {setting.key: setting.title for setting in SETTINGS}
    rows = measure(only)
    return {
        "sglang": version("sglang"),
        "settings": settings,
        "rows": rows,
        "bytes": all_bytes(),
        "notes": list(NOTES),
    }


def main() -> None:
    """Print the tables; write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[case.name for case in CASES])
    arguments = parser.parse_args()
    report = build(arguments.only)
    text = markdown(report)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text("# kv_canary and kvguard, side by side\n\n" + text)


if __name__ == "__main__":
    main()
