"""A run's folder: who may write to it, and how files get there whole.

run.json       status, result, versions; replaced as a whole
config.json    every setting, resolved, with the objective in words
metrics.jsonl  one line a step        updates.jsonl  one line an optimizer update
events.jsonl   flags and trouble      rollouts/      sampled responses, one Parquet file a step
checkpoints/   step_000100/…          .lock          held while a process writes here
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from ascent.types import Refused

LINES = ("metrics.jsonl", "updates.jsonl", "events.jsonl")


def write_json(path: Path, value: Any) -> None:
    """Write aside, flush, rename: a reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "w") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise Refused(f"{path.parent}: there is no {path.name} here, so this is not a run folder") from None
    except (OSError, json.JSONDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines, up to its last newline: a torn last line is still being written."""
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


class RunFolder:
    """The folder of a run that this process writes, locked until `close`."""

    def __init__(self, path: Path):
        self.path = path
        self.run: dict[str, Any] = {}
        """What run.json holds."""
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config: dict[str, Any], run: dict[str, Any]) -> RunFolder:
        """A new folder with its config. One that holds anything is refused, never overwritten."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = f"`ascent resume {path}` goes on with it" if (path / "run.json").exists() else "it is not empty"
            raise Refused(f"--out {path}: already there ({what}), and nothing is overwritten. Choose another folder")
        folder = cls(path)
        try:
            (path / "checkpoints").mkdir(parents=True)
            (path / "rollouts").mkdir()
            folder.lock()
            for name in LINES:
                (path / name).touch()
            write_json(path / "config.json", config)
            folder.run = run | {"status": "running", "result": None, "history": []}
            folder.note("started")
        except OSError as error:
            raise Refused(
                f"--out {path}: cannot write there ({error.strerror}). Choose a folder that you own"
            ) from None
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """An existing run's folder, to go on writing."""
        folder = cls(path)
        folder.run = read_json(path / "run.json")
        try:
            folder.lock()
            (path / "checkpoints").mkdir(exist_ok=True)
            (path / "rollouts").mkdir(exist_ok=True)
        except OSError as error:
            raise Refused(f"{path}: cannot write there ({error.strerror})") from None
        return folder

    def lock(self) -> None:
        self._lock = open(self.path / ".lock", "a+")  # noqa: SIM115 (held as long as the run)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            pid = self._lock.read().strip() or "unknown"
            raise Refused(
                f"{self.path}: this run is being written by another process (pid {pid}). Wait for it, or stop it first"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def note(self, event: str, **more: Any) -> None:
        """An event of the run's life (started, resumed, interrupted, …), with its time, into run.json."""
        self.run["history"].append({"event": event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **more})
        self.save()

    def save(self) -> None:
        self.run["heartbeat"] = time.time()
        write_json(self.path / "run.json", self.run)

    def cut(self, sizes: dict[str, int], step: int) -> None:
        """Take the records back to where they were at a checkpoint, so that a resume writes them once."""
        for name in LINES:
            path = self.path / name
            size = sizes.get(name, 0)
            have = path.stat().st_size if path.exists() else 0
            if have < size:
                raise Refused(f"{path} has {have} bytes, but the checkpoint was made at {size}: the file was cut short")
            with open(path, "ab") as file:
                file.truncate(size)
        for path in (self.path / "rollouts").iterdir():
            if path.suffix != ".parquet" or int(path.stem.split("_")[1]) >= step:
                path.unlink()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


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
