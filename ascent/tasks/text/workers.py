"""Rewards in processes that can be ended: whatever one does, the run continues and knows what happened.

A process computes one reward at a time, under limits of time and memory. One that hangs is killed with all that it
started and replaced; one that dies is replaced; and each such reward becomes an error with its reason, never a 0. Every
job has a number that nobody can guess, and a process that answers with another one is ended: no reward ever counts for
another response.

Each process is two: a keeper, which runs no code but ours, and the grader that it forks. When the grader ends, or this
process does, the keeper kills everything that the grader has started, sessions of their own included (on Linux;
elsewhere the process group). Processes are started on first use, kept, and end with `close`, or with this process
however it ends. Of the environment they see an allow-list, and they never import torch for their own sake.
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
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from ascent.tasks.files import run_file
from ascent.tasks.text.base import Problem

START = 120.0
"""Seconds that a process may take to start and to import what its rewards need."""
GLANCE = 0.5
"""Seconds after which to look whether a silent process is still there."""
ENDING = 5.0
"""Seconds that a keeper may take to end its grader and what that has started."""
FRAME = 1 << 20
"""The most bytes of an answer."""
PASSED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""The environment variables that a reward sees, beside LC_…, PYTHON… and those that its user names."""
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


class Limits(NamedTuple):
    """What a grading process may use."""

    seconds: float
    """Wall-clock time of one reward."""
    memory: float = 0.0
    """GiB of each process; 0: as much as there is."""
    env: tuple[str, ...] = ()
    """Names of environment variables that it sees beside the usual ones."""

    def environment(self) -> dict[str, str]:
        """What it sees of this process's environment: nothing that may be a secret, unless its user named it."""
        usual = {*PASSED, *self.env}
        return {k: v for k, v in os.environ.items() if k in usual or k.startswith(("LC_", "PYTHON"))}


class Worker:
    """A grading process, seen from outside."""

    def __init__(self, graders: bytes, limits: Limits):
        self.socket, theirs = socket.socketpair()
        read, self.lifeline = os.pipe()
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; from ascent.tasks.text.workers "
            f"import keep_grader; keep_grader({theirs.fileno()}, {read}, {int(limits.memory * 2**30)})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=limits.environment(),
            pass_fds=(theirs.fileno(), read),
            start_new_session=True,
        )
        theirs.close()
        os.close(read)
        self.job: int | None = None
        self.number = ""
        self.deadline = time.monotonic() + START
        self.ready = False
        self.read = b""
        """What it has said of an answer that is not complete."""
        self._send(graders)

    def begin(self, index: int, job: Job, seconds: float) -> None:
        number = secrets.token_hex(8)
        frame = pickle.dumps((number, *job))  # before anything is noted: a problem that cannot be sent is an error
        self.job, self.number, self.deadline = index, number, time.monotonic() + seconds
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        """Whoever dies or does not listen is noticed by its silence."""
        self.socket.settimeout(max(0.1, self.deadline - time.monotonic()))
        with suppress(OSError):
            self.socket.sendall(struct.pack("!Q", len(frame)) + frame)

    def answer(self) -> dict[str, Any] | None:
        """Its reply, once it is complete; or that it died, and how."""
        try:
            said = self.socket.recv(FRAME, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        if not said:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            return {"error": f"the reward ended its process: {self.ending()}", "ended": True}
        line, end, self.read = (self.read + said).partition(b"\n")
        if not end and len(line) <= FRAME:
            self.read = line
            return None
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        return reply if isinstance(reply, dict) else {"number": "none"}

    def ending(self) -> str:
        code = self.process.poll()
        if code is None or code >= 0:
            return f"exit status {code}" if code is not None else "it closed its pipe"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def end(self) -> None:
        """Let its keeper kill it and whatever it started, and leave no zombie."""
        os.close(self.lifeline)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.socket.close()


class Pool:
    """Grading processes for these graders."""

    def __init__(self, graders: Sequence[Grader], workers: int, limits: Limits):
        self.graders = pickle.dumps([tuple(grader) for grader in graders])
        self.count, self.limits = workers, limits
        self.workers: list[Worker] = []
        self.lock = threading.Lock()
        self.broken: str | None = None
        weakref.finalize(self, _end_all, self.workers)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of every job, in their order."""
        with self.lock:
            outcomes: list[Outcome | None] = [None] * len(jobs)
            self.waiting, self.again = list(range(len(jobs)))[::-1], set[int]()
            try:
                while any(outcome is None for outcome in outcomes) and self.broken is None:
                    self._hand_out(jobs, outcomes)
                    self._collect(outcomes)
            finally:  # interrupted: what is still at work would answer the next call
                for worker in [w for w in self.workers if w.job is not None]:
                    self._drop(worker)
            lost = Outcome(error=f"no process can compute rewards: {self.broken}")
            self.broken = None
            return [lost if outcome is None else outcome for outcome in outcomes]

    def _hand_out(self, jobs: Sequence[Job], outcomes: list[Outcome | None]) -> None:
        while len(self.workers) < min(self.count, len(jobs)):
            self.workers.append(Worker(self.graders, self.limits))
        for worker in self.workers:
            while worker.ready and worker.job is None and self.waiting:
                index = self.waiting.pop()
                try:
                    worker.begin(index, jobs[index], self.limits.seconds)
                except Exception as error:
                    outcomes[index] = Outcome(error=f"the problem cannot be sent to a process: {error}")

    def _collect(self, outcomes: list[Outcome | None]) -> None:
        """Wait for whoever speaks first, and no longer than anybody's limit."""
        active = [w for w in self.workers if w.job is not None or not w.ready]
        limit = min((w.deadline for w in active), default=0.0) - time.monotonic()
        spoke = wait([w.socket for w in active], max(0.0, min(limit, GLANCE)))
        for worker in active:
            ended = worker.process.poll() is not None
            reply = worker.answer() if ended or worker.socket in spoke else None
            if reply is None and ended:  # what it left behind holds the socket
                reply = {"error": f"the reward ended its process: {worker.ending()}", "ended": True}
            if reply is None and time.monotonic() >= worker.deadline:
                limit = self.limits.seconds
                what = f"took longer than {limit:g} s" if worker.ready else f"did not start within {START:g} s"
                reply = {"error": what, "ended": True}
            if reply is not None:
                self._heard(worker, reply, outcomes)

    def _heard(self, worker: Worker, reply: dict[str, Any], outcomes: list[Outcome | None]) -> None:
        if not worker.ready:
            worker.ready = "ready" in reply
            if not worker.ready:
                self.broken = reply.get("error", "it sent nothing")
                self._drop(worker)
            return
        index, ended = worker.job, reply.pop("ended", False)
        assert index is not None
        if not ended and reply.pop("number", None) != worker.number:
            # Somebody else spoke: a thread or a child of an earlier reward. This response may do better elsewhere.
            if index not in self.again:
                self.again.add(index)
                self.waiting.append(index)
            else:
                outcomes[index] = Outcome(error="its process sent an answer that is not the one to this response")
            return self._drop(worker)
        outcome = _outcome(reply)
        outcomes[index] = outcome or Outcome(error=f"its process sent what is not a reward: {sorted(reply)}"[:REASON])
        worker.job = None
        if ended or outcome is None or worker.process.poll() is not None:
            self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.end()

    def close(self) -> None:
        _end_all(self.workers)


def _outcome(reply: Mapping[str, Any]) -> Outcome | None:
    """A reply as an outcome, if it has the fields of one."""
    kinds = {"value": float, "strict": bool, "lenient": bool, "reason": str, "error": str}
    odd = [name for name, value in reply.items() if type(value) is not kinds.get(name)]
    if odd or not ("value" in reply or "error" in reply) or not math.isfinite(reply.get("value", 0.0)):
        return None
    return Outcome(**reply)


def _end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()


# ---- inside a process ------------------------------------------------------------------------


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
