"""A sandbox seen from outside: it is started on first use, and makes a process for every job in a few milliseconds.

A job has one line to its owner, who asks and waits with a deadline. Whatever a job does, its owner gets an answer, or
`Ended` with the reason. A sandbox that dies is started anew. A fork of its owner may use it; it ends with the owner.
"""

import json
import os
import select
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

from ascent.sandbox import isolation as walls_module
from ascent.sandbox.allowed_packages import allowed_packages
from ascent.sandbox.fork_server import BEGUN
from ascent.sandbox.isolation import Walls, choose

START = 60.0
"""Seconds that a sandbox may take to start and to load its guest."""
ENDING = 10.0
"""Seconds that it may take to end a job or itself; then it is killed."""
CLOSING = 100
"""Milliseconds between the ends of two sockets of a process that dies."""
GIB = 1 << 30


class BoxLimits(NamedTuple):
    """What a job may use."""

    seconds: float = 5.0
    """Wall-clock time of one answer."""
    memory: float = 1.0
    """GiB of address space; 0: as much as there is."""
    cpu: float = 0.0
    """Seconds of computing of the whole job; 0: as many as one answer may take, and one more."""
    disk: int = 16 << 20
    """Bytes of its folder, where it has one."""
    inodes: int = 4096
    """Files and folders in it."""
    files: int = 64
    """Files that are open at once."""
    threads: int = 128
    """Threads at once, beside the first."""
    output: int = 1 << 20
    """Bytes of one answer."""


class JobEndedError(Exception):
    """A job is over before it answered: its words say why."""


class SandboxError(Exception):
    """The sandbox itself does not start, or its walls cannot be put up."""


class Sandbox:
    """Jobs of one guest: MODULE:FUNCTION, whose result for `settings` serves the line of each job (`warm.py`)."""

    def __init__(
        self,
        guest: str,
        limits: BoxLimits | None = None,
        settings: Mapping[str, Any] | None = None,
        kind: str = "auto",
        readable: Sequence[str] = (),
        packages: Sequence[str] = (),
    ):
        """`readable`: files and folders; `packages`: installed packages beside `DEFAULT_PACKAGES`."""
        self.guest, self.limits, self.settings = guest, limits or BoxLimits(), dict(settings or {})
        self.kind, self.readable = kind, tuple(os.path.realpath(path) for path in readable)
        self.packages = tuple(packages)
        self.walls: Walls | None = None
        self._control: socket.socket | None = None
        self._ends: list[Any] = []
        """What is to be ended, and whose it is: a fork may use its parent's sandbox, but not end it."""
        weakref.finalize(self, _end, self._ends)

    def start(self) -> None:
        """Start the sandbox if it is not running. Raises SandboxError, or IsolationError without any isolation."""
        if self._control is not None:
            return
        walls = choose(self.kind)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            entries = allowed_packages(self.packages)
            process = walls_module.start_warm(walls, theirs, entries, self.readable)
        self._ends[:] = [(ours, process, os.getpid())]
        ours.settimeout(START)
        try:
            ours.send(json.dumps(self._setup(walls)).encode())
            reply = json.loads(ours.recv(1 << 16) or b'{"error": "it ended while it started"}')
        except (OSError, ValueError) as error:
            reply = {"error": str(error)}
        if "ready" not in reply:
            self.close()
            raise SandboxError(f"the sandbox ({walls.words()}) does not start: {reply.get('error', '')!s:.500}")
        self._control, self.walls = ours, walls

    def _setup(self, walls: Walls) -> dict[str, Any]:
        limits, entries, (paths, hidden) = self.limits, allowed_packages(self.packages), walls_module.system_paths()
        system = [part for path in paths for part in walls_module.paths_around(path, hidden)]
        cpu = int(limits.cpu or limits.seconds) + 1
        return {
            "kind": walls.kind,
            "landlock": walls.landlock,
            "folder": walls.folder,
            "readable": [*system, *entries, *self.readable],
            "devices": walls_module.filter_existing(walls_module.DEVICES),
            "packages": [*entries, *(path for path in system if path.startswith(walls_module.STANDARD))],
            "space": [limits.disk, limits.inodes],
            "threads": limits.threads,
            "limits": [int(limits.memory * GIB), cpu, limits.disk, limits.files],
            "guest": self.guest,
            "settings": self.settings,
        }

    def job(self) -> "BoxJob":
        """A new job, in a process of its own."""
        for again in (True, False):
            self.start()
            assert self._control is not None
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                    return BoxJob(ours, self.limits, self._control)
                except OSError as error:  # it has died
                    ours.close()
                    self.close()
                    if not again:
                        raise SandboxError(f"the sandbox has ended: {error}") from None
        raise AssertionError

    def close(self) -> None:
        """End it with everything in it. A job that is asked for afterwards starts it again."""
        self._control = None
        _end(self._ends)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(ends: list[Any]) -> None:
    while ends:
        control, process, owner = ends.pop()
        if owner != os.getpid():
            control.close()
            continue
        with suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)
        control.close()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class BoxJob:
    """A process in a sandbox, and our end of its line."""

    def __init__(self, line: socket.socket, limits: BoxLimits, control: socket.socket):
        line.setblocking(False)
        self.line, self.limits, self.control = line, limits, control
        self.begun, self.read = False, b""
        """Whether its walls are up, and what it has said of an answer that is not complete."""

    def ask(self, question: Any, seconds: float | None = None) -> Any:
        """What it answers. `Ended`, and the job is over: it took too long, it died, or what it said is not JSON."""
        answer = self.ask_bytes(json.dumps(question).encode(), seconds)
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            self.close()
            raise JobEndedError("it sent an answer that is not JSON") from None

    def ask_bytes(self, question: bytes, seconds: float | None = None) -> bytes:
        until = time.monotonic() + (self.limits.seconds if seconds is None else seconds)
        try:
            self.send(question, until)
            while (answer := self.receive()) is None:
                self.wait(select.POLLIN, until)
        except (JobEndedError, SandboxError):
            self.close()
            raise
        return answer

    def send(self, line: bytes, until: float) -> None:
        rest = memoryview(line + b"\n")
        while rest:
            try:
                rest = rest[self.line.send(rest) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, until)
            except OSError:
                return  # it has ended, which will be heard

    def wait(self, events: int, until: float) -> None:
        poll = select.poll()
        poll.register(self.line, events)
        if not poll.poll(1000 * max(0.0, until - time.monotonic())):
            raise JobEndedError(f"took longer than {self.limits.seconds:g} s")

    def receive(self) -> bytes | None:
        """Its next line, if that is complete."""
        while b"\n" not in self.read:
            try:
                part = self.line.recv(1 << 16)
            except BlockingIOError:
                return None
            except OSError:
                part = b""
            if not part:
                if self._orphaned():
                    raise SandboxError("the sandbox ended while a job was in it")
                if not self.begun:
                    raise SandboxError(
                        "the sandbox cannot begin a job: this machine has no process, file or memory for it"
                    )
                raise JobEndedError("it closed its line")
            self.read += part if self.begun else part.removeprefix(BEGUN)
            self.begun = True
            if len(self.read) > self.limits.output:
                raise JobEndedError(f"sent more than {self.limits.output:,} bytes")
        line, _, self.read = self.read.partition(b"\n")
        return self._alive(line)

    def _orphaned(self) -> bool:
        """Has the warm process ended? Its end of the control socket is closed then, perhaps a moment after the line."""
        if self.control.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.control, 0)
        return bool(poll.poll(CLOSING))

    def _alive(self, line: bytes) -> bytes | None:
        """The line, unless it is that of the warm process, after the job has ended: a blank line and how."""
        if line:
            return line
        how = "it closed its line"
        with suppress(ValueError, AttributeError):
            how = f"ended its process: {json.loads(self.read)['ended']!s:.40}"
        raise JobEndedError(how)

    def close(self) -> None:
        """End it, and wait until nothing of it is left."""
        if self.line.fileno() < 0:
            return
        until = time.monotonic() + ENDING
        with self.line, suppress(OSError):
            self.line.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self.line, select.POLLIN)
                if poll.poll(1000 * left) and not self.line.recv(1 << 20):
                    break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
