"""A sandbox seen from inside: a warm process that has loaded what jobs need, and forks for each.

It walls itself in first, then loads. Its guest is a function that makes another: `guest(settings)` runs once, here, and
what it returns runs in every job with the job's line. Jobs have walls of their own on top: no process can be made, no
other process named, and each has its own folder, if there is one to write in.

A job ends when its guest returns, when it dies, or when the other end of its line is closed. Then its process is
killed, its folder is wiped, and the line is closed: that is how its owner knows that nothing of it is left.
"""

import gc
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from ascent.sandbox import filter as filters
from ascent.sandbox import kernel
from ascent.sandbox.line import Line

SETUP = 1 << 20
"""The most bytes of the settings."""
Guest = Callable[[Line], object]


class _Job(NamedTuple):
    """A job that is under way."""

    pid: int
    ended: int
    """A file that tells when its process has ended."""
    line: socket.socket
    folder: str
    wiping: bool = False
    """It is over, and this process wipes its folder."""


def be_warm(control: int) -> NoReturn:
    """Never comes back: the process ends with its owner."""
    owner = socket.socket(fileno=control)
    os.set_inheritable(control, False)
    try:
        try:
            setup = json.loads(owner.recv(SETUP))
            guest = wall_in(setup)
        except BaseException as error:
            owner.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        else:
            owner.send(json.dumps({"ready": True}).encode())
            fork_jobs(owner, guest, setup)
    finally:
        os._exit(0)


def wall_in(setup: dict[str, Any]) -> Guest:
    """Wall this process in, and load what jobs need."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path[:] = [*sys.path[:-1], *setup["paths"]]
    if setup["kind"] != "none":
        kernel.renounce()
        if setup["landlock"]:
            kernel.landlock(setup["readable"], [setup["folder"]] if setup["folder"] else [], setup["devices"])
        kept = setup["landlock"] >= 3 or setup["kind"] == "bubblewrap"
        setup["filter"] = filters.filter_program(False, bool(setup["folder"]), kept)
        kernel.install_filter(filters.filter_program(True, bool(setup["folder"]), kept))
    module, name = setup["guest"].split(":")
    make: Any = reduce(getattr, name.split("."), import_module(module))
    guest: Guest = make(setup["settings"])
    gc.collect()
    gc.freeze()  # pages that a collection would write to stay shared
    return guest


def fork_jobs(owner: socket.socket, guest: Guest, setup: dict[str, Any]) -> None:
    """Fork for every line that comes, and end what is over, until the owner has gone."""
    jobs: dict[int, _Job] = {}
    """Each by the number of its line, and by the file that tells of its end."""
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file == owner.fileno():
                _, files, *_ = socket.recv_fds(owner, 1, 1)
                if not files:
                    return
                job = begin_job(socket.socket(fileno=files[0]), owner, guest, setup)
                for place in (job.ended, job.line.fileno()):
                    jobs[place] = job
                poll.register(job.ended, select.POLLIN)
                poll.register(job.line, getattr(select, "POLLRDHUP", 0))
            elif file in jobs:
                job = jobs[file]
                for place in (job.ended, *([] if job.wiping else [job.line.fileno()])):
                    poll.unregister(place)
                    del jobs[place]
                if (wiper := end_job(job)) is not None:
                    jobs[wiper.ended] = wiper
                    poll.register(wiper.ended, select.POLLIN)


def begin_job(line: socket.socket, owner: socket.socket, guest: Guest, setup: dict[str, Any]) -> _Job:
    folder = os.path.join(setup["folder"], f"ascent-{os.urandom(12).hex()}") if setup["folder"] else ""
    if folder:
        os.mkdir(folder, 0o700)
    warm, pid = os.getpid(), os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            if os.getppid() == warm:
                owner.close()
                enter(line, folder, setup)
                guest(Line(line))
                status = 0
        finally:
            os._exit(status)
    return _Job(pid, os.pidfd_open(pid), line, folder)


def enter(line: socket.socket, folder: str, setup: dict[str, Any]) -> None:
    """The walls of a job. Where they cannot be put up, it does not run."""
    signal.set_wakeup_fd(-1)
    os.closerange(3, line.fileno())
    os.closerange(line.fileno() + 1, 4096)
    os.chdir(folder or "/")
    os.environ["TMPDIR"] = folder or "/"
    random.seed(0)
    kernel.limit(*setup["limits"])
    if setup["kind"] != "none":
        kernel.set_option(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if folder:
            kernel.landlock(setup["readable"], [folder], setup["devices"])
        kernel.install_filter(filters.for_process(setup["filter"], os.getpid()))


def end_job(job: _Job) -> _Job | None:
    """Kill it, and say how it ended. A folder that is not empty is wiped by a process of its own, which is returned."""
    with suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGKILL)
    _, status = os.waitpid(job.pid, 0)
    os.close(job.ended)
    if not job.wiping:
        code = os.waitstatus_to_exitcode(status)
        words = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        job.line.setblocking(False)
        with suppress(OSError):
            job.line.send(b"\n" + json.dumps({"ended": words}).encode() + b"\n")
    if job.folder and not job.wiping:
        try:
            os.rmdir(job.folder)
        except OSError:
            pid = os.fork()
            if pid == 0:
                try:
                    wipe(job.folder)
                finally:
                    os._exit(0)
            return _Job(pid, os.pidfd_open(pid), job.line, job.folder, wiping=True)
    job.line.close()
    return None


def wipe(folder: str) -> None:
    """Remove a job's folder, whatever modes it has set and however deep it is: without recursion, and without paths."""
    os.chmod(folder, 0o700)
    os.chdir(folder)
    below: list[str] = []
    while True:
        inner = None
        with os.scandir(".") as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    inner = entry.name
                    break
                os.unlink(entry.name)
        if inner is not None:
            os.chmod(inner, 0o700)
            os.chdir(inner)
            below.append(inner)
        elif below:
            os.chdir("..")
            os.rmdir(below.pop())
        else:
            break
    os.chdir("/")
    os.rmdir(folder)
