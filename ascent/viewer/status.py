"""What has become of a run, as far as its files and this machine can tell."""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ascent.records.folder import is_locked
from ascent.viewer.reading import changed, number, read_object

SILENT = 30.0
"""Seconds without a sign of life after which a run on another machine counts as dead. One comes every five."""


def status_of(folder: Path, run: dict[str, Any], now: float | None = None) -> tuple[str, str]:
    """A status, and why: a run that says it is running is so only while something is heard of it.

    On this machine the lock says it. Of a run on another machine, whose lock is not seen here, only the file
    `.alive` is known, which its process renews every few seconds however long a step takes; before it comes and
    when it has just gone, the time in run.json.
    """
    now = time.time() if now is None else now
    status = str(run.get("status", "unreadable"))
    done = f"{run.get('step', 0)} of {run.get('steps', '?')} steps"
    if status != "running":
        return status, {"finished": f"finished, {done}", "interrupted": f"stopped and saved after {done}"}.get(
            status, f"{status} after {done}"
        )
    sign = read_sign(folder)
    age = silence(folder, sign, now)
    if age is None and (heard := number(run.get("heartbeat"))) is not None:
        age = now - heard
    said = f"last sign of life {ago(age)}" if age is not None else "no sign of life"
    if is_locked(folder):
        return "running", f"running, {done}, {said}"
    host = sign.get("host") or host_of(run)
    elsewhere = host not in (None, socket.gethostname())
    if elsewhere and age is not None and age < SILENT:
        return "running", f"running on {host}, {done}, {said}"
    where = f"on {host}" if elsewhere else "here"
    return "died", f"died after {done}: no process {where} is writing it any more, {said}"


def host_of(run: dict[str, Any]) -> str | None:
    """The machine that run.json names."""
    machine = run.get("machine")
    host = machine.get("host") if isinstance(machine, dict) else None
    return host if isinstance(host, str) else None


def brief(status: str, said: str) -> str:
    """Why, without what a list says in other columns: the status and the steps."""
    short = re.sub(r"(,| after) \d+ of \S+ steps", "", said, count=1)
    return re.sub(rf"^{re.escape(status)}(, |: |$)", "", short)


def going_on(folder: Path, status: str) -> dict[str, str] | None:
    """How to go on with a run that came to no end: a command, or why there is none."""
    if status not in ("died", "interrupted", "failed"):
        return None
    if not any(re.fullmatch(r"step_\d+", path.name) for path in (folder / "checkpoints").glob("step_*")):
        return {"words": "It left no checkpoint, so there is nothing to go on from."}
    here = Path.cwd()
    path = folder.resolve()
    shown = os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
    return {"words": "To go on from its last checkpoint:", "command": f"ascent resume {shlex.quote(shown)}"}


def read_sign(folder: Path) -> dict[str, Any]:
    """What the process of a run last said of itself: host, pid, time."""
    found, _ = read_object(folder / ".alive")
    return found if number(found.get("time")) is not None else {}


_seen: dict[Path, tuple[float, float]] = {}
"""The last sign of each run, and when it was first seen here: by this machine's clock alone."""
MOST_SEEN = 10_000


def silence(folder: Path, sign: dict[str, Any], now: float) -> float | None:
    """Seconds since the last sign of life, whatever the other machine's clock says, if it was seen to change.

    At a first look there is only what the sign says of itself; if that lies in the future, when the file was written.
    """
    if not sign:
        return None
    known = _seen.get(folder)
    if known is not None and known[0] != sign["time"]:
        _seen[folder] = sign["time"], now
        return 0.0
    if known is None:
        if len(_seen) >= MOST_SEEN:
            _seen.clear()
        _seen[folder] = sign["time"], -1.0
    seen = -1.0 if known is None else known[1]
    if seen >= 0:
        return now - seen
    told = now - sign["time"]
    return told if told >= 0 else now - (changed(folder / ".alive") or sign["time"])


def ago(seconds: float) -> str:
    """3 s ago, 5 min ago, 2 h ago, 4 days ago."""
    if seconds < 0:
        return "in the future: the clocks of the two machines differ"
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def begun(run: dict[str, Any]) -> float | None:
    """When a run was started, in seconds since 1970."""
    history = run.get("history")
    if not isinstance(history, list) or not history or not isinstance(history[0], dict):
        return None
    try:
        return datetime.strptime(str(history[0].get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
