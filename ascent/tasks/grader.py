"""The process in which rewards are computed, seen from inside: a keeper, and the grader that it forks.

The keeper runs no code but ours. When the grader ends, or the process that started them does, it kills everything that
the grader has started, sessions of their own included (on Linux; elsewhere the process group).
"""

import ctypes
import functools
import importlib
import inspect
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ascent.tasks.files import run_file
from ascent.tasks.text.base import Problem

ENDING = 5.0
"""Seconds that a keeper may take to end its grader and what that has started."""
FRAME = 1 << 20
"""The most bytes of an answer."""
LARGEST = 3.4028234663852886e38
"""Of a float32: what is larger would be infinite in the batch."""
REASON = 300
"""Characters of a reason that are kept."""
FORM = "a reward returns one number, or (number, reason)"


class Grader(NamedTuple):
    """What a process needs to compute a reward: where the code is, and a task's fields (None: a plain function)."""

    source: str
    """python:FILE:NAME, or MODULE:NAME for what can be imported."""
    settings: Mapping[str, Any] | None = None
    numbers: bool = False
    """A function of a small task: f(prompt, response) on lists of numbers."""


class Job(NamedTuple):
    """One reward to compute."""

    grader: int
    prompt: Any
    response: Any
    """Words, or numbers."""
    answer: str | None
    columns: Mapping[str, Any]


class Wrong(Exception):
    """What was returned is not a reward."""


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
        return _say(pipe, {"error": _words(error)})
    _say(pipe, {"ready": True})
    while True:
        try:
            number, *job = pickle.loads(_receive(pipe))
        except EOFError:
            return
        try:
            answer = calls[job[0]](Job(*job))
        except BaseException as error:  # SystemExit and the rest: a reward has no say over this process
            answer = {"error": _words(error)}
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


def _load(grader: Grader) -> Callable[[Job], dict[str, Any]]:
    """The reward of python:FILE:NAME or MODULE:NAME: a function, or a task with these settings."""
    where, name = grader.source.removeprefix("python:").rsplit(":", 1)
    module = run_file(Path(where), 0) if grader.source.startswith("python:") else importlib.import_module(where)
    code: Any = functools.reduce(getattr, name.split("."), module)
    if grader.settings is None:
        return functools.partial(_own, code, frozenset() if grader.numbers else _names(code), grader.numbers)
    task = object.__new__(code)  # its settings were checked by the parent: nothing is read or checked again
    vars(task).update(grader.settings)
    task.prepare()
    return functools.partial(_grade, task)


def _names(function: Callable[..., Any]) -> frozenset[str] | None:
    """The columns that a function asks for by name; None: all of them, it takes **columns."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _own(function: Callable[..., Any], names: frozenset[str] | None, numbers: bool, job: Job) -> dict[str, Any]:
    """A reward function of your own: f(prompt, response, answer, **columns) -> a number, or (number, reason).

    Of `numbers`: f(prompt, response).
    """
    columns = {k: v for k, v in job.columns.items() if names is None or k in names}
    asked = (job.prompt, job.response) if numbers else (job.prompt, job.response, job.answer)
    returned = function(*asked, **columns)
    value, reason = returned, ""
    if isinstance(returned, tuple | list):
        if len(returned) != 2 or isinstance(returned, list):
            raise Wrong(f"returned a {type(returned).__name__} of {len(returned)}: {FORM}")
        value, reason = returned
    return {"value": _number(value), "reason": str(reason)[:REASON]}


def _grade(task: Any, job: Job) -> dict[str, Any]:
    """The task's own check."""
    problem = Problem(job.prompt, job.answer, dict(job.columns))
    value, strict, lenient, reason = task.grade(problem, job.response)
    return {"value": _number(value), "strict": bool(strict), "lenient": bool(lenient), "reason": str(reason)[:REASON]}


def _number(value: Any) -> float:
    """A finite number, or an error that says what it was instead."""
    if not hasattr(type(value), "__float__"):
        raise Wrong(f"returned {type(value).__name__}: {FORM}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise Wrong(f"returned {number}: a reward is a finite number")
    return number


def _words(error: BaseException) -> str:
    """What went wrong and, for an error in somebody's own code, in which line."""
    try:
        if isinstance(error, Wrong):
            return str(error)[:REASON]
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        files = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        own = [(file.name, line) for file, line in files if file != Path(__file__) and file.is_file()]
        return message[:REASON] + (f" ({own[-1][0]}, line {own[-1][1]})" if own else "")
    except BaseException as worse:  # an error whose own words are broken
        return f"{type(error).__name__}, and {type(worse).__name__} when asked for its words"
