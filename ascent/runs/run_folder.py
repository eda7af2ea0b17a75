"""The folder of a run: locking, atomic writes, the heartbeat file and truncation for resumes.

run.json       status, result, versions; replaced atomically
config.json    every resolved setting, with a description of the objective
metrics.jsonl  one line per step      updates.jsonl  one line per optimizer update
events.jsonl   alerts, notes, errors      occupancy.jsonl    one line per step: how many responses were decoded at once
rollouts/      sampled responses, one Parquet file per step
held_out/      greedy answers to held-out prompts, one Parquet file per evaluation
checkpoints/   step_000100/…          .lock          held while a process writes here
journal/       with a serving engine, the batches since the newest checkpoint
.alive         heartbeat: host, process and time of the writer

Files may be hard links (as in backups), so they are never overwritten in place: they are copied or removed first. A
folder may come from an untrusted source, so it is read with `untrusted_files`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import socket
import stat
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ascent.core.errors import ConfigError
from ascent.runs.untrusted_files import open_regular, read_json

JSONL_FILES = ("metrics.jsonl", "updates.jsonl", "events.jsonl", "occupancy.jsonl")
STEP_FOLDERS = ("rollouts", "held_out")
"""Folders with one file per step."""
HEARTBEAT_FILE, HEARTBEAT_FILE_ASIDE = ".alive", ".alive.new"
HEARTBEAT_INTERVAL = 5.0
"""Seconds between two heartbeats."""
TRACKER_FOLDERS = frozenset({"tensorboard", "wandb", "mlflow"})
"""Folders that trackers write into a run's folder."""
FILES_BEFORE_START = {".lock", HEARTBEAT_FILE, HEARTBEAT_FILE_ASIDE, "config.json", ".config.json.new", ".run.json.new"}
"""Files of a run that was killed before its run.json was written."""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically. Unpaired surrogates are escaped."""
    aside = unlinked(path.with_name(f".{path.name}.new"))
    with open(aside, "x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def mark_nonfinite(values: dict[str, Any]) -> dict[str, Any]:
    """Return a line for a JSON file: infinite and NaN numbers become None and are named in `nonfinite`."""
    nonfinite = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return (
        {k: None if k in nonfinite else v for k, v in values.items()} | {"nonfinite": nonfinite}
        if nonfinite
        else values
    )


def unlinked(path: Path) -> Path:
    """Remove a stale file or link at `path` and return the path."""
    path.unlink(missing_ok=True)
    return path


def oom_kill_count() -> str | None:
    """Return the boot id and the number of out-of-memory kills since boot; None if unknown."""
    with suppress(OSError, StopIteration):
        count = next(line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill "))
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {count.split()[1]}"
    return None


class HeartbeatWriter:
    """Writes the heartbeat file .alive, for readers on machines that cannot see the lock.

    A thread replaces it every few seconds until `stop`, however long a step takes. A process that exits removes it; a
    killed process leaves an old one. Errors are ignored. A forked process has no such thread and does not stop that of
    its parent.
    """

    def __init__(self, folder: Path, lock: IO[str]):
        self.folder, self.pid, self.host = folder, os.getpid(), socket.gethostname()
        self._held, self._lock = weakref.ref(lock), os.fstat(lock.fileno())
        self._stopped = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._work, name="ascent-alive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() != self.pid:
            return
        self._stopped.set()
        self._thread.join(HEARTBEAT_INTERVAL)  # with a timeout, in case a disk hangs
        if self._is_our_folder():
            for name in (HEARTBEAT_FILE, HEARTBEAT_FILE_ASIDE):
                with suppress(OSError):
                    os.unlink(self.folder / name)

    def _work(self) -> None:
        while not self._stopped.wait(HEARTBEAT_INTERVAL) and self._held() is not None:
            self._write()

    def _write(self) -> None:
        """Write the file atomically, without a flush, so that it never waits for a disk."""
        if not self._is_our_folder():
            return
        with suppress(OSError):
            with open(unlinked(self.folder / HEARTBEAT_FILE_ASIDE), "x") as file:
                json.dump({"host": self.host, "pid": self.pid, "time": time.time(), "killed": oom_kill_count()}, file)
            os.rename(self.folder / HEARTBEAT_FILE_ASIDE, self.folder / HEARTBEAT_FILE)

    def _is_our_folder(self) -> bool:
        """Whether this is still the folder that was locked; it may have been removed and created again."""
        lock = self._held()
        if lock is None or lock.closed:
            return False
        with suppress(OSError):
            return os.path.samestat(os.stat(self.folder / ".lock"), self._lock)
        return False


class RunFolder:
    """The folder of a run that this process writes; it is locked until `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.run: dict[str, Any] = {}
        """The contents of run.json."""
        self._lock: IO[str] | None = None
        self._alive: HeartbeatWriter | None = None

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], run: dict[str, Any]) -> RunFolder:
        """Create the folder of a new run with its config. A folder that is not empty is never overwritten."""
        check_new_folder(path)
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            write_json(path / "config.json", config)
            folder.run = run | {"status": "running", "result": None, "history": []}
            folder.note("started")
            folder.create_files()
        except OSError as error:
            raise _unwritable(path, error) from None
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run to continue it. It is read after it is locked."""
        folder = cls(path)
        try:
            folder.lock()
            folder.run = read_json(path / "run.json")
            folder.create_files()
        except ConfigError:
            folder.close()
            raise
        except OSError as error:
            folder.close()
            raise ConfigError(f"{path}: cannot write there ({error.strerror})") from None
        return folder

    def create_files(self) -> None:
        for name in ("checkpoints", *STEP_FOLDERS):
            (self.path / name).mkdir(exist_ok=True)
        for path in (self.path / name for name in JSONL_FILES):
            if path.is_file() and path.stat().st_nlink > 1:
                os.replace(shutil.copy2(path, unlinked(path.with_name(f".{path.name}.new"))), path)
            path.touch()

    def lock(self) -> None:
        check_links_stay_inside(self.path)
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 (closed by `close`)
        for _ in range(20):  # `is_locked` holds the lock for a moment
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            self._lock.seek(0)
            pid = next(iter(re.findall(r"^\d{1,10}$", self._lock.read(12))), "unknown")
            self.close()
            raise ConfigError(f"{self.path}: another process (pid {pid}) writes this run: wait for it, or stop it")
        if os.fstat(self._lock.fileno()).st_nlink == 1:
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        self._alive = HeartbeatWriter(self.path, self._lock)

    def note(self, event: str, **details: Any) -> None:
        """Add an event (started, resumed, interrupted, …) with its time to the history in run.json."""
        self.run["history"].append({"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **details})
        self.save()

    def save(self) -> None:
        self.run["heartbeat"] = time.time()
        write_json(self.path / "run.json", self.run)

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Raise ConfigError if a file is shorter than it was at a checkpoint."""
        for name in JSONL_FILES:
            have, size = (self.path / name).stat().st_size, sizes.get(name, 0)
            if have < size:
                raise ConfigError(
                    f"{self.path / name} has {have} bytes, but had {size} at the checkpoint: it was truncated "
                    "since. Resume from an older checkpoint with --from"
                )

    def cut(self, sizes: dict[str, int], step: int) -> None:
        """Truncate the files to their sizes at a checkpoint and remove the rollouts of later steps."""
        for name in JSONL_FILES:
            os.truncate(self.path / name, sizes.get(name, 0))
        for where in STEP_FOLDERS:
            for path in self._files(where, step):
                path.unlink()

    def _files(self, where: str, step: int) -> list[Path]:
        """Return the response files from a step on, including incomplete ones, but no files of other programs."""
        matches = (
            (path, re.fullmatch(r"(\.?)step_(\d+)\.parquet", path.name)) for path in (self.path / where).iterdir()
        )
        return [path for path, match in matches if match and (match[1] or int(match[2]) >= step)]

    def back_up_records(self, step: int) -> None:
        """Copy the records that a resume from an older checkpoint will truncate."""
        backup = self.path / f"replaced-{time.time_ns()}"
        (backup / "held_out").mkdir(parents=True)  # rollouts and answers have equal file names
        for path in [*(self.path / name for name in JSONL_FILES), *self._files("rollouts", step)]:
            shutil.copy2(path, backup)
        for path in self._files("held_out", step):
            shutil.copy2(path, backup / "held_out")

    def close(self, last_event: str | None = None) -> None:
        """Stop the heartbeat, then write the last event, so that a finished run leaves no heartbeat file."""
        if self._alive is not None:
            self._alive.stop()
            self._alive = None
        if last_event is not None:
            with suppress(OSError):  # a full disk: the run counts as died and can be resumed
                self.note(last_event)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def check_new_folder(path: Path) -> None:
    """Raise ConfigError if the folder of a new run is not empty or cannot be created."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from None
    if names - FILES_BEFORE_START:
        hint = f"to continue it: ascent resume {path}" if "run.json" in names else "it is not empty"
        raise ConfigError(f"--out {path}: already there ({hint}), and nothing is overwritten. Choose another folder")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {path}: cannot write there ({error.strerror}). Choose a folder that you own")


def is_locked(path: Path) -> bool:
    """Return whether a process writes this run."""
    try:
        with open_regular(path / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def check_links_stay_inside(folder: Path, part: str = ".") -> None:
    """Raise ConfigError if the folder contains a link out of it, a pipe or a device, to which a run could write."""
    for at, folders, files in os.walk(folder / part):
        paths = [Path(at), *(Path(at, name) for name in (*folders, *files))]
        folders[:] = [name for name in folders if name not in TRACKER_FOLDERS]
        for path in paths:
            with suppress(FileNotFoundError):  # the run may have removed a checkpoint meanwhile
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode) and not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
                    raise ConfigError(
                        f"{path} is a link that leads out of the run's folder and is not followed: move its "
                        "target here, or link the whole run folder instead"
                    )
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                    raise ConfigError(f"{path} is neither a file nor a folder: remove it")
