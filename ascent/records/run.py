"""A run, read back from its folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ascent.config import Config
from ascent.policies import CausalLM
from ascent.records import checkpoint, rollouts
from ascent.records.folder import is_locked, read_json, read_lines
from ascent.settings import configure, flatten
from ascent.types import Refused


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
        """One dictionary a step."""
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def updates(self) -> list[dict[str, Any]]:
        """One dictionary an optimizer update."""
        return read_lines(self.folder / "updates.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "events.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The recorded responses of a step, one dictionary each."""
        return rollouts.read(self.folder, step)

    def held_out(self, step: int) -> list[dict[str, Any]]:
        """The recorded greedy answers of the evaluation in a step, one dictionary each."""
        return rollouts.read(self.folder, step, rollouts.HELD_OUT)

    @property
    def checkpoints(self) -> list[Path]:
        return checkpoint.complete(self.folder / "checkpoints")

    def checkpoint(self, step: int | None = None, best: bool = False, flag: str = "--step") -> Path:
        """The newest checkpoint, that of a step, or that of the best evaluation; refused with what there is."""
        if step is not None and best:
            raise Refused(f"{flag} {step} and --best name two checkpoints: give one of them")
        found = self.checkpoints
        if not found:
            raise Refused(f"{self.folder}: no checkpoint yet, so there is no policy to load")
        if step is None and not best:
            return found[-1]
        if best:
            step, flag = self._best(), "--best"
        wanted = self.folder / "checkpoints" / checkpoint.name(step or 0)
        if wanted not in found:
            there = ", ".join(str(checkpoint.step_of(p)) for p in found)
            why = f"its best evaluation is that of step {step}, which was not kept (--keep-best does)" if best else ""
            raise Refused(
                f"{flag}{'' if best else f' {step}'}: {self.folder} has no such checkpoint"
                f"{f': {why}' if why else ''}. There are: {there}"
            )
        return wanted

    def _best(self) -> int:
        from ascent.records.writer import best_of

        found = best_of(self.metrics)
        if found is None:
            raise Refused(f"--best: {self.folder} was never evaluated, so no checkpoint is its best")
        return found[0]

    @property
    def policy(self) -> Any:
        """The policy of the newest checkpoint: a module of ours, or a language model with its tokenizer."""
        return policy_of(self.config, self.checkpoint())


def policy_of(config: Config, path: Path) -> Any:
    """The policy of a checkpoint, without whatever only training needs."""
    if getattr(config.algorithm.loss, "trains", "policy") != "policy":
        raise Refused(
            f"{path.parent.parent} trained a reward and no policy: ascent.learned.rewards.load_reward_model loads a "
            "reward model, and ascent.learned.process.load_process a process reward"
        )
    given = checkpoint.params(path)
    if isinstance(config.policy, CausalLM):
        from ascent.engines.language import load_params

        lm = config.policy.load(config.seed)
        load_params(lm.trained(), given)
        return lm
    policy = config.policy(config.task.space, torch.Generator())
    policy.load_state_dict(given)
    return policy


def read_config(path: Path) -> Config:
    """The config that a run's config.json holds."""
    settings = flatten(read_settings(path))
    return configure(settings.pop("task"), settings)


def read_settings(path: Path) -> dict[str, Any]:
    """A config.json as it stands, less what is there only to be read."""
    given = read_json(path)
    if not isinstance(given, dict) or "task" not in given:
        raise Refused(f"{path} is no config: it has to be an object with a `task`, as a run's config.json is")
    return {key: value for key, value in given.items() if key not in ("objective", "formula", "label")}
