"""Weights & Biases tracker."""

import netrc
import os
import secrets
from contextlib import suppress
from pathlib import Path

from ascent.runs.trackers.tracker import StepMetrics, Tracker, flatten_config


class Wandb(Tracker):
    """Weights & Biases. Without WANDB_MODE it is online if there is an API key, and offline otherwise.

    It never asks for a key during a run. The step is logged as a metric, so that a resumed run may repeat steps.
    """

    package = "wandb"

    def start(self) -> str | None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_api_key() else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "ascent"),
            name=self.name,
            id=self.run_id(lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(self.folder),
            config=flatten_config(self.config),
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        if mode == "offline":
            return f"wandb is offline. To upload the run: wandb sync {Path(self.run.dir).parent}"
        return f"wandb: {self.run.url}" if mode == "online" else None

    def log(self, steps: list[StepMetrics]) -> None:
        for step, metrics in steps:
            self.run.log({**metrics, "step": step})

    def end(self, status: str) -> None:
        self.run.finish(exit_code=int(status != "finished"))


def _has_api_key() -> bool:
    """Whether there is an API key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
