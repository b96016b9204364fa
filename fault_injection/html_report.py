"""A campaign as one HTML file that needs nothing else: verdict first, then what leaks, then the numbers."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvguard.fault_injection.faults.transfers import TRANSFER_FAULTS
from kvguard.fault_injection.junit import clean_shortcomings, history, shortcomings
from kvguard.fault_injection.plan import KV_DTYPES, SCHEDULINGS, UNSUPPORTED, WEIGHTS, Cell
from kvguard.fault_injection.results import DETECTED, MISSED, CampaignResults, Leak, Tally, TrialResult
from kvguard.fault_injection.results import UNSUPPORTED as UNSUPPORTED_OUTCOME
from kvguard.fault_injection.sglang_plan import SGLANG_UNSUPPORTED
from kvguard.fault_injection.targets.vllm_writes import NOT_IN_VLLM, VLLM_WRITE_FAULTS

TEMPLATES = Path(__file__).parent / "templates"
LEAKS_SHOWN_MAX, LEAKS_SHOWN_MIN = 5, 3
FOREIGN_CHARACTERS_MIN, FOREIGN_DIFFERING_MIN = 6, 4
"""A run of text counts as another request's from this length, and if this much of it differs from golden: two secrets
share their form, so that shorter runs also come about by chance."""

# Control characters have a picture of their own from U+2400 on; lone surrogates cannot be written as UTF-8.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_UNWRITABLE = re.compile("[\ud800-\udfff\x80-\x9f\ufffe\uffff]")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One key figure. `tone`: good, bad or plain; `note` says what it counts."""

    value: str
    label: str
    note: str = ""
    tone: str = "plain"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of text. `mark`: "" as golden, `differs` from golden, `foreign` (of another request's prompt)."""

    text: str
    mark: str = ""


@dataclass(frozen=True, kw_only=True)
class ShownLeak:
    """A trial worth showing, its guard-off text cut into spans.

    source        the prompt that the foreign text stands in, "" if there is none
    source_spans  that prompt, the text in question marked
    short_by      characters of golden that guard-off lacks at its end
    """

    trial: TrialResult
    leak: Leak
    spans: tuple[Span, ...]
    source: str
    source_spans: tuple[Span, ...]
    short_by: int


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """KV dtype x weights x page size. `tone`: good (all proven), bad, or none (no trial)."""

    text: str
    tone: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a chart; `share` of the longest, 0 to 1."""

    label: str
    count: int
    share: float


def report_html(results: CampaignResults, data: dict[str, Any]) -> str:
    """The report as one self-contained page. `data` is what `results_json` returned for the same results."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    total = results.total()
    unproven = [trial for trial in results.trials if shortcomings(trial)]
    return environment.get_template("report.html.j2").render(
        run=data.get("run", ""),
        verdict=_verdict(results, total, unproven),
        figures=_figures(total, data),
        leaks=telling_leaks(results.trials),
        fault_rows=results.by_fault(),
        total=total,
        grid=_grid(results.trials),
        steps=_bars(_steps(results.trials)),
        proofs=_bars(_proofs(results.trials)),
        clean=results.clean,
        contained=results.clean_counts(),
        empty=results.empty_clean_counts(),
        unclean=[(run, clean_shortcomings(run)) for run in results.clean if not run.clean],
        unproven=[(trial, shortcomings(trial)) for trial in unproven],
        left_out=_left_out(results.trials),
        facts=_facts(data),
        history=history,
    )


def _printable(value: Any) -> Any:
    """Every value on its way into the page: controls become visible, what UTF-8 cannot hold becomes U+FFFD."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _UNWRITABLE.sub("\ufffd", value.translate(_PICTURES))
    return value


def _share(part: int, whole: int) -> str:
    """A percentage that never rounds a missing one up to 100 %, nor a present one down to 0 %."""
    if not whole:
        return "\u2013"
    percent = round(100 * part / whole)
    return f"{min(percent, 99) if part < whole else max(percent, 1) if part else 0}\u00a0%"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _verdict(results: CampaignResults, total: Tally, unproven: Sequence[TrialResult]) -> dict[str, Any]:
    """tone, headline, and a sentence for each thing that is not proven or was not looked at."""
    lines = []
    ways = (
        ("missed", lambda trial: trial.outcome == MISSED),
        ("let tokens out after the fault", lambda trial: trial.tokens_after_fault > 0),
        ("changed other requests' output", lambda trial: bool(trial.bystanders_changed)),
        ("aborted requests without need", lambda trial: bool(trial.false_positives)),
    )
    checks: Sequence[tuple[str, Callable[[TrialResult], bool]]] = ways
    for words, applies in checks:
        count = sum(applies(trial) for trial in unproven)
        if count:
            lines.append(f"{_plural(count, 'trial')} {words}")
    if total.not_injected:
        lines.append(f"{_plural(total.not_injected, 'trial')} could not inject the fault and prove nothing")
    unclean = sum(not run.clean for run in results.clean)
    if unclean:
        lines.append(f"violations or changed outputs in {_plural(unclean, 'clean run')}")
    for name in results.empty_clean_counts():
        lines.append(f"the clean runs contained no {name.replace('_', ' ')}: they prove less than they should")
    if not results.all_proven:
        return {"tone": "bad", "headline": "Not all proven", "lines": lines}
    if not results.clean:
        lines.append("no clean runs: whether healthy traffic is left alone was not looked at")
    if not total.detected:
        return {"tone": "plain", "headline": "No fault was tried", "lines": lines}
    return {"tone": "good", "headline": "All proven", "lines": lines}


def _figures(total: Tally, data: dict[str, Any]) -> list[Figure]:
    def zero(value: int, label: str, note: str) -> Figure:
        return Figure(value=str(value), label=label, note=note, tone="bad" if value else "good")

    judged, tried = total.detected + total.missed, total.trials - total.unsupported
    bound = f"< {100 * float(data['miss_rate_upper_95']):.2f}\u00a0%" if judged else "\u2013"
    figures = [
        Figure(value=str(total.trials), label="trials", note="each with the guard off and on"),
        Figure(
            value=str(total.detected),
            label="detected",
            note=f"{_share(total.detected, tried)} of the faults tried",
            tone="good" if total.detected == tried and tried else "bad" if tried else "plain",
        ),
        zero(total.missed, "missed", "the affected request went on"),
        Figure(value=bound, label="miss rate", note="95\u00a0% upper bound"),
        zero(total.not_injected, "not injected", "these prove nothing"),
        Figure(
            value=_share(total.potent, tried), label="potent", note=f"{total.potent} changed output with the guard off"
        ),
        zero(total.false_positives, "false positives", "healthy requests flagged"),
        Figure(value=str(total.clean_runs), label="clean runs", note="no fault, guard on"),
        zero(total.tokens_after_fault, "tokens after fault", "left the engine once it was live"),
        zero(total.bystanders_changed, "bystanders changed", "other requests with other output"),
        Figure(value=str(total.detection_steps_max), label="steps to detect", note="at most; 0: the very forward"),
    ]
    if total.unsupported:
        figures.append(Figure(value=str(total.unsupported), label="unsupported", note="for reasons given below"))
    return figures


def telling_leaks(trials: Sequence[TrialResult]) -> list[ShownLeak]:
    """Three to five proven trials that say most about life without the guard, of different faults where there are.

    Foreign text counts most, then fp8 KV with int4 weights, then that a request was aborted rather than an operation
    refused, then that all proofs were on, then the length of the foreign text.
    """
    # All trials with one traffic seed serve the same requests: what one leaks may be the prompt that another shows.
    prompts: dict[int, dict[str, None]] = {}
    for trial in trials:
        if trial.leak is not None:
            prompts.setdefault(trial.traffic_seed, {})[trial.leak.prompt] = None
    ranked = []
    for trial in trials:
        if trial.leak is not None and trial.proven:
            run = _foreign_run(trial.leak, prompts[trial.traffic_seed])
            storage = trial.cell.kv_dtype.startswith("fp8") + (trial.cell.weights == "int4")
            length = run.stop - run.start if run else 0
            production = trial.cell.proofs == "all"
            rank = (run is not None, storage == 2, bool(trial.leak.error), production, storage, length, -trial.index)
            ranked.append((rank, _shown(trial, trial.leak, run)))
    ranked.sort(key=lambda item: item[0], reverse=True)
    shown: list[ShownLeak] = []
    rest: list[ShownLeak] = []
    faults: set[str] = set()
    for _, leak in ranked:
        (rest if leak.trial.cell.fault in faults else shown).append(leak)
        faults.add(leak.trial.cell.fault)
    return (shown + rest)[: min(LEAKS_SHOWN_MAX, max(LEAKS_SHOWN_MIN, len(shown)))]


@dataclass(frozen=True, kw_only=True)
class _ForeignRun:
    """text[start:stop] of guard-off stands at `place` in `source`, another request's prompt."""

    start: int
    stop: int
    source: str
    place: int


def _foreign_run(leak: Leak, prompts: Iterable[str]) -> _ForeignRun | None:
    """The longest stretch of guard-off that is not the victim's to say and that another prompt holds word for word."""
    best: _ForeignRun | None = None
    off, golden = leak.guard_off, leak.golden
    for prompt in prompts:
        if prompt == leak.prompt:
            continue
        match = difflib.SequenceMatcher(None, off, prompt, autojunk=False).find_longest_match()
        start, stop = match.a, match.a + match.size
        differing = [at for at in range(start, stop) if off[at] != golden[at : at + 1]]
        if len(differing) < FOREIGN_DIFFERING_MIN:
            continue
        # What both prompts begin or end with alike is no leak: the run is what lies between.
        start, stop = differing[0], differing[-1] + 1
        enough = stop - start >= FOREIGN_CHARACTERS_MIN and off[start:stop] not in leak.prompt
        if enough and (best is None or stop - start > best.stop - best.start):
            best = _ForeignRun(start=start, stop=stop, source=prompt, place=match.b + start - match.a)
    return best


def _shown(trial: TrialResult, leak: Leak, run: _ForeignRun | None) -> ShownLeak:
    off, golden = leak.guard_off, leak.golden
    marks = ["differs" if character != golden[at : at + 1] else "" for at, character in enumerate(off)]
    source_spans: tuple[Span, ...] = ()
    if run is not None:
        marks[run.start : run.stop] = ["foreign"] * (run.stop - run.start)
        source_marks = [
            "foreign" if 0 <= at - run.place < run.stop - run.start else "" for at in range(len(run.source))
        ]
        source_spans = _spans(run.source, source_marks)
    return ShownLeak(
        trial=trial,
        leak=leak,
        spans=_spans(off, marks),
        source=run.source if run is not None else "",
        source_spans=source_spans,
        short_by=max(0, len(golden) - len(off)),
    )


def _spans(text: str, marks: Sequence[str]) -> tuple[Span, ...]:
    """Neighbouring characters with the same mark, put together."""
    spans: list[Span] = []
    for character, mark in zip(text, marks, strict=True):
        if spans and spans[-1].mark == mark:
            spans[-1] = Span(text=spans[-1].text + character, mark=mark)
        else:
            spans.append(Span(text=character, mark=mark))
    return tuple(spans)


def _in_order(values: Iterable[str], order: Sequence[str]) -> list[str]:
    return sorted(set(values), key=lambda value: (order.index(value) if value in order else len(order), value))


_Row = tuple[str, str, str]


def _row(cell: Cell) -> _Row:
    """What a row of the grid stands for: vLLM's runner, scheduling, or two phases, if any, and the KV dtype."""
    return cell.runner or ("P/D" if cell.phases == "pd" else ""), cell.scheduling, cell.kv_dtype


def _grid(trials: Sequence[TrialResult]) -> dict[str, Any]:
    """Rows of KV dtypes (in vLLM of each runner and scheduling), columns of weights x page size: detected/trials."""
    tried = [trial for trial in trials if trial.outcome != UNSUPPORTED_OUTCOME]
    pages = sorted({trial.cell.page_size for trial in tried})
    weights = _in_order((trial.cell.weights for trial in tried), WEIGHTS)
    found: dict[tuple[_Row, str, int], list[TrialResult]] = {}
    for trial in tried:
        found.setdefault((_row(trial.cell), trial.cell.weights, trial.cell.page_size), []).append(trial)

    def cell(row: _Row, weight: str, page: int) -> GridCell:
        here = found.get((row, weight, page), [])
        where = f"{' '.join((*row[:2], 'KV', row[2])).strip()}, weights {weight}, page size {page}"
        if not here:
            return GridCell(text="\u2013", tone="none", title=f"{where}: no trial")
        detected, proven = sum(t.outcome == DETECTED for t in here), sum(t.proven for t in here)
        return GridCell(
            text=f"{detected}/{len(here)}",
            tone="good" if proven == len(here) else "bad",
            title=f"{where}: {proven} of {len(here)} proven",
        )

    def place(row: _Row) -> tuple[str, int, int]:
        runner, scheduling, kv_dtype = row
        known = kv_dtype in KV_DTYPES
        return runner, [*SCHEDULINGS, scheduling].index(scheduling), KV_DTYPES.index(kv_dtype) if known else 99

    return {
        "pages": pages,
        "weights": weights,
        "rows": [
            (" ".join(row).strip(), [cell(row, weight, page) for weight in weights for page in pages])
            for row in sorted({_row(trial.cell) for trial in tried}, key=place)
        ],
    }


def _steps(trials: Sequence[TrialResult]) -> list[tuple[str, int]]:
    """How many trials were detected how late."""
    counts = Counter(trial.detection_steps for trial in trials if trial.outcome == DETECTED)
    names = {0: "in the same forward or before", 1: "1 step late"}
    return [(names.get(steps, f"{steps} steps late"), count) for steps, count in sorted(counts.items())]


def _proofs(trials: Sequence[TrialResult]) -> list[tuple[str, int]]:
    """How many trials were detected by which proofs; several may see the same fault."""
    counts = Counter(" and ".join(trial.detected_by) for trial in trials if trial.outcome == DETECTED)
    return [(name.replace("_", " ") or "unnamed", count) for name, count in counts.most_common()]


def _bars(counts: Sequence[tuple[str, int]]) -> list[Bar]:
    longest = max((count for _, count in counts), default=1)
    return [Bar(label=label, count=count, share=count / longest) for label, count in counts]


def _left_out(trials: Sequence[TrialResult]) -> list[tuple[str, str, str]]:
    """(fault, proofs, reason) of combinations that prove nothing, of the faults that were tried here."""
    faults = {trial.cell.fault for trial in trials}
    in_sglang = any(trial.cell.engine == "sglang" for trial in trials)
    known = SGLANG_UNSUPPORTED if in_sglang else UNSUPPORTED
    left_out = {pair: reason for pair, reason in known.items() if pair[0] in faults}
    if any(trial.cell.phases == "pd" for trial in trials):
        left_out |= {(name, "any"): fault.uncovered for name, fault in TRANSFER_FAULTS.items() if fault.uncovered}
    if any(trial.cell.engine == "vllm" and trial.cell.fault in VLLM_WRITE_FAULTS for trial in trials):
        left_out |= {(name, "any"): reason for name, reason in NOT_IN_VLLM.items()}
    for trial in trials:
        if trial.outcome == UNSUPPORTED_OUTCOME and (trial.cell.fault, trial.cell.proofs) not in left_out:
            left_out[trial.cell.fault, trial.cell.proofs] = trial.reason
    return [(fault, proofs, reason) for (fault, proofs), reason in left_out.items()]


def _facts(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What was run on what: everything in `data` that is neither a count nor a verdict, the usual names first."""
    names = {"kvguard": "kvguard", "python": "Python", "torch": "PyTorch", "wall_s": "duration"}
    first = ("command", "seed", "engine", "model", "backend", "kvguard", "python", "torch", "wall_s")
    counts = {*Tally().to_json(), "all_proven"}
    found = [key for key in first if data.get(key) not in (None, "")]
    found += [
        key
        for key, value in data.items()
        if key not in counts and key not in found and isinstance(value, str | int | float) and value != ""
    ]
    return [
        (names.get(key, key.replace("_", " ")), f"{data[key]} s" if key == "wall_s" else str(data[key]))
        for key in found
    ]


__all__ = ["report_html", "telling_leaks"]
