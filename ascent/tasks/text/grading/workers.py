"""Rewards in processes that can be ended: whatever one does, the run continues and knows what happened.

A process computes one reward at a time, under a wall-clock limit. One that hangs is killed with all that it
started and replaced; one that dies is replaced; and each such reward becomes an error with its reason, never a 0.
Processes are started on first use, kept, and end with `close`, or with this process however it ends.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from ascent.tasks.text.grading.worker import Grader, Job

START = 120.0
"""Seconds that a process may take to start and to import what its rewards need."""
GLANCE = 0.5
"""Seconds after which to look whether a silent process is still there."""


@dataclass(frozen=True)
class Outcome:
    """What became of a job: its value, or the error."""

    value: float = 0.0
    strict: bool = False
    lenient: bool = False
    reason: str = ""
    error: str | None = None


class Worker:
    """A grading process, seen from outside."""

    def __init__(self, graders: bytes):
        ours, theirs = Pipe()
        read, self.lifeline = os.pipe()
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
            f"from ascent.tasks.text.grading.worker import serve_jobs; serve_jobs({theirs.fileno()}, {read})"
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

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()
