"""An attack, and how it is run: in its own process, with a deadline, with and without the defense.

Importing torch takes seconds, so the process is a fork of this one, which has only one thread. Whatever happens to it
(a crash, a hang, another folder, an exit, a patched library) happens to it alone.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Attempt = Callable[[Path], str | None]
"""Attacks in a new folder. Returns what the attacker got, or None if the defence held."""
BROKEN = "the attempt itself failed: "
DEADLINE, GLANCE = 60.0, 6.0
"""Seconds after which an attacked process hangs; of one that is expected to hang."""


@dataclass(frozen=True)
class Attack:
    """One attack, and the defence that has to hold it."""

    kind: str
    name: str
    attempt: Attempt
    disarm: Callable[[], None]
    """Switches the defence off, in this process."""
    hangs: bool = False
    """Whether it wants its victim to hang: without its defence a few seconds are enough to see that."""


class Fork:
    """Work in a fork of this process; `result` returns its value, or how it ended."""

    def __init__(self, work: Callable[[], Any], seconds: float):
        self.read, write = os.pipe()
        self.end = time.monotonic() + seconds
        self.seconds, self.heard = seconds, b""
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(self.read)
            _silence()
            try:
                result = work()
            except BaseException:
                result = BROKEN + traceback.format_exc()
            with suppress(OSError), os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(write)

    def result(self) -> Any:
        """Wait for it, but not past its deadline."""
        while (left := self.end - time.monotonic()) > 0 and select.select([self.read], [], [], left)[0]:
            if not (part := os.read(self.read, 1 << 16)):
                break
            self.heard += part
        hung = time.monotonic() >= self.end
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.read)
        if hung:
            return f"it hung for {self.seconds:g} s"
        try:
            return json.loads(self.heard)
        except ValueError:
            return f"it ended: {signal.Signals(-status).name if status < 0 else f'exit status {status}'}"


def _silence() -> None:
    """Discard the output of an attacked program."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder and remove it, whatever it contains then."""
    folder = Path(tempfile.mkdtemp(prefix="ascent-attacks-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outcome(attack: Attack, armed: bool) -> str | None:
    """Return what the attacker got, or None. An attack that fails without the defence raises AssertionError."""
    with scratch() as folder:

        def work() -> str | None:
            if not armed:
                attack.disarm()
            return attack.attempt(folder)

        seconds = GLANCE if attack.hangs and not armed else DEADLINE
        got = Fork(work, seconds).result()
    if not armed and (got is None or got.startswith(BROKEN) or ("it hung" in got and not attack.hangs)):
        raise AssertionError(f"{attack.kind}, {attack.name}: not even without its defence: {got}")
    return got


def soon(is_so: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether something becomes true within some seconds."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
