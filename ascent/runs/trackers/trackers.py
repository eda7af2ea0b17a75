"""Trackers as further destinations of a run's metrics: TensorBoard, W&B, Trackio, MLflow.

They are guests. The run folder holds everything already, so a tracker that fails, hangs or is slow neither stops nor
slows a run: each has a thread and a bounded queue of its own, is said to fail once, and is dropped when it keeps
failing. Only one that is not installed is refused, before any work. Each library is imported on use.
"""

import importlib
import json
import logging
import math
import netrc
import os
import queue
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.runs.metrics import CHARTS
from ascent.runs.run_folder import vacated
from ascent.runs.untrusted_files import read_regular

WAITING = 4096
"""Steps that may wait for a tracker. More are not sent to it."""
PAUSES = (1.0, 30.0)
"""Seconds before a tracker that failed is tried again; once they are used up it is dropped."""
CLOSING = 15.0
"""Seconds that all trackers together have to finish after the run."""
Say = Callable[[str], None]
Row = tuple[int, dict[str, float]]
"""A step and its metrics."""


@dataclass
class Sink:
    """One tracker. All its calls come from one thread, and any of them may raise."""

    package: ClassVar[str]
    """What has to be importable."""
    folder: Path
    config: dict[str, Any]
    name: str
    """The run's folder, config and name."""
    resume_step: int
    """The step that a resumed run goes on with; 0: a new run."""

    def start(self) -> str | None:
        """Open it; return a line worth saying, if there is one."""

    def log(self, rows: list[Row]) -> None:
        """Send some steps."""

    def end(self, status: str) -> None:
        """Flush and close: the run is finished, interrupted or failed."""

    def identity(self, new: Callable[[], str]) -> str:
        """The tracker's name for this run, kept in the run's folder so that a resume goes on with the same one."""
        path = self.folder / type(self).__name__.lower() / "id"
        if self.resume_step and path.exists():
            return read_regular(path).decode().strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        vacated(path).write_text(found := new())
        return found


class TensorBoard(Sink):
    """Event files in RUN/tensorboard, our charts under Custom Scalars. After a resume, it hides repeated steps."""

    package = "torch.utils.tensorboard"

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.resume_step or None)
        text = json.dumps(self.config, indent=2, ensure_ascii=False, default=str)
        self.writer.add_text("config", f"```json\n{text}\n```", self.resume_step)
        charts = {chart.title: ["Multiline", [f"{re.escape(m.name)}$" for m in chart.series]] for chart in CHARTS}
        self.writer.add_custom_scalars({"Ascent": charts})

    def log(self, rows: list[Row]) -> None:
        for step, metrics in rows:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, status: str) -> None:
        self.writer.close()


class Wandb(Sink):
    """Weights & Biases: as WANDB_MODE says; where that is not set, online if there is a key, else offline.

    It never asks for a key in the middle of a run. The step is a metric of its own, so that a resumed run may go back.
    """

    package = "wandb"

    def start(self) -> str | None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ascent"),
            name=self.name,
            id=self.identity(lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(self.folder),
            config=flat(self.config),
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            return f"wandb writes offline; send it with: wandb sync {Path(self.run.dir).parent}"
        return f"wandb: {self.run.url}" if mode == "online" else None

    def log(self, rows: list[Row]) -> None:
        for step, metrics in rows:
            self.run.log({**metrics, "step": step})

    def end(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "finished"))


def _has_key() -> bool:
    """Has `wandb login` been done on this machine?"""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class Trackio(Sink):
    """Trackio, in its own local folder unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say otherwise.

    The folder is one for a whole process, so it cannot be the run's.
    """

    package = "trackio"

    def start(self) -> None:
        import trackio

        with _silent_trackio():
            self.run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "ascent"),
                name=self.name,
                config=flat(self.config),
                resume="allow" if self.resume_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, rows: list[Row]) -> None:
        with _silent_trackio():
            for step, metrics in rows:
                self.run.log(metrics, step=step)

    def end(self, status: str) -> None:
        with _silent_trackio():
            self.run.finish()


@contextmanager
def _silent_trackio() -> Iterator[None]:
    """Trackio has no quiet mode, and stdout may be somebody's input. Its modules print again when this is left."""
    import trackio
    import trackio.run
    import trackio.utils

    spaces = [vars(module) for module in (trackio, trackio.run, trackio.utils)]
    try:
        for space in spaces:
            space["print"] = lambda *_, **__: None
        yield
    finally:
        for space in spaces:
            space.pop("print", None)


class Mlflow(Sink):
    """MLflow, in RUN/mlflow/mlflow.db, or where MLFLOW_TRACKING_URI says."""

    package = "mlflow"
    most = 1000
    """Metrics in one call; a server refuses more."""

    def start(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        home = self.folder.resolve() / "mlflow"
        home.mkdir(exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
        self.id = self.identity(lambda: self._new_run(None if uri else (home / "artifacts").as_uri()))
        self.client.update_run(self.id, status="RUNNING")
        if not self.resume_step:
            params = [Param(_plain(key), str(value)[:500]) for key, value in flat(self.config).items()]
            for first in range(0, len(params), 100):
                self.client.log_batch(self.id, params=params[first : first + 100])

    def _new_run(self, artifacts: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ascent")
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name, artifacts)
        return self.client.create_run(experiment, run_name=self.name).info.run_id

    def log(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(_plain(name), value, now, step) for step, metrics in rows for name, value in metrics.items()]
        for first in range(0, len(found), self.most):
            self.client.log_batch(self.id, metrics=found[first : first + self.most])

    def end(self, status: str) -> None:
        words = {"finished": "FINISHED", "interrupted": "KILLED"}
        self.client.set_terminated(self.id, words.get(status, "FAILED"))


def _plain(name: str) -> str:
    """A name that MLflow accepts: one that it does not would cost the whole step."""
    return re.sub(r"[^\w\-./ :]", "_", name)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loss": {"high": 0.2}} -> {"loss.high": 0.2}, as trackers show settings best."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


class Feed:
    """A tracker's own thread, and the steps that wait for it. Notes are for the run's thread to say."""

    def __init__(self, name: str, sink: Sink):
        self.name, self.sink = name, sink
        self.notes: deque[str] = deque()
        self.waiting: queue.Queue[Row | None] = queue.Queue(WAITING)
        self.closing, self.status = threading.Event(), "failed"
        self.lost, self.failures = False, 0
        self.thread = threading.Thread(target=self._work, name=f"ascent-{name}", daemon=True)
        self.thread.start()

    def put(self, row: Row) -> None:
        """Never waits."""
        if not self.thread.is_alive():
            return
        try:
            self.waiting.put_nowait(row)
        except queue.Full:
            if not self.lost:
                text = f"--track {self.name} is too slow or hangs: from step {row[0]} on, steps may be missing"
                self.notes.append(text)
            self.lost = True

    def finish(self, status: str) -> None:
        self.status = status
        if self.waiting.full():
            with suppress(queue.Empty):
                self.waiting.get_nowait()
        self.waiting.put(None)
        self.closing.set()

    def _work(self) -> None:
        """Send everything that waits, as often as something does; None comes last."""
        going = self._try(self.sink.start)
        while going:
            taken = [self.waiting.get()]
            while taken[-1] is not None and not self.waiting.empty():
                taken.append(self.waiting.get())
            rows = [row for row in taken if row is not None]
            going = not rows or self._try(partial(self.sink.log, rows))
            if going and taken[-1] is None:
                self._try(partial(self.sink.end, self.status))
                return

    def _try(self, call: Callable[[], str | None]) -> bool:
        """Call it, and again after a pause (none once the run is over) where it fails. False: it is given up."""
        for pause in (*PAUSES, None):
            try:
                if (words := call()) is not None:
                    self.notes.append(words)
                return True
            except (Exception, SystemExit) as error:
                self.failures += 1
                if self.failures == 1:
                    self.notes.append(
                        f"--track {self.name} failed ({type(error).__name__}: {error}). The run goes on; everything is "
                        "in its folder"
                    )
            if pause is not None:
                self.closing.wait(pause)
        self.notes.append(f"--track {self.name} kept failing and was dropped")
        return False


class Sinks:
    """The trackers of one run. An unknown or a missing one is refused."""

    def __init__(
        self, names: Iterable[str], folder: Path, config: dict[str, Any], run: str, resume_step: int, say: Say
    ):
        check_sinks(names)
        self.feeds, self.say = [Feed(name, SINKS[name](folder, config, run, resume_step)) for name in names], say

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand a step on, without waiting. What trackers had to say is said here, in the caller's thread."""
        if not self.feeds:
            return
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


def check_sinks(names: Iterable[str]) -> None:
    """Refuse, before any work, a tracker that is not known or cannot be imported."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"--track {name}: no such tracker. There are {', '.join(SINKS)}.{nearest(name, SINKS)}")
        try:
            importlib.import_module(SINKS[name].package)
        except ImportError as error:
            raise ConfigError(
                f"--track {name}: it cannot be imported ({error}). Install it: pip install 'ascent-rl[track]'"
            ) from None


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among them; the step is said beside them."""
    numbers = {k: v for k, v in metrics.items() if isinstance(v, Real) and not isinstance(v, bool) and k != "step"}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}
