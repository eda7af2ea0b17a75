"""A sign of life beside a run, for readers on machines that cannot see who holds its lock.

`.alive` is replaced every few seconds for as long as a process holds the folder, however long a step takes: the host
that writes there, its process, and when it last did. A process that ends takes the file along; one that is killed
leaves it to grow old.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

NAME, ASIDE = ".alive", ".alive.new"
EVERY = 5.0
"""Seconds between two signs of life."""


class SignOfLife:
    """Written at once, then by a thread of its own until `stop`. What it cannot write, it leaves be.

    A fork of the process has no such thread, and does not end that of its parent.
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
        self._thread.join(EVERY)  # no longer, should a disk hang
        if self._ours():
            for name in (NAME, ASIDE):
                with suppress(OSError):
                    os.unlink(self.folder / name)

    def _work(self) -> None:
        while not self._over.wait(EVERY) and self._held() is not None:
            self._write()

    def _write(self) -> None:
        """Written aside and renamed, so that nobody reads half of it; not flushed, so that no disk is waited for."""
        if not self._ours():
            return
        with suppress(OSError):
            with open(self.folder / ASIDE, "w") as file:
                json.dump({"host": self.host, "pid": self.pid, "time": time.time()}, file)
            os.rename(self.folder / ASIDE, self.folder / NAME)

    def _ours(self) -> bool:
        """Is this still the folder that was locked? It may have been removed, and another made in its place."""
        lock = self._held()
        if lock is None or lock.closed:
            return False
        with suppress(OSError):
            return os.path.samestat(os.stat(self.folder / ".lock"), self._lock)
        return False


def read(folder: Path) -> dict[str, Any] | None:
    """Host, process and time of the last sign of life; None: there is none that can be read."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / NAME).read_text())
        if isinstance(found, dict) and isinstance(found.get("time"), int | float):
            return found
    return None
