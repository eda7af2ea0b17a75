"""The cache of answers: one JSON line each, on disk as soon as it arrives. Several processes may share the file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ascent.core.types import Refused, Trouble

Answer = dict[str, Any]
"""text, finish (why it ended), usage, model."""


def request_key(body: dict[str, Any], again: int) -> str:
    """A hash of everything that decides an answer: model, messages, parameters, and how often it was asked before."""
    request = json.dumps([body, again], sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(request).hexdigest()


class Answers:
    """A file of answers by key. Lines are only appended, one at a time, under a lock.

    A line that a crash left incomplete is skipped. Lines that other processes append are seen too.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._known: dict[str, Answer] = {}
        self._offset = 0
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open(self.path, "ab").close()
        except OSError as error:
            raise Refused(f"--cache {self.path}: cannot write there ({error.strerror})") from None

    def get(self, key: str) -> Answer | None:
        with self._lock:
            if key not in self._known:
                with suppress(OSError), open(self.path, "rb") as file:
                    self._catch_up(file)
            return self._known.get(key)

    def put(self, key: str, answer: Answer) -> None:
        """Append an answer. When this returns, it is on the disk."""
        line = json.dumps({"key": key, **answer}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            try:
                with open(self.path, "a+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
                    incomplete = self._catch_up(file)
                    file.write(b"\n" + line if incomplete else line)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise Trouble(
                    f"{self.path} cannot be written ({error.strerror}). The judge is not asked any more, because its "
                    "answers could not be kept. Make room, then run the same command again"
                ) from None
            self._known[key] = answer

    def _catch_up(self, file: IO[bytes]) -> bool:
        """Read the lines that were appended since the last time; returns whether an incomplete one follows."""
        file.seek(self._offset)
        data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # incomplete: it will be asked again
                entry = json.loads(line)
                self._known[entry.pop("key")] = entry
        return end < len(data)
