"""A campaign as JUnit XML, for a CI server: a suite per fault, a test case per trial, and a suite of clean runs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from kvguard.fault_injection.plan import Cell
from kvguard.fault_injection.results import (
    DETECTED,
    MISSED,
    NOT_INJECTED,
    UNSUPPORTED,
    CampaignResults,
    CleanResult,
    TrialResult,
)

# What XML 1.0 cannot hold in any form, plus DEL and the C1 controls, which it can but which no reader shows.
_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
_OUTCOME_TAGS = ("failure", "error", "skipped")


def shortcomings(trial: TrialResult) -> list[str]:
    """Why the trial is not proven, a phrase each; empty exactly if it is proven or unsupported."""
    found = []
    because = f": {trial.reason}" if trial.reason else ""
    if trial.outcome == MISSED:
        found.append(f"missed{because}")
    elif trial.outcome == NOT_INJECTED:
        found.append(f"not injected{because}")
    elif trial.outcome not in (DETECTED, UNSUPPORTED):
        found.append(f"unknown outcome {trial.outcome!r}{because}")
    if trial.outcome != UNSUPPORTED:
        if trial.tokens_after_fault:
            found.append(f"tokens that left the engine after the fault was live: {trial.tokens_after_fault}")
        if trial.bystanders_changed:
            found.append(f"output of others changed: {', '.join(trial.bystanders_changed)}")
        if trial.false_positives:
            found.append(f"aborted without need: {', '.join(trial.false_positives)}")
    return found


def clean_shortcomings(run: CleanResult) -> list[str]:
    """Why the run is not clean, a phrase each; empty exactly if it is."""
    found = []
    if run.guard_trouble:
        found.append(run.guard_trouble)
    if run.violations:
        found.append(f"flagged where nothing was wrong: {len(run.violations)}")
    if run.requests_changed:
        found.append(f"output changed under the guard: {', '.join(run.requests_changed)}")
    return found


def junit_xml(results: CampaignResults) -> str:
    """The whole campaign; red exactly where `results.all_proven` is False, and naming why.

    A trial that shows a failure of the guard is a <failure>. One whose fault could not be injected is an <error>: it
    says nothing about the guard, and must not pass.
    """
    root = ET.Element("testsuites", name="kvguard campaign")
    by_fault: dict[str, list[TrialResult]] = {}
    for fault, _, _ in results.by_fault():
        by_fault.setdefault(fault, [])
    for trial in results.trials:
        by_fault[trial.cell.fault_label].append(trial)
    for fault, trials in by_fault.items():
        suite = _suite(root, fault)
        for trial in trials:
            _add_trial(suite, trial)
    _add_clean(_suite(root, "clean"), results)
    for element in (*root.findall("testsuite"), root):
        _count(element)
    ET.indent(root)
    # The declaration is ours: ElementTree would name the encoding of the locale in that of a string.
    return _DECLARATION + ET.tostring(root, encoding="unicode") + "\n"


def _text(value: str) -> str:
    return _NOT_TEXT.sub("", value)


def _suite(root: ET.Element, name: str) -> ET.Element:
    return ET.SubElement(root, "testsuite", name=_text(name))


def _case(suite: ET.Element, classname: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=_text(classname), name=_text(name))


def _outcome(case: ET.Element, tag: str, kind: str, message: str, body: str = "") -> None:
    element = ET.SubElement(case, tag, message=_text(message))
    if tag != "skipped":
        element.set("type", kind)
    if body:
        element.text = _text(body)


def _add_trial(suite: ET.Element, trial: TrialResult) -> None:
    cell = trial.cell
    case = _case(
        suite,
        f"campaign.{cell.engine}.{cell.fault}",
        f"{_setup_part(cell)}kv={cell.kv_dtype}-w={cell.weights}-page={cell.page_size}-proofs={cell.proofs}"
        f"-trial={trial.index}",
    )
    found = shortcomings(trial)
    if trial.outcome == UNSUPPORTED:
        _outcome(case, "skipped", UNSUPPORTED, trial.reason or "unsupported")
    elif found:
        tag = "error" if trial.outcome == NOT_INJECTED and len(found) == 1 else "failure"
        body = "\n".join(
            (
                history(trial),
                f"affected: {', '.join(trial.affected) or 'nobody'}; aborted: {', '.join(trial.aborted) or 'nobody'}",
                f"again: kvguard campaign --replay {trial.index}",
                "",
                trial.report or "no violation was reported",
            )
        )
        kind = trial.outcome if trial.outcome != DETECTED else "detected_with_damage"
        _outcome(case, tag, kind, "; ".join(found), body)
    else:
        ET.SubElement(case, "system-out").text = _text(history(trial))


def history(trial: TrialResult) -> str:
    """What was broken, when it mattered and who noticed: one line."""
    if trial.injected_step < 0:
        return "nothing was injected"
    live = f"live at step {trial.live_step}" if trial.live_step >= 0 else "never live"
    proofs, kinds = ", ".join(trial.detected_by) or "no proof", ", ".join(trial.kinds) or "no kind"
    noticed = (
        f"noticed at step {trial.detected_step} by {proofs} ({kinds})" if trial.detected_step >= 0 else "unnoticed"
    )
    return f"step {trial.injected_step}: {trial.description or 'injected'}; {live}; {noticed}"


def _setup_part(item: Cell | CleanResult) -> str:
    """`runner=v2-sched=async-` in vLLM, `sched=overlap-` in SGLang, `phases=pd-` for a prefill and a decode worker."""
    if item.phases != "single":
        return f"phases={item.phases}-"
    runner = f"runner={item.runner}-" if item.runner else ""
    return f"{runner}sched={item.scheduling}-" if item.scheduling else ""


def _add_clean(suite: ET.Element, results: CampaignResults) -> None:
    for run in results.clean:
        name = f"{_setup_part(run)}kv={run.kv_dtype}-w={run.weights}-page={run.page_size}-run={run.index}"
        case = _case(suite, "campaign.clean", name)
        found = clean_shortcomings(run)
        if found:
            _outcome(case, "failure", "not_clean", "; ".join(found), "\n".join(run.violations))
    empty = results.empty_clean_counts()
    if empty:
        # No single run is to blame, yet the campaign is not proven: a case of its own keeps the file as red as that.
        names = ", ".join(name.replace("_", " ") for name in empty)
        case = _case(suite, "campaign.clean", "runs-contained-what-they-must")
        _outcome(case, "failure", "empty_clean_runs", f"the clean runs contained no {names}: they prove too little")


def _count(element: ET.Element) -> None:
    """The counts that a CI server reads from the attributes of a suite, or of all suites."""
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for tag, attribute in zip(_OUTCOME_TAGS, ("failures", "errors", "skipped"), strict=True):
        element.set(attribute, str(sum(case.find(tag) is not None for case in cases)))


__all__ = ["clean_shortcomings", "history", "junit_xml", "shortcomings"]
