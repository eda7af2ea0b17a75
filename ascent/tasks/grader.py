"""The process in which rewards are computed, seen from inside: a keeper, and the grader that it forks.

The keeper runs no code but ours. When the grader ends, or the process that started them does, it kills everything that
the grader has started, sessions of their own included (on Linux; elsewhere the process group).
"""

import asyncio
import ctypes
import functools
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ascent.tasks.calls import REASON, Job, Wrong, compute, error_words, read_call, read_number, read_reward
from ascent.tasks.files import run_file
from ascent.tasks.text.base import Problem

ENDING = 5.0
"""Seconds that a keeper may take to end its grader and what that has started."""
FRAME = 1 << 20
"""The most bytes of an answer."""
Answer = Callable[[Sequence[Job], float], list[dict[str, Any]]]
"""From jobs of one call, and the seconds that it may take, to an answer for each."""


class Grader(NamedTuple):
    """What a process needs to compute a reward: where the code is, and a task's fields (None: a plain function)."""

    source: str
    """python:FILE:NAME, or MODULE:NAME for what can be imported."""
    settings: Mapping[str, Any] | None = None
    numbers: bool = False
    """A function of a small task: f(prompt, response) on lists of numbers."""
    sent: bytes | None = None
    """The code itself, where it is an object of the parent's and lies in no file: pickled there, for this process
    alone. It never comes from a run folder."""


def keep_grader(jobs: int, lifeline: int, memory: int) -> None:
    """The keeper: it forks the grader, and ends as that does, or with the parent, when nothing of it is left.

    `jobs` and `lifeline` are the numbers of a socket and of a pipe that the parent holds open; `memory` is in bytes.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever loses its parent becomes ours
    keeper, grader = os.getpid(), os.fork()
    if grader == 0:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(lifeline)
        if memory:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        if os.getppid() == keeper:
            serve_jobs(socket.socket(fileno=jobs))
        os._exit(0)
    os.close(jobs)
    watched, status = [lifeline], None
    with suppress(AttributeError, OSError):  # where there is none, look often
        watched.append(os.pidfd_open(grader))
    while status is None and lifeline not in select.select(watched, [], [], 1.0 if len(watched) == 2 else 0.05)[0]:
        status = _reaped(grader)
    _end_children(grader)
    code = os.waitstatus_to_exitcode(status or 0)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Linux alone knows these options."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reaped(grader: int) -> int | None:
    """Take leave of children that have ended; how the grader did, if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            status = ended if pid == grader else status
    return status


def _end_children(grader: int) -> None:
    """Kill the grader and everything that it has started, also in sessions of their own."""
    until = time.monotonic() + ENDING / 2
    while time.monotonic() < until:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(grader, signal.SIGKILL)
        left = _descendants(os.getpid())
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reaped(grader)
        if not left:
            return
        time.sleep(0.005)


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


def serve_jobs(pipe: socket.socket) -> None:
    """The grader: it answers one job after the other, each with the job's own number."""
    own = os.getpid()
    try:
        calls = [_load(Grader(*grader)) for grader in pickle.loads(_receive(pipe))]
    except EOFError:
        return
    except BaseException as error:
        return _say(pipe, {"error": error_words(error)})
    _say(pipe, {"ready": True})
    while True:
        try:
            number, seconds, jobs = pickle.loads(_receive(pipe))
        except EOFError:
            return
        try:
            answer: dict[str, Any] = {"answers": calls[jobs[0][0]]([Job(*job) for job in jobs], seconds)}
        except BaseException as error:  # SystemExit and the rest: a reward has no say over this process
            answer = {"error": error_words(error)}
        if os.getpid() != own:  # a child that the reward forked, and that came back from it too
            os._exit(0)
        _say(pipe, {"number": number, **answer})


def _receive(pipe: socket.socket) -> bytes:
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


def _say(pipe: socket.socket, answer: Mapping[str, Any]) -> None:
    pipe.sendall(json.dumps(answer).encode() + b"\n")


def _load(grader: Grader) -> Answer:
    """The reward of python:FILE:NAME or MODULE:NAME, or what was sent: a function, or a task with these settings."""
    if grader.sent is not None:
        code: Any = pickle.loads(grader.sent)
    else:
        where, name = grader.source.removeprefix("python:").rsplit(":", 1)
        module = run_file(Path(where), 0) if grader.source.startswith("python:") else importlib.import_module(where)
        code = functools.reduce(getattr, name.split("."), module)
    if grader.settings is not None:
        task = object.__new__(code)  # its settings were checked by the parent: nothing is read or checked again
        vars(task).update(grader.settings)
        task.prepare()
        return functools.partial(_grade, task)
    if grader.numbers:
        return functools.partial(_numbers, code)
    call = read_call(code)
    loop = asyncio.new_event_loop() if call.awaited else None
    return lambda jobs, seconds: compute(call, jobs, loop, seconds)


def _numbers(function: Callable[..., Any], jobs: Sequence[Job], _: float) -> list[dict[str, Any]]:
    """A reward function of a small task: f(prompt, response) on lists of numbers."""
    answers = [read_reward(function(job.prompt, job.response)) for job in jobs]
    if any("skipped" in answer for answer in answers):
        raise Wrong("returned NoneType: a reward returns one number, or (number, reason)")
    return answers


def _grade(task: Any, jobs: Sequence[Job], _: float) -> list[dict[str, Any]]:
    """The task's own check."""
    (job,) = jobs
    problem = Problem(job.prompt, job.answer, dict(job.columns))
    value, strict, lenient, reason = task.grade(problem, job.response)
    number = read_number(value)
    return [{"value": number, "strict": bool(strict), "lenient": bool(lenient), "reason": str(reason)[:REASON]}]
