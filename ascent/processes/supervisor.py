"""A process under a supervisor: all that it starts ends with it, and it ends with the process that started it.

    owner ── supervisor ── program
                              └─ whatever it starts

The supervisor runs no user code. When the program ends, or the owner does, it kills everything that the program has
started, including what is in another session (on Linux; elsewhere the process group), and reports over the channel how
the program ended. `SupervisedProcess` is the owner's side; the functions below it run in the supervisor.
"""

import ctypes
import functools
import importlib
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ascent.processes.channel import Channel, PolledChannel, hang_up
from ascent.processes.torch_variables import torch_variables

END_SECONDS = 5.0
"""Seconds that a supervisor may take to end its child and what that has started."""
CLOSE_SECONDS = 1.0
"""Seconds that a child has to end by itself after the owner has closed its channel."""
START_SECONDS = 120.0
"""Seconds that a process may take to start and to import what it needs."""
ALLOWED_VARIABLES = (
    "PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MIMALLOC_PURGE_DECOMMITS",
)  # fmt: skip
"""Environment variables that such a process sees, beside LC_…, PYTHON… and those that the user names."""


class Limits(NamedTuple):
    """What a process that runs user code may use."""

    seconds: float
    """Wall-clock time of one call: a reward, or a turn of an environment."""
    memory: float = 0.0
    """GiB of each process; 0: no limit."""
    env: tuple[str, ...] = ()
    """Names of environment variables that it sees beside the usual ones."""

    def environment(self) -> dict[str, str]:
        """Return the variables of this process that are allowed there; secrets only if the user named them."""
        allowed = {*ALLOWED_VARIABLES, *self.env}
        inherited = {k: v for k, v in os.environ.items() if k in allowed or k.startswith(("LC_", "PYTHON"))}
        return torch_variables() | inherited


class SupervisedProcess:
    """A process under a supervisor, seen from its owner."""

    def __init__(self, program: str, limits: Limits, is_fork_server: bool = False, **environment: str):
        """Start MODULE:FUNCTION, which is called with its end of the channel.

        A fork server is also given the files that tell its supervisor to end, for the supervisors of its forks; and
        these forks continue when it dies.
        """
        ours, theirs = socket.socketpair()
        self.channel = PolledChannel(ours)
        self.lifeline, other_end = socket.socketpair()
        memory = int(limits.memory * 2**30)
        arguments = (program, theirs.fileno(), other_end.fileno(), os.getpid(), memory, is_fork_server)
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
            f"from ascent.processes.supervisor import supervise_program; supervise_program{arguments}"
        )
        with theirs, other_end:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment | limits.environment(),
                pass_fds=(theirs.fileno(), other_end.fileno()),
                start_new_session=True,
            )

    def end(self) -> None:
        """Let the supervisor kill the process and all that it started, and leave no zombie."""
        hang_up(self.lifeline)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.channel.socket.close()


# ---- the supervisor ---------------------------------------------------------------------------------

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REAP_SECONDS = 5.0
"""Seconds between two rounds of reaping orphans that have ended."""


def supervise_program(
    program: str, pipe: int, lifeline: int, owner: int, memory: int, is_fork_server: bool
) -> NoReturn:
    """Run MODULE:FUNCTION as a supervised child of this process.

    `pipe` and `lifeline` are the numbers of sockets whose other ends the owner holds; `memory` is in bytes.
    """
    try:
        for file in (pipe, lifeline):
            os.set_inheritable(file, False)
        end_files = [lifeline]
        with suppress(AttributeError, OSError):  # a fork of the owner may hold the lifeline too
            end_files.append(os.pidfd_open(owner))
        if os.getppid() == owner:
            channel = Channel(socket.socket(fileno=pipe))
            run = functools.partial(_run_program, program, channel, end_files if is_fork_server else [])
            supervise(run, channel, end_files, memory, is_fork_server)
    finally:
        os._exit(0)


def _run_program(program: str, channel: Channel, end_files: Sequence[int]) -> None:
    module, function = program.split(":")
    run = getattr(importlib.import_module(module), function)
    run(channel, end_files) if end_files else run(channel)


def supervise(
    run: Callable[[], Any], channel: Channel, end_files: Sequence[int], memory: int = 0, is_fork_server: bool = False
) -> NoReturn:
    """Fork a child that runs this, end all that it started when it ends, and report how it ended.

    `end_files` tell when to end it: one of them can be read.
    """
    try:
        child = _fork_child(run, () if is_fork_server else end_files, memory)
        status = _wait_for(child, end_files, channel.socket.fileno())
        if status is not None and is_fork_server:
            channel.report_exit(os.waitstatus_to_exitcode(status))
            while _reap(child)[1] and not _is_readable(end_files, 0.5):  # its forks continue
                pass
        killed = _end_children(child)
        status = killed if status is None else status
        channel.report_exit(None if status is None else os.waitstatus_to_exitcode(status))
    finally:
        os._exit(0)


def _fork_child(run: Callable[[], Any], hidden_files: Sequence[int], memory: int) -> int:
    """Fork the one child of this supervisor, in another session and without these files."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    supervisor, child = os.getpid(), os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for file in hidden_files:
            os.close(file)
        if memory:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        if os.getppid() == supervisor:
            run()
        code = 0
    finally:
        os._exit(code)


def _wait_for(child: int, end_files: Sequence[int], pipe: int) -> int | None:
    """Wait until the child ends and return its status; None: it has to be ended.

    After the owner has closed the channel, the child has some time to end by itself.
    """
    poll, deadline = select.poll(), math.inf
    for file in end_files:
        poll.register(file, select.POLLIN)
    poll.register(pipe, getattr(select, "POLLRDHUP", 0))
    pause = 0.05
    with suppress(AttributeError, OSError):  # without a pidfd, look often
        poll.register(os.pidfd_open(child), select.POLLIN)
        pause = REAP_SECONDS
    while (status := _reap(child)[0]) is None:
        readable = [file for file, _ in poll.poll(1000 * max(0.0, min(pause, deadline - time.monotonic())))]
        if pipe in readable:
            poll.unregister(pipe)
            deadline = time.monotonic() + CLOSE_SECONDS
        if any(file in readable for file in end_files) or time.monotonic() >= deadline:
            return _reap(child)[0]
    return status


def _is_readable(files: Sequence[int], seconds: float) -> bool:
    """Whether one of these files can be read within this time."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _reap(child: int) -> tuple[int | None, bool]:
    """Reap children that have ended: the status of this one, if it is among them, and whether others are left."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        status = ended if pid == child else status


def _end_children(child: int) -> int | None:
    """Kill the child and everything that it has started, in any session. Return its status if it ended now."""
    until, pause, status = time.monotonic() + END_SECONDS / 2, 0.001, None
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        if pause > 0.004:  # nearly always the process group is all there is
            for pid in _descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        ended, are_left = _reap(child)
        status = status if ended is None else ended
        if not are_left or time.monotonic() > until:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.016)


def _descendants(root: int) -> list[int]:
    """The processes below this one, according to /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    below = children.get(root, [])
    for pid in below:  # it grows while it is read
        below += children.get(pid, [])
    return below


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
