r"""A pattern of the user's own, searched for in a process that ends itself in time.

Python's `re` cannot be interrupted, and a pattern such as `(\d+)+$` takes years on some texts. So the search runs in a
separate process: this file, as a script. An alarm ends it when its seconds are over, and it ends with its parent.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

SECONDS, MEMORY = 1.0, 1 << 30
"""Limits of one search: in seconds, and in bytes of its process."""
LEAST = 0.05
"""Seconds that a search has in any case. Nearly all take a thousandth of a second."""
Found = tuple[str, int]
"""The group of a match, and where it ends in the text."""


def last_match(pattern: str, text: str) -> Found | None:
    last = None
    for match in re.finditer(pattern, text):
        last = match
    return None if last is None else (last[1] or "", last.end(1))


class PatternSearcher:
    """Searches that end in time. Threads may share it; its processes are kept for the next search."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []

    def last_match(self, pattern: str, text: str, end: float) -> Found | None:
        """The last match; TimeoutError if it is not found until `end`, a moment of `time.monotonic`."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = _start()
        seconds = max(LEAST, min(SECONDS, end - time.monotonic()))
        with suppress(OSError):
            process.stdin.write(json.dumps([pattern, text, seconds]).encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        reply = process.stdout.readline()  # type: ignore[union-attr]
        if not reply:
            late = process.wait() == -signal.SIGALRM
            _end(process)
            raise TimeoutError(f"more than {seconds:.2g} s" if late else f"its process ended ({process.returncode})")
        self._idle.append(process)
        found = json.loads(reply)
        return None if found is None else tuple(found)

    def close(self) -> None:
        while self._idle:
            _end(self._idle.pop())


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", __file__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)  # Ctrl-C is not for it


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(OSError), process:
        pass


def _serve() -> None:
    """Answer searches, one per line, until the parent closes the pipe."""
    with suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    for line in sys.stdin:
        pattern, text, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        found = last_match(pattern, text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    _serve()
