"""The status of a run, as far as its files and this machine can tell."""

from __future__ import annotations

import os
import re
import shlex
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from ascent.records.folder import SIGN, is_locked
from ascent.records.reading import finite_number, modified_at, read_object

SILENT = 30.0
"""Seconds without a sign of life after which a run on another machine counts as dead. One comes every five."""


def status_of(folder: Path, run: dict[str, Any], now: float | None = None) -> tuple[str, str]:
    """A status and its reason. A run that calls itself running is so only while it gives signs of life.

    On this machine the lock decides. The lock of a run on another machine is not seen here, so the file `.alive`
    decides, which its process renews every few seconds. While that file is missing, the time in run.json decides.
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
    if age is None and (heard := finite_number(run.get("heartbeat"))) is not None:
        age = now - heard
    sign_words = f"last sign of life {ago(age)}" if age is not None else "no sign of life"
    if is_locked(folder):
        return "running", f"running, {done}, {sign_words}"
    host = sign.get("host") or _host_of(run)
    elsewhere = host not in (None, socket.gethostname())
    if elsewhere and age is not None and age < SILENT:
        return "running", f"running on {host}, {done}, {sign_words}"
    where = f"on {host}" if elsewhere else "here"
    return "died", f"died after {done}: no process {where} is writing it any more, {sign_words}"


def _host_of(run: dict[str, Any]) -> str | None:
    """The machine that run.json names."""
    machine = run.get("machine")
    host = machine.get("host") if isinstance(machine, dict) else None
    return host if isinstance(host, str) else None


def status_reason(status: str, words: str) -> str:
    """The reason without the status and the steps, which a list shows in other columns."""
    short = re.sub(r"(,| after) \d+ of \S+ steps", "", words, count=1)
    return re.sub(rf"^{re.escape(status)}(, |: |$)", "", short)


def how_to_resume(folder: Path, status: str) -> dict[str, str] | None:
    """How to resume a run that did not finish: a command, or why there is none."""
    if status not in ("died", "interrupted", "failed"):
        return None
    if not any(re.fullmatch(r"step_\d+", path.name) for path in (folder / "checkpoints").glob("step_*")):
        return {"words": "It left no checkpoint, so it cannot be resumed."}
    here = Path.cwd()
    path = folder.resolve()
    shown = os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
    return {"words": "To resume from its last checkpoint:", "command": f"ascent resume {shlex.quote(shown)}"}


def read_sign(folder: Path) -> dict[str, Any]:
    """The last sign of life of a run's process: host, pid, time; empty if there is none that can be read."""
    sign, _ = read_object(folder / SIGN)
    return sign if finite_number(sign.get("time")) is not None else {}


_seen: dict[Path, tuple[float, float | None]] = {}
"""The last sign of each run, and when it was seen to change, by this machine's clock."""
MOST_SEEN = 10_000


def silence(folder: Path, sign: dict[str, Any], now: float) -> float | None:
    """Seconds since the last sign of life. Once it was seen to change, the other machine's clock does not matter.

    Before that, the time in the sign counts; if it lies in the future, the time when the file was written.
    """
    if not sign:
        return None
    if len(_seen) >= MOST_SEEN and folder not in _seen:
        _seen.clear()
    last, changed_at = _seen.setdefault(folder, (sign["time"], None))
    if last != sign["time"]:
        changed_at = now
        _seen[folder] = sign["time"], now
    if changed_at is not None:
        return now - changed_at
    age = now - sign["time"]
    return age if age >= 0 else now - (modified_at(folder / SIGN) or sign["time"])


def ago(seconds: float) -> str:
    """3 s ago, 5 min ago, 2 h ago, 4 days ago."""
    if seconds < 0:
        return "in the future: the clocks of the two machines differ"
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def started_at(run: dict[str, Any]) -> float | None:
    """When a run was started, in seconds since 1970."""
    history = run.get("history")
    if not isinstance(history, list) or not history or not isinstance(history[0], dict):
        return None
    try:
        return datetime.strptime(str(history[0].get("time")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
