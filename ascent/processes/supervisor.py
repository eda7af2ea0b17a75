"""A process under a keeper: all that it starts ends with it, and it ends with the process that started it.

The keeper runs no code but ours. When its child ends, or the process that started them does, it kills everything that
the child has started, sessions of their own included (on Linux; elsewhere the process group). From outside such a
process is a `Kept`; what follows it here runs inside.
"""

import ctypes
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ENDING = 5.0
"""Seconds that a keeper may take to end its child and what that has started."""
CLOSING = 1.0
"""Seconds that a child has to end by itself when the other end of its pipe is closed."""
FRAME = 1 << 20
"""The most bytes of an answer."""
START = 120.0
"""Seconds that a process may take to start and to import what it needs."""
PASSED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""The environment variables that such a process sees, beside LC_…, PYTHON… and those that its user names."""


class Limits(NamedTuple):
    """What a process that runs code of a user's may use."""

    seconds: float
    """Wall-clock time of one call: a reward, or a turn of an environment."""
    memory: float = 0.0
    """GiB of each process; 0: as much as there is."""
    env: tuple[str, ...] = ()
    """Names of environment variables that it sees beside the usual ones."""

    def environment(self) -> dict[str, str]:
        """What it sees of this process's environment: nothing that may be a secret, unless its user named it."""
        usual = {*PASSED, *self.env}
        return {k: v for k, v in os.environ.items() if k in usual or k.startswith(("LC_", "PYTHON"))}


class SupervisedProcess:
    """A process under a keeper, seen from outside."""

    def __init__(self, program: str, limits: Limits, **environment: str):
        """`program` is MODULE:FUNCTION. It is called with the numbers of its end of the socket and of the lifeline,
        with this process, and with the bytes of memory that it may use."""
        self.socket, theirs = socket.socketpair()
        self.lifeline, held = socket.socketpair()
        module, function = program.split(":")
        arguments = (theirs.fileno(), held.fileno(), os.getpid(), int(limits.memory * 2**30))
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
            f"from {module} import {function}; {function}{arguments}"
        )
        with theirs, held:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment | limits.environment(),
                pass_fds=(theirs.fileno(), held.fileno()),
                start_new_session=True,
            )

    def ending(self) -> str:
        return ending_words(self.process.poll())

    def end(self) -> None:
        """Let its keeper kill it and whatever it started, and leave no zombie."""
        hang_up(self.lifeline)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.socket.close()


def hang_up(end: socket.socket) -> None:
    """Close our end for good: a fork of this process may hold it too."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def ending_words(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None or code >= 0:
        return f"exit status {code}" if code is not None else "it closed its pipe"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


# ---- frames: to the process with their length, from it as lines of JSON -------------------------------


def framed(content: bytes) -> bytes:
    return struct.pack("!Q", len(content)) + content


def receive(pipe: socket.socket) -> bytes:
    """The next frame that the parent sends."""

    def exactly(count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0:
            parts.append(pipe.recv(min(count, FRAME)))
            count -= len(parts[-1])
            if not parts[-1]:
                raise EOFError
        return b"".join(parts)

    return exactly(struct.unpack("!Q", exactly(8))[0])


def say(pipe: socket.socket, answer: Mapping[str, Any]) -> None:
    pipe.sendall(json.dumps(answer).encode() + b"\n")


# ---- the keeper --------------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GLANCE = 5.0
"""Seconds between two looks at orphans that have ended."""


def prctl(option: int, value: int) -> None:
    """Linux alone knows these options."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def lifelines(lifeline: int, parent: int) -> list[int]:
    """The files that tell a keeper when to end: the parent hangs up, or is no more, whoever else holds its files."""
    ends = [lifeline]
    with suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(parent))
    if os.getppid() != parent:
        os._exit(0)
    return ends


def fork_child(run: Callable[[], object], hidden: Sequence[int], memory: int = 0) -> int:
    """The one child of this keeper, in a session of its own and without the `hidden` files."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever loses its parent becomes ours
    keeper, child = os.getpid(), os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for file in hidden:
            os.close(file)
        if memory:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        if os.getppid() == keeper:
            run()
        code = 0
    finally:
        os._exit(code)


def wait_for(child: int, ends: Sequence[int], pipe: int | None = None) -> int | None:
    """How the child ended; None: it has to be ended, for somebody hung up.

    Where the other end of its pipe is closed, the child has some time to end by itself.
    """
    poll, asked = select.poll(), math.inf
    for end in ends:
        poll.register(end, select.POLLIN)
    if pipe is not None:
        poll.register(pipe, getattr(select, "POLLRDHUP", 0))
    glance = 0.05
    with suppress(AttributeError, OSError):  # where there is none, look often
        poll.register(os.pidfd_open(child), select.POLLIN)
        glance = GLANCE
    while (status := reaped(child)[0]) is None:
        spoke = [file for file, _ in poll.poll(1000 * max(0.0, min(glance, asked - time.monotonic())))]
        if pipe in spoke:
            poll.unregister(pipe)
            asked = time.monotonic() + CLOSING
        if any(end in spoke for end in ends) or time.monotonic() >= asked:
            return reaped(child)[0]
    return status


def hung_up(ends: Sequence[int], seconds: float) -> bool:
    """Whether one of these files says that it is time to end, after waiting for so long."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def reaped(child: int) -> tuple[int | None, bool]:
    """Take leave of children that have ended: how this one did, if it is among them, and whether others are left."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        status = ended if pid == child else status


def end_children(child: int) -> int | None:
    """Kill the child and everything that it has started, also in sessions of their own. How the child ended, if now."""
    until, pause, status = time.monotonic() + ENDING / 2, 0.001, None
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if pause > 0.004:  # its group is nearly always all
            for pid in _descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        ended, left = reaped(child)
        status = status if ended is None else ended
        if not left or time.monotonic() > until:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.016)


def _descendants(root: int) -> list[int]:
    """The processes below this one, as far as /proc tells."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    below = children.get(root, [])
    for pid in below:  # it grows while it is read
        below += children.get(pid, [])
    return below


def end_as(status: int) -> NoReturn:
    """End this process as that one did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
