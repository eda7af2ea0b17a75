"""Reward models, process rewards and judges, loaded and handed to the task that names them.

--reward own 0.5*model:RUN 0.1*judge:FILE     for text tasks, with --reward-batch and --reward-device
--reward model:RUN                            for sort
--reward positions+0.5*process:RUN            for sort, step by step
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.engines.backend import Backend, BoundTask, LearnedReward
from ascent.engines.backends import backend_of
from ascent.records import Run, checkpoint
from ascent.records.writer import best_of
from ascent.rewards.judge.settings import read_judge
from ascent.rewards.judge.verdicts import JudgeGrader

BATCH = 16
COMMANDS = {"rewards": ("reward model", "reward-model"), "steps": ("process reward", "process-reward")}
"""What a loss trains, in words, and the command that trains it."""


def load_reward_model(run: str | Path, device: str | None = None, batch: int = BATCH) -> Any:
    """The reward model of a run's best held-out evaluation, else its newest: call it with rollouts, or `rate` words.

    device: where it runs; None: as it was trained. batch: responses at once.
    """
    return _load(run, "rewards", device, batch)


def load_process_reward(run: str | Path, device: str | None = None, batch: int = BATCH) -> Any:
    """The process reward of a run, as `load_reward_model`: call it with rollouts, or `rate` the steps of words."""
    return _load(run, "steps", device, batch)


def _load(run: str | Path, trains: str, device: str | None, batch: int) -> LearnedReward:
    existing = Run(run)
    config = existing.config
    if config.algorithm.loss.trains != trains:
        what, command = COMMANDS[trains]
        raise Refused(f"{run} did not train a {what}; `ascent {command}` does")
    return backend_of(config).learned_reward(config, checkpoint.params(_best(existing)), device, batch)


def _best(run: Run) -> Path:
    """The best checkpoint where it was kept, else the newest."""
    best = best_of(run.metrics) if run.config.keep_best else None
    kept = [path for path in run.checkpoints if best is not None and checkpoint.step_of(path) == best[0]]
    return kept[0] if kept else run.checkpoint()


def check_rewards(backend: Backend, task: Any) -> None:
    """Refuse, before any work, a task that cannot be trained on, and judges whose settings are wrong."""
    task.verify()
    for source in backend.reward_sources(task):
        if source.startswith("judge:"):
            read_judge(source.removeprefix("judge:")).insist()


def bind_task(backend: Backend, task: Any, model: Any) -> BoundTask:
    """The task as the loop calls it: bound to the policy's tokens, and to the rewards that it names."""
    return backend.bind(
        task, model, {source: _reward(backend, task, source) for source in backend.reward_sources(task)}
    )


def _reward(backend: Backend, task: Any, source: str) -> Any:
    kind, _, path = source.partition(":")
    if kind == "judge":
        return JudgeGrader(path)
    model = _load(path, "rewards" if kind == "model" else "steps", *backend.reward_placement(task))
    other = backend_of(model.config)
    if other.task_kind != backend.task_kind:
        raise Refused(
            f"--reward {source}: it was trained for a {other.task_kind} task, and this is a {backend.task_kind} task. "
            "Train one for this kind of task"
        )
    return model
