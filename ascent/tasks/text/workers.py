"""Rewards in processes that can be ended: whatever one does, the run continues and knows what happened.

A process computes one reward at a time, under a wall-clock limit. One that hangs is killed with all that it
started and replaced; one that dies is replaced; and each such reward becomes an error with its reason, never a 0.
Processes are started on first use, kept, and end with `close`, or with this process however it ends. They never import
torch for their own sake.
"""

import fcntl
import functools
import importlib
import inspect
import json
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

from ascent.tasks.files import run_file
from ascent.tasks.text.base import Problem

START = 120.0
"""Seconds that a process may take to start and to import what its rewards need."""
GLANCE = 0.5
"""Seconds after which to look whether a silent process is still there."""
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


class Job(NamedTuple):
    """One reward to compute."""

    grader: int
    prompt: Any
    response: str
    answer: str | None
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a reward: its value, or the error."""

    value: float = 0.0
    strict: bool = False
    lenient: bool = False
    reason: str = ""
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of a task's rewards together: the value of each by its name, before its weight."""


class Worker:
    """A grading process, seen from outside."""

    def __init__(self, graders: bytes):
        ours, theirs = Pipe()
        read, self.lifeline = os.pipe()
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
            f"from ascent.tasks.text.workers import serve_jobs; serve_jobs({theirs.fileno()}, {read})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), read),
            start_new_session=True,
        )
        theirs.close()
        os.close(read)
        self.pipe: Connection = ours
        self.job: int | None = None
        self.deadline = time.monotonic() + START
        self.ready = False
        with suppress(OSError):
            self.pipe.send_bytes(graders)

    def begin(self, index: int, job: bytes, seconds: float) -> None:
        self.job, self.deadline = index, time.monotonic() + seconds
        with suppress(OSError):  # it died while idle: the pipe's end says so
            self.pipe.send_bytes(job)

    def answer(self) -> dict[str, Any]:
        """Its reply; or that it died, and how."""
        try:
            reply = json.loads(self.pipe.recv_bytes(1 << 20))
            return reply if isinstance(reply, dict) else {"error": "the grading process sent no answer"}
        except (EOFError, OSError, ValueError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            return {"error": f"the reward ended its process: {self.ending()}"}

    def ending(self) -> str:
        code = self.process.poll()
        if code is None or code >= 0:
            return f"exit status {code}" if code is not None else "it closed its pipe"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def end(self) -> None:
        """Kill it and whatever it started, and leave no zombie."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        os.close(self.lifeline)


class Pool:
    """Grading processes for these graders. Each call has a limit in seconds."""

    def __init__(self, graders: Sequence[Grader], workers: int, seconds: float):
        self.graders = pickle.dumps([tuple(grader) for grader in graders])
        self.count, self.seconds = workers, seconds
        self.workers: list[Worker] = []
        self.lock = threading.Lock()
        self.broken: str | None = None
        weakref.finalize(self, _end_all, self.workers)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of every job, in their order."""
        with self.lock:
            outcomes: list[Outcome | None] = [None] * len(jobs)
            waiting = list(range(len(jobs)))[::-1]
            try:
                while any(outcome is None for outcome in outcomes) and self.broken is None:
                    self._hand_out(jobs, waiting, outcomes)
                    self._collect(outcomes)
            finally:  # interrupted: what is still at work would answer the next call
                for worker in [w for w in self.workers if w.job is not None]:
                    self._drop(worker)
            lost = Outcome(error=f"no process can compute rewards: {self.broken}")
            self.broken = None
            return [lost if outcome is None else outcome for outcome in outcomes]

    def _hand_out(self, jobs: Sequence[Job], waiting: list[int], outcomes: list[Outcome | None]) -> None:
        while len(self.workers) < min(self.count, len(jobs)):
            self.workers.append(Worker(self.graders))
        for worker in self.workers:
            while worker.ready and worker.job is None and waiting:
                index = waiting.pop()
                try:
                    worker.begin(index, pickle.dumps(tuple(jobs[index])), self.seconds)
                except Exception as error:
                    outcomes[index] = Outcome(error=f"the problem cannot be sent to a process: {error}")

    def _collect(self, outcomes: list[Outcome | None]) -> None:
        """Wait for whoever speaks first, and no longer than anybody's limit."""
        active = [w for w in self.workers if w.job is not None or not w.ready]
        limit = min((w.deadline for w in active), default=0.0) - time.monotonic()
        spoke = wait([w.pipe for w in active], max(0.0, min(limit, GLANCE)))
        for worker in active:
            if worker.pipe in spoke:
                self._heard(worker, worker.answer(), outcomes)
            elif worker.process.poll() is not None and not worker.pipe.poll():  # what it left behind holds the pipe
                self._heard(worker, {"error": f"the reward ended its process: {worker.ending()}"}, outcomes)
            elif time.monotonic() >= worker.deadline:
                what = f"took longer than {self.seconds:g} s" if worker.ready else f"did not start within {START:g} s"
                self._heard(worker, {"error": what, "hangs": True}, outcomes)

    def _heard(self, worker: Worker, reply: dict[str, Any], outcomes: list[Outcome | None]) -> None:
        if not worker.ready:
            worker.ready = "ready" in reply
            if not worker.ready:
                self.broken = reply.get("error", "it sent nothing")
                self._drop(worker)
            return
        assert worker.job is not None
        outcomes[worker.job] = Outcome(**{k: v for k, v in reply.items() if k != "hangs"})
        worker.job = None
        if "hangs" in reply or worker.process.poll() is not None:
            self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.end()

    def close(self) -> None:
        _end_all(self.workers)


def _end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()


# ---- inside a process ------------------------------------------------------------------------


class Wrong(Exception):
    """What was returned is not a reward."""


def serve_jobs(jobs: int, lifeline: int) -> None:
    """The process: `jobs` and `lifeline` are the numbers of its two pipes."""
    _end_with_parent(lifeline)
    pipe = Connection(jobs)
    try:
        graders = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return
    try:
        calls = [_load(Grader(*grader)) for grader in graders]
    except BaseException as error:
        pipe.send_bytes(json.dumps({"error": _words(error)}).encode())
        return
    pipe.send_bytes(b'{"ready": true}')
    while True:
        try:
            sent = pipe.recv_bytes()
        except EOFError:
            return
        try:
            job = Job(*pickle.loads(sent))
            answer = calls[job.grader](job)
        except BaseException as error:  # SystemExit and the rest: a reward has no say over this process
            answer = {"error": _words(error)}
        pipe.send_bytes(json.dumps(answer).encode())


def _end_with_parent(lifeline: int) -> None:
    """Let the kernel end this process group with SIGIO, whose default it is, as soon as the parent is gone."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was gone before
        os._exit(1)


def _load(grader: Grader) -> Callable[[Job], dict[str, Any]]:
    """The reward of python:FILE:NAME or MODULE:NAME: a function, or a task with these settings."""
    where, name = grader.source.removeprefix("python:").rsplit(":", 1)
    module = run_file(Path(where), 0) if grader.source.startswith("python:") else importlib.import_module(where)
    code: Any = functools.reduce(getattr, name.split("."), module)
    if grader.settings is None:
        return functools.partial(_own, code, _names(code))
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


def _own(function: Callable[..., Any], names: frozenset[str] | None, job: Job) -> dict[str, Any]:
    """A reward function of your own: f(prompt, response, answer, **columns) -> a number, or (number, reason)."""
    columns = {k: v for k, v in job.columns.items() if names is None or k in names}
    returned = function(job.prompt, job.response, job.answer, **columns)
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
