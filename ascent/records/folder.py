"""A run's folder: who may write to it, and how files get there whole.

run.json       status, result, versions; replaced as a whole
config.json    every setting, resolved, with the objective in words
metrics.jsonl  one line a step        updates.jsonl  one line an optimizer update
events.jsonl   flags and trouble      rollouts/      sampled responses, one Parquet file a step
held_out/      greedy answers to held-out prompts, one Parquet file an evaluation
checkpoints/   step_000100/…          .lock          held while a process writes here
.alive         who writes here, and when it last gave a sign of life
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ascent.records import alive
from ascent.types import Refused

LINES = ("metrics.jsonl", "updates.jsonl", "events.jsonl")
SAMPLED, HELD_OUT = BY_STEP = ("rollouts", "held_out")
"""Folders with a file a step."""
UNBEGUN = {".lock", alive.NAME, alive.ASIDE, "config.json", ".config.json.new", ".run.json.new"}
"""All that a folder can hold before its run.json is there: a run that was killed before it began."""


def write_json(path: Path, value: Any) -> None:
    """Write aside, flush, rename: a reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)  # what a kill left, or a link that would lead elsewhere
    with open(aside, "x") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise Refused(f"{path.parent}: there is no {path.name} here, so this is not a run folder") from None
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines, up to its last newline: a torn last line is still being written."""
    if not path.exists():
        return []
    text, found = path.read_bytes(), []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise Refused(f"{path}, line {number}, is no JSON: {error}. Something else has written there") from None
    return found


class RunFolder:
    """The folder of a run that this process writes, locked until `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.run: dict[str, Any] = {}
        """What run.json holds."""
        self._lock: IO[str] | None = None
        self._alive: alive.SignOfLife | None = None

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], run: dict[str, Any]) -> RunFolder:
        """A new folder with its config. One that holds anything is refused, never overwritten."""
        refuse_taken(path)
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.lock()
            write_json(path / "config.json", config)
            folder.run = run | {"status": "running", "result": None, "history": []}
            folder.note("started")
            folder.furnish()
        except OSError as error:
            raise _unwritable(path, error) from None
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """An existing run's folder, to go on writing."""
        folder = cls(path)
        folder.run = read_json(path / "run.json")
        try:
            folder.lock()
            folder.furnish()
        except OSError as error:
            raise Refused(f"{path}: cannot write there ({error.strerror})") from None
        return folder

    def furnish(self) -> None:
        for name in ("checkpoints", *BY_STEP):
            (self.path / name).mkdir(exist_ok=True)
        for name in LINES:
            (self.path / name).touch()

    def lock(self) -> None:
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 (held as long as the run)
        try:
            _lock_soon(self._lock)
        except BlockingIOError:
            self._lock.seek(0)
            pid = self._lock.read().strip() or "unknown"
            self.close()
            raise Refused(
                f"{self.path}: this run is being written by another process (pid {pid}). Wait for it, or stop it first"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._alive = alive.SignOfLife(self.path, self._lock)

    def note(self, event: str, **more: Any) -> None:
        """An event of the run's life (started, resumed, interrupted, …), with its time, into run.json."""
        self.run["history"].append({"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more})
        self.save()

    def save(self) -> None:
        self.run["heartbeat"] = time.time()
        write_json(self.path / "run.json", self.run)

    def check_cut(self, sizes: dict[str, int]) -> None:
        """Refuse records that are shorter than they were at a checkpoint: what it goes on from is lost."""
        for name in LINES:
            have, size = (self.path / name).stat().st_size, sizes.get(name, 0)
            if have < size:
                raise Refused(
                    f"{self.path / name} has {have} bytes, but had {size} when the checkpoint was made: it was cut "
                    "short since. Go back to an older checkpoint with --from"
                )

    def cut(self, sizes: dict[str, int], step: int) -> None:
        """Take the records back to where they were at a checkpoint, so that a resume writes them once."""
        for name in LINES:
            os.truncate(self.path / name, sizes.get(name, 0))
        for where in BY_STEP:
            for path in self._files(where, step):
                path.unlink()

    def _files(self, where: str, step: int) -> list[Path]:
        """Our own files of responses from this step on, half-written ones included; nobody else's."""
        found = ((path, re.fullmatch(r"(\.?)step_(\d+)\.parquet", path.name)) for path in (self.path / where).iterdir())
        return [path for path, name in found if name and (name[1] or int(name[2]) >= step)]

    def set_aside(self, step: int) -> None:
        """Keep a copy of the records that going back to an older checkpoint will cut."""
        kept = self.path / f"replaced-{time.time_ns()}"
        (kept / HELD_OUT).mkdir(parents=True)  # its files have the names of those of rollouts
        for path in [*(self.path / name for name in LINES), *self._files(SAMPLED, step)]:
            shutil.copy2(path, kept)
        for path in self._files(HELD_OUT, step):
            shutil.copy2(path, kept / HELD_OUT)

    def close(self, last_word: str | None = None) -> None:
        """Its sign of life goes before its last word: whenever it is killed, a run that ended leaves none behind."""
        if self._alive is not None:
            self._alive.stop()
            self._alive = None
        if last_word is not None:
            with suppress(OSError):  # a full disk: it reads as died, and can go on
                self.note(last_word)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lock_soon(file: IO[str]) -> None:
    """Lock a file. One who only looks whether it is locked holds it for a moment: that is waited for."""
    for left in reversed(range(20)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.01)


def refuse_taken(path: Path) -> None:
    """Refuse a folder for a new run that holds anything, and a path that cannot be a folder."""
    try:
        held = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from None
    if held - UNBEGUN:
        what = f"`ascent resume {path}` goes on with it" if "run.json" in held else "it is not empty"
        raise Refused(f"--out {path}: already there ({what}), and nothing is overwritten. Choose another folder")


def _unwritable(path: Path, error: OSError) -> Refused:
    return Refused(f"--out {path}: cannot write there ({error.strerror}). Choose a folder that you own")


def is_locked(path: Path) -> bool:
    """Does a living process write this run?"""
    try:
        with open(path / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
