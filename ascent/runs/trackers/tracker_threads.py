"""Send a run's metrics to experiment trackers: TensorBoard, W&B, Trackio and MLflow.

The run folder already holds every metric, so a tracker that fails, hangs or is slow neither stops nor slows the run.
Each tracker has a thread and a bounded queue. Its first failure is reported, and a tracker that keeps failing is
dropped. Only a tracker that is not installed is an error, before training begins. Each library is imported on use.
"""

import importlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.runs.trackers.mlflow_tracker import Mlflow
from ascent.runs.trackers.tensorboard_tracker import TensorBoard
from ascent.runs.trackers.tracker import StepMetrics, Tracker
from ascent.runs.trackers.trackio_tracker import Trackio
from ascent.runs.trackers.wandb_tracker import Wandb

QUEUE_SIZE = 4096
"""Maximum number of steps that wait for a tracker. Further steps are not sent to it."""
RETRY_DELAYS = (1.0, 30.0)
"""Seconds before each retry of a failed call. After the last retry the tracker is dropped."""
CLOSE_TIMEOUT = 15.0
"""Seconds in which all trackers together have to finish after the run."""


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


class TrackerThread:
    """A tracker's thread, and the queue of steps that it sends. The run's thread reports the messages in `notes`."""

    def __init__(self, name: str, tracker: Tracker):
        self.name, self.tracker = name, tracker
        self.notes: deque[str] = deque()
        self.queue: queue.Queue[StepMetrics | None] = queue.Queue(QUEUE_SIZE)
        self.closing, self.status = threading.Event(), "failed"
        self.dropped_steps, self.failures = False, 0
        self.thread = threading.Thread(target=self._work, name=f"ascent-{name}", daemon=True)
        self.thread.start()

    def put(self, step: StepMetrics) -> None:
        """Queue a step without waiting. If the queue is full, drop the step."""
        if not self.thread.is_alive():
            return
        try:
            self.queue.put_nowait(step)
        except queue.Full:
            if not self.dropped_steps:
                self.notes.append(
                    f"--track {self.name} is too slow or hangs: from step {step[0]} on, steps may be missing"
                )
            self.dropped_steps = True

    def finish(self, status: str) -> None:
        """Queue the end of the run; if the queue is full, drop a step for it."""
        self.status = status
        if self.queue.full():
            with suppress(queue.Empty):
                self.queue.get_nowait()
        self.queue.put(None)
        self.closing.set()

    def _work(self) -> None:
        """Send all queued steps whenever there are any, until the queue yields None."""
        alive = self._try(self.tracker.start)
        while alive:
            items = [self.queue.get()]
            while items[-1] is not None and not self.queue.empty():
                items.append(self.queue.get())
            steps = [step for step in items if step is not None]
            alive = not steps or self._try(partial(self.tracker.log, steps))
            if alive and items[-1] is None:
                self._try(partial(self.tracker.end, self.status))
                return

    def _try(self, call: Callable[[], str | None]) -> bool:
        """Make a call, with retries. Return False if all of them failed. Once the run is over, retries do not wait."""
        for delay in (*RETRY_DELAYS, None):
            try:
                if (message := call()) is not None:
                    self.notes.append(message)
                return True
            except (Exception, SystemExit) as error:
                self.failures += 1
                if self.failures == 1:
                    self.notes.append(
                        f"--track {self.name} failed ({type(error).__name__}: {error}). The run continues; its folder "
                        "has every metric"
                    )
            if delay is not None:
                self.closing.wait(delay)
        self.notes.append(f"--track {self.name} kept failing and was dropped")
        return False


class Trackers:
    """The trackers of one run."""

    def __init__(
        self,
        names: Iterable[str],
        folder: Path,
        config: dict[str, Any],
        run: str,
        resume_step: int,
        report: Callable[[str], None],
    ):
        check_trackers(names)
        self.threads = [TrackerThread(name, TRACKERS[name](folder, config, run, resume_step)) for name in names]
        self.report = report

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue the metrics of a step without waiting, and report the trackers' messages in the caller's thread."""
        if not self.threads:
            return
        values = finite_metrics(metrics)
        for thread in self.threads:
            thread.put((step, values))
        self._report_notes()

    def close(self, status: str) -> None:
        """End all trackers and wait for them up to `CLOSE_TIMEOUT`; `status` is finished, interrupted or failed."""
        for thread in self.threads:
            thread.finish(status)
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in self.threads:
            thread.thread.join(max(0.0, deadline - time.monotonic()))
            if thread.thread.is_alive():
                thread.notes.append(
                    f"--track {thread.name} did not finish in {CLOSE_TIMEOUT:g} s: its last steps may be missing"
                )
        self._report_notes()

    def _report_notes(self) -> None:
        for thread in self.threads:
            while thread.notes:
                self.report(thread.notes.popleft())


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError for a tracker that does not exist or cannot be imported."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"--track {name}: no such tracker. There are {', '.join(TRACKERS)}.{nearest(name, TRACKERS)}"
            )
        try:
            importlib.import_module(TRACKERS[name].package)
        except ImportError as error:
            raise ConfigError(
                f"--track {name}: it cannot be imported ({error}). Install it: pip install 'ascent-rl[track]'"
            ) from None


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are finite numbers, without the step."""
    numbers = {k: v for k, v in metrics.items() if isinstance(v, Real) and not isinstance(v, bool) and k != "step"}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
