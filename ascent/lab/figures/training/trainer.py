"""The process of a training: a run as `ascent train` makes it, with a gate between steps that the lab opens and shuts.

    python -m ascent.lab.figures.training.trainer GATE OUT TASK SETTINGS

GATE is a file that holds how many steps may be done: a large number is play, a smaller one pause, −1 stop. OUT is the
folder of the run, SETTINGS is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascent.api import start
from ascent.core.types import Refused, Trouble
from ascent.records.display import Display, for_stream
from ascent.records.plot import plot_runs
from ascent.settings import configure

POLL = 0.02
"""Seconds between two looks at a shut gate."""
PATIENCE = 3600.0
"""Seconds at a shut gate after which a run saves itself and ends: nobody is coming back."""


class Gated(Display):
    """A display that keeps the run waiting after a step while the gate is shut."""

    def __init__(self, inner: Display, gate: Path):
        self.inner, self.gate, self.total = inner, gate, 0

    def start(self, done: int, total: int, title: str) -> None:
        self.total = total
        self.inner.start(done, total, title)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.inner.step(step, metrics)
        began, waiting = time.monotonic(), self.gate.with_name("waiting")
        while step + 1 < self.total:
            allowed = read_gate(self.gate)
            if allowed < 0 or time.monotonic() - began > PATIENCE:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the step is saved, and the run can be resumed
                break
            if step + 1 < allowed:
                break
            if not waiting.exists():
                waiting.touch()  # the page says "paused" only when the run really waits
            time.sleep(POLL)
        waiting.unlink(missing_ok=True)

    def say(self, text: str) -> None:
        self.inner.say(text)

    def close(self) -> None:
        self.inner.close()


def read_gate(path: Path) -> int:
    """How many steps may be done; with no gate, all of them."""
    try:
        return int(path.read_text() or 0)
    except (FileNotFoundError, ValueError):
        return sys.maxsize


def write_gate(path: Path, steps: int) -> None:
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(str(steps))
    os.replace(aside, path)


def train_gated(gate: str, out: str, task: str, settings: str) -> int:
    """Exit status as that of `ascent train`: 0 finished, 1 stopped by trouble, 2 refused, 130 interrupted."""
    try:
        run = start(configure(task, json.loads(settings)), out, Gated(for_stream(), Path(gate)))
    except (Refused, Trouble, OSError) as error:
        print(f"ascent: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    if run.status != "finished":
        return 130
    title = f"{run.info['task']}, {run.info['label']}, seed {run.info['seed']}"
    plot_runs([(run.folder.name, run.metrics, run.config.task.max_reward)], run.folder / "plot.png", title)
    return 0


if __name__ == "__main__":
    sys.exit(train_gated(*sys.argv[1:]))
