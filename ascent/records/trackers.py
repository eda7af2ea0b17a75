"""The trackers themselves: how TensorBoard, W&B, Trackio and MLflow are opened, fed and closed.

Each library is imported on use. Nothing here catches an error: `sinks` does, in a thread of the tracker's own.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

Row = tuple[int, dict[str, float]]
"""A step and its metrics."""


@dataclass
class Sink:
    """One tracker. All its calls come from one thread, and any of them may raise."""

    package: ClassVar[str]
    """What has to be importable."""
    folder: Path
    """The run's folder."""
    config: dict[str, Any]
    name: str
    """The run's name."""
    resume_step: int
    """The step that a resumed run goes on with; 0: a new run."""

    def start(self) -> str | None:
        """Open it; return a line worth saying, if there is one."""
        raise NotImplementedError

    def log(self, rows: list[Row]) -> None:
        raise NotImplementedError

    def end(self, status: str) -> None:
        """Flush and close: the run is finished, interrupted or failed."""
        raise NotImplementedError

    def identity(self, new: Callable[[], str]) -> str:
        """The tracker's name for this run, kept in the run's folder so that a resume goes on with the same one."""
        path = self.folder / type(self).__name__.lower() / "id"
        if self.resume_step and path.exists():
            return path.read_text().strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found := new())
        return found


class TensorBoard(Sink):
    """Event files in RUN/tensorboard. After a resume, TensorBoard hides the steps that are taken again."""

    package = "torch.utils.tensorboard"

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.resume_step or None)
        text = json.dumps(self.config, indent=2, ensure_ascii=False, default=str)
        self.writer.add_text("config", f"```json\n{text}\n```", self.resume_step)

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
    """Trackio, in its own local folder, where `trackio show` looks.

    TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL say otherwise. The folder is one for a whole process, so it
    cannot be the run's.
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
    """Trackio has no quiet mode, and stdout may be somebody's input. Its `print` is as it was when this is left."""
    import trackio
    import trackio.run
    import trackio.utils

    spaces = [vars(module) for module in (trackio, trackio.run, trackio.utils)]
    before = [space.get("print") for space in spaces]
    try:
        for space in spaces:
            space["print"] = lambda *_, **__: None
        yield
    finally:
        for space, own in zip(spaces, before, strict=True):
            if own is None:
                space.pop("print", None)
            else:
                space["print"] = own


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
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
