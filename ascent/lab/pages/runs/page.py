"""The list of runs with status, a small curve, notes and tags (notes.json)."""

import hashlib
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.core.errors import ConfigError
from ascent.lab.curves import spark
from ascent.lab.page_base import (
    MAX_RUNS_PER_REQUEST,
    FiniteJSONResponse,
    Lab,
    json_route,
    read_json_body,
    repeated_param,
    viewer_page,
)
from ascent.runs.foreign_runs import READERS, foreign_events, foreign_files, foreign_lines
from ascent.runs.metrics import evaluation_label
from ascent.runs.run_folder import is_locked, write_json
from ascent.runs.run_list import MAX_RUNS, RunEntry, find_run, run_status, runs_below, started_at, status_reason
from ascent.runs.untrusted_files import (
    FileCache,
    finite_json,
    finite_number,
    modified_at,
    open_regular,
    printable,
    read_object,
    read_regular,
)

MOST_EVENTS = 1 << 20
"""Maximum number of bytes of events.jsonl that are read."""
END, LAST = 1 << 15, 4
"""Bytes at the end of metrics.jsonl that are searched for last values, and lines that are parsed."""
FAR = 1 << 22
"""Bytes that are searched for the last values of evaluations, which are rare."""
RARE = ("eval/accuracy", "eval/reward")
BLANK: dict[str, Any] = {
    **dict.fromkeys(("seed", "steps", "started", "updated", "accuracy", "reward", "max_reward")),
    **{"task": "", "label": "", "status": "unreadable", "step": 0},
}
"""A row without data."""
_read = FileCache(2 * MAX_RUNS)


def routes(lab: Lab) -> list[BaseRoute]:
    def rows(_: Request) -> dict[str, Any]:
        return {"root": lab.runs.name, "runs": [run_row_or_reason(place) for place in runs_below(lab.runs)]}

    def sparks(request: Request) -> dict[str, Any]:
        """Return the small curves of some runs, without runs that no longer exist."""
        curves = {}
        for id in repeated_param(request, "id", MAX_RUNS_PER_REQUEST):
            with suppress(ConfigError, OSError), lab.column_cache.columns(find_run(lab.runs, id)) as columns:
                curves[id] = spark(columns)
        return curves

    async def note(request: Request) -> Response:
        asked = await read_json_body(request)
        place = find_run(lab.runs, str(asked.get("id", "")))
        words = (asked.get("text"), asked.get("tags"), asked.get("revision"))
        return FiniteJSONResponse(await run_in_threadpool(write_note, place.folder, *words))

    return [
        Route("/runs", viewer_page(lab, "runs", "Runs")),
        Route("/api/view/runs", json_route(rows)),
        Route("/api/view/spark", json_route(sparks)),
        Route("/api/view/notes", note, methods=["POST"]),
    ]


def run_row_or_reason(place: RunEntry) -> dict[str, Any]:
    """Return a row even if the files are unreadable, so that one run cannot break the list."""
    try:
        return run_row(place)
    except Exception as error:
        said = f"its files cannot be read: {type(error).__name__}: {error}"[:300]
        return BLANK | {"id": place.id, "kind": place.kind, "tags": [], "note": "", "said": said, "alerts": []}


def run_row(place: RunEntry) -> dict[str, Any]:
    """Return the row of a run, without reading all of its files."""
    note = read_note(place.folder)
    about = BLANK | {"id": place.id, "kind": place.kind, "tags": note["tags"], "note": note["text"]}
    if place.kind != "ascent":
        return about | _foreign_row(place)
    run, problem = read_object(place.folder / "run.json")
    last = last_values(place.folder / "metrics.jsonl")
    if not problem:
        status, said = run_status(place.folder, run | {"step": last.get("step", -1) + 1})
    elif (place.folder / "run.json").exists():
        status, said = "unreadable", problem
    elif is_locked(place.folder):
        status, said = "running", "starting: its process is there"
    else:
        status, said = "died", "killed before its first step; only its settings are here"
    alerts = [printable(e["name"]) for e in run_events(place) if e.get("event") == "alert" and "name" in e]
    return about | {
        **{name: printable(run.get(name, "")) for name in ("task", "label")},
        **{name: finite_number(run.get(name)) for name in ("seed", "steps")},
        **{"status": status, "said": said, "brief": status_reason(status, said)},
        "step": last.get("step", -1) + 1,
        "started": started_at(run),
        "updated": modified_at(place.folder / "metrics.jsonl") or modified_at(place.folder / "run.json"),
        **_last_of(last, evaluation_label(run.get("task"))),
        "max_reward": finite_number(part_of(run, "result", dict).get("max_reward")),
        "alerts": list(dict.fromkeys(alerts)),
    }


def part_of(held: Mapping[str, Any], name: str, kind: type[dict] | type[list]) -> Any:
    """Return this object or list of an untrusted file; empty if it has another type."""
    part = held.get(name)
    return part if isinstance(part, kind) else kind()


def _last_of(last: dict[str, Any], greedy: str) -> dict[str, Any]:
    """Return the last accuracy and reward, each with what it was measured on."""
    values: dict[str, Any] = {}
    for name in ("accuracy", "reward"):
        evaluated = f"eval/{name}" in last
        values[name] = last[f"eval/{name}"] if evaluated else last.get(name)
        values[f"{name}_of"] = greedy if evaluated else "sampled"
    return values


def _foreign_row(place: RunEntry) -> dict[str, Any]:
    lines, problems = foreign_lines(place.folder)
    last = {key: value for line in lines for key, value in line.items() if value is not None}
    times = [t for t in (modified_at(path) for path in foreign_files(place.folder)) if t is not None]
    name = READERS[place.kind].title
    said = f"completions that {name} wrote; whether it still runs is not known"
    said = problems[0] if problems and not lines else said
    return {
        "label": name,
        **{"status": "foreign" if lines else "unreadable", "said": said, "brief": said},
        "step": int(last.get("step", -1)) + 1,
        **{"started": min(times, default=None), "updated": max(times, default=None)},
        **_last_of(last, "evaluated"),
        "alerts": [event["name"] for event in foreign_events(place.folder)],
    }


def run_events(place: RunEntry) -> list[dict[str, Any]]:
    """Return the readable events. A run raises each alert once, so reading the start of the file is enough."""
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
    """Return the last value of every metric from the end of the file; rare ones by name, without parsing every line."""

    def read() -> dict[str, Any]:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - END))
            lines = file.read().split(b"\n")[:-1]
            objects = [_json(line) for line in (lines if size <= END else lines[1:])[-LAST:]]
            pairs = [pair for line in objects if isinstance(line, dict) for pair in line.items()]
            last = {name: value for name, value in pairs if finite_number(value) is not None}
            missing = [name for name in RARE if name not in last]
            file.seek(max(0, size - FAR))
            far = file.read() if missing else b""
        for name in missing:
            for text in re.findall(rb'"%s": ?(-?[0-9][0-9.eE+-]*)' % name.encode(), far)[-1:]:
                if (value := finite_number(_json(text))) is not None:
                    last[name] = value
        return last

    try:
        return dict(_read(path, read))
    except OSError:
        return {}


def _json(line: bytes) -> Any:
    try:
        return finite_json(line)
    except ValueError:
        return None


# ---- a person's words and tags for a run: nothing typed is ever overwritten unseen ------------------------------

FILE = "notes.json"
MOST_TEXT = 20_000
MOST_TAGS, LONGEST_TAG = 20, 40
_writing = threading.Lock()


def read_note(folder: Path) -> dict[str, Any]:
    """Return text, tags and a revision that changes with them, also if the file is not readable as JSON."""
    about: dict[str, Any] = {"text": "", "tags": [], "revision": "unreadable"}
    try:
        data = read_regular(folder / FILE)
        about["revision"] = hashlib.sha256(data).hexdigest()[:16]
        note = finite_json(data)
        tags = [printable(tag) for tag in note.get("tags", [])]
        return about | {"text": printable(note.get("text", "")), "tags": tags}
    except FileNotFoundError:
        return about | {"revision": ""}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return about | {"problem": f"{FILE} cannot be read: {error}"}


def write_note(folder: Path, text: Any, tags: Any, revision: Any) -> dict[str, Any]:
    """Replace text and tags, unless they have changed since the client read them."""
    if not isinstance(text, str) or len(text) > MOST_TEXT or text != printable(text):
        raise ConfigError(f"a note is text of at most {MOST_TEXT:,} characters")
    if not isinstance(tags, list) or not all(isinstance(tag, str) and tag == printable(tag) for tag in tags):
        raise ConfigError("tags are a list of words")
    tags = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
    if len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise ConfigError(f"a run has at most {MOST_TAGS} tags, each of at most {LONGEST_TAG} characters")
    with _writing:
        now = read_note(folder)
        if "problem" in now:
            raise ConfigError(f"{now['problem']}. Nothing was written over: mend or move {folder / FILE} first")
        if now["revision"] != revision:
            raise ConfigError(
                "someone else has changed this note meanwhile, and nothing was written over. It says now: "
                f"{now['text'] or '(nothing)'} (tags: {', '.join(now['tags']) or 'none'})"
            )
        try:
            write_json(folder / FILE, {"text": text, "tags": tags})
        except OSError as error:
            raise ConfigError(f"the note cannot be written ({error.strerror}): is the folder yours?") from None
        return read_note(folder)
