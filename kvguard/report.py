"""A violation report in a sanitizer's form: what, where, who owns, who read, the page's history, what to do.

Reports carry request ids, page ids, tags and steps. They never carry prompt text or token ids; an adapter that was
configured with `report_content` may pass some in, and only then are they shown.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvguard.recorder import PageEvent
from kvguard.violation import ADVICE, MEANING, Action, Violation

_DID = {
    Action.ABORTED: "aborted this request and withheld its token of the step; everyone else goes on",
    Action.REFUSED: "refused the operation before it took effect; nobody was aborted",
    Action.OBSERVED: "nothing: on_violation is 'observe', so the engine went on with unproven data",
    Action.HALTED: "stopped the engine: on_violation is 'halt'",
}


def format_tag(tag: int) -> str:
    """A tag as reports show it."""
    return "vacant" if tag == 0 else f"{tag:#018x}"


def report_text(violation: Violation, *, content: str | None = None) -> str:
    """The report as text, several lines, ending in a one-line SUMMARY that is easy to grep.

    `content`: text of the request to show, only where the operator asked for it (`report_content`).
    """
    v = violation
    who = f"request {v.request}" if v.request is not None else "the allocator"
    lines = ["=" * 72, f"kvguard: VIOLATION {v.id}: {v.kind}", f"  {who} {MEANING[v.kind]}", ""]
    lines.append(f"  where     pool {v.pool}, step {v.step}" + (f", block-table row {v.row}" if v.row >= 0 else ""))
    if v.column >= 0:
        span = ""
        if v.page_size is not None:
            span = f" (tokens {v.column * v.page_size} to {(v.column + 1) * v.page_size - 1})"
        lines.append(f"            column {v.column}{span}")
    if v.page >= 0:
        lines.append(f"  page      {v.page}, held now by {v.owner or 'nobody'}")
    if v.expected_tag:
        lines.append(f"  promised  tag {format_tag(v.expected_tag)}")
    if v.page >= 0:
        lines.append(f"  found     tag {format_tag(v.found_tag)}")
    if v.row_entries:
        differing = [
            f"column {column}: {found} instead of {wanted}"
            for column, (found, wanted) in enumerate(zip(v.row_entries, v.promised_pages, strict=False))
            if found != wanted
        ]
        shown = "; ".join(differing[:8]) + (f"; and {len(differing) - 8} more" if len(differing) > 8 else "")
        lines.append(f"  row       {shown or 'as promised'}")
    if v.detail:
        lines.append(f"  detail    {v.detail}")
    if v.cause:
        lines.append(f"  follows   violation {v.cause}")
    if content is not None:
        lines.append(f"  content   {content}")
    if v.history is not None and v.history.events:
        lines += ["", f"  history of page {v.history.page}, oldest first:"]
        lines += [f"    {_event_text(event)}" for event in v.history.events]
    lines += ["", f"  kvguard   {_DID[v.action]}" + (f"; page {v.page} is quarantined" if v.quarantined else "")]
    lines += [f"  next      {ADVICE[v.kind]}"]
    place = f"pool={v.pool} page={v.page} request={v.request} owner={v.owner}"
    lines.append(f"SUMMARY: kvguard: {v.kind} {place} id={v.id}")
    lines.append("=" * 72)
    return "\n".join(lines)


def _event_text(event: PageEvent) -> str:
    who = f" by {event.request}" if event.request is not None else ""
    detail = f" ({event.detail})" if event.detail else ""
    return f"step {event.step:>6}  {event.what:<11} tag {format_tag(event.tag)}{who}{detail}"


def report_json(violation: Violation, *, content: str | None = None) -> dict[str, Any]:
    """The same as plain data, for machines. Tags are strings: they do not fit a JavaScript number."""
    v = violation
    data: dict[str, Any] = {
        "id": v.id,
        "proof": str(v.proof),
        "kind": str(v.kind),
        "action": str(v.action),
        "message": v.message,
        "pool": v.pool,
        "request": v.request,
        "step": v.step,
        "row": v.row,
        "column": v.column,
        "page": v.page,
        "expected_tag": format_tag(v.expected_tag),
        "found_tag": format_tag(v.found_tag),
        "owner": v.owner,
        "row_entries": list(v.row_entries),
        "promised_pages": list(v.promised_pages),
        "cause": v.cause,
        "quarantined": v.quarantined,
        "detail": v.detail,
        "advice": ADVICE[v.kind],
        "time_s": v.time_s,
        "history": [
            {
                "step": e.step,
                "what": e.what,
                "tag": format_tag(e.tag),
                "request": e.request,
                "detail": e.detail,
            }
            for e in (v.history.events if v.history else ())
        ],
    }
    if content is not None:
        data["content"] = content
    return data


def write_report(folder: Path, violation: Violation, *, content: str | None = None) -> Path:
    """Write `<id>.txt` and `<id>.json` to `folder`; returns the text file's path. Raises OSError as the disk does."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / f"{violation.id}.txt", folder / f"{violation.id}.json"
    for path, body in (
        (text, report_text(violation, content=content) + "\n"),
        (data, json.dumps(report_json(violation, content=content), indent=2) + "\n"),
    ):
        partial = path.with_suffix(path.suffix + ".part")
        partial.write_text(body, encoding="utf-8")
        os.replace(partial, path)
    return text
