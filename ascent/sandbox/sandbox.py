"""A sandbox, seen from its owner. It starts on first use and forks an isolated process for every job in milliseconds.

A job has one channel to its owner, who sends questions and waits for answers with a deadline. Whatever a job does, its
owner gets an answer, or JobEndedError with the reason. A sandbox that dies is restarted. A fork of its owner may use
it; it ends with the owner.
"""

import json
import os
import select
import socket
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

from ascent.processes.channel import CLOSED, PolledChannel, poll_channels, request_fork
from ascent.sandbox import isolation as isolation_module
from ascent.sandbox.allowed_packages import allowed_packages
from ascent.sandbox.isolation import Isolation, choose_isolation

START_SECONDS = 60.0
"""Time limit for a sandbox to start and to load its entry point."""
END_SECONDS = 10.0
"""Time limit for a sandbox to end a job or itself; then it is killed."""
CLOSE_MILLISECONDS = 100
"""Time between the closing of two sockets of a process that dies."""
GIB = 1 << 30


class SandboxLimits(NamedTuple):
    """What a job may use."""

    seconds: float = 5.0
    """Wall-clock time of one answer."""
    memory: float = 1.0
    """GiB of address space; 0: no limit."""
    cpu: float = 0.0
    """CPU seconds of the whole job; 0: one more than `seconds`."""
    disk: int = 16 << 20
    """Bytes in its folder, if it has one."""
    inodes: int = 4096
    """Files and folders in it."""
    files: int = 64
    """Files that are open at once."""
    threads: int = 128
    """Threads at once, besides the main thread."""
    output: int = 1 << 20
    """Bytes of one answer."""


class JobEndedError(Exception):
    """A job ended before it answered; the message says why."""


class SandboxError(Exception):
    """The sandbox itself does not start, or it cannot isolate a job."""


class Sandbox:
    """Jobs of one entry point, MODULE:FUNCTION.

    The function is called once with `settings`, in the fork server (`sandbox_server.py`). What it returns is called in
    every job, with the channel of the job.
    """

    def __init__(
        self,
        entry_point: str,
        limits: SandboxLimits | None = None,
        settings: Mapping[str, Any] | None = None,
        kind: str = "auto",
        readable: Sequence[str] = (),
        packages: Sequence[str] = (),
    ):
        """`readable`: files and folders; `packages`: installed packages in addition to `DEFAULT_PACKAGES`."""
        self.entry_point, self.limits, self.settings = entry_point, limits or SandboxLimits(), dict(settings or {})
        self.kind, self.readable = kind, tuple(os.path.realpath(path) for path in readable)
        self.packages = tuple(packages)
        self.isolation: Isolation | None = None
        self._control: socket.socket | None = None
        self._ends: list[Any] = []
        """The control socket, the process and its owner: a fork may use its parent's sandbox, but not end it."""
        weakref.finalize(self, _end, self._ends)

    def start(self) -> None:
        """Start the sandbox if it is not running. Raises SandboxError, or IsolationError without any isolation."""
        if self._control is not None:
            return
        isolation = choose_isolation(self.kind)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            entries = allowed_packages(self.packages)
            process = isolation_module.start_server(isolation, theirs, entries, self.readable)
        self._ends[:] = [(ours, process, os.getpid())]
        ours.settimeout(START_SECONDS)
        try:
            ours.send(json.dumps(self._setup(isolation)).encode())
            reply = json.loads(ours.recv(1 << 16) or b'{"error": "it ended while it started"}')
        except (OSError, ValueError) as error:
            reply = {"error": str(error)}
        if "ready" not in reply:
            self.close()
            raise SandboxError(f"the sandbox ({isolation.describe()}) does not start: {reply.get('error', '')!s:.500}")
        self._control, self.isolation = ours, isolation

    def _setup(self, isolation: Isolation) -> dict[str, Any]:
        limits, entries, (paths, hidden) = self.limits, allowed_packages(self.packages), isolation_module.system_paths()
        system = [part for path in paths for part in isolation_module.paths_around(path, hidden)]
        cpu = int(limits.cpu or limits.seconds) + 1
        return {
            "kind": isolation.kind,
            "landlock": isolation.landlock,
            "folder": isolation.folder,
            "readable": [*system, *entries, *self.readable],
            "devices": isolation_module.existing_paths(isolation_module.DEVICES),
            "packages": [*entries, *(path for path in system if path.startswith(isolation_module.STANDARD_LIBRARY))],
            "space": [limits.disk, limits.inodes],
            "threads": limits.threads,
            "limits": [int(limits.memory * GIB), cpu, limits.disk, limits.files],
            "entry_point": self.entry_point,
            "settings": self.settings,
        }

    def job(self) -> "SandboxJob":
        """Start a job in a new process."""
        for again in (True, False):
            self.start()
            assert self._control is not None
            try:
                return SandboxJob(request_fork(self._control), self.limits, self._control)
            except OSError as error:  # it has died
                self.close()
                if not again:
                    raise SandboxError(f"the sandbox has ended: {error}") from None
        raise AssertionError

    def close(self) -> None:
        """End the sandbox and all its jobs. A job that is requested afterwards starts it again."""
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
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class SandboxJob:
    """A process in a sandbox, and our end of its channel."""

    def __init__(self, end: socket.socket, limits: SandboxLimits, control: socket.socket):
        self.channel, self.limits, self.control = PolledChannel(end, limits.output), limits, control
        self.has_begun = False
        """Whether the job is isolated and runs."""
        self.messages: deque[bytes] = deque()
        """Messages that have arrived and were not read yet."""

    def ask(self, question: Any, seconds: float | None = None) -> Any:
        """Return its answer. JobEndedError: the job is over, because it was too slow, died or did not send JSON."""
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
                if not poll_channels([self.channel], until - time.monotonic()):
                    raise self._late()
        except (JobEndedError, SandboxError):
            self.close()
            raise
        return answer

    def send(self, message: bytes, until: float) -> None:
        self.channel.send(message)
        if not self.channel.wait_until_sent(until):
            raise self._late()

    def _late(self) -> JobEndedError:
        return JobEndedError(f"took longer than {self.limits.seconds:g} s")

    def receive(self) -> bytes | None:
        """Return its next message, or None if none has arrived. An error if there will be none."""
        if not self.messages:
            self.messages.extend(self.channel.receive())
            if self.messages and not self.has_begun:
                self.messages.popleft()  # from the fork server
                self.has_begun = True
        if self.messages:
            return self.messages.popleft()
        if self.channel.is_too_long:
            raise JobEndedError(f"sent more than {self.limits.output:,} bytes")
        if self.channel.ended:
            if self.channel.ended == CLOSED and self._is_orphaned():
                raise SandboxError("the sandbox ended while a job was in it")
            if not self.has_begun:
                raise SandboxError("the sandbox cannot begin a job: this machine has no process, file or memory for it")
            raise JobEndedError(f"ended its process: {self.channel.ended}")
        return None

    def _is_orphaned(self) -> bool:
        """Whether the fork server has ended. Its control socket is then closed, perhaps a moment after the channel."""
        if self.control.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self.control, 0)
        return bool(poll.poll(CLOSE_MILLISECONDS))

    def close(self) -> None:
        """End it, and wait until nothing of it is left."""
        end = self.channel.socket
        if end.fileno() < 0:
            return
        until = time.monotonic() + END_SECONDS
        with end, suppress(OSError):
            end.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                if poll_channels([self.channel], left) and not end.recv(1 << 20):
                    break

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
