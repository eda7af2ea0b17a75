"""A run as a row of a list: what can be known without reading all of its files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ascent.lab.pages.runs.notes import read_note
from ascent.records.folder import is_locked
from ascent.records.foreign import READERS, foreign_events, foreign_files, foreign_lines
from ascent.records.metrics import greedy_of
from ascent.records.places import MOST_RUNS, Place
from ascent.records.reading import (
    FileCache,
    finite_json,
    finite_number,
    modified_at,
    open_regular,
    printable,
    read_object,
)
from ascent.records.status import started_at, status_of, status_reason

MOST_EVENTS = 1 << 20
"""Bytes of events.jsonl that are read."""
END = 1 << 15
"""Bytes at the end of metrics.jsonl in which a list looks for the last values."""
LAST = 4
"""Lines of them that are parsed."""
FAR = 1 << 22
"""And for those of an evaluation, which come now and then."""
RARE = ("eval/accuracy", "eval/reward")
BLANK: dict[str, Any] = {
    **dict.fromkeys(("seed", "steps", "started", "updated", "accuracy", "reward", "max_reward")),
    **{"task": "", "label": "", "status": "unreadable", "step": 0},
}
"""A row of which nothing is known."""
_read = FileCache(2 * MOST_RUNS)


def run_row_or_reason(place: Place) -> dict[str, Any]:
    """A row whatever the files hold: in a list of many runs no one of them may cost the others."""
    try:
        return run_row(place)
    except Exception as error:
        said = f"its files cannot be read: {type(error).__name__}: {error}"[:300]
        return BLANK | {"id": place.id, "kind": place.kind, "tags": [], "note": "", "said": said, "flags": []}


def run_row(place: Place) -> dict[str, Any]:
    """A run in a list: what can be known without reading all of it."""
    note = read_note(place.folder)
    about = BLANK | {"id": place.id, "kind": place.kind, "tags": note["tags"], "note": note["text"]}
    if place.kind != "ascent":
        return about | _foreign_row(place)
    run, problem = read_object(place.folder / "run.json")
    result = run.get("result") if isinstance(run.get("result"), dict) else {}
    last = last_values(place.folder / "metrics.jsonl")
    if not problem:
        status, said = status_of(place.folder, run | {"step": last.get("step", -1) + 1})
    elif (place.folder / "run.json").exists():
        status, said = "unreadable", problem
    elif is_locked(place.folder):
        status, said = "running", "starting: its process is there"
    else:
        status, said = "died", "killed before its first step; only its settings are here"
    flags = [printable(e["name"]) for e in run_events(place) if e.get("event") == "flag" and "name" in e]
    return about | {
        "task": printable(run.get("task", "")),
        "label": printable(run.get("label", "")),
        "seed": finite_number(run.get("seed")),
        "status": status,
        "said": said,
        "brief": status_reason(status, said),
        "step": last.get("step", -1) + 1,
        "steps": finite_number(run.get("steps")),
        "started": started_at(run),
        "updated": modified_at(place.folder / "metrics.jsonl") or modified_at(place.folder / "run.json"),
        **_last_of(last, greedy_of(run.get("task"))),
        "max_reward": finite_number((result or {}).get("max_reward")),
        "flags": list(dict.fromkeys(flags)),
    }


def _last_of(last: dict[str, Any], greedy: str) -> dict[str, Any]:
    """The last share of right answers and reward, each with what it was measured on."""
    values: dict[str, Any] = {}
    for name in ("accuracy", "reward"):
        evaluated = f"eval/{name}" in last
        values[name] = last[f"eval/{name}"] if evaluated else last.get(name)
        values[f"{name}_of"] = greedy if evaluated else "sampled"
    return values


def _foreign_row(place: Place) -> dict[str, Any]:
    lines, problems = foreign_lines(place.folder)
    last = {key: value for line in lines for key, value in line.items() if value is not None}
    times = [t for t in (modified_at(path) for path in foreign_files(place.folder)) if t is not None]
    name = READERS[place.kind].title
    said = f"completions that {name} wrote; whether it still runs is not known"
    said = problems[0] if problems and not lines else said
    return {
        "label": name,
        "status": "foreign" if lines else "unreadable",
        "said": said,
        "brief": said,
        "step": int(last.get("step", -1)) + 1,
        "started": min(times, default=None),
        "updated": max(times, default=None),
        **_last_of(last, "evaluated"),
        "flags": [event["name"] for event in foreign_events(place.folder)],
    }


def run_events(place: Place) -> list[dict[str, Any]]:
    """Flags, trouble and notes, as far as they can be read. A run raises each flag once, so the beginning will do."""
    if place.kind != "ascent":
        return foreign_events(place.folder)
    path = place.folder / "events.jsonl"

    def read() -> list[dict[str, Any]]:
        with open_regular(path) as file:
            lines = map(_json, file.read(MOST_EVENTS).split(b"\n")[:-1])
        return [line for line in lines if isinstance(line, dict) and finite_number(line.get("step")) is not None]

    try:
        return list(_read(path, read))
    except OSError:
        return []


def last_values(path: Path) -> dict[str, Any]:
    """The last known value of every metric, from the end of the file alone."""

    def read() -> dict[str, Any]:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - END))
            lines = file.read().split(b"\n")[:-1]
            objects = [_json(line) for line in (lines if size <= END else lines[1:])[-LAST:]]
            numbers = [(k, v) for line in objects if isinstance(line, dict) for k, v in line.items()]
            last = {name: value for name, value in numbers if finite_number(value) is not None}
            if not all(name in last for name in RARE):
                file.seek(max(0, size - FAR))
                last = _rare_values(file.read()) | last
        return last

    try:
        return dict(_read(path, read))
    except OSError:
        return {}


def _rare_values(data: bytes) -> dict[str, Any]:
    """The last value of what is measured now and then: found by its name, without parsing every line."""
    values = {}
    for name in RARE:
        for text in re.findall(rb'"%s": ?(-?[0-9][0-9.eE+-]*)' % name.encode(), data)[-1:]:
            if (value := finite_number(_json(text))) is not None:
                values[name] = value
    return values


def _json(line: bytes) -> Any:
    try:
        return finite_json(line)
    except ValueError:
        return None
