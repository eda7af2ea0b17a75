"""Answers on disk: one JSON line each, there for good as soon as it came, whoever else writes there too."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from ascent.types import Refused, Trouble

Answer = dict[str, Any]
"""text, finish (why it ended), usage, model."""


def key_of(body: dict[str, Any], again: int) -> str:
    """Of everything that decides an answer: model, words, parameters; and which of several answers it is."""
    said = json.dumps([body, again], sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(said).hexdigest()


class Answers:
    """A file of answers by their keys. Lines are only ever appended, each in one write, locked and flushed.

    A line torn by a crash is skipped and never continued. What another process has appended is found too.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._known: dict[str, Answer] = {}
        self._read = 0
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise Refused(f"--cache {self.path}: cannot write there ({error.strerror})") from None

    def get(self, key: str) -> Answer | None:
        with self._lock:
            if key not in self._known:
                self._catch_up()
            return self._known.get(key)

    def put(self, key: str, answer: Answer) -> None:
        """On return it is on the disk."""
        line = json.dumps({"key": key, **answer}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                try:
                    size = os.fstat(self._handle).st_size
                    torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
                    _write(self._handle, (b"\n" if torn else b"") + line)
                    os.fsync(self._handle)
                finally:
                    fcntl.flock(self._handle, fcntl.LOCK_UN)
            except OSError as error:
                raise Trouble(
                    f"{self.path} cannot be written ({error.strerror}), and no more answers are paid for that cannot "
                    "be kept. Make room, then run the same command again"
                ) from None
            self._known[key] = answer

    def _catch_up(self) -> None:
        """Read what was appended since, up to the last newline."""
        size = os.fstat(self._handle).st_size
        if size <= self._read:
            return
        text = os.pread(self._handle, size - self._read, self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                found = json.loads(line)
                self._known[found.pop("key")] = found
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # torn by a crash: its answer is asked for again

    def close(self) -> None:
        os.close(self._handle)


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]
