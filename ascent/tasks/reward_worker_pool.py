"""Compute rewards in worker processes, so that a reward that fails, hangs or crashes does not affect the run.

A worker computes one call at a time, under limits of time and memory. A worker that hangs is killed with all that it
started and replaced; a worker that dies is replaced. Such a reward becomes an error with its reason, never a 0. Call
numbers cannot be guessed, and a worker that answers with another number is ended, so a reward never counts for another
response. If rewards are fast, a worker is sent a few milliseconds of calls at once; if it dies or hangs, its current
call fails and the others are computed by another worker.

Workers start on first use and are reused. They end with `close`, and with this process however it ends. All that they
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
"""Additional time of a call with several jobs, each of which has its own time limit in the worker."""
MAX_SECONDS_AHEAD, MAX_BYTES_AHEAD = 0.005, 1 << 15
"""Limits of the calls that a worker is sent at once: their expected time, and their size."""
FIELD_TYPES = {"value": float, "strict": bool, "lenient": bool, "reason": str, "error": str, "skipped": bool}
"""The fields of an answer and their types."""
POLL_SECONDS = 0.5
"""Time between two checks of whether a silent worker is still running."""


@dataclass(frozen=True)
class RewardOutcome:
    """The result of a reward: its value, or an error."""

    value: float = 0.0
    strict: bool = False
    lenient: bool = False
    reason: str = ""
    error: str | None = None
    skipped: bool = False
    """The function returned None: the reward does not apply to this row."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """For the weighted sum of a task's rewards: the unweighted value of each, by name."""

    def __post_init__(self) -> None:
        for name in ("reason", "error"):
            if text := getattr(self, name):
                object.__setattr__(self, name, replace_surrogates(text))


@dataclass(eq=False)
class PendingCall:
    """A call of a reward on one job, or on several that it takes together, and its outcomes."""

    jobs: Sequence[RewardJob]
    outcomes: list[RewardOutcome] | None = None
    """The outcome of each job, once the call has ended."""
    is_retried: bool = False
    """A worker has answered it with a wrong number before."""

    def fail(self, error: str) -> None:
        """Set the same error for every job."""
        self.outcomes = [RewardOutcome(error=error)] * len(self.jobs)


class RewardWorker(SupervisedProcess):
    """A process that computes rewards, seen from its owner."""

    def __init__(self, specs: bytes, limits: Limits):
        super().__init__("ascent.tasks.reward_worker:serve_rewards", limits)
        self.calls: deque[tuple[PendingCall, str, float]] = deque()
        """Calls that it has not answered, in order, with their numbers and time limits."""
        self.start, self.num_sent = 0.0, 0
        """When calls were last sent to it, and how many."""
        self.deadline = time.monotonic() + START_SECONDS
        self.is_ready = False
        self.channel.send(specs)

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
    """Worker processes for these rewards.

    `run` computes calls while it waits for them. `submit` starts a thread that computes them in the background, for as
    long as there are unfinished calls; `wait_for_results` waits for them.
    """

    def __init__(self, specs: Sequence[RewardSpec], workers: int, limits: Limits):
        self.specs = pickle_line(([tuple(spec) for spec in specs], CODE))
        self.num_workers, self.limits = workers, limits
        self.workers: list[RewardWorker] = []
        self.seconds_per_call: float | None = None
        """Time of a call, measured last."""
        self._start()
        weakref.finalize(self, _end_all, self.workers, self.process)

    def _start(self) -> None:
        self.process = os.getpid()
        self.waiting: deque[PendingCall] = deque()
        """Calls that are not sent to a worker."""
        self.worker_lock = threading.Lock()
        """Held while workers are started, sent to, read or ended."""
        self.queue_lock = threading.Lock()
        """Held while calls are added, or the thread is started or ended."""
        self.thread: threading.Thread | None = None
        self.progress = threading.Condition()
        """Notified when the thread has read from a worker."""
        self.wake_end, wait_end = socket.socketpair()
        """Wakes the thread that waits for messages of the workers."""
        self.wakeups = PolledChannel(wait_end)
        weakref.finalize(self, _close, self.wake_end, wait_end)
        self.start_error: str | None = None

    def run(self, jobs: Sequence[RewardJob]) -> list[RewardOutcome]:
        """Return the outcome of every job, in order."""
        return [outcome for (outcome,) in self.run_calls([[job] for job in jobs])]

    def run_calls(self, calls: Sequence[Sequence[RewardJob]]) -> list[list[RewardOutcome]]:
        """Return the outcomes of calls, each of one reward on one job or on several that it takes together."""
        return self.wait_for_results(self._queue(calls, in_background=False))

    def submit(self, calls: Sequence[Sequence[RewardJob]]) -> list[PendingCall]:
        """Start to compute these calls in the background."""
        return self._queue(calls, in_background=True)

    def _queue(self, calls: Sequence[Sequence[RewardJob]], in_background: bool) -> list[PendingCall]:
        if self.process != os.getpid():  # a fork: the workers and the thread belong to its parent
            self.workers[:] = []
            self._start()
        pending = [PendingCall(jobs) for jobs in calls]
        with self.queue_lock:
            self.waiting += pending
            if in_background and pending and self.thread is None:
                self.thread = threading.Thread(target=self._run_thread, name="ascent-rewards", daemon=True)
                self.thread.start()
            elif self.thread is not None:
                self._wake()
        return pending

    def wait_for_results(self, pending: Sequence[PendingCall]) -> list[list[RewardOutcome]]:
        """Wait for these calls and return their outcomes."""
        unfinished = list(pending)
        try:
            while unfinished := [call for call in unfinished if call.outcomes is None]:
                if self.thread is None:
                    self._advance()
                    continue
                with self.progress:
                    if unfinished[-1].outcomes is None and self.thread is not None:
                        self.progress.wait(POLL_SECONDS)
        finally:  # interrupted: a running call would answer the next one
            self._cancel([call for call in unfinished if call.outcomes is None])
        return [call.outcomes or [] for call in pending]

    def _run_thread(self) -> None:
        """Compute calls until none is left. If the thread fails, the caller continues and raises the same error."""
        try:
            while True:
                self._advance()
                with self.progress:
                    self.progress.notify_all()
                with self.queue_lock:
                    if not self._has_open_calls():
                        self.thread = None
                        return
        except BaseException:
            self.thread = None
            raise

    def _has_open_calls(self) -> bool:
        return bool(self.waiting) or any(worker.calls for worker in self.workers)

    def _wake(self) -> None:
        with suppress(OSError):  # the thread is already woken
            self.wake_end.send(b"!\n", socket.MSG_DONTWAIT)

    def _advance(self) -> None:
        """Send waiting calls to workers, and read replies."""
        with self.worker_lock:
            self._send_waiting()
            if any(worker.calls or not worker.is_ready for worker in self.workers):
                self._collect()
            if self.start_error is not None:
                error, self.start_error = f"no process can compute rewards: {self.start_error}", None
                for worker in [w for w in self.workers if w.calls]:
                    self._drop(worker)
                while self.waiting:
                    self.waiting.popleft().fail(error)

    def _send_waiting(self) -> None:
        at_work = sum(len(worker.calls) for worker in self.workers)
        while len(self.workers) < min(self.num_workers, len(self.waiting) + at_work):
            self.workers.append(RewardWorker(self.specs, self.limits))
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
                self.start_error = reply.get("error", "it sent nothing")
                self._drop(worker)
            return
        has_ended = reply.pop("ended", False)
        if not worker.calls:  # an answer without a call
            return self._drop(worker)
        if not has_ended and reply.pop("number", None) != worker.calls[0][1]:
            # A thread or a child of an earlier reward has written it. This response may do better in another process.
            call = worker.calls[0][0]
            if call.is_retried:
                worker.pop_call().fail("its process sent an answer that is not the one to this response")
            call.is_retried = True
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
        """End a worker; calls that it has not started are computed by another one."""
        self.waiting.extendleft(call for call, *_ in reversed(worker.calls))
        self.workers.remove(worker)
        worker.end()

    def _cancel(self, calls: Sequence[PendingCall]) -> None:
        """Cancel these calls, and end the workers that compute them."""
        if not calls:
            return
        self._wake()
        canceled = set(calls)
        with self.worker_lock:
            for worker in [w for w in self.workers if any(call in canceled for call, *_ in w.calls)]:
                self._drop(worker)
            with self.queue_lock:
                self.waiting = deque(call for call in self.waiting if call not in canceled)

    def close(self) -> None:
        """End all workers. Unfinished calls fail."""
        if self.process != os.getpid():
            return
        self._wake()
        with self.worker_lock, self.queue_lock:
            unfinished = [*self.waiting, *(call for worker in self.workers for call, *_ in worker.calls)]
            self.waiting.clear()
            _end_all(self.workers, self.process)
            for call in unfinished:
                call.fail("the processes that compute rewards were ended")


def _outcomes(reply: Mapping[str, Any], count: int) -> list[RewardOutcome] | None:
    """Return the outcomes in a reply: an error for all jobs, or an answer for each; None: it is not valid."""
    if reply.keys() == {"error"} and isinstance(reply["error"], str):
        return [RewardOutcome(error=reply["error"])] * count
    answers = reply.get("answers") if len(reply) == 1 else None
    if not isinstance(answers, list) or len(answers) != count:
        return None
    outcomes = [_outcome(answer) for answer in answers]
    return None if None in outcomes else [outcome for outcome in outcomes if outcome is not None]


def _outcome(reply: Any) -> RewardOutcome | None:
    """Return the outcome in an answer, if it is valid."""
    if not isinstance(reply, dict):
        return None
    has_wrong_type = any(type(value) is not FIELD_TYPES.get(name) for name, value in reply.items())
    if has_wrong_type or not reply.keys() & {"value", "error", "skipped"} or not math.isfinite(reply.get("value", 0.0)):
        return None
    return RewardOutcome(**reply)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        each.close()


def _end_all(workers: list[RewardWorker], owner: int) -> None:
    while workers and os.getpid() == owner:  # a fork does not own them
        workers.pop().end()
