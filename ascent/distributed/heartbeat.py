"""Every rank shows twice a second that it lives, what it does and how far it is; whoever falls silent ends the run.

A thread of each rank writes into the launcher's store, where torchrun keeps what its processes tell each other. Rank 0
reads what all others write, and they read what it writes. The first who knows of a failure writes it down once, with
the rank, the phase and the step; everybody else reads it there and ends with the same words.
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

EVERY = 0.5
"""Seconds between two signs of life."""
SILENT = 60.0
"""Seconds without one after which a rank counts as lost, if the deadline is not shorter."""
SUSPECT = 3.0
"""The same, where a connection has broken already."""
GRACE = 10.0
"""Seconds that a rank has to end by itself once a failure is known."""
BROKEN = ("gloo", "nccl", "connection", "timed out", "timeout", "peer", "socket", "store")
"""Words of an error that comes from the connection to other ranks."""


class Heartbeat:
    """The signs of life of all ranks, and what is known of a failure."""

    def __init__(self, store: Any, rank: int, size: int, deadline: float):
        self.store, self.rank, self.size, self.deadline = store, rank, size, deadline
        self.silent = min(SILENT, deadline)
        self.phase, self.step, self.entered = "start", 0, 0
        """What this rank does, in which step, and how many times it has met the others."""
        self.over = False
        """Has this rank nothing more to fear: it is ending?"""
        self._beats: dict[int, dict[str, Any]] = {}
        self._heard = dict.fromkeys(range(size), time.monotonic())
        self._reached = time.monotonic()
        self._known: float | None = None
        self._stop = threading.Event()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._interrupt)
        self._thread = threading.Thread(target=self._work, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.over = True
        self._stop.set()
        self._thread.join(5)

    # ---- failure -------------------------------------------------------------------------------

    def said(self) -> str | None:
        """What is written down of a failure; None: nothing."""
        try:
            return self.store.get("failed").decode() if self.store.check(["failed"]) else None
        except RuntimeError:
            return None

    def fail(self, rank: int, why: str, beat: dict[str, Any] | None = None) -> str:
        """Write down that this rank failed, unless something is written already; returned is what is."""
        self.over = True
        return self._write(rank, why, beat)

    def _write(self, rank: int, why: str, beat: dict[str, Any] | None = None) -> str:
        at = beat or {"phase": self.phase, "step": self.step}
        words = f"rank {rank} of {self.size}, in the phase {at['phase']} of step {at['step']}: {why}"
        try:
            return self.store.compare_set("failed", "", words).decode() or words
        except RuntimeError:
            return words

    def explain(self, error: BaseException) -> Exception:
        """What to raise for an error in work that ranks do together: who it was, where that can be found out."""
        if isinstance(error, RunError | ConfigError):
            self.fail(self.rank, str(error))
            return error
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no words'}"
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return RunError(self.fail(self.rank, f"out of memory: lower --micro-batch. It said: {reason}"))
        if not isinstance(error, RuntimeError) or not any(word in str(error).lower() for word in BROKEN):
            return RunError(self.fail(self.rank, reason))
        self.over, late = True, any(word in str(error).lower() for word in ("timed out", "timeout"))
        until = time.monotonic() + self.silent + GRACE
        while time.monotonic() < until:
            if (said := self.said()) is not None:
                return RunError(said)
            if (found := self._suspect(late)) is not None:
                return RunError(self.fail(*found))
            time.sleep(EVERY)
        return RunError(self.fail(self.rank, f"the connection to other ranks broke, and nobody knows why. {reason}"))

    def _suspect(self, late: bool) -> tuple[int, str, dict[str, Any]] | None:
        """Whoever is not heard of any more; where a wait was too long (`late`), whoever has met the others least."""
        with suppress(RuntimeError):  # without the store, what was heard last has to do
            self._listen(range(self.size))
        now, others = time.monotonic(), [r for r in self._beats if r != self.rank]
        gone = [r for r in others if now - self._heard[r] > SUSPECT]
        if gone:
            return gone[0], f"it ended or hangs ({self._beats[gone[0]]['place']})", self._beats[gone[0]]
        behind = min(others, key=lambda r: self._beats[r]["entered"], default=None)
        if late and behind is not None and self._beats[behind]["entered"] < self.entered:
            where = self._beats[behind]["place"]
            return behind, f"it did not come within {self.deadline:g} seconds ({where})", self._beats[behind]
        return None

    def _interrupt(self, *_: Any) -> None:
        """In the main thread, wherever it is: the run is over."""
        if not self.over:
            self.over = True
            raise RunError(self.said() or "another rank failed")

    # ---- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        number = 0
        place = f"{socket.gethostname()}, process {os.getpid()}"
        watched = range(1, self.size) if self.rank == 0 else range(1)
        while not self._stop.wait(EVERY if number else 0):
            number += 1
            beat = {"number": number, "phase": self.phase, "step": self.step, "entered": self.entered, "place": place}
            try:
                self.store.set(f"beat/{self.rank}", json.dumps(beat))
                self._listen(watched)
                self._reached = time.monotonic()
                self._judge(watched)
            except RuntimeError as error:  # the store is gone, and with it the launcher or rank 0
                if time.monotonic() - self._reached > self.silent:
                    self._end(f"the launcher's store does not answer: {error}")

    def _listen(self, ranks: range) -> None:
        keys = [f"beat/{rank}" for rank in ranks if rank in self._beats or self.store.check([f"beat/{rank}"])]
        for key, value in zip(keys, self.store.multi_get(keys) if keys else [], strict=True):
            rank, beat = int(key.removeprefix("beat/")), json.loads(value)
            if beat["number"] != self._beats.get(rank, {}).get("number"):
                self._beats[rank], self._heard[rank] = beat, time.monotonic()

    def _judge(self, watched: range) -> None:
        now = time.monotonic()
        for rank in watched:
            if rank in self._beats and now - self._heard[rank] > self.silent and not self.over:
                beat = self._beats[rank]
                self._write(rank, f"no sign of life for {self.silent:g} seconds ({beat['place']})", beat)
        if self.store.check(["failed"]):
            self._end(self.said() or "")

    def _end(self, why: str) -> None:
        """Have the main thread end; if it cannot, because it waits for somebody who is gone, end the process."""
        if self._known is None:
            self._known = time.monotonic()
            if not self.over and self.rank == 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        elif time.monotonic() - self._known > GRACE:
            sys.stderr.write(f"ascent: stopped: {why}\n" if self.rank == 0 or "rank 0 of " in why else "")
            sys.stderr.flush()
            os._exit(1)
