"""Heartbeats of all ranks: a rank that stops sending them ends the run.

A thread of each rank writes a heartbeat to torchrun's store twice a second. Rank 0 reads the heartbeats of all other
ranks, and they read that of rank 0. The first rank that detects a failure records it once in the store, with the rank,
the phase and the step. All other ranks read it there and end with the same message.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from ascent.core.errors import ConfigError, RunError

HEARTBEAT_INTERVAL = 0.5
"""Seconds between two heartbeats."""
MAX_SILENCE = 60.0
"""Seconds without a heartbeat after which a rank counts as lost, if the deadline is not shorter."""
MAX_SILENCE_AFTER_ERROR = 3.0
"""The same once a connection has failed."""
SHUTDOWN_GRACE = 10.0
"""Seconds that a rank has to end by itself after a failure."""
CONNECTION_ERROR_WORDS = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "store")
"""Substrings of error messages that come from the connection to other ranks."""


class Heartbeat:
    """Sends the heartbeats of this rank, watches those of others, and reports failures."""

    def __init__(self, store: Any, rank: int, world_size: int, deadline: float):
        self.store, self.rank, self.world_size, self.deadline = store, rank, world_size, deadline
        self.max_silence = min(MAX_SILENCE, deadline)
        self.phase, self.step, self.num_collectives = "start", 0, 0
        """The phase and step of this rank, and the number of collectives that it has entered."""
        self.is_ending = False
        """Is this rank ending, so that failures of other ranks no longer matter?"""
        self._beats: dict[int, dict[str, Any]] = {}
        self._last_seen = dict.fromkeys(range(world_size), time.monotonic())
        self._store_reached = time.monotonic()
        self._failure_seen: float | None = None
        self._stop = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._interrupt)
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.is_ending = True
        self._stop.set()
        self._thread.join(5)

    # ---- failure -------------------------------------------------------------------------------

    def failure(self) -> str | None:
        """Return the recorded failure; None: there is none."""
        try:
            return self.store.get("failed").decode() if self.store.check(["failed"]) else None
        except RuntimeError:
            return None

    def fail(self, rank: int, reason: str, beat: dict[str, Any] | None = None) -> str:
        """Record the failure of a rank, unless one is recorded already. Return the recorded failure."""
        self.is_ending = True
        return self._record_failure(rank, reason, beat)

    def _record_failure(self, rank: int, reason: str, beat: dict[str, Any] | None = None) -> str:
        state = beat or {"phase": self.phase, "step": self.step}
        message = f"rank {rank} of {self.world_size}, in the phase {state['phase']} of step {state['step']}: {reason}"
        try:
            return self.store.compare_set("failed", "", message).decode() or message
        except RuntimeError:
            return message

    def explain(self, error: BaseException) -> Exception:
        """Return the exception to raise for an error in a collective; it names the failed rank if it can be found."""
        if isinstance(error, RunError | ConfigError):
            self.fail(self.rank, str(error))
            return error
        text = str(error).strip()
        reason = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return RunError(self.fail(self.rank, f"out of memory: lower --micro-batch. The error was: {reason}"))
        if not isinstance(error, RuntimeError) or not any(word in text.lower() for word in CONNECTION_ERROR_WORDS):
            return RunError(self.fail(self.rank, reason))
        self.is_ending, timed_out = True, any(word in text.lower() for word in ("timed out", "timeout"))
        until = time.monotonic() + self.max_silence + SHUTDOWN_GRACE
        while time.monotonic() < until:
            if (failure := self.failure()) is not None:
                return RunError(failure)
            if (suspect := self._suspect(timed_out)) is not None:
                return RunError(self.fail(*suspect))
            time.sleep(HEARTBEAT_INTERVAL)
        reason = f"the connection to other ranks failed for an unknown reason. {reason}"
        return RunError(self.fail(self.rank, reason))

    def _suspect(self, timed_out: bool) -> tuple[int, str, dict[str, Any]] | None:
        """Return a rank without heartbeats, or after a timeout the rank that has entered the fewest collectives."""
        with suppress(RuntimeError):  # without the store, the last known heartbeats are used
            self._read_beats(range(self.world_size))
        now, others = time.monotonic(), [r for r in self._beats if r != self.rank]
        silent = [r for r in others if now - self._last_seen[r] > MAX_SILENCE_AFTER_ERROR]
        if silent:
            return silent[0], f"it ended or hangs ({self._beats[silent[0]]['place']})", self._beats[silent[0]]
        behind = min(others, key=lambda r: self._beats[r]["entered"], default=None)
        if timed_out and behind is not None and self._beats[behind]["entered"] < self.num_collectives:
            place = self._beats[behind]["place"]
            return behind, f"it did not arrive within {self.deadline:g} seconds ({place})", self._beats[behind]
        return None

    def _interrupt(self, *_: Any) -> None:
        """Raise the failure in the main thread."""
        if not self.is_ending:
            self.is_ending = True
            raise RunError(self.failure() or "another rank failed")

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        number = 0
        place = f"{socket.gethostname()}, process {os.getpid()}"
        watched = range(1, self.world_size) if self.rank == 0 else range(1)
        while not self._stop.wait(HEARTBEAT_INTERVAL if number else 0):
            number += 1
            beat = {"number": number, "phase": self.phase, "step": self.step}
            beat |= {"entered": self.num_collectives, "place": place}
            try:
                self.store.set(f"beat/{self.rank}", json.dumps(beat))
                self._read_beats(watched)
                self._store_reached = time.monotonic()
                self._check_beats(watched)
            except RuntimeError as error:  # the store is gone, and with it the launcher or rank 0
                if time.monotonic() - self._store_reached > self.max_silence:
                    self._end(f"torchrun's store does not answer: {error}")

    def _read_beats(self, ranks: range) -> None:
        keys = [f"beat/{rank}" for rank in ranks if rank in self._beats or self.store.check([f"beat/{rank}"])]
        for key, value in zip(keys, self.store.multi_get(keys) if keys else [], strict=True):
            rank, beat = int(key.removeprefix("beat/")), json.loads(value)
            if beat["number"] != self._beats.get(rank, {}).get("number"):
                self._beats[rank], self._last_seen[rank] = beat, time.monotonic()

    def _check_beats(self, watched: range) -> None:
        now = time.monotonic()
        for rank in watched:
            if rank in self._beats and now - self._last_seen[rank] > self.max_silence and not self.is_ending:
                beat = self._beats[rank]
                self._record_failure(rank, f"no heartbeat for {self.max_silence:g} seconds ({beat['place']})", beat)
        if self.store.check(["failed"]):
            self._end(self.failure() or "")

    def _end(self, reason: str) -> None:
        """Interrupt the main thread. If it does not end, because it waits for a lost rank, end the process."""
        if self._failure_seen is None:
            self._failure_seen = time.monotonic()
            if not self.is_ending and self.rank == 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        elif time.monotonic() - self._failure_seen > SHUTDOWN_GRACE:
            sys.stderr.write(f"ascent: stopped: {reason}\n" if self.rank == 0 or "rank 0 of " in reason else "")
            sys.stderr.flush()
            os._exit(1)
