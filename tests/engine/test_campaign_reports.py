"""Reports of a campaign: what they count, what they name, and that no text of a trial can break out of them."""

import dataclasses
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from kvguard.fault_injection.html_report import report_html, telling_leaks
from kvguard.fault_injection.junit import clean_shortcomings, junit_xml, shortcomings
from kvguard.fault_injection.plan import Cell
from kvguard.fault_injection.results import (
    CLEAN_RUNS_THAT_MUST_CONTAIN_ALL,
    CampaignResults,
    CleanResult,
    Leak,
    TrialResult,
    results_json,
)

NASTY = "<script>alert('x')</script> \"q\" & \x00\x08\x1b\x7f\x9f\ud800\ufffe ]]> &lt; {{ 7 * 7 }}"
VOID_TAGS = {"meta", "br", "rect"}
META = {
    "seed": 11,
    "engine": "embedded",
    "model": "recall",
    "backend": "torch",
    "kvguard": "9.8.7",
    "python": "3.11.0",
    "wall_s": 12.5,
    "command": "kvguard campaign --seed 11",
}
OURS, THEIRS = "Mia Castellan, PIN 1111, code AAAA\n", "Omar Haddad, PIN 2222, code BBBB\n"


def _cell(fault: str = "use-after-free", kv: str = "bf16", weights: str = "bf16", proofs: str = "all") -> Cell:
    return Cell(engine="embedded", fault=fault, kv_dtype=kv, weights=weights, page_size=16, proofs=proofs)


def _leak(*, prompt: str = OURS, guard_off: str = "Mia C" + THEIRS[5:24], error: str = "kvguard v1: aborted") -> Leak:
    return Leak(victim="r1", prompt=prompt, golden=prompt[:24], guard_off=guard_off, guard_on=prompt[:5], error=error)


def _detected(index: int, cell: Cell | None = None, leak: Leak | None = None) -> TrialResult:
    return TrialResult(
        index=index,
        cell=cell or _cell(),
        traffic_seed=1,
        fault_seed=2,
        outcome="detected",
        detected_by=("tag",),
        kinds=("stale-page",),
        potent=True,
        description="page 7 freed under r1",
        injected_step=4,
        live_step=5,
        detected_step=5,
        affected=("r1",),
        aborted=("r1",),
        leak=leak,
        report=f"kvguard: VIOLATION of trial {index}",
    )


def _clean(index: int, **changes: object) -> CleanResult:
    run = CleanResult(
        index=index,
        kv_dtype="fp32",
        weights="fp32",
        page_size=1,
        traffic_seed=3,
        violations=(),
        requests_changed=(),
        preemptions=2,
        evictions=3,
        prefix_hits=4,
        promised_hits=5,
        client_aborts=6,
        steps=70,
    )
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def _campaign() -> CampaignResults:
    """Two proven trials, each way to fall short once, one unsupported trial, and one clean run of two not clean."""
    fine = _detected(0, leak=_leak())
    return CampaignResults(
        trials=[
            fine,
            _detected(101, _cell("stale-row", "fp8_e4m3", "int4"), _leak(prompt=THEIRS, guard_off=NASTY, error=NASTY)),
            dataclasses.replace(fine, index=102, outcome="missed", reason=NASTY, report=NASTY, detected_by=()),
            dataclasses.replace(fine, index=103, outcome="not_injected", reason="no suitable victim", leak=None),
            dataclasses.replace(fine, index=104, tokens_after_fault=3),
            dataclasses.replace(fine, index=105, bystanders_changed=("r8",)),
            dataclasses.replace(fine, index=106, false_positives=("r9",)),
            dataclasses.replace(fine, index=107, outcome="not_injected", false_positives=("r9",)),
            dataclasses.replace(
                fine, index=108, outcome="unsupported", cell=_cell("null-entry", proofs="control_plane"), reason=NASTY
            ),
        ],
        clean=[_clean(0), _clean(1, violations=(NASTY,), requests_changed=("r2",))],
    )


UNPROVEN = (102, 103, 104, 105, 106, 107)


class _Page(HTMLParser):
    """Checks that tags nest, and collects text, tag names and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def _html(results: CampaignResults) -> str:
    return report_html(results, results_json(results, META))


def _junit(results: CampaignResults) -> ET.Element:
    text = junit_xml(results)
    text.encode("utf-8")
    return ET.fromstring(text.removeprefix('<?xml version="1.0" encoding="UTF-8"?>'))


def test_junit_counts_every_way_to_fall_short() -> None:
    """Failures, errors and skips are what the trials and clean runs say, per suite and in all."""
    root = _junit(_campaign())
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["use-after-free", "stale-row", "null-entry", "clean"]
    counts = {
        name: tuple(suite.get(key) for key in ("tests", "failures", "errors", "skipped"))
        for name, suite in suites.items()
    }
    assert counts == {
        "use-after-free": ("7", "5", "1", "0"),
        "stale-row": ("1", "0", "0", "0"),
        "null-entry": ("1", "0", "0", "1"),
        "clean": ("2", "1", "0", "0"),
    }
    assert [root.get(key) for key in ("tests", "failures", "errors", "skipped")] == ["11", "6", "1", "1"]


def test_junit_names_cell_trial_and_reason() -> None:
    """A failed case names its cell and trial, says why in its message and holds the violation report."""
    cases = {case.get("name"): case for case in _junit(_campaign()).iter("testcase")}
    case = cases["kv=bf16-w=bf16-page=16-proofs=all-trial=104"]
    assert case.get("classname") == "campaign.embedded.use-after-free"
    failure = case.find("failure")
    assert failure is not None and failure.text is not None
    assert "after the fault was live: 3" in failure.get("message", "")
    assert "VIOLATION of trial 0" in failure.text and "--replay 104" in failure.text
    missed = cases["kv=bf16-w=bf16-page=16-proofs=all-trial=102"].find("failure")
    assert missed is not None and "<script>alert('x')</script> \"q\" &  ]]> &lt;" in missed.get("message", "")


@pytest.mark.parametrize("unsafe", [*map(chr, range(32)), "\x7f", "\x85", "\ud800", "\udfff", "\ufffe", "\uffff"])
def test_junit_is_xml_whatever_texts_hold(unsafe: str) -> None:
    """Characters that XML cannot hold are dropped wherever a text is used; the rest of the text stays."""
    text = f"a{unsafe}b"
    trial = dataclasses.replace(
        _detected(1), outcome="missed", reason=text, report=text, description=text, bystanders_changed=(text,)
    )
    failure = _junit(CampaignResults(trials=[trial], clean=[_clean(0, violations=(text,))])).find(".//failure")
    assert failure is not None
    kept = unsafe if unsafe in "\t\n\r" else ""
    assert f"a{kept}b" in failure.get("message", "")


def test_junit_is_red_exactly_if_not_all_is_proven() -> None:
    """Clean runs that contained no preemption fail the file too, though no single run is to blame."""
    proven = CampaignResults(trials=[_detected(0)], clean=[_clean(0)])
    assert proven.all_proven and _junit(proven).get("failures") == "0"
    runs = [_clean(index, preemptions=0) for index in range(CLEAN_RUNS_THAT_MUST_CONTAIN_ALL)]
    empty = CampaignResults(trials=[_detected(0)], clean=runs)
    assert not empty.all_proven and _junit(empty).get("failures") == "1"
    assert _junit(CampaignResults()).get("tests") == "0"


def test_shortcomings_are_empty_exactly_if_proven() -> None:
    """Every result that falls short has a reason in words, and no other has."""
    results = _campaign()
    for trial in results.trials:
        assert bool(shortcomings(trial)) == (not trial.proven and trial.outcome != "unsupported")
    for run in results.clean:
        assert bool(clean_shortcomings(run)) == (not run.clean)


def test_page_parses_and_escapes_content() -> None:
    """Tags nest, hostile text arrives as text, and controls become visible instead of vanishing."""
    html = _html(_campaign())
    page = _Page(html)
    assert "script" not in page.tags and "<script>alert('x')</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text and "␀␈␛␡" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", html)
    html.encode("utf-8")


def test_page_needs_nothing_but_itself() -> None:
    """No reference leads out of the file: no address, no script, image, font or style sheet."""
    page, html = _Page(_html(_campaign())), _html(_campaign())
    assert not re.search(r"https?://|@import|url\(", html)
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert all(value and value.startswith("#") for name, value in page.attributes if name in ("href", "src"))


def test_page_names_every_unproven_trial() -> None:
    """Each is listed with the command that runs it again; proven and unsupported ones are not in that list."""
    html = _html(_campaign())
    listed = html[html.index('<section id="unproven">') :]
    assert [int(found) for found in re.findall(r'id="trial-(\d+)"', listed)] == list(UNPROVEN)
    assert all(f"--replay {index}<" in listed for index in UNPROVEN)
    assert "Not all proven" in html and "flagged where nothing was wrong: 1" in html


def test_page_states_verdict_bound_and_facts() -> None:
    """A campaign without a flaw says so, with the rule-of-three bound and what was run."""
    trials = [_detected(index, _cell(kv="fp8_e4m3")) for index in range(288)]
    page = _Page(_html(CampaignResults(trials=trials, clean=[_clean(0)])))
    assert "All proven" in page.text and "< 1.04\u00a0%" in page.text and "288/288" in page.text
    assert all(str(META[key]) in page.text for key in ("seed", "kvguard", "python", "command", "model", "wall_s"))
    assert "Not proven" not in page.text


def test_most_telling_leaks_come_first() -> None:
    """Another client's text beats fp8 with int4, which beats the rest; one trial per fault while there are enough."""
    source = _detected(0, _cell("null-entry"), _leak(prompt=THEIRS, guard_off="Omar ???????????????????"))
    foreign = _detected(1, _cell("use-after-free"), _leak())
    again = _detected(2, _cell("use-after-free"), _leak())
    quantised = _detected(3, _cell("stale-row", "fp8_e5m2", "int4"), _leak(guard_off="Mia C###################"))
    missed = dataclasses.replace(foreign, index=4, cell=_cell("double-allocation"), outcome="missed")
    shown = telling_leaks([source, foreign, again, quantised, missed])
    assert [leak.trial.index for leak in shown] == [1, 3, 0]
    assert shown[0].source == THEIRS and shown[1].source == ""
    assert "".join(span.text for span in shown[0].spans) == shown[0].leak.guard_off
    assert [span.text for span in shown[0].spans if span.mark == "foreign"] == ["Haddad, PIN 2222, c"]
    assert [leak.trial.index for leak in telling_leaks([foreign, again])] == [1, 2]


@pytest.mark.parametrize("trials", [True, False], ids=["trials", "no-trials"])
@pytest.mark.parametrize("clean", [True, False], ids=["clean-runs", "no-clean-runs"])
def test_page_of_a_campaign_that_lacks_a_part(trials: bool, clean: bool) -> None:
    """Nothing is called proven that was not tried, and what was not looked at is said."""
    results = CampaignResults(trials=[_detected(0)] if trials else [], clean=[_clean(0)] if clean else [])
    page = _Page(_html(results))
    assert ("All proven" in page.text) == trials
    assert ("No fault was tried" in page.text) == (not trials)
    assert ("not looked at" in page.text) == (not clean)
