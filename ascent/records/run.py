"""A run, read back from its folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from ascent.core.config import Config
from ascent.core.types import Refused
from ascent.engines.backends import backend_of
from ascent.records import checkpoint, rollouts
from ascent.records.folder import is_locked, read_json, read_lines
from ascent.settings import configure, flatten


class Run:
    """A finished, running or dead run: `run.folder`, `run.metrics`, `run.policy`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise Refused(f"{self.folder}: there is no such folder")
        if (self.folder / "config.json").exists() and not (self.folder / "run.json").exists():
            raise Refused(
                f"{self.folder}: this run was killed before it began. Start it again: ascent train --config "
                f"{self.folder / 'config.json'} --out {self.folder}"
            )
        info = self.info
        if not isinstance(info, dict) or not {"status", "result", "history"} <= info.keys():
            raise Refused(f"{self.folder / 'run.json'} is not a run's: it has no status, result and history")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.status})"

    @property
    def info(self) -> dict[str, Any]:
        return read_json(self.folder / "run.json")

    @property
    def status(self) -> str:
        """finished, interrupted, failed, running, or died: left running by a process that is gone."""
        status = self.info["status"]
        return "died" if status == "running" and not is_locked(self.folder) else status

    @property
    def result(self) -> dict[str, Any] | None:
        return self.info["result"]

    @cached_property
    def config(self) -> Config:
        return read_config(self.folder / "config.json")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per step."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def updates(self) -> list[dict[str, Any]]:
        """One dictionary per optimizer update."""
        return read_lines(self.folder / "updates.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "events.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The recorded responses of a step, one dictionary each."""
        return rollouts.read_rollouts(self.folder, step)

    def held_out(self, step: int) -> list[dict[str, Any]]:
        """The recorded greedy answers of the evaluation in a step, one dictionary each."""
        return rollouts.read_rollouts(self.folder, step, rollouts.HELD_OUT)

    @property
    def checkpoints(self) -> list[Path]:
        return checkpoint.complete(self.folder / "checkpoints")

    def checkpoint(self, step: int | None = None, best: bool = False, flag: str = "--step") -> Path:
        """The newest checkpoint, that of a step, or that of the best evaluation; refused with what there is."""
        if step is not None and best:
            raise Refused(f"{flag} {step} and --best name two checkpoints: give one of them")
        checkpoints = self.checkpoints
        if not checkpoints:
            raise Refused(f"{self.folder}: no checkpoint yet, so there is no policy to load")
        if step is None and not best:
            return checkpoints[-1]
        if best:
            step, flag = self._best(), "--best"
        wanted = self.folder / "checkpoints" / checkpoint.name(step or 0)
        if wanted not in checkpoints:
            there = ", ".join(str(checkpoint.step_of(p)) for p in checkpoints)
            why = f"its best evaluation is that of step {step}, which was not kept (--keep-best does)" if best else ""
            raise Refused(
                f"{flag}{'' if best else f' {step}'}: {self.folder} has no such checkpoint"
                f"{f': {why}' if why else ''}. There are: {there}"
            )
        return wanted

    def _best(self) -> int:
        from ascent.records.writer import best_of

        best = best_of(self.metrics)
        if best is None:
            raise Refused(f"--best: {self.folder} was never evaluated, so no checkpoint is its best")
        return best[0]

    @property
    def policy(self) -> Any:
        """The policy of the newest checkpoint: a module of ours, or a language model with its tokenizer."""
        return load_policy(self.config, self.checkpoint())


def load_policy(config: Config, path: Path) -> Any:
    """The policy of a checkpoint, without what only training needs."""
    check_trains_policy(config, path.parent.parent)
    return backend_of(config).policy(config, checkpoint.params(path))


def check_trains_policy(config: Config, folder: Path) -> None:
    """Refuse a run that trained a reward model or a process reward."""
    if config.algorithm.loss.trains != "policy":
        raise Refused(
            f"{folder} trained a reward and not a policy: ascent.rewards.reward_models.load_reward_model loads a "
            "reward model, and load_process_reward beside it a process reward"
        )


def read_config(path: Path) -> Config:
    """The config that a run's config.json holds."""
    settings = flatten(read_settings(path))
    return configure(settings.pop("task"), settings)


def read_settings(path: Path) -> dict[str, Any]:
    """A config.json as it stands, without what is there only for people."""
    settings = read_json(path)
    if not isinstance(settings, dict) or "task" not in settings:
        raise Refused(f"{path} is not a config: it has to be an object with a `task`, as a run's config.json is")
    return {key: value for key, value in settings.items() if key not in ("objective", "formula", "label")}
