"""Trackers as further destinations of a run's metrics: TensorBoard, W&B, Trackio, MLflow.

They are guests. The run folder holds everything already, so a tracker that fails, hangs or is slow neither stops nor
slows a run: each has a thread and a bounded queue of its own, is said to fail once, and is dropped when it keeps
failing. Only one that is not installed is refused, before any work.
"""

from __future__ import annotations

import importlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

from ascent.core.menu import nearest
from ascent.core.types import Refused
from ascent.records.trackers import SINKS, Row, Sink

WAITING = 4096
"""Steps that may wait for a tracker. More are not sent to it."""
PAUSES = (1.0, 30.0)
"""Seconds before a tracker that failed is tried again; once they are used up it is dropped."""
CLOSING = 15.0
"""Seconds that all trackers together have to finish after the run."""


class Feed:
    """A tracker's own thread, and the steps that wait for it. Notes are for the run's thread to say."""

    def __init__(self, name: str, sink: Sink):
        self.name, self.sink = name, sink
        self.notes: deque[str] = deque()
        self.waiting: queue.Queue[Row | None] = queue.Queue(WAITING)
        self.closing, self.status = threading.Event(), "failed"
        self.lost = self.failures = 0
        self.thread = threading.Thread(target=self._work, name=f"ascent-{name}", daemon=True)
        self.thread.start()

    def put(self, row: Row) -> None:
        """Never waits."""
        if not self.thread.is_alive():
            return
        try:
            self.waiting.put_nowait(row)
        except queue.Full:
            self.lost += 1
            if self.lost == 1:
                self.notes.append(
                    f"--track {self.name} is too slow or hangs: from step {row[0]} on, steps may be missing"
                )

    def finish(self, status: str) -> None:
        self.status = status
        if self.waiting.full():
            with suppress(queue.Empty):
                self.waiting.get_nowait()
        self.waiting.put(None)
        self.closing.set()

    def _work(self) -> None:
        rows: list[Row] = []
        if not self._try(self.sink.start):
            return
        open_ = True
        while open_:
            open_ = self._take(rows)
            if rows and not self._try(lambda: self.sink.log(rows)):
                return
            rows.clear()
        self._try(lambda: self.sink.end(self.status))

    def _take(self, rows: list[Row]) -> bool:
        """Everything that waits, at least one row of it; False: that was the last."""
        row = self.waiting.get()
        while row is not None:
            rows.append(row)
            if self.waiting.empty():
                return True
            row = self.waiting.get()
        return False

    def _try(self, call: Callable[[], str | None]) -> bool:
        """Call it, and again after a pause (none once the run is over) where it fails. False: it is given up."""
        for pause in (*PAUSES, None):
            try:
                self._note(call())
                return True
            except (Exception, SystemExit) as error:
                self.failures += 1
                if self.failures == 1:
                    self._note(
                        f"--track {self.name} failed ({type(error).__name__}: {error}). The run goes on; everything is "
                        "in its folder"
                    )
            if pause is not None:
                self.closing.wait(pause)
        self._note(f"--track {self.name} kept failing and was dropped")
        return False

    def _note(self, text: str | None) -> None:
        if text is not None:
            self.notes.append(text)


class Sinks:
    """The trackers of one run."""

    def __init__(self, feeds: list[Feed], say: Callable[[str], None]):
        self.feeds, self.say = feeds, say

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand a step on, without waiting. What trackers had to say is said here, in the caller's thread."""
        row = (step, finite(metrics))
        for feed in self.feeds:
            feed.put(row)
        self._tell()

    def close(self, status: str) -> None:
        """The run is finished, interrupted or failed. Waits for the trackers, but not for long."""
        for feed in self.feeds:
            feed.finish(status)
        deadline = time.monotonic() + CLOSING
        for feed in self.feeds:
            feed.thread.join(max(0.0, deadline - time.monotonic()))
            if feed.thread.is_alive():
                feed.notes.append(f"--track {feed.name} did not finish in {CLOSING:g} s: its last steps may be missing")
        self._tell()

    def _tell(self) -> None:
        for feed in self.feeds:
            while feed.notes:
                self.say(feed.notes.popleft())


def open_sinks(
    names: tuple[str, ...],
    run_folder: Path,
    config: dict[str, Any],
    name: str,
    resume_step: int,
    say: Callable[[str], None],
) -> Sinks:
    """Start these trackers for a run in this folder. An unknown or a missing one is refused."""
    check_sinks(names)
    made = {name_: SINKS[name_](run_folder, config, name, resume_step) for name_ in names}
    return Sinks([Feed(name_, sink) for name_, sink in made.items()], say)


def check_sinks(names: tuple[str, ...]) -> None:
    """Refuse, before any work, a tracker that is not known or cannot be imported."""
    for name in names:
        if name not in SINKS:
            raise Refused(f"--track {name}: no such tracker. There are {', '.join(SINKS)}.{nearest(name, SINKS)}")
        try:
            importlib.import_module(SINKS[name].package)
        except ImportError as error:
            raise Refused(
                f"--track {name}: it cannot be imported ({error}). Install it: pip install 'ascent-rl[track]'"
            ) from None


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among them; the step is said beside them."""
    numbers = {k: v for k, v in metrics.items() if isinstance(v, Real) and not isinstance(v, bool) and k != "step"}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
