"""A sandbox seen from inside: a warm process that has loaded what jobs need, and forks for each.

It runs code of Ascent and of allowed packages, never of a job. Its guest is a function that makes another:
`guest(settings)` runs once, here, and what it returns runs in every job with the job's line, behind the walls of that
job: no process can be made, no other process named, and each has its own folder, if there is one to write in.

A job ends when its guest returns, when it dies, or when the other end of its line is closed. Then its process is
killed, its folder is removed, and the line is closed: that is how its owner knows that nothing of it is left.
"""

import gc
import itertools
import json
import os
import platform
import random
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from importlib import import_module
from typing import Any, NoReturn

from ascent.processes.channel import Channel, ChannelClosedError, receive_fork_request
from ascent.sandbox import kernel_isolation
from ascent.sandbox import seccomp_filter as filters
from ascent.sandbox.allowed_packages import AllowedFinder

SETUP = 1 << 20
"""The most bytes of the settings."""
BEGUN = b"+\n"
"""The first message on a job's channel, from the fork server: the job is isolated."""
OPEN_FILES = 4096
"""The most files that the fork server has open: three for each job."""
RDHUP: int = getattr(select, "POLLRDHUP", 0)
Guest = Callable[[Channel], object]


class _Job:
    """A job that is under way."""

    def __init__(self, line: socket.socket):
        self.line, self.folder, self.begun = line, "", False
        self.pid, self.ended = 0, -1
        """Its process, and a file that tells when that has ended."""
        self.threads, self.listener = 0, -1
        """Its threads beside the first, and a file that tells when one begins or ends; -1: then none can begin."""

    def files(self) -> list[int]:
        return [file for file in (self.ended, self.line.fileno(), self.listener) if file >= 0]


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
    """Wall this process in, and load what jobs need. Ascent's own files are read before, and cannot be read behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path.pop()
    sys.meta_path.append(AllowedFinder(setup["packages"]))
    module, name = setup["guest"].split(":")
    make: Any = reduce(getattr, name.split("."), import_module(module))
    if setup["kind"] != "none":
        isolate_server(setup)
    guest: Guest = make(setup["settings"])
    gc.collect()
    gc.freeze()  # pages that a collection would write to stay shared
    return guest


def isolate_server(setup: dict[str, Any]) -> None:
    """Close this process in. It runs no code of a job, and keeps the capability to mount, where jobs have folders."""
    kernel_isolation.close_memory()
    folder = [setup["folder"]] if setup["folder"] else []
    if not folder:
        kernel_isolation.drop_capabilities()
    setup["tops"] = [f"/{name}" for name in os.listdir("/") if f"/{name}" not in folder]
    if setup["landlock"]:
        setup["rules"] = kernel_isolation.make_ruleset(setup["readable"], folder, setup["devices"])
    kept = setup["landlock"] >= 3 or setup["kind"] == "bubblewrap"
    setup["filter"] = filters.filter_program(False, bool(folder), kept)
    kernel_isolation.install_filter(filters.filter_program(True, bool(folder), kept))


def fork_jobs(owner: socket.socket, guest: Guest, setup: dict[str, Any]) -> None:
    """Fork for every line that comes, count threads, and end what is over, until the owner has gone."""
    jobs: dict[int, _Job] = {}
    """Each by its files."""
    starts, ends = (pair[filters.MACHINES[platform.machine()][0]] for pair in (filters.CLONE, filters.EXIT))
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    while True:
        for file, event in poll.poll():
            if file == owner.fileno():
                try:
                    line = receive_fork_request(owner)
                except ChannelClosedError:
                    return
                job = _Job(line) if line else None
                if job is not None and begin_job(job, guest, setup):
                    for each in job.files():
                        jobs[each] = job
                        poll.register(each, RDHUP if each == job.line.fileno() else select.POLLIN)
            elif file in jobs:
                job = jobs[file]
                if file == job.listener and event & select.POLLIN:
                    call = kernel_isolation.answer_call(file, [starts] if job.threads >= setup["threads"] else [])
                    job.threads += (call == starts) - (call == ends)
                    continue
                for each in job.files():
                    poll.unregister(each)
                    del jobs[each]
                end_job(job, setup["kind"])


def begin_job(job: _Job, guest: Guest, setup: dict[str, Any]) -> bool:
    """Fork it. Where that fails, its line is closed without `BEGUN`."""
    try:
        job.folder = make_folder(setup) if setup["folder"] else ""
        server, own = socket.socketpair()
        with server, own:
            warm, job.pid = os.getpid(), os.fork()
            if job.pid == 0:
                status = 1
                try:
                    os.setsid()
                    if os.getppid() == warm:
                        enter(job, own, setup)
                        guest(Channel(job.line))
                        status = 0
                finally:
                    os._exit(status)
            own.close()
            job.ended = os.pidfd_open(job.pid)
            word, files, flags, _ = socket.recv_fds(server, 1, 1)  # its walls are up, and no code of its own has run
            job.listener = files[0] if files else -1
            job.begun = bool(word and not flags & socket.MSG_CTRUNC and job.line.send(BEGUN))
    except OSError:
        job.begun = False
    if not job.begun:
        end_job(job, setup["kind"])
    return job.begun


def enter(job: _Job, server: socket.socket, setup: dict[str, Any]) -> None:
    """The walls of a job. Where they cannot be put up, it does not run."""
    signal.set_wakeup_fd(-1)
    if setup["landlock"]:
        kernel_isolation.restrict(setup["rules"])
    for last, file in itertools.pairwise([2, *sorted((job.line.fileno(), server.fileno())), OPEN_FILES]):
        os.closerange(last + 1, file)
    os.chdir(job.folder or "/")
    os.environ["TMPDIR"] = job.folder or "/"
    random.seed(0)
    listeners = []
    if setup["kind"] != "none":
        kernel_isolation.set_option(kernel_isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
        if job.folder:  # not those of other jobs
            kernel_isolation.restrict(kernel_isolation.make_ruleset(setup["tops"], [job.folder], setup["devices"]))
        kernel_isolation.drop_capabilities()
        listeners = kernel_isolation.install_filter(filters.for_process(setup["filter"], os.getpid()), listens=True)
    with server:
        socket.send_fds(server, [b"."], listeners)
        for listener in listeners:
            os.close(listener)
        server.recv(1)  # until it has said that the job has begun
    kernel_isolation.limit(
        *setup["limits"]
    )  # not before: a limit on files is one on descriptors that any process is sending


def end_job(job: _Job, kind: str) -> None:
    """Kill it, say how it ended, and remove its folder. Nothing that a job does makes this raise."""
    status = 0
    with suppress(OSError):
        if job.pid:
            os.kill(job.pid, signal.SIGKILL)
            _, status = os.waitpid(job.pid, 0)
    if job.begun:
        Channel(job.line).report_exit(os.waitstatus_to_exitcode(status))
    if job.folder:
        remove_folder(job.folder, kind)
    for file in job.files():
        os.close(file)
    job.line.detach()


def make_folder(setup: dict[str, Any]) -> str:
    """The folder of a job: a file system of its own, in memory, except where there are no walls."""
    folder = os.path.join(setup["folder"], f"ascent-{os.urandom(12).hex()}")
    os.mkdir(folder, 0o700)
    if setup["kind"] != "none":
        kernel_isolation.mount_folder(folder, *setup["space"])
    return folder


def remove_folder(folder: str, kind: str) -> None:
    """Remove it with all that is in it."""
    if kind != "none":
        kernel_isolation.unmount_folder(folder)
        with suppress(OSError):
            return os.rmdir(folder)
    import shutil  # it would make every fork slower

    def unlock(_: Any, path: str, __: Any) -> None:
        with suppress(OSError, RecursionError):
            os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(folder, onerror=unlock)
