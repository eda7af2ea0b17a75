"""Records which functions of the package each test calls: a plugin of pytest, and of every Python that a test starts.

It imports nothing of the repository, because tests prepare themselves before the package is imported.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

VARIABLE = "ASCENT_MUTANTS_CALLS"
"""Names the file that calls are written to, and the root of the tree."""


class Recorder:
    """Writes the functions that this process calls."""

    def __init__(self, file: str, root: str):
        self.file, self.package = file, f"{root}/ascent/"
        self.cut = len(root) + 1
        self.pid, self.test = os.getpid(), os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        self.seen: set[int] = set()
        self.held: list[Any] = []  # so that no other code gets the same id
        self.called: set[str] = set()

    def trace(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if id(code) in self.seen:
            return
        self.seen.add(id(code))
        if not code.co_filename.startswith(self.package):
            return
        self.held.append(code)
        if code.co_name.startswith("<"):
            return
        name = f"{code.co_filename[self.cut :]}::{code.co_qualname}"
        if os.getpid() == self.pid and "pytest" in sys.modules:
            self.called.add(name)
        else:  # it may end at any moment
            self.write({"test": self.test, "calls": [name]})

    def start(self) -> None:
        sys.settrace(self.trace)
        threading.settrace(self.trace)

    def write(self, line: dict[str, Any]) -> None:
        to = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(to, (json.dumps(line) + "\n").encode())
        finally:
            os.close(to)


def recorder() -> Recorder | None:
    given = os.environ.get(VARIABLE, "").split(os.pathsep)
    return Recorder(*given) if len(given) == 2 else None


RECORDER: Recorder | None = None


def pytest_runtest_protocol(item: Any) -> None:
    """A test begins: what was called before was another's."""
    global RECORDER
    RECORDER = RECORDER or recorder()
    if RECORDER is not None:
        RECORDER.pid, RECORDER.test = os.getpid(), item.nodeid
        RECORDER.seen.clear(), RECORDER.called.clear()
        RECORDER.begun = time.monotonic()  # type: ignore[attr-defined]
        RECORDER.start()


def pytest_runtest_logfinish(nodeid: str) -> None:
    if RECORDER is not None and RECORDER.test == nodeid:
        sys.settrace(None)
        seconds = round(time.monotonic() - RECORDER.begun, 3)  # type: ignore[attr-defined]
        RECORDER.write({"test": nodeid, "seconds": seconds, "calls": sorted(RECORDER.called)})
