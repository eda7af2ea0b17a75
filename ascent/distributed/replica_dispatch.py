"""Dispatches chunks of prompts to replicas, which may die, hang, join and leave.

A chunk is generated whole by one replica, with one version of the weights and with the seeds of its responses. So the
results do not depend on which replica generates it, when, or how often it is retried. A replica that lacks the weights
of a chunk gets them first, and has to answer a probe as the learner's own copy does.

One thread manages all replicas. Callers get futures.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ascent.core.errors import RunError
from ascent.core.types import Rollouts
from ascent.distributed.replica_errors import ReplicaLostError

RETRY_DELAY = 0.2
"""Seconds before a lost replica is called again, while it is restarted."""
REPLICA_STARTUP_TIMEOUT = 120.0
"""Seconds that a replica has to start and load its first weights, if the deadline is not longer. A replica with a
serving engine gets the startup timeout of its server in addition."""
TIMEOUT_CHECK_INTERVAL = 1.0
"""Seconds between two checks for calls that exceed their deadline."""


class ReplicaSet(Protocol):
    """Replicas that are called by name."""

    def names(self) -> list[str]:
        """Return the names of the existing replicas, ready or not."""

    def put(self, params: dict[str, Tensor]) -> Any:
        """Return a snapshot of the weights, to be passed to `load`."""

    def load(self, name: str, weights: Any, version: int, config: dict[str, Any]) -> Future[Any]:
        """Load these weights on a replica. The result is that of `Replica.load`."""

    def call(self, name: str, method: str, *args: Any) -> Future[Any]:
        """Call a method of a replica."""

    def result(self, call: Future[Any]) -> Any:
        """Return the result of a finished call, or raise ReplicaLostError."""

    def restart(self, name: str) -> None:
        """Kill a replica that hangs, so that it is replaced."""


@dataclass(eq=False)
class Chunk:
    """Prompts whose responses one replica generates with one version of the weights."""

    version: int
    args: tuple[Any, ...]
    rollouts: Future[Rollouts] = field(default_factory=Future)


class ReplicaCall(NamedTuple):
    """A call in progress: it generates a chunk; without a chunk it loads a version, or greets a new replica (−1)."""

    future: Future[Any]
    begun: float
    version: int
    chunk: Chunk | None


@dataclass(eq=False)
class ReplicaState:
    """The state of a replica as the dispatcher knows it."""

    name: str
    version: int = -1
    """The version of its weights."""
    call: ReplicaCall | None = None
    is_killed: bool = False
    """Was it killed because its call exceeded the deadline, while the call has not failed yet?"""
    lost_since: float | None = None
    retry_at: float = 0.0
    """When it may be called next."""
    tokens: int = 0
    """Tokens generated since the last log line. The next three are counted in the same way."""
    generate_seconds: float = 0.0
    load_seconds: float = 0.0
    num_losses: int = 0


class ReplicaDispatcher:
    """Dispatches chunks to a set of replicas.

    `check_probe` raises an error if the probe response of a replica differs too much from the expected one. `log`
    writes a line of the replica log.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        config: dict[str, Any],
        deadline: float,
        check_probe: Callable[[str, int, Rollouts, Rollouts], None],
        log: Callable[[dict[str, Any]], None],
        server_startup: float = 0.0,
    ):
        """`server_startup`: seconds that the server of a replica may take to start."""
        self.replicas, self.config, self.deadline = replicas, config, deadline
        self.check_probe, self.log = check_probe, log
        self.states = {name: ReplicaState(name) for name in replicas.names()}
        self._initial_count, self._removed = len(self.states), set[str]()
        self._startup_timeout = max(deadline, REPLICA_STARTUP_TIMEOUT + server_startup)
        self._weights: dict[int, tuple[Any, Rollouts]] = {}
        """By version: the weights and the expected response to the probe."""
        self._queue: deque[Chunk] = deque()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last_logged, self._closed = time.monotonic(), False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)
        self._thread.start()

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a call: that of available replicas, but not fewer than at the start."""
        return max(self._initial_count, sum(state.lost_since is None for state in list(self.states.values())))

    def load(self, version: int, weights: Any, probe_response: Rollouts, idle_seconds: float) -> None:
        """Set the weights of later chunks and the expected response to their probe.

        `idle_seconds`: for the log, how long the learners were idle since the last load.
        """
        self._events.put(partial(self._set_weights, version, (weights, probe_response), idle_seconds))

    def submit(self, version: int, chunk_args: Sequence[tuple[Any, ...]]) -> list[Future[Rollouts]]:
        """Queue chunks, given by the arguments of `Replica.generate` after the version."""
        chunks = [Chunk(version, args) for args in chunk_args]
        self._events.put(partial(self._queue.extend, chunks))
        return [chunk.rollouts for chunk in chunks]

    def close(self) -> None:
        def stop() -> None:
            self._closed = True
            self._write_log(max(self._weights, default=-1), 0.0)

        self._events.put(stop)
        self._thread.join(5)

    # ---- the thread

    def _run(self) -> None:
        while not self._closed:
            any_lost = any(state.lost_since is not None for state in self.states.values())
            any_busy = any(state.call for state in self.states.values())
            try:
                timeout = RETRY_DELAY if any_lost else TIMEOUT_CHECK_INTERVAL if any_busy else None
                self._events.get(timeout=timeout)()
            except queue.Empty:
                pass
            except BaseException as error:  # raised from the futures
                self._error = error
            try:
                self._end_overdue_calls()  # first: the chunks of removed replicas are queued again
                self._assign_chunks()
            except BaseException as error:
                self._error = error
            if self._error is not None:
                self._fail_chunks(self._error)

    def _fail_chunks(self, error: BaseException) -> None:
        running = [state.call.chunk for state in self.states.values() if state.call]
        for chunk in (*self._queue, *(chunk for chunk in running if chunk is not None)):
            if not chunk.rollouts.done():
                chunk.rollouts.set_exception(error)
        self._queue.clear()

    def _set_weights(self, version: int, weights: tuple[Any, Rollouts], idle_seconds: float) -> None:
        running = (state.call.version for state in self.states.values() if state.call)
        needed = {*running, *(chunk.version for chunk in self._queue)}
        self._weights = {old: value for old, value in self._weights.items() if old in needed} | {version: weights}
        self._write_log(version, idle_seconds)
        for name in set(self.replicas.names()) - self.states.keys() - self._removed:
            self.states[name] = ReplicaState(name, lost_since=time.monotonic())
            self._start_call(self.states[name], -1, None, self.replicas.call(name, "status"))

    def _assign_chunks(self) -> None:
        now = time.monotonic()
        for state in self.states.values():
            if not self._queue:
                return
            if state.call is not None or state.retry_at > now:
                continue
            version = self._queue[0].version
            if state.version == version:
                chunk = self._queue.popleft()
                future = self.replicas.call(state.name, "generate", version, *chunk.args)
                self._start_call(state, version, chunk, future)
            else:
                future = self.replicas.load(state.name, self._weights[version][0], version, self.config)
                self._start_call(state, version, None, future)

    def _start_call(self, state: ReplicaState, version: int, chunk: Chunk | None, future: Future[Any]) -> None:
        state.call = ReplicaCall(future, time.monotonic(), version, chunk)
        future.add_done_callback(lambda done: self._events.put(partial(self._finish_call, state, done)))

    def _finish_call(self, state: ReplicaState, future: Future[Any]) -> None:
        """Keep the result of a call, or queue its chunk again."""
        call = state.call
        if call is None or call.future is not future:  # the replica was removed
            return
        state.call, seconds = None, time.monotonic() - call.begun
        try:
            result = self.replicas.result(future)
        except ReplicaLostError as error:
            self._handle_loss(state, call, error)
            return
        if call.version < 0:
            self.log({"event": "joined", "replica": state.name})
        elif call.chunk is None:
            self.check_probe(state.name, call.version, self._weights[call.version][1], result)
            state.version, state.load_seconds = call.version, state.load_seconds + seconds
        else:
            state.tokens += int(result.mask.sum())
            state.generate_seconds += seconds
            if not call.chunk.rollouts.done():  # it is done if the dispatcher has failed
                call.chunk.rollouts.set_result(result)
        state.lost_since, state.is_killed = None, False

    # ---- lost replicas

    def _end_overdue_calls(self) -> None:
        """Kill replicas whose calls exceed the deadline. Remove a replica if its call does not end even then."""
        now = time.monotonic()
        for state in list(self.states.values()):
            call = state.call
            limit = self.deadline if state.version >= 0 else self._startup_timeout
            if call is None or call.version < 0 or call.future.done() or now - call.begun <= limit:
                continue
            if state.is_killed:
                state.call = None
                error = ReplicaLostError(f"it did not end within {limit:g} seconds", is_permanent=True)
                self._handle_loss(state, call, error)
            else:
                state.is_killed, state.call = True, call._replace(begun=now)
                self.replicas.restart(state.name)

    def _handle_loss(self, state: ReplicaState, call: ReplicaCall, error: ReplicaLostError) -> None:
        """Queue the chunk again. Remove a replica that does not come back within the startup timeout."""
        now = time.monotonic()
        if call.chunk is not None:
            self._queue.appendleft(call.chunk)
        state.version, state.retry_at, state.is_killed = -1, now + RETRY_DELAY, False
        was_lost, state.lost_since = state.lost_since is not None, state.lost_since or now
        if not was_lost and not error.is_permanent:
            state.num_losses += 1
            self._report(state.name, "lost", "was lost; other replicas generate its responses until it is back", error)
        if error.is_permanent or now - state.lost_since > self._startup_timeout:
            del self.states[state.name]
            self._removed.add(state.name)
            self._report(state.name, "left", "was removed from the run", error)
        if not any(other.call is None or other.call.version >= 0 for other in self.states.values()):
            raise RunError(f"no sampler of the cluster is left. The last one, {state.name}, was lost: {error}")

    def _report(self, name: str, event: str, message: str, error: ReplicaLostError) -> None:
        sys.stderr.write(f"ascent: {name} {message} ({error})\n")
        self.log({"event": event, "replica": name, "why": str(error)})

    def _write_log(self, version: int, idle_seconds: float) -> None:
        """Write a log line with the work of every replica since the last line."""
        now = time.monotonic()
        replicas = {
            state.name: {
                "version": state.version,
                "tokens": state.tokens,
                "drawing": round(state.generate_seconds, 4),
                "loading": round(state.load_seconds, 4),
                "lost": state.num_losses,
                "away": state.lost_since is not None,
            }
            for state in self.states.values()
        }
        seconds = {"seconds": round(now - self._last_logged, 4), "waited": round(idle_seconds, 4)}
        self.log({"version": version, **seconds, "replicas": replicas})
        self._last_logged = now
        for state in self.states.values():
            state.tokens, state.generate_seconds, state.load_seconds, state.num_losses = 0, 0.0, 0.0, 0
