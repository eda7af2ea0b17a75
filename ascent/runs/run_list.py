"""List the runs below a folder with their status. Nothing outside the folder is opened."""

import os
import re
import shlex
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.runs.foreign_runs import foreign_kind
from ascent.runs.run_folder import HEARTBEAT_FILE, is_locked, oom_kill_count
from ascent.runs.untrusted_files import READ_ERRORS, finite_number, modified_at, read_object

MAX_DEPTH = 4
"""Maximum depth of folders to search: a comparison has its runs one level down."""
MAX_RUNS = 5_000
"""Maximum number of runs in a list."""
MAX_ID_LENGTH = 500
RUN_SUBFOLDERS = frozenset({"checkpoints", "journal", "rollouts", "held_out", "tensorboard", "wandb", "mlflow"})
"""Folders inside a run that are not runs."""
HEARTBEAT_TIMEOUT = 30.0
"""Seconds without a heartbeat after which a run on another machine counts as died. Heartbeats come every five."""


@dataclass(frozen=True)
class RunEntry:
    """A run in a list. Its id is its path below the listed folder."""

    id: str
    folder: Path
    kind: str
    """The library that wrote the run: `ascent`, `trl` or `verl`."""


def run_kind(folder: Path) -> str | None:
    """Return the library that wrote the run in a folder; None if it has no run."""
    with suppress(OSError):  # no permission
        if (folder / "run.json").exists() or ((folder / "config.json").exists() and (folder / ".lock").exists()):
            return "ascent"
        return foreign_kind(folder)
    return None


def find_run(root: Path, id: str) -> RunEntry:
    """Return the run with an id; raise ConfigError for an id that leads out of the folder."""
    parts = id.split("/")
    if (
        len(id) > MAX_ID_LENGTH
        or "\0" in id
        or "\\" in id
        or any(p in ("", ".", "..") or p.startswith(".") for p in parts)
    ):
        raise ConfigError(f"{id[:80]!r} is not the name of a run")
    try:
        folder = root.joinpath(*parts).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise ConfigError(f"there is no run {id}") from None
    if not folder.is_relative_to(root.resolve()):
        raise ConfigError(f"{id}: that is not inside the folder of runs")
    kind = run_kind(folder) if folder.is_dir() else None
    if kind is None:
        raise ConfigError(f"there is no run {id}")
    return RunEntry(id, folder, kind)


def runs_below(root: Path) -> list[RunEntry]:
    """Return every run below a folder, sorted by id. Links are not followed."""
    runs: list[RunEntry] = []
    waiting = [(root, "", 0)]
    while waiting and len(runs) < MAX_RUNS:
        folder, id, depth = waiting.pop()
        kind = run_kind(folder) if depth else None
        if kind is not None:
            runs.append(RunEntry(id, folder, kind))
        elif depth < MAX_DEPTH:
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    is_candidate = (
                        entry.name.isprintable() and not entry.name.startswith(".") and entry.name not in RUN_SUBFOLDERS
                    )
                    if is_candidate and entry.is_dir(follow_symlinks=False):
                        waiting.append((Path(entry.path), f"{id}/{entry.name}".lstrip("/"), depth + 1))
    return sorted(runs, key=lambda place: place.id)


def run_status(folder: Path, run: dict[str, Any], now: float | None = None) -> tuple[str, str]:
    """Return a status and its explanation. A run with status "running" is running only while its process is alive.

    On this machine the lock decides. The lock of a run on another machine is not visible: its heartbeat file decides,
    or the heartbeat in run.json if there is no such file.
    """
    now = time.time() if now is None else now
    status = str(run.get("status", "unreadable"))
    done = f"{run.get('step', 0)} of {run.get('steps', '?')} steps"
    if status != "running":
        words = {"finished": "finished,", "interrupted": "stopped and saved after"}.get(status, f"{status} after")
        return status, f"{words} {done}"
    heartbeat = read_heartbeat(folder)
    age = heartbeat_age(folder, heartbeat, now)
    if age is None and (recorded_time := finite_number(run.get("heartbeat"))) is not None:
        age = now - recorded_time
    heartbeat_text = f"last heartbeat {ago(age)}" if age is not None else "no heartbeat"
    if is_locked(folder):
        return "running", f"running, {done}, {heartbeat_text}"
    machine = run.get("machine")
    host = heartbeat.get("host") or (machine.get("host") if isinstance(machine, dict) else None)
    elsewhere = isinstance(host, str) and host != socket.gethostname()
    if elsewhere and age is not None and age < HEARTBEAT_TIMEOUT:
        return "running", f"running on {host}, {done}, {heartbeat_text}"
    where = f"on {host}" if elsewhere else "here"
    return "died", f"died after {done}: no process {where} writes it, {heartbeat_text}"


def status_reason(status: str, words: str) -> str:
    """Return the explanation without the status and the steps, which a list shows in other columns."""
    short = re.sub(r"(,| after) \d+ of \S+ steps", "", words, count=1)
    return re.sub(rf"^{re.escape(status)}(, |: |$)", "", short)


def how_to_resume(folder: Path, status: str) -> dict[str, str] | None:
    """Return the command that resumes an unfinished run, or why there is none."""
    if status not in ("died", "interrupted", "failed"):
        return None
    if not any(re.fullmatch(r"step_\d+", path.name) for path in (folder / "checkpoints").glob("step_*")):
        return {"words": "It has no checkpoint, so it cannot be resumed."}
    here, path = Path.cwd(), folder.resolve()
    shown_path = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return {"words": "To resume from its last checkpoint:", "command": f"ascent resume {shlex.quote(shown_path)}"}


def read_heartbeat(folder: Path) -> dict[str, Any]:
    """Read the last heartbeat (host, pid, time); empty if there is none."""
    heartbeat, _ = read_object(folder / HEARTBEAT_FILE)
    return heartbeat if finite_number(heartbeat.get("time")) is not None else {}


_last_heartbeats: dict[Path, tuple[float, float | None]] = {}
"""The last heartbeat of each run, and when it changed by this machine's clock."""
MAX_SEEN_HEARTBEATS = 10_000


def heartbeat_age(folder: Path, heartbeat: dict[str, Any], now: float) -> float | None:
    """Return the seconds since the last heartbeat. Once it was seen to change, only this machine's clock matters.

    Before that, the time in the heartbeat counts, or the file's modification time if that time is in the future.
    """
    if not heartbeat:
        return None
    if len(_last_heartbeats) >= MAX_SEEN_HEARTBEATS and folder not in _last_heartbeats:
        _last_heartbeats.clear()
    last, changed_at = _last_heartbeats.setdefault(folder, (heartbeat["time"], None))
    if last != heartbeat["time"]:
        changed_at = now
        _last_heartbeats[folder] = heartbeat["time"], now
    if changed_at is not None:
        return now - changed_at
    age = now - heartbeat["time"]
    return age if age >= 0 else now - (modified_at(folder / HEARTBEAT_FILE) or heartbeat["time"])


def ago(seconds: float) -> str:
    """Format a duration: 3 s ago, 5 min ago, 2 h ago, 4 days ago."""
    if seconds < 0:
        return "in the future: the clocks of the two machines differ"
    for size, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def started_at(run: dict[str, Any]) -> float | None:
    """Return the start time of a run in seconds since 1970."""
    with suppress(LookupError, TypeError, ValueError):
        return datetime.strptime(run["history"][0]["time"], "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return None


def was_oom_killed(folder: Path) -> bool:
    """Return whether this machine has killed a process out of memory since the run's last heartbeat."""
    try:
        heartbeat, _ = read_object(folder / HEARTBEAT_FILE)
        before, now = heartbeat["killed"], oom_kill_count()
        same = heartbeat["host"] == socket.gethostname() and before.split()[0] == str(now).split()[0]
    except READ_ERRORS:
        return False
    return same and before != now
