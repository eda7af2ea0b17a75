"""All that the pages say of a run besides its curves and responses."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ascent.records.folder import is_locked
from ascent.viewer import foreign, notes
from ascent.viewer.charts import charts_of, greedy_of
from ascent.viewer.curves import Library, measured
from ascent.viewer.places import MOST, Place
from ascent.viewer.reading import changed, loads, number, opened, read_object, text
from ascent.viewer.recorded import HELD_OUT
from ascent.viewer.recorded import steps as steps_of
from ascent.viewer.status import begun, brief, going_on, status_of

MOST_EVENTS = 1 << 20
"""Bytes of events.jsonl that are read."""
END = 1 << 15
"""Bytes at the end of metrics.jsonl in which a list looks for the last values."""
LAST = 4
"""Lines of them that are parsed."""
FAR = 1 << 22
"""And for those of an evaluation, which come now and then."""
RARE = ("eval/accuracy", "eval/reward")
SAID = ("objective", "formula", "label")
"""What config.json holds only to be read."""


def safe_row(place: Place) -> dict[str, Any]:
    """A row whatever the files hold: in a list of many runs no one of them may cost the others."""
    try:
        return row(place)
    except Exception as error:
        blank = dict.fromkeys(("seed", "steps", "started", "updated", "accuracy", "reward", "max_reward"))
        said = f"its files cannot be read: {type(error).__name__}: {error}"[:300]
        about: dict[str, Any] = {"id": place.id, "kind": place.kind, "tags": [], "note": "", "task": "", "label": ""}
        return about | blank | {"status": "unreadable", "said": said, "step": 0, "flags": []}


def row(place: Place) -> dict[str, Any]:
    """A run in a list: what can be known without reading all of it."""
    if place.kind != "ascent":
        return _foreign_row(place)
    run, problem = read_object(place.folder / "run.json")
    result = run.get("result") if isinstance(run.get("result"), dict) else {}
    last = last_values(place.folder / "metrics.jsonl")
    if problem:
        status, said = "unreadable", problem
        if not (place.folder / "run.json").exists():
            status, said = "died", "killed before its first step; only its settings are here"
            if is_locked(place.folder):
                status, said = "running", "starting: its process is there"
    else:
        status, said = status_of(place.folder, run | {"step": last.get("step", -1) + 1})
    return {
        **_common(place),
        "task": text(run.get("task", "")),
        "label": text(run.get("label", "")),
        "seed": number(run.get("seed")),
        "status": status,
        "said": said,
        "brief": brief(status, said),
        "step": last.get("step", -1) + 1,
        "steps": number(run.get("steps")),
        "started": begun(run),
        "updated": changed(place.folder / "metrics.jsonl") or changed(place.folder / "run.json"),
        **_last_of(last, greedy_of(run.get("task"))),
        "max_reward": number((result or {}).get("max_reward")),
        "flags": flagged(events(place)),
    }


def flagged(found: list[dict[str, Any]]) -> list[str]:
    """The names of flags, each once."""
    return list(dict.fromkeys(text(e["name"]) for e in found if e.get("event") == "flag" and "name" in e))


def _last_of(last: dict[str, Any], greedy: str) -> dict[str, Any]:
    """The last share of right answers and reward, each with what it was measured on."""
    found: dict[str, Any] = {}
    for name in ("accuracy", "reward"):
        evaluated = f"eval/{name}" in last
        found[name] = last[f"eval/{name}"] if evaluated else last.get(name)
        found[f"{name}_of"] = greedy if evaluated else "sampled"
    return found


def _common(place: Place) -> dict[str, Any]:
    note = notes.read(place.folder)
    return {"id": place.id, "kind": place.kind, "tags": note["tags"], "note": note["text"]}


def _foreign_row(place: Place) -> dict[str, Any]:
    lines, problems = foreign.lines(place.folder)
    last = {key: value for line in lines for key, value in line.items() if value is not None}
    times = [t for t in (changed(path) for path in foreign.files(place.folder)) if t is not None]
    name = {"trl": "TRL", "verl": "verl"}[place.kind]
    said = f"completions that {name} wrote; whether it still runs is not known"
    return {
        **_common(place),
        "task": "",
        "label": name,
        "seed": None,
        "status": "foreign" if lines else "unreadable",
        "said": problems[0] if problems and not lines else said,
        "brief": problems[0] if problems and not lines else said,
        "step": int(last.get("step", -1)) + 1,
        "steps": None,
        "started": min(times, default=None),
        "updated": max(times, default=None),
        **_last_of(last, "evaluated"),
        "max_reward": None,
        "flags": [event["name"] for event in foreign.events(place.folder)],
    }


def page(place: Place, library: Library) -> dict[str, Any]:
    """A run in full, less its curves."""
    run, run_problem = read_object(place.folder / "run.json") if place.kind == "ascent" else ({}, "")
    config, config_problem = read_object(place.folder / "config.json") if place.kind == "ascent" else ({}, "")
    problems = [problem for problem in (run_problem, config_problem) if problem]
    with library.digest(place) as digest:
        charts = charts_of(measured(digest), "evaluated" if place.kind != "ascent" else greedy_of(run.get("task")))
        problems += [f"metrics.jsonl: {text}" for text in (digest.problem, *digest.bad[:3]) if text]
        if digest.bad_count > 3:
            problems.append(f"metrics.jsonl: {digest.bad_count:,} lines in all cannot be read, and are left out")
        problems += [
            f"{name} was not finite in {count:,} step{'s' * (count > 1)}, first {text} in step {step:g}"
            for name, count in digest.nonfinite_counts.items()
            for step, text in digest.nonfinite[name][:1]
        ]
    if place.kind != "ascent":
        problems += foreign.lines(place.folder)[1]
    elif not (place.folder / "metrics.jsonl").exists():
        problems.append("metrics.jsonl is missing, so there are no curves")
    result = run.get("result") if isinstance(run.get("result"), dict) else {}
    about = row(place)
    return {
        **about,
        "going_on": going_on(place.folder, about["status"]),
        "words": (result or {}).get("words", []),
        "objective": config.get("objective", ""),
        "formula": config.get("formula", ""),
        "config": {key: value for key, value in config.items() if key not in SAID},
        "versions": run.get("versions", {}),
        "machine": run.get("machine", {}),
        "history": run.get("history", []),
        "events": events(place),
        "charts": charts,
        "recorded": recorded(place),
        "held_out": steps_of(place.folder, place.kind, HELD_OUT),
        "greedy": greedy_of(run.get("task")),
        "notes": notes.read(place.folder),
        "problems": problems,
    }


def recorded(place: Place) -> list[int]:
    """The steps of which responses were kept."""
    return steps_of(place.folder, place.kind)


def events(place: Place) -> list[dict[str, Any]]:
    """Flags, trouble and notes, as far as they can be read."""
    if place.kind != "ascent":
        return foreign.events(place.folder)
    path = place.folder / "events.jsonl"
    try:
        about = path.stat()
    except OSError:
        return []
    return list(_events(path, about.st_size, about.st_mtime_ns))


@lru_cache(maxsize=MOST)
def _events(path: Path, size: int, _: int) -> tuple[dict[str, Any], ...]:
    """At most so many bytes of it: a run raises each flag once."""
    try:
        with opened(path) as file:
            lines = file.read(min(size, MOST_EVENTS)).split(b"\n")[:-1]
    except OSError:
        return ()
    found = (_json(line) for line in lines)
    return tuple(line for line in found if isinstance(line, dict) and number(line.get("step")) is not None)


def last_values(path: Path) -> dict[str, Any]:
    """The last known value of every metric, from the end of the file alone."""
    try:
        about = path.stat()
    except OSError:
        return {}
    return dict(_last_values(path, about.st_size, about.st_mtime_ns))


@lru_cache(maxsize=MOST)
def _last_values(path: Path, size: int, _: int) -> dict[str, Any]:
    try:
        with opened(path) as file:
            file.seek(max(0, size - END))
            lines = file.read().split(b"\n")[:-1]
            found = [_json(line) for line in (lines if size <= END else lines[1:])[-LAST:]]
            last = {k: v for line in found if isinstance(line, dict) for k, v in line.items() if number(v) is not None}
            if not all(name in last for name in RARE):
                file.seek(max(0, size - FAR))
                last = rare(file.read()) | last
    except OSError:
        return {}
    return last


def rare(data: bytes) -> dict[str, Any]:
    """The last value of what is measured now and then: found by its name, without parsing every line."""
    found = {}
    for name in RARE:
        for given in re.findall(rb'"%s": ?(-?[0-9][0-9.eE+-]*)' % name.encode(), data)[-1:]:
            if (value := number(_json(given))) is not None:
                found[name] = value
    return found


def _json(line: bytes) -> Any:
    try:
        return loads(line)
    except ValueError:
        return None
