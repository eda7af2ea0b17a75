"""The fork server of a sandbox: it has loaded what jobs need, and forks an isolated process for each.

It runs code of Ascent and of allowed packages, never code of a job. The entry point is called once, here, with the
settings; what it returns is called in every job, with the channel of the job. A job cannot make or name processes, and
sees only its own folder, if there is one to write in.

A job ends when that function returns, when it dies, or when its owner closes the channel. Then its process is killed,
its folder is removed and its channel is closed, so the owner knows that nothing of it is left.

It is not the fork server of `ascent.processes`: a job that can make no process needs no supervisor, and this server
also answers the seccomp notifications of its jobs and mounts their folders.
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

MAX_SETUP_BYTES = 1 << 20
"""Limit of the settings, in bytes."""
BEGUN = b"+\n"
"""The first message to the owner of a job, sent by the fork server when the job is isolated."""
MAX_OPEN_FILES = 4096
"""Limit of the files that the fork server has open; each job takes three."""
RDHUP: int = getattr(select, "POLLRDHUP", 0)
ServeJob = Callable[[Channel], object]


class _RunningJob:
    """A job that runs."""

    def __init__(self, channel: socket.socket):
        self.channel, self.folder, self.has_begun = channel, "", False
        self.pid, self.ended = 0, -1
        """Its process, and the pidfd that can be read when it has ended."""
        self.threads, self.listener = 0, -1
        """Its threads besides the first, and the seccomp listener for their starts and ends; -1: no threads."""

    def files(self) -> list[int]:
        return [file for file in (self.ended, self.channel.fileno(), self.listener) if file >= 0]


def run_server(control: int) -> NoReturn:
    """Run the fork server until its owner ends."""
    owner = socket.socket(fileno=control)
    os.set_inheritable(control, False)
    try:
        try:
            setup = json.loads(owner.recv(MAX_SETUP_BYTES))
            serve_job = load_isolated(setup)
        except BaseException as error:
            owner.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        else:
            owner.send(json.dumps({"ready": True}).encode())
            fork_jobs(owner, serve_job, setup)
    finally:
        os._exit(0)


def load_isolated(setup: dict[str, Any]) -> ServeJob:
    """Isolate this process and load what jobs need. Files of Ascent can only be read before."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.path.pop()
    sys.meta_path.append(AllowedFinder(setup["packages"]))
    module, name = setup["entry_point"].split(":")
    make: Any = reduce(getattr, name.split("."), import_module(module))
    if setup["kind"] != "none":
        isolate_server(setup)
    serve_job: ServeJob = make(setup["settings"])
    gc.collect()
    gc.freeze()  # memory pages that a collection would write to stay shared with the jobs
    return serve_job


def isolate_server(setup: dict[str, Any]) -> None:
    """Isolate the fork server. It keeps the capability to mount if jobs have folders."""
    kernel_isolation.protect_memory()
    folder = [setup["folder"]] if setup["folder"] else []
    if not folder:
        kernel_isolation.drop_capabilities()
    setup["tops"] = [f"/{name}" for name in os.listdir("/") if f"/{name}" not in folder]
    if setup["landlock"]:
        setup["rules"] = kernel_isolation.make_ruleset(setup["readable"], folder, setup["devices"])
    keeps_truncate_rule = setup["landlock"] >= 3 or setup["kind"] == "bubblewrap"
    setup["filter"] = filters.filter_program(False, bool(folder), keeps_truncate_rule)
    kernel_isolation.install_filter(filters.filter_program(True, bool(folder), keeps_truncate_rule))


def fork_jobs(owner: socket.socket, serve_job: ServeJob, setup: dict[str, Any]) -> None:
    """Fork for every request, count threads, and end jobs that are over, until the owner is gone."""
    jobs: dict[int, _RunningJob] = {}
    """Each job by its files."""
    starts, ends = (pair[filters.MACHINES[platform.machine()][0]] for pair in (filters.CLONE, filters.EXIT))
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    while True:
        for file, event in poll.poll():
            if file == owner.fileno():
                try:
                    channel = receive_fork_request(owner)
                except ChannelClosedError:
                    return
                job = _RunningJob(channel) if channel else None
                if job is not None and begin_job(job, serve_job, setup):
                    for each in job.files():
                        jobs[each] = job
                        poll.register(each, RDHUP if each == job.channel.fileno() else select.POLLIN)
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


def begin_job(job: _RunningJob, serve_job: ServeJob, setup: dict[str, Any]) -> bool:
    """Fork a job. If that fails, its channel is closed without `BEGUN`."""
    try:
        job.folder = make_folder(setup) if setup["folder"] else ""
        server_end, job_end = socket.socketpair()
        with server_end, job_end:
            server_pid, job.pid = os.getpid(), os.fork()
            if job.pid == 0:
                status = 1
                try:
                    os.setsid()
                    if os.getppid() == server_pid:
                        isolate_job(job, job_end, setup)
                        serve_job(Channel(job.channel))
                        status = 0
                finally:
                    os._exit(status)
            job_end.close()
            job.ended = os.pidfd_open(job.pid)
            word, files, flags, _ = socket.recv_fds(server_end, 1, 1)  # it is isolated, and has not run untrusted code
            job.listener = files[0] if files else -1
            job.has_begun = bool(word and not flags & socket.MSG_CTRUNC and job.channel.send(BEGUN))
    except OSError:
        job.has_begun = False
    if not job.has_begun:
        end_job(job, setup["kind"])
    return job.has_begun


def isolate_job(job: _RunningJob, server_end: socket.socket, setup: dict[str, Any]) -> None:
    """Isolate this process, a job. If that raises, the job does not run."""
    signal.set_wakeup_fd(-1)
    if setup["landlock"]:
        kernel_isolation.restrict(setup["rules"])
    for last, file in itertools.pairwise([2, *sorted((job.channel.fileno(), server_end.fileno())), MAX_OPEN_FILES]):
        os.closerange(last + 1, file)
    os.chdir(job.folder or "/")
    os.environ["TMPDIR"] = job.folder or "/"
    random.seed(0)
    listeners = []
    if setup["kind"] != "none":
        kernel_isolation.set_option(kernel_isolation.PR_SET_PDEATHSIG, signal.SIGKILL)
        if job.folder:  # the folders of other jobs cannot be read
            kernel_isolation.restrict(kernel_isolation.make_ruleset(setup["tops"], [job.folder], setup["devices"]))
        kernel_isolation.drop_capabilities()
        listeners = kernel_isolation.install_filter(filters.for_process(setup["filter"], os.getpid()), listens=True)
    with server_end:
        socket.send_fds(server_end, [b"."], listeners)
        for listener in listeners:
            os.close(listener)
        server_end.recv(1)  # until it has said that the job has begun
    kernel_isolation.set_limits(
        *setup["limits"]
    )  # not before: a limit on files is one on descriptors that any process is sending


def end_job(job: _RunningJob, kind: str) -> None:
    """Kill a job, report how it ended, and remove its folder. Nothing that a job does makes this raise."""
    status = 0
    with suppress(OSError):
        if job.pid:
            os.kill(job.pid, signal.SIGKILL)
            _, status = os.waitpid(job.pid, 0)
    if job.has_begun:
        Channel(job.channel).report_exit(os.waitstatus_to_exitcode(status))
    if job.folder:
        remove_folder(job.folder, kind)
    for file in job.files():
        os.close(file)
    job.channel.detach()


def make_folder(setup: dict[str, Any]) -> str:
    """Make the folder of a job: a file system in memory, except without isolation."""
    folder = os.path.join(setup["folder"], f"ascent-{os.urandom(12).hex()}")
    os.mkdir(folder, 0o700)
    if setup["kind"] != "none":
        kernel_isolation.mount_folder(folder, *setup["space"])
    return folder


def remove_folder(folder: str, kind: str) -> None:
    """Remove a folder with all that is in it."""
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
