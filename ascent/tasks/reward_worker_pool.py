"""Rewards in processes that can be ended: whatever one does, the run continues and knows what happened.

A process computes one reward at a time, under limits of time and memory. One that hangs is killed with all that it
started and replaced; one that dies is replaced; and each such reward becomes an error with its reason, never a 0. Every
job has a number that nobody can guess, and a process that answers with another one is ended: no reward ever counts for
another response. Where rewards are quick, a process is sent a few milliseconds' worth of them at once; if it dies or
hangs, the one that it was at is the error, and the others are computed elsewhere.

Processes are started on first use, kept, and end with `close`, or with this process however it ends. All that they have
started ends with them (`ascent.processes.supervisor`). They see an allow-list of environment variables, and never
import torch themselves.
"""

import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ascent.processes.call_loop import number_call
from ascent.processes.channel import PolledChannel, describe_exit, pickle_line, poll_channels
from ascent.processes.reward_calls import MAX_REASON_CHARS, RewardJob, replace_surrogates
from ascent.processes.supervisor import START_SECONDS, Limits, SupervisedProcess
from ascent.processes.user_code import CODE
from ascent.tasks.reward_worker import RewardSpec

GROUP_GRACE_SECONDS = 1.0
"""Seconds more that many jobs may take together: those that run at the same time have their own limits inside."""
MAX_SECONDS_AHEAD, MAX_BYTES_AHEAD = 0.005, 1 << 15
"""Seconds' worth of rewards that a process is sent at once, and bytes of them: it never waits to be read."""
FIELD_TYPES = {"value": float, "strict": bool, "lenient": bool, "reason": str, "error": str, "skipped": bool}
"""The fields of an answer."""
POLL_SECONDS = 0.5
"""Seconds after which to look whether a silent process is still there."""


@dataclass(frozen=True)
class RewardOutcome:
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
            if words := getattr(self, name):
                object.__setattr__(self, name, replace_surrogates(words))


@dataclass(eq=False)
class PendingCall:
    """A call that a pool was handed: of one grader, on one job or on several that it takes together."""

    jobs: Sequence[RewardJob]
    outcomes: list[RewardOutcome] | None = None
    """Of each job, once they are there."""
    again: bool = False
    """Was it already sent to a process that answered something else?"""

    def fail(self, error: str) -> None:
        """The same error for every job."""
        self.outcomes = [RewardOutcome(error=error)] * len(self.jobs)


class RewardWorker(SupervisedProcess):
    """A process that computes rewards, seen from outside."""

    def __init__(self, graders: bytes, limits: Limits):
        super().__init__("ascent.tasks.reward_worker:serve_rewards", limits)
        self.calls: deque[tuple[PendingCall, str, float]] = deque()
        """Calls that it has to answer, in that order, with their numbers and time limits."""
        self.start, self.num_sent = 0.0, 0
        """When calls were last sent to it, and how many."""
        self.deadline = time.monotonic() + START_SECONDS
        self.is_ready = False
        self.channel.send(graders)

    def add_call(self, call: PendingCall, seconds: float) -> bytes:
        """Note a call that is about to be sent, and return its message."""
        # The message first: a problem that cannot be pickled is an error of its call.
        number, line = number_call((seconds, [tuple(job) for job in call.jobs]))
        self.calls.append((call, number, seconds + GROUP_GRACE_SECONDS * (len(call.jobs) > 1)))
        return line

    def send_calls(self, lines: Sequence[bytes]) -> None:
        self.start, self.num_sent = time.monotonic(), len(lines)
        self.deadline = self.start + self.calls[0][2]
        self.channel.send(b"\n".join(lines))

    def pop_call(self) -> PendingCall:
        """Remove the call that was answered. The time limit of the next one begins."""
        call = self.calls.popleft()[0]
        if self.calls:
            self.deadline = time.monotonic() + self.calls[0][2]
        return call

    def replies(self) -> list[dict[str, Any]]:
        """Return the replies that have arrived, and an error if the process ended."""
        replies = self.channel.receive_objects()
        if self.channel.is_too_long:
            replies.append({})
        # A process that the worker left behind may hold the channel open.
        if self.channel.ended or (not replies and self.process.poll() is not None):
            how = self.channel.ended or describe_exit(self.process.poll())
            replies.append({"error": f"the reward ended its process: {how}", "ended": True})
        return replies


class RewardWorkerPool:
    """Grading processes for these graders.

    Calls are computed while somebody waits for them (`results`), or beside whatever else this process does (`begin`):
    then a thread looks after the processes for as long as anything is open.
    """

    def __init__(self, graders: Sequence[RewardSpec], workers: int, limits: Limits):
        self.graders = pickle_line(([tuple(grader) for grader in graders], CODE))
        self.count, self.limits = workers, limits
        self.workers: list[RewardWorker] = []
        self.seconds_per_call: float | None = None
        """Seconds of a call, as they were last."""
        self._start()
        weakref.finalize(self, _end_all, self.workers, self.process)

    def _start(self) -> None:
        self.process = os.getpid()
        self.waiting: deque[PendingCall] = deque()
        """Calls that no process has yet."""
        self.lock = threading.Lock()
        """Of whoever looks after the processes now."""
        self.changing = threading.Lock()
        """Of whoever hands calls over, or starts or ends the thread."""
        self.thread: threading.Thread | None = None
        self.news = threading.Condition()
        """The thread has heard from a process."""
        self.wake_end, wait_end = socket.socketpair()
        """Wakes the thread that waits for messages of the processes."""
        self.wakeups = PolledChannel(wait_end)
        weakref.finalize(self, _close, self.wake_end, wait_end)
        self.broken: str | None = None

    def run(self, jobs: Sequence[RewardJob]) -> list[RewardOutcome]:
        """The outcome of every job, in their order."""
        return [outcome for (outcome,) in self.run_calls([[job] for job in jobs])]

    def run_calls(self, calls: Sequence[Sequence[RewardJob]]) -> list[list[RewardOutcome]]:
        """The outcomes of calls, each of one grader on one job or on several that it takes together."""
        return self.results(self._queue(calls, beside=False))

    def begin(self, calls: Sequence[Sequence[RewardJob]]) -> list[PendingCall]:
        """Let these be computed from now on, without waiting for them."""
        return self._queue(calls, beside=True)

    def _queue(self, calls: Sequence[Sequence[RewardJob]], beside: bool) -> list[PendingCall]:
        if self.process != os.getpid():  # a fork of ours: the processes are its parent's, and so is the thread
            self.workers[:] = []
            self._start()
        begun = [PendingCall(jobs) for jobs in calls]
        with self.changing:
            self.waiting += begun
            if beside and begun and self.thread is None:
                self.thread = threading.Thread(target=self._look_after, name="ascent-rewards", daemon=True)
                self.thread.start()
            elif self.thread is not None:
                self._ring()
        return begun

    def results(self, begun: Sequence[PendingCall]) -> list[list[RewardOutcome]]:
        """The outcomes of these calls, waited for."""
        missing = list(begun)
        try:
            while missing := [call for call in missing if call.outcomes is None]:
                if self.thread is None:
                    self._turn()
                    continue
                with self.news:
                    if missing[-1].outcomes is None and self.thread is not None:
                        self.news.wait(POLL_SECONDS)
        finally:  # interrupted: what is still at work would answer the next call
            self._give_up([call for call in missing if call.outcomes is None])
        return [call.outcomes or [] for call in begun]

    def _look_after(self) -> None:
        """What the thread does: it ends when nothing is open. If it fails, whoever waits goes on, and fails alike."""
        try:
            while True:
                self._turn()
                with self.news:
                    self.news.notify_all()
                with self.changing:
                    if not self._open():
                        self.thread = None
                        return
        except BaseException:
            self.thread = None
            raise

    def _open(self) -> bool:
        return bool(self.waiting) or any(worker.calls for worker in self.workers)

    def _ring(self) -> None:
        with suppress(OSError):  # it is ringing already
            self.wake_end.send(b"!\n", socket.MSG_DONTWAIT)

    def _turn(self) -> None:
        """Hand out what waits, and take what comes."""
        with self.lock:
            self._hand_out()
            if any(worker.calls or not worker.is_ready for worker in self.workers):
                self._collect()
            if self.broken is not None:
                lost, self.broken = f"no process can compute rewards: {self.broken}", None
                for worker in [w for w in self.workers if w.calls]:
                    self._drop(worker)
                while self.waiting:
                    self.waiting.popleft().fail(lost)

    def _hand_out(self) -> None:
        at_work = sum(len(worker.calls) for worker in self.workers)
        while len(self.workers) < min(self.count, len(self.waiting) + at_work):
            self.workers.append(RewardWorker(self.graders, self.limits))
        for worker in [w for w in self.workers if w.is_ready and not w.calls]:
            lines, size = list[bytes](), 0
            max_calls = 1
            if self.seconds_per_call is not None:
                fair_share = len(self.waiting) // (2 * len(self.workers))
                max_calls = max(1, min(fair_share, int(MAX_SECONDS_AHEAD / max(self.seconds_per_call, 1e-6))))
            while self.waiting and len(lines) < max_calls and size < MAX_BYTES_AHEAD:
                call = self.waiting.popleft()
                try:
                    lines.append(worker.add_call(call, self.limits.seconds))
                    size += len(lines[-1])
                except Exception as error:
                    call.fail(f"the problem cannot be sent to a process: {error}")
            if lines:
                worker.send_calls(lines)

    def _collect(self) -> None:
        """Wait for the first reply, at most until the next deadline, and read all that have arrived."""
        active = [worker for worker in self.workers if worker.calls or not worker.is_ready]
        seconds = min(min(worker.deadline for worker in active) - time.monotonic(), POLL_SECONDS)
        readable = poll_channels([self.wakeups, *(worker.channel for worker in active)], seconds)
        if self.wakeups in readable:
            self.wakeups.receive()
        for worker in active:
            has_ended = worker.process.poll() is not None
            replies = worker.replies() if has_ended or worker.channel in readable else []
            if not replies and time.monotonic() >= worker.deadline:
                late = f"took longer than {self.limits.seconds:g} s"
                error = late if worker.is_ready else f"did not start within {START_SECONDS:g} s"
                replies = [{"error": error, "ended": True}]
            for reply in replies:
                if worker in self.workers:  # an earlier reply may have ended it
                    self._handle(worker, reply)

    def _handle(self, worker: RewardWorker, reply: dict[str, Any]) -> None:
        if not worker.is_ready:
            worker.is_ready = "ready" in reply
            if not worker.is_ready:
                self.broken = reply.get("error", "it sent nothing")
                self._drop(worker)
            return
        has_ended = reply.pop("ended", False)
        if not worker.calls:  # an answer without a call
            return self._drop(worker)
        if not has_ended and reply.pop("number", None) != worker.calls[0][1]:
            # A thread or a child of an earlier reward has written it. This response may do better in another process.
            call = worker.calls[0][0]
            if call.again:
                worker.pop_call().fail("its process sent an answer that is not the one to this response")
            call.again = True
            return self._drop(worker)
        reply.pop("seconds", None)
        call = worker.pop_call()
        outcomes = _outcomes(reply, len(call.jobs))
        if outcomes is None:
            call.fail(f"its process sent what is not a reward: {sorted(reply)}"[:MAX_REASON_CHARS])
        else:
            call.outcomes = outcomes
        if not worker.calls:
            self.seconds_per_call = (time.monotonic() - worker.start) / worker.num_sent
        if has_ended or outcomes is None or (not worker.calls and worker.process.poll() is not None):
            self._drop(worker)

    def _drop(self, worker: RewardWorker) -> None:
        """End it; what it was not yet at is computed elsewhere."""
        self.waiting.extendleft(call for call, *_ in reversed(worker.calls))
        self.workers.remove(worker)
        worker.end()

    def _give_up(self, calls: Sequence[PendingCall]) -> None:
        """Nobody waits for these any more: processes that are at them end."""
        if not calls:
            return
        self._ring()
        left = set(calls)
        with self.lock:
            for worker in [w for w in self.workers if any(call in left for call, *_ in w.calls)]:
                self._drop(worker)
            with self.changing:
                self.waiting = deque(call for call in self.waiting if call not in left)

    def close(self) -> None:
        """End all processes. What is open has failed."""
        if self.process != os.getpid():
            return
        self._ring()
        with self.lock, self.changing:
            every = [*self.waiting, *(call for worker in self.workers for call, *_ in worker.calls)]
            self.waiting.clear()
            _end_all(self.workers, self.process)
            for call in every:
                call.fail("the processes that compute rewards were ended")


def _outcomes(reply: Mapping[str, Any], count: int) -> list[RewardOutcome] | None:
    """A reply as the outcomes of a call: the error of all, or an answer for each."""
    if reply.keys() == {"error"} and isinstance(reply["error"], str):
        return [RewardOutcome(error=reply["error"])] * count
    answers = reply.get("answers") if len(reply) == 1 else None
    if not isinstance(answers, list) or len(answers) != count:
        return None
    made = [_outcome(answer) for answer in answers]
    return None if None in made else [outcome for outcome in made if outcome is not None]


def _outcome(reply: Any) -> RewardOutcome | None:
    """An answer as an outcome, if it has the fields of one."""
    if not isinstance(reply, dict):
        return None
    odd = any(type(value) is not FIELD_TYPES.get(name) for name, value in reply.items())
    if odd or not reply.keys() & {"value", "error", "skipped"} or not math.isfinite(reply.get("value", 0.0)):
        return None
    return RewardOutcome(**reply)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _end_all(workers: list[RewardWorker], owner: int) -> None:
    while workers and os.getpid() == owner:  # a fork has no say over them
        workers.pop().end()
