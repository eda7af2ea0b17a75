"""A run's folder: who may write to it, and how its files are written as a whole.

run.json       status, result, versions; replaced as a whole
config.json    every setting, resolved, with the objective in words
metrics.jsonl  one line per step      updates.jsonl  one line per optimizer update
events.jsonl   alerts, notes, errors      lanes.jsonl    one line per step: how many responses were decoded at once
rollouts/      sampled responses, one Parquet file per step
held_out/      greedy answers to held-out prompts, one Parquet file per evaluation
checkpoints/   step_000100/…          .lock          held while a process writes here
journal/       with a serving engine, the batches since the newest checkpoint
.alive         which process writes here, and when it last did

A file may have a second name elsewhere (a hard link, as in backups), so none is written over: it is copied or removed
first. What a folder holds is read with `reading`: it may have come from anywhere.
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

JSONL_FILES = ("metrics.jsonl", "updates.jsonl", "events.jsonl", "lanes.jsonl")
STEP_FOLDERS = ("rollouts", "held_out")
"""Folders with one file per step."""
HEARTBEAT_FILE, HEARTBEAT_FILE_ASIDE = ".alive", ".alive.new"
HEARTBEAT_INTERVAL = 5.0
"""Seconds between two signs of life."""
TRACKER_FOLDERS = frozenset({"tensorboard", "wandb", "mlflow"})
"""What other programs write into a run's folder."""
FILES_BEFORE_START = {".lock", HEARTBEAT_FILE, HEARTBEAT_FILE_ASIDE, "config.json", ".config.json.new", ".run.json.new"}
"""What a run leaves that was killed before it began, that is, before its run.json was written."""


def write_json(path: Path, value: Any) -> None:
    """Write aside, flush, rename: a reader sees the old file or the new one. Half a character becomes its escape."""
    aside = unlinked(path.with_name(f".{path.name}.new"))
    with open(aside, "x", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def mark_nonfinite(values: dict[str, Any]) -> dict[str, Any]:
    """A line of records. A number that is not finite becomes None, and is named in `nonfinite`."""
    bad = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in values.items()} | {"nonfinite": bad} if bad else values


def unlinked(path: Path) -> Path:
    """This path, free for a new file: what a kill left is removed, or a link that would lead elsewhere."""
    path.unlink(missing_ok=True)
    return path


def oom_kill_count() -> str | None:
    """How often this system has killed a process for want of memory since it started; None: it does not say."""
    with suppress(OSError, StopIteration):
        count = next(line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill "))
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {count.split()[1]}"
    return None


class HeartbeatWriter:
    """The file .alive, for readers on machines that cannot see who holds the lock: host, process, time.

    A thread of its own replaces it every few seconds until `stop`, however long a step takes. A process that ends
    removes it; one that is killed leaves it to grow old. Errors are ignored. A fork of the process has no such thread,
    and does not end that of its parent.
    """

    def __init__(self, folder: Path, lock: IO[str]):
        self.folder, self.pid, self.host = folder, os.getpid(), socket.gethostname()
        self._held, self._lock = weakref.ref(lock), os.fstat(lock.fileno())
        self._over = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._work, name="ascent-alive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() != self.pid:
            return
        self._over.set()
        self._thread.join(HEARTBEAT_INTERVAL)  # no longer, in case a disk hangs
        if self._ours():
            for name in (HEARTBEAT_FILE, HEARTBEAT_FILE_ASIDE):
                with suppress(OSError):
                    os.unlink(self.folder / name)

    def _work(self) -> None:
        while not self._over.wait(HEARTBEAT_INTERVAL) and self._held() is not None:
            self._write()

    def _write(self) -> None:
        """Write aside and rename, so that nobody reads half of it. It is not flushed, so it never waits for a disk."""
        if not self._ours():
            return
        with suppress(OSError):
            with open(unlinked(self.folder / HEARTBEAT_FILE_ASIDE), "x") as file:
                json.dump({"host": self.host, "pid": self.pid, "time": time.time(), "killed": oom_kill_count()}, file)
            os.rename(self.folder / HEARTBEAT_FILE_ASIDE, self.folder / HEARTBEAT_FILE)

    def _ours(self) -> bool:
        """Is this still the folder that was locked? It may have been removed, and another made in its place."""
        lock = self._held()
        if lock is None or lock.closed:
            return False
        with suppress(OSError):
            return os.path.samestat(os.stat(self.folder / ".lock"), self._lock)
        return False


class RunFolder:
    """The folder of a run that this process writes, locked until `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.run: dict[str, Any] = {}
        """What run.json holds."""
        self._lock: IO[str] | None = None
        self._alive: HeartbeatWriter | None = None

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], run: dict[str, Any]) -> RunFolder:
        """A new folder with its config. One that is not empty is refused, never overwritten."""
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
        """An existing run's folder, to continue it. It is read once it is locked: until then it may still end."""
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
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 (held as long as the run)
        for _ in range(20):  # whoever checks whether it is locked holds it for a moment
            with suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.01)
        else:
            self._lock.seek(0)
            pid = next(iter(re.findall(r"^\d{1,10}$", self._lock.read(12))), "unknown")
            self.close()
            raise ConfigError(
                f"{self.path}: this run is being written by another process (pid {pid}). Wait for it, or stop it first"
            )
        if os.fstat(self._lock.fileno()).st_nlink == 1:
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        self._alive = HeartbeatWriter(self.path, self._lock)

    def note(self, event: str, **more: Any) -> None:
        """An event of the run's life (started, resumed, interrupted, …), with its time, into run.json."""
        self.run["history"].append({"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more})
        self.save()

    def save(self) -> None:
        self.run["heartbeat"] = time.time()
        write_json(self.path / "run.json", self.run)

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Refuse records that are shorter than they were at a checkpoint: what the run would continue from is lost."""
        for name in JSONL_FILES:
            have, size = (self.path / name).stat().st_size, sizes.get(name, 0)
            if have < size:
                raise ConfigError(
                    f"{self.path / name} has {have} bytes, but had {size} when the checkpoint was made: it was cut "
                    "short since. Go back to an older checkpoint with --from"
                )

    def cut(self, sizes: dict[str, int], step: int) -> None:
        """Cut the records back to where they were at a checkpoint, so that a resumed run writes them once."""
        for name in JSONL_FILES:
            os.truncate(self.path / name, sizes.get(name, 0))
        for where in STEP_FOLDERS:
            for path in self._files(where, step):
                path.unlink()

    def _files(self, where: str, step: int) -> list[Path]:
        """Our own files of responses from this step on, half-written ones included; nobody else's."""
        found = ((path, re.fullmatch(r"(\.?)step_(\d+)\.parquet", path.name)) for path in (self.path / where).iterdir())
        return [path for path, name in found if name and (name[1] or int(name[2]) >= step)]

    def back_up_records(self, step: int) -> None:
        """Keep a copy of the records that going back to an older checkpoint will cut."""
        kept = self.path / f"replaced-{time.time_ns()}"
        (kept / "held_out").mkdir(parents=True)  # its files have the names of those of rollouts
        for path in [*(self.path / name for name in JSONL_FILES), *self._files("rollouts", step)]:
            shutil.copy2(path, kept)
        for path in self._files("held_out", step):
            shutil.copy2(path, kept / "held_out")

    def close(self, last_word: str | None = None) -> None:
        """Remove the sign of life, then write the last event, so that a run that ended never leaves a sign behind."""
        if self._alive is not None:
            self._alive.stop()
            self._alive = None
        if last_word is not None:
            with suppress(OSError):  # a full disk: the run counts as died, and can be resumed
                self.note(last_word)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def check_new_folder(path: Path) -> None:
    """Refuse a folder for a new run that is not empty, or a path that cannot be a folder."""
    try:
        held = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from None
    if held - FILES_BEFORE_START:
        what = f"to continue it: ascent resume {path}" if "run.json" in held else "it is not empty"
        raise ConfigError(f"--out {path}: already there ({what}), and nothing is overwritten. Choose another folder")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out {path}: cannot write there ({error.strerror}). Choose a folder that you own")


def is_locked(path: Path) -> bool:
    """Is a process writing this run?"""
    try:
        with open_regular(path / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def check_links_stay_inside(folder: Path, part: str = ".") -> None:
    """Refuse a folder, or a part of it, with a link that leads out of it, a pipe or a device: bytes would go there."""
    for at, folders, files in os.walk(folder / part):
        paths = [Path(at), *(Path(at, name) for name in (*folders, *files))]
        folders[:] = [name for name in folders if name not in TRACKER_FOLDERS]
        for path in paths:
            with suppress(FileNotFoundError):  # a checkpoint that its run has dropped by now
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode) and not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
                    raise ConfigError(
                        f"{path} is a link that leads out of the run's folder, and not followed: move what it leads to "
                        "here, or link the whole run folder instead"
                    )
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                    raise ConfigError(f"{path} is neither a file nor a folder: remove it")
