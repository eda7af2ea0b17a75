"""Rewards in processes that can be ended: whatever one does, the run continues and knows what happened.

A process computes one reward at a time, under limits of time and memory. One that hangs is killed with all that it
started and replaced; one that dies is replaced; and each such reward becomes an error with its reason, never a 0. Every
job has a number that nobody can guess, and a process that answers with another one is ended: no reward ever counts for
another response. Where rewards are quick, a process is sent a few milliseconds' worth of them at once; if it dies or
hangs, the one that it was at is the error, and the others are computed elsewhere.

Processes are started on first use, kept, and end with `close`, or with this process however it ends. All that they have
started ends with them (keeper.py). They see an allow-list of environment variables, and never import torch themselves.
"""

import json
import math
import os
import pickle
import secrets
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from ascent.tasks.calls import REASON, Job, whole_text
from ascent.tasks.grader import Grader
from ascent.tasks.keeper import FRAME, START, Kept, Limits, framed

GRACE = 1.0
"""Seconds more that many jobs may take together: those that run at the same time have their own limits inside."""
AHEAD, PACKET = 0.005, 1 << 15
"""Seconds' worth of rewards that a process is sent at once, and bytes of them: it never waits to be read."""
GLANCE = 0.5
"""Seconds after which to look whether a silent process is still there."""


@dataclass(frozen=True)
class Outcome:
    """What became of a reward: its value, or the error."""

    value: float = 0.0
    strict: bool = False
    lenient: bool = False
    reason: str = ""
    error: str | None = None
    skipped: bool = False
    """It is not for this row: the function returned None."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of a task's rewards together: the value of each by its name, before its weight."""

    def __post_init__(self) -> None:
        """Words of a reward or a judge are text from here on."""
        for name in ("reason", "error"):
            if (words := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_text(words))


Outcomes = list[list[Outcome] | None]
"""Of each call, once it is there."""


class Worker(Kept):
    """A grading process, seen from outside."""

    def __init__(self, graders: bytes, limits: Limits):
        super().__init__("ascent.tasks.grader:keep_grader", limits)
        self.jobs: deque[tuple[int, str, float]] = deque()
        """What it has to answer, in that order: which calls, their numbers, and the seconds that they may take."""
        self.begun, self.sent = 0.0, 0
        """When it was sent jobs last, and how many."""
        self.deadline = time.monotonic() + START
        self.ready = False
        self.read = b""
        """What it has said of an answer that is not complete."""
        self._send(framed(graders))

    def note(self, index: int, jobs: Sequence[Job], seconds: float) -> bytes:
        """A call that it is about to be sent."""
        number = secrets.token_hex(8)
        # before anything is noted: a problem that cannot be sent is an error
        frame = framed(pickle.dumps((number, seconds, [tuple(job) for job in jobs])))
        self.jobs.append((index, number, seconds + GRACE * (len(jobs) > 1)))
        return frame

    def begin(self, frames: Sequence[bytes]) -> None:
        """Let it compute what was noted."""
        self.begun, self.sent = time.monotonic(), len(frames)
        self.deadline = self.begun + self.jobs[0][2]
        self._send(b"".join(frames))

    def done(self) -> int:
        """It has answered: which call that was. The time of the next one begins."""
        index = self.jobs.popleft()[0]
        if self.jobs:
            self.deadline = time.monotonic() + self.jobs[0][2]
        return index

    def _send(self, frames: bytes) -> None:
        """Whoever dies or does not listen is noticed by its silence."""
        self.socket.settimeout(max(0.1, self.deadline - time.monotonic()))
        with suppress(OSError):
            self.socket.sendall(frames)

    def answers(self) -> list[dict[str, Any]]:
        """Its replies that are complete; or that it died, and how."""
        try:
            said = self.socket.recv(FRAME, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            said = b""
        if not said:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            return [{"error": f"the reward ended its process: {self.ending()}", "ended": True}]
        *lines, self.read = (self.read + said).split(b"\n")
        if len(self.read) > FRAME:
            lines.append(self.read)
        return [_reply(line) for line in lines]


class Pool:
    """Grading processes for these graders."""

    def __init__(self, graders: Sequence[Grader], workers: int, limits: Limits):
        self.graders = pickle.dumps([tuple(grader) for grader in graders])
        self.sizes: list[int] = []
        self.count, self.limits = workers, limits
        self.workers: list[Worker] = []
        self.pace: float | None = None
        """Seconds of a call, as they were last."""
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.broken: str | None = None
        weakref.finalize(self, _end_all, self.workers, self.process)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcome of every job, in their order."""
        return [outcome for (outcome,) in self.run_calls([[job] for job in jobs])]

    def run_calls(self, calls: Sequence[Sequence[Job]]) -> list[list[Outcome]]:
        """The outcomes of calls, each of one grader on one job or on several that it takes together."""
        with self.lock:
            if self.process != os.getpid():  # a fork of ours: the processes are its parent's
                self.process, self.workers[:] = os.getpid(), []
            outcomes: Outcomes = [None] * len(calls)
            self.waiting, self.again, self.sizes = list(range(len(calls)))[::-1], set[int](), list(map(len, calls))
            try:
                while (self.waiting or any(w.jobs for w in self.workers)) and self.broken is None:
                    self._hand_out(calls, outcomes)
                    self._collect(outcomes)
            finally:  # interrupted: what is still at work would answer the next call
                for worker in [w for w in self.workers if w.jobs]:
                    self._drop(worker)
            lost = Outcome(error=f"no process can compute rewards: {self.broken}")
            self.broken = None
            return [[lost] * size if made is None else made for size, made in zip(self.sizes, outcomes, strict=True)]

    def _hand_out(self, calls: Sequence[Sequence[Job]], outcomes: Outcomes) -> None:
        while len(self.workers) < min(self.count, len(calls)):
            self.workers.append(Worker(self.graders, self.limits))
        for worker in [w for w in self.workers if w.ready and not w.jobs]:
            fair, frames, size = len(self.waiting) // (2 * len(self.workers)), list[bytes](), 0
            most = 1 if self.pace is None else max(1, min(fair, int(AHEAD / max(self.pace, 1e-6))))
            while self.waiting and len(frames) < most and size < PACKET:
                index = self.waiting.pop()
                try:
                    frames.append(worker.note(index, calls[index], self.limits.seconds))
                    size += len(frames[-1])
                except Exception as error:
                    outcomes[index] = self._all(index, f"the problem cannot be sent to a process: {error}")
            if frames:
                worker.begin(frames)

    def _all(self, index: int, error: str) -> list[Outcome]:
        """The same error for every job of a call."""
        return [Outcome(error=error)] * self.sizes[index]

    def _collect(self, outcomes: Outcomes) -> None:
        """Wait for whoever speaks first, and no longer than anybody's limit."""
        active = [w for w in self.workers if w.jobs or not w.ready]
        limit = min((w.deadline for w in active), default=0.0) - time.monotonic()
        spoke = wait([w.socket for w in active], max(0.0, min(limit, GLANCE)))
        for worker in active:
            ended = worker.process.poll() is not None
            replies = worker.answers() if ended or worker.socket in spoke else []
            if not replies and ended:  # what it left behind holds the socket
                replies = [{"error": f"the reward ended its process: {worker.ending()}", "ended": True}]
            if not replies and time.monotonic() >= worker.deadline:
                limit = self.limits.seconds
                what = f"took longer than {limit:g} s" if worker.ready else f"did not start within {START:g} s"
                replies = [{"error": what, "ended": True}]
            for reply in replies:
                if worker in self.workers:  # else it was ended for an earlier one
                    self._heard(worker, reply, outcomes)

    def _heard(self, worker: Worker, reply: dict[str, Any], outcomes: Outcomes) -> None:
        if not worker.ready:
            worker.ready = "ready" in reply
            if not worker.ready:
                self.broken = reply.get("error", "it sent nothing")
                self._drop(worker)
            return
        ended = reply.pop("ended", False)
        if not worker.jobs:  # nobody asked it
            return self._drop(worker)
        if not ended and reply.pop("number", None) != worker.jobs[0][1]:
            # Somebody else spoke: a thread or a child of an earlier reward. This response may do better elsewhere.
            index = worker.jobs[0][0]
            if index in self.again:
                worker.done()
                outcomes[index] = self._all(index, "its process sent an answer that is not the one to this response")
            self.again.add(index)
            return self._drop(worker)
        index = worker.done()
        made = _outcomes(reply, self.sizes[index])
        outcomes[index] = made or self._all(index, f"its process sent what is not a reward: {sorted(reply)}"[:REASON])
        if not worker.jobs:
            self.pace = (time.monotonic() - worker.begun) / worker.sent
        if ended or made is None or (not worker.jobs and worker.process.poll() is not None):
            self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        """End it; what it was not yet at is computed elsewhere."""
        self.waiting += [index for index, *_ in reversed(worker.jobs)]
        self.workers.remove(worker)
        worker.end()

    def close(self) -> None:
        with self.lock:
            _end_all(self.workers, self.process)


def _reply(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    return reply if isinstance(reply, dict) else {"number": "none"}


def _outcomes(reply: Mapping[str, Any], count: int) -> list[Outcome] | None:
    """A reply as the outcomes of a call: the error of all, or an answer for each."""
    if reply.keys() == {"error"} and isinstance(reply["error"], str):
        return [Outcome(error=reply["error"])] * count
    answers = reply.get("answers") if len(reply) == 1 else None
    if not isinstance(answers, list) or len(answers) != count:
        return None
    made = [_outcome(answer) for answer in answers]
    return None if None in made else [outcome for outcome in made if outcome is not None]


def _outcome(reply: Any) -> Outcome | None:
    """An answer as an outcome, if it has the fields of one."""
    kinds = {"value": float, "strict": bool, "lenient": bool, "reason": str, "error": str, "skipped": bool}
    if not isinstance(reply, dict):
        return None
    odd = [name for name, value in reply.items() if type(value) is not kinds.get(name)]
    if odd or not reply.keys() & {"value", "error", "skipped"} or not math.isfinite(reply.get("value", 0.0)):
        return None
    return Outcome(**reply)


def _end_all(workers: list[Worker], owner: int) -> None:
    while workers and os.getpid() == owner:  # a fork has no say over them
        workers.pop().end()
